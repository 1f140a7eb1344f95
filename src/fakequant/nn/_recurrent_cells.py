"""Quantized `nn.LSTMCell`, `nn.GRUCell` and `nn.RNNCell`: one step, with the products `ih` and `hh`."""

from typing import Any

from torch import Tensor, nn

from fakequant.nn._layer_kinds import AnyLayer, quantizes
from fakequant.nn._quantized_layer import quantize_output
from fakequant.nn._recurrent import RecurrentKind
from fakequant.nn._recurrent_formulas import FORMULAS


@quantizes(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
class RecurrentCell(RecurrentKind):
    """A cell with quantized products. Its caller computes the steps, so each hidden state is observed by itself."""

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor, hx: Any = None) -> Any:
        """Takes and returns the same as the cell in float."""
        has_cell_state = isinstance(layer, nn.LSTMCell)
        given = () if hx is None else tuple(hx) if has_cell_state else (hx,)
        for name, x in (("input", input), *(("hidden", state) for state in given)):
            if x.dim() not in (1, 2):
                name = f"{layer._fakequant.float_class.__name__}: Expected {name}"
                raise ValueError(f"{name} to be 1D or 2D, got {x.dim()}D instead")
        is_batched = input.dim() == 2
        x, *states = (t if is_batched else t.unsqueeze(0) for t in (input, *given))
        state = tuple(states) or (x.new_zeros(x.shape[0], layer.hidden_size),) * (2 if has_cell_state else 1)
        h, *rest = FORMULAS[_mode(layer)](layer.ih(x), layer.hh(state[0]), state)
        state = (quantize_output(layer, h), *rest)
        if not is_batched:
            state = tuple(part.squeeze(0) for part in state)
        return state if has_cell_state else state[0]


def _mode(layer: AnyLayer) -> str:
    """Returns the name of the formula, as `nn.RNNBase.mode` names it."""
    if isinstance(layer, nn.RNNCell):
        return f"RNN_{layer.nonlinearity.upper()}"
    return "LSTM" if isinstance(layer, nn.LSTMCell) else "GRU"
