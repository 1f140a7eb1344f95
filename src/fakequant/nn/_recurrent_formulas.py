"""One step of a recurrent layer, from the products of its input and of its hidden state.

All of it is computed in float. The order of the operations is that of torch's kernels.

    LSTM    i, f, g, o = x_product + h_product
            c' = sigmoid(f) * c + sigmoid(i) * tanh(g)          h' = sigmoid(o) * tanh(c')
    GRU     r = sigmoid(x_r + h_r)    z = sigmoid(x_z + h_z)    n = tanh(x_n + r * h_n)
            h' = (h - n) * z + n
    RNN     h' = tanh(x_product + h_product), or relu
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

# The hidden state; of an LSTM also the cell state.
State: TypeAlias = tuple[Tensor, ...]
# Returns the next state from the product of the input, the product of the hidden state, and the state.
Formula: TypeAlias = Callable[[Tensor, Tensor, State], State]


def _lstm(x_product: Tensor, h_product: Tensor, state: State) -> State:
    i, f, g, o = (h_product + x_product).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(x_product: Tensor, h_product: Tensor, state: State) -> State:
    x_r, x_z, x_n = x_product.chunk(3, -1)
    h_r, h_z, h_n = h_product.chunk(3, -1)
    r, z = torch.sigmoid(h_r + x_r), torch.sigmoid(h_z + x_z)
    n = torch.tanh(x_n + h_n * r)
    return ((state[0] - n) * z + n,)


def _tanh(x_product: Tensor, h_product: Tensor, state: State) -> State:
    return (torch.tanh(h_product + x_product),)


def _relu(x_product: Tensor, h_product: Tensor, state: State) -> State:
    return (torch.relu(h_product + x_product),)


# By `nn.RNNBase.mode`.
FORMULAS: dict[str, Formula] = {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": _tanh, "RNN_RELU": _relu}
