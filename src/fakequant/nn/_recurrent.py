"""Quantized `nn.LSTM`, `nn.GRU` and `nn.RNN`.

A prepared recurrent layer has one child per product, a `RecurrentProduct`:

    ih_l0             the input of layer 0        with weight_ih_l0 and bias_ih_l0
    hh_l0             its hidden state            with weight_hh_l0 and bias_hh_l0
    hr_l0             with `proj_size`, what becomes the hidden state, with weight_hr_l0
    ih_l0_reverse     the same for the other direction

Inputs and weights of the products are quantized. Gates, cell states and the elementwise operations stay in float, in
the order of torch's kernels. The product of the input is computed for all steps at once, and the product of the hidden
state step by step:

    LSTM    i, f, g, o = x_product + h_product
            c' = sigmoid(f) * c + sigmoid(i) * tanh(g)          h' = sigmoid(o) * tanh(c')
    GRU     r = sigmoid(x_r + h_r)    z = sigmoid(x_z + h_z)    n = tanh(x_n + r * h_n)
            h' = (h - n) * z + n
    RNN     h' = tanh(x_product + h_product), or relu
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._layer_kinds import AnyLayer, LayerKind, register_layer_kind
from fakequant.nn._model_quantizers import has_scale
from fakequant.nn._owners import OwnedProduct, OwnerKind
from fakequant.nn._quantized_layer import QuantizedLayer, quantize_output
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import DerivedModule, LayerRecord, Operands
from fakequant.nn._saved_codes import linear

# --- one step -------------------------------------------------------------------------------------

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


class RecurrentProduct(OwnedProduct):
    """The product of a tensor with one weight of a recurrent layer, plus the bias.

    >>> owner = nn.LSTM(3, 2)
    >>> RecurrentProduct(owner, "weight_hh_l0", "bias_hh_l0").weight is owner.weight_hh_l0
    True
    """

    def forward(self, input: Tensor, operands: Operands | None = None) -> Tensor:
        """Returns `input @ weight.T + bias`. `operands` are not needed in float."""
        return F.linear(input, self.weight, self.bias)


@register_layer_kind(RecurrentProduct)
class QuantizedProduct(LayerKind):
    """A product with quantized input and weight."""

    can_sum_exactly: ClassVar[bool] = True

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor, operands: Operands | None = None) -> Tensor:
        """Returns the product. `operands` come from the layer's record, for several calls with one weight."""
        return quantize_output(layer, layer._fakequant.compute(layer, linear, input, operands))


class Steps:
    """The calls of one product over the steps of a sequence. Use it in a `with` statement.

    The weight is quantized once. The inputs of all steps are observed together, as one tensor, after the last step:
    the range of a hidden state grows from step to step, so that ranges of single steps say little. A quantizer that
    observes therefore quantizes with the range of the sequences before. If it has none yet, the inputs of this
    sequence stay in float.
    """

    def __init__(self, product: RecurrentProduct) -> None:
        self._product = product
        self._operands: Operands | None = None
        self._observing: Quantizer | None = None
        self._quantizing = False
        self._seen: list[Tensor] = []
        if isinstance(product, QuantizedLayer):
            self._operands = product._fakequant.operands(product)
            quantizer = product.input_quantizer
            if isinstance(quantizer, Quantizer) and _observes(quantizer):
                self._observing, self._quantizing = quantizer, quantizer.quantizing
                if isinstance(quantizer, FakeQuantize):
                    quantizer.restore_scale()
                self._can_quantize = has_scale(quantizer)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product of `x`."""
        if self._observing is not None:
            self._seen.append(x.detach().flatten(0, -2))
        y: Tensor = self._product(x, self._operands)
        return y

    def __enter__(self) -> "Steps":
        if self._observing is not None:
            # Not through the switches: these are saved with the state.
            self._observing._observing = False
            self._observing._quantizing = self._quantizing and self._can_quantize
        return self

    def __exit__(self, *error: object) -> None:
        quantizer = self._observing
        if quantizer is None:
            return
        quantizer._observing, quantizer._quantizing = True, self._quantizing
        if error[0] is None and self._seen:
            with torch.no_grad():
                quantizer(torch.cat(self._seen))


def _observes(quantizer: Quantizer) -> bool:
    """Returns True if a static quantizer observes its next tensor."""
    return quantizer.observing and quantizer.training and not quantizer.frozen and not quantizer.is_dynamic


# --- layers ---------------------------------------------------------------------------------------

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class QuantizedRecurrentLayer(DerivedModule):
    """The base of prepared and converted recurrent layers. Their products are the quantized layers."""

    _fakequant: Any


@dataclasses.dataclass(eq=False, kw_only=True)
class Recurrence(LayerRecord):
    """The record of a prepared or converted recurrent layer: `layer._fakequant`."""

    base = QuantizedRecurrentLayer

    def sequences(self, x: Tensor, axis: int) -> "Sequences":
        """Returns how the steps of a batch, whose time is `axis`, are computed."""
        return Sequences(x.shape[axis], axis)


class RecurrentKind(OwnerKind):
    """The base of kinds of recurrent layers."""

    record = Recurrence

    @classmethod
    def products(cls, module: AnyLayer) -> dict[str, OwnedProduct]:
        """Returns one product per weight, with the bias that belongs to it."""
        names = [name for name, _ in module.named_parameters(recurse=False) if name.startswith("weight_")]
        parts = [name.removeprefix("weight_") for name in names]
        return {part: RecurrentProduct(module, f"weight_{part}", f"bias_{part}") for part in parts}

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Rejects layers with weights that are not parameters, because a parametrization or a hook computes them."""
        expected = (
            module._flat_weights_names if isinstance(module, nn.RNNBase) else ("weight_ih", "weight_hh")
        )  # a list of torch's, with all names
        computed = [name for name in expected if name not in module._parameters]
        return f"{computed[0]} is not a parameter: it is computed" if computed else None


def is_recurrent(module: nn.Module) -> bool:
    """Returns True for recurrent layers and cells of torch, quantized or not."""
    return isinstance(module, _RECURRENT)


@register_layer_kind(nn.LSTM, nn.GRU, nn.RNN)
class Recurrent(RecurrentKind):
    """A recurrent layer with quantized products."""

    @staticmethod
    # As in float: Dynamo does not compile these classes, and would compile each step by itself.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(layer: AnyLayer, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """Takes and returns the same as the layer in float."""
        if isinstance(input, PackedSequence):
            return _forward_packed(layer, input, hx)
        if input.dim() not in (2, 3):
            raise ValueError(f"{layer.mode}: Expected input to be 2D or 3D, got {input.dim()}D instead")
        is_batched = input.dim() == 3
        axis = 1 if layer.batch_first and is_batched else 0  # of time
        x = input if is_batched else input.unsqueeze(1)
        if not x.shape[axis]:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        states = _first_states(layer, x, x.shape[1 - axis], hx, 3 if is_batched else 2)
        y, last = _run(layer, x, states, layer._fakequant.sequences(x, axis))
        if not is_batched:
            y, last = y.squeeze(1), tuple(state.squeeze(1) for state in last)
        return quantize_output(layer, y), last if layer.mode == "LSTM" else last[0]


def _forward_packed(layer: AnyLayer, input: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
    x, batch_sizes, order, back = input
    sizes = batch_sizes.tolist()
    if hx is not None:
        hx = layer.permute_hidden(hx, order)
    states = _first_states(layer, x, sizes[0], hx, 3)
    y, last = _run(layer, x, states, _Packed(sizes))
    hidden = layer.permute_hidden(last if layer.mode == "LSTM" else last[0], back)
    return PackedSequence(quantize_output(layer, y), batch_sizes, order, back), hidden


def _first_states(layer: AnyLayer, x: Tensor, batch: int, hx: Any, dims: int) -> list[State]:
    """Returns the first state of every layer and direction. `dims` is the number of axes that `hx` must have."""
    if x.shape[-1] != layer.input_size:
        raise RuntimeError(
            f"input.size(-1) must be equal to input_size. Expected {layer.input_size}, got {x.shape[-1]}"
        )
    number = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size, *([layer.hidden_size] if layer.mode == "LSTM" else [])]
    if hx is None:
        return [tuple(x.new_zeros(batch, size) for size in sizes)] * number
    given = tuple(hx) if layer.mode == "LSTM" else (hx,)
    for state, size in zip(given, sizes, strict=True):
        expected = (number, batch, size) if dims == 3 else (number, size)
        if tuple(state.shape) != expected:
            raise RuntimeError(f"Expected hidden size {expected}, got {list(state.shape)}")
    given = tuple(state if dims == 3 else state.unsqueeze(1) for state in given)
    return [tuple(state[place] for state in given) for place in range(number)]


@dataclasses.dataclass(frozen=True)
class Sequences:
    """A batch of sequences of the same length."""

    length: int
    # The axis of time in the input and the result of the layer. In between it is 0.
    axis: int

    def split(self, products: Tensor, *, first: bool) -> Any:
        """Returns the products of the input by step. `first` and `last` are True in the first and the last layer."""
        axis = self.axis if first else 0
        return [products.select(axis, step) for step in range(self.length)]

    def join(self, results: Any, *, last: bool) -> Tensor:
        """Returns the results of all steps as one tensor."""
        return torch.stack(results, self.axis if last else 0)

    def run(self, advance: "Advance", products: Any, state: State, *, reverse: bool) -> tuple[Any, State]:
        """Returns the results of all steps, in the order of time, and the last state."""
        results: list[Any] = [None] * self.length
        for step in range(self.length)[:: -1 if reverse else 1]:
            state = advance(products[step], state)
            results[step] = state[0]
        return results, state


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A packed batch of sequences, the longest first."""

    # The number of sequences that have each step.
    sizes: list[int]

    def split(self, products: Tensor, *, first: bool) -> list[Tensor]:
        return list(products.split(self.sizes))

    def join(self, results: list[Tensor], *, last: bool) -> Tensor:
        return torch.cat(results)

    def run(self, advance: "Advance", products: list[Tensor], state: State, *, reverse: bool) -> tuple[Any, State]:
        if reverse:
            return self._backward(advance, products, state)
        results, ended = [], []
        for product, size in zip(products, self.sizes, strict=True):
            if size < len(state[0]):  # the others have ended
                ended.append(tuple(part[size:] for part in state))
                state = tuple(part[:size] for part in state)
            state = advance(product, state)
            results.append(state[0])
        parts = [state, *reversed(ended)]
        return results, tuple(torch.cat(values) for values in zip(*parts, strict=True))

    def _backward(self, advance: "Advance", products: list[Tensor], first: State) -> tuple[Any, State]:
        results: list[Any] = [None] * len(self.sizes)
        state = tuple(part[:0] for part in first)
        for step in range(len(self.sizes))[::-1]:
            size = self.sizes[step]
            if size > len(state[0]):  # the others start here
                starting = (part[len(state[0]) : size] for part in first)
                state = tuple(torch.cat(parts) for parts in zip(state, starting, strict=True))
            state = advance(products[step], state)
            results[step] = state[0]
        return results, state


class Advance:
    """One direction of one layer. A call returns the next state. Use it in a `with` statement."""

    def __init__(self, layer: AnyLayer, suffix: str) -> None:
        self.suffix = suffix
        self._formula = FORMULAS[layer.mode]
        self._hidden = Steps(getattr(layer, f"hh_{suffix}"))
        self._projection = Steps(getattr(layer, f"hr_{suffix}")) if layer.proj_size else None

    def __enter__(self) -> "Advance":
        for steps in (self._hidden, self._projection):
            if steps is not None:
                steps.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for steps in (self._hidden, self._projection):
            if steps is not None:
                steps.__exit__(*error)

    def __call__(self, x_product: Tensor, state: State) -> State:
        h, *rest = self._formula(x_product, self._hidden(state[0]), state)
        return (h if self._projection is None else self._projection(h), *rest)


def _run(layer: AnyLayer, x: Tensor, states: list[State], batch: Sequences | _Packed) -> tuple[Tensor, State]:
    """Returns the results of the last layer, and the last states of all layers and directions."""
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    ends: list[State] = []
    for number in range(layer.num_layers):
        results = []
        for direction in directions:
            suffix = f"l{number}{direction}"
            products = batch.split(getattr(layer, f"ih_{suffix}")(x), first=number == 0)
            with Advance(layer, suffix) as advance:
                found, end = batch.run(advance, products, states[len(ends)], reverse=bool(direction))
            results.append(batch.join(found, last=number == layer.num_layers - 1))
            ends.append(end)
        x = results[0] if len(results) == 1 else torch.cat(results, -1)
        if layer.dropout and number < layer.num_layers - 1:
            x = F.dropout(x, layer.dropout, layer.training)
    return x, tuple(torch.stack(values) for values in zip(*ends, strict=True))


@register_layer_kind(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
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
