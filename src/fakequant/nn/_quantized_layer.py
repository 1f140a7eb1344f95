"""Prepared layers: layers that quantize their tensors.

The class of a prepared layer is derived from the layer's original class, with the forward pass of its `LayerKind`. Its
record is a `Quantization`. `fakequant._prepare.attach` turns a layer into a prepared layer, and back.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant._backends.torch.grouped_linear import Groups
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._runtimes.target import weight_shift
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._folding import BatchNorm, bias_to_add
from fakequant.nn._frozen_weights import Keeping
from fakequant.nn._integer_sums import KeptWeight, exact_product, kept_weight
from fakequant.nn._layer_kinds import AnyLayer, LayerKind, find_kind, load_kind
from fakequant.nn._operators import TorchFunction, convolution_call
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._quantizer_state import StateDict
from fakequant.nn._recomputation import current_replay, runs
from fakequant.nn._records import (
    FACTORS,
    TOKENS,
    DerivedModule,
    LayerRecord,
    Operands,
    Operator as Operator,
    RecordedLayer,
    derived_class,
    find_record,
)
from fakequant.nn._saved_codes import linear, saving_codes
from fakequant.spec import QuantSpec

QUANTIZERS = ("weight_quantizer", "input_quantizer", "output_quantizer")
# Those that only `nn.MultiheadAttention` has.
ATTENTION_QUANTIZERS = ("projection_quantizer", "attention_quantizer")
# Attributes that prepared and converted layers add. A user's layer must not have them.
RESERVED = ("_fakequant", TOKENS, FACTORS, "weight_codes", "weight_scale", "weight_zero_point", "bias_codes")


class QuantizedLayer(DerivedModule):
    """The base of all prepared and converted layers, for `isinstance`. It adds no public methods."""

    # A `Quantization`; of a converted layer another `LayerRecord`.
    _fakequant: Any
    weight_quantizer: Quantizer | None
    # Quantizers, or `CallQuantizers` if the layer is called several times; of a converted layer grids.
    input_quantizer: Any
    output_quantizer: Any

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, metadata: Any, strict: bool, missing: list[str], *lists: list[str]
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *lists)
        key = prefix + TOKENS
        if key in missing:  # it need not be there: the state of a float model has none
            missing.remove(key)
        key = prefix + FACTORS
        if key in missing and prefix + self._fakequant.kind.weight_name in state_dict:  # a weight without factors
            missing.remove(key)
            self.get_buffer(FACTORS).fill_(1)


@dataclasses.dataclass(eq=False, kw_only=True)
class Quantization(LayerRecord, Keeping):
    """The record of a prepared layer: `layer._fakequant`."""

    base = QuantizedLayer

    # Whether codes are kept for the backward pass instead of floats.
    save_codes: bool = True
    # Whether sums of products of codes are exact.
    exact_sums: bool = False
    # The quantizer of the module that computes the input, if the layer has no `input_quantizer`.
    input_grid: Quantizer | None = None
    # The batch norm that `convert` will fold into the layer.
    norm: BatchNorm | None = None
    # Whether training adds the deployed bias too, not only evaluation.
    deploys_bias: bool = False
    # Whether the bias is deployed as a float, whatever the scale of the sums.
    has_float_bias: bool = False
    # The shape and the dtype of the weight, if it is held as codes; see `_packed_weights.py`.
    packed: tuple[tuple[int, ...], torch.dtype] | None = None
    # The last result of `weight_shift`, with the spec it is for.
    _shift: tuple[QuantSpec, int] | None = dataclasses.field(default=None, init=False)
    # What was last written to the buffer `TOKENS`, and the buffer's version then.
    _noted: tuple[bool, int] | None = dataclasses.field(default=None, init=False)

    def set_norm(self, layer: AnyLayer, norm: nn.Module) -> None:
        """Sets the batch norm that `convert` will fold into the layer."""
        self.norm = cast("BatchNorm", norm)
        weight = layer._parameters.get(self.kind.weight_name)  # not read: a parametrization may compute it
        quantizer: Quantizer | None = layer.weight_quantizer
        if quantizer is not None and (weight is None or weight.dim() == 2) and TOKENS not in layer._buffers:
            layer.register_buffer(TOKENS, torch.zeros((), dtype=torch.uint8, device=quantizer.switches.device))

    def _note_tokens(self, layer: AnyLayer, on: bool) -> None:
        """Records, in training and calibration, whether the layer's input has more than two axes."""
        noted: Tensor | None = layer._buffers.get(TOKENS)
        quantizer: Quantizer = layer.weight_quantizer
        if noted is None or not quantizer.training or quantizer.frozen or self._noted == (on, noted._version):
            return
        if is_eager(noted) and not (runs.stack and current_replay() is not None):
            with torch.no_grad():
                noted.fill_(on)
            self._noted = on, noted._version

    def weight_shift(self, spec: QuantSpec) -> int:
        """Returns k if codes of a weight with this spec will be stored times 2^k; see `_runtimes/target.py`."""
        if torch.compiler.is_compiling():  # which would compile again after `_shift` has changed
            return weight_shift(spec)
        if self._shift is None or self._shift[0] != spec:
            self._shift = spec, weight_shift(spec)
        return self._shift[1]

    def quantize_input(self, layer: AnyLayer, x: Tensor) -> Tensor:
        """Returns `x` on the grid of the layer's input."""
        quantized: Tensor = x if layer.input_quantizer is None else layer.input_quantizer(x)
        return quantized

    def quantized_weight(self, layer: AnyLayer) -> Tensor:
        """Returns the weight on its grid."""
        weight = self.kind.read_weight(layer)
        quantizer: Quantizer | None = layer.weight_quantizer
        return weight if quantizer is None else self._on_grid(quantizer, weight)

    def _on_grid(self, quantizer: Quantizer, weight: Tensor) -> Tensor:
        if quantizer.is_own_class and quantizer.has_equal_steps and quantizer.quantizing and not quantizer.training:
            y = quantizer(weight)
            on_grid = quantizer.without_rounding_errors(y)
            return y if on_grid is None else on_grid
        keeper = self.keeper  # read once: another thread may end its context
        if keeper is None or quantizer.training or quantizer._forward_hooks or quantizer._forward_pre_hooks:
            return quantizer(weight)
        # The scales of a dynamic quantizer follow from the weight.
        tensors = () if quantizer.is_dynamic else (*quantizer._parameters.values(), *quantizer._buffers.values())
        sources = (weight, *(tensor for tensor in tensors if tensor is not None))
        return keeper.get(sources, quantizer.settings(), lambda: quantizer(weight))

    def operands(self, layer: AnyLayer) -> Operands:
        """Returns the quantized weight and the bias, for several calls of `compute`. No batch norm may follow."""
        assert self.norm is None
        weight = self.quantized_weight(layer)
        return Operands(weight, bias_to_add(layer, weight, weight), kept_weight(layer, weight))

    def compute(
        self,
        layer: AnyLayer,
        operator: Operator,
        input: Tensor,
        operands: Operands | None = None,
        weight: Tensor | None = None,
        groups: Groups | None = None,
    ) -> Tensor:
        """Returns `operator` of the quantized input, the quantized weight and the bias.

        The forward pass of a prepared layer takes these steps:

            hooks        `_call_quantizers` counts the call, if the module is called several times
            LayerKind    `_layers`, `_attention`, ... have `forward`, which calls `compute` and `quantize_output`.
                         A layer with a forward pass of its own runs it, and `_own_forward` calls `compute` in it
            input        `quantize_input`: the quantizer of the layer, unless the module before it has quantized it
            weight       the quantizer of the weight: like the input's a `FakeQuantize`, which chooses a scale
                         (`_fake_quantize`, `_tensor_ranges`), or a `LearnedFakeQuantize`
            bias         `_folding.bias_to_add`: in evaluation as it will be deployed, with the batch norm that follows
            operator     `_saved_codes` keeps codes for the backward pass instead of floats, and has `linear`
            output       `quantize_output`, if the config or the target asks for it
        """
        if operands is not None:
            x = self.quantize_input(layer, input)
            weight, bias, kept = operands
            if not self.save_codes:
                return self._product(layer, operator, x, weight, lambda: bias, kept)
            # The calls share the weight, so it is kept once and not quantized again in the backward pass of each.
            with saving_codes(x, input_grid_of(layer), weight, None, weight):
                return self._product(layer, operator, x, weight, lambda: bias, kept)
        # Looked up in the dicts of the module, because reading its attributes takes longer.
        modules, name = layer._modules, self.kind.weight_name
        own = layer._parameters.get(name) if weight is None else None
        # Read once, because reading a parametrized weight computes it.
        source: Tensor = own if own is not None else getattr(layer, name) if weight is None else weight
        is_given = weight is not None  # by code that computes it, and may have cast it
        quantize_input = modules.get("input_quantizer")
        quantize_weight: Quantizer | None = modules.get("weight_quantizer")
        x = input if quantize_input is None else quantize_input(input)
        weight = source if quantize_weight is None else self._on_grid(quantize_weight, source)
        if self.norm is not None and weight.dim() == 2 and not torch.compiler.is_compiling():
            self._note_tokens(layer, x.dim() > 2)

        def bias_of() -> Tensor | None:
            bias = bias_to_add(layer, x, weight)
            return bias.to(weight.dtype) if is_given and bias is not None else bias

        sources = (None if quantize_input is None else input), source
        if not self.save_codes or not torch.is_grad_enabled():
            return self._product(layer, operator, x, weight, bias_of, sources=sources, groups=groups)
        with saving_codes(x, input_grid_of(layer), weight, quantize_weight, source):
            return self._product(layer, operator, x, weight, bias_of, sources=sources, groups=groups)

    def _product(
        self,
        layer: AnyLayer,
        operator: Operator,
        x: Tensor,
        weight: Tensor,
        bias: Callable[[], Tensor | None],
        kept: KeptWeight | None = None,
        sources: tuple[Tensor | None, Tensor | None] = (None, None),
        rows: slice | None = None,
        groups: Groups | None = None,
    ) -> Tensor:
        """Returns `operator` of quantized tensors, with exact sums if the layer has them.

        `bias` returns what is added. `kept` is the weight as integers, if several calls share it. `sources` are the
        tensors before they were quantized, if this layer has just quantized them. With `rows`, `weight` and the bias
        are these rows of the layer's. `operator` is the product of `groups`, if there are any.
        """
        if self.exact_sums:
            y = exact_product(layer, operator, x, weight, bias, input_grid_of(layer), sources, rows, kept, groups)
            if y is not None:
                return y
        return operator(x, weight, bias())

    def compute_groups(self, layer: AnyLayer, input: Tensor, groups: Groups) -> Tensor:
        """Returns the products of the rows of `input`, each with the part of the weight that `groups` says."""
        return self.compute(layer, groups.linear, input, groups=groups)

    def compute_rows(self, layer: AnyLayer, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
        """Returns `operator` of each input with its part of weight and bias, cut into equal parts along axis 0."""
        weight = self.quantized_weight(layer)
        bias = cache(lambda: bias_to_add(layer, inputs[0], weight))
        quantized: list[Tensor] = []
        for number, x in enumerate(inputs):
            same = next((i for i in range(number) if inputs[i] is x), None)
            quantized.append(self.quantize_input(layer, x) if same is None else quantized[same])
        size = len(weight) // len(inputs)
        parts = [slice(number * size, (number + 1) * size) for number in range(len(inputs))]

        def bias_of(rows: slice) -> Tensor | None:
            found = bias()
            return None if found is None else found[rows]

        return [
            self._product(layer, operator, x, weight[rows], partial(bias_of, rows), rows=rows)
            for x, rows in zip(quantized, parts, strict=True)
        ]


def compute(layer: RecordedLayer, operator: Operator, input: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns `operator(x, weight, bias)` of the quantized input and weight of a layer.

    A prepared layer keeps codes for the backward pass. A converted layer computes with integers.

    Args:
        layer: A prepared or converted layer.
        operator: A function of input, weight and bias that computes sums of products.
        input: The input, which need not be quantized.
        weight: The weight to quantize, if it is computed from the parameters of the layer. The kind of the layer must
            then also have a `read_weight` that returns it. If None, the weight itself. A converted layer ignores it.
    """
    return layer._fakequant.compute(layer, operator, input, None, weight)


def compute_rows(layer: RecordedLayer, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
    """Returns `operator` of each input with its part of weight and bias, cut into equal parts along axis 0."""
    return layer._fakequant.compute_rows(layer, operator, inputs)


def quantize_input(layer: RecordedLayer, x: Tensor) -> Tensor:
    """Returns `x` on the grid of the layer's input."""
    return layer._fakequant.quantize_input(layer, x)


def quantized_weight(layer: RecordedLayer) -> Tensor:
    """Returns the weight of a layer on its grid."""
    return layer._fakequant.quantized_weight(layer)


def quantize_output(layer: AnyLayer, y: Tensor) -> Tensor:
    """Returns `y` on the grid of the layer's result. Call it last."""
    quantizer: Quantizer | None = layer._modules.get("output_quantizer")  # a grid if the layer is converted
    return y if quantizer is None else quantizer(y)


def input_grid_of(layer: AnyLayer) -> Any:
    """Returns the quantizer (of a converted layer: the grid) of a layer's input, or None.

    It may belong to the layer or to the module that computes the input. If the layer is called several times, it is
    the one of the running call, or of the first call if none is running.
    """
    own = layer.input_quantizer
    if isinstance(own, CallQuantizers):
        return own.current
    return layer._fakequant.input_grid if own is None else own


def input_grids_of(layer: AnyLayer) -> list[Any]:
    """Returns the quantizers (of a converted layer: the grids) of a layer's input, or None, for every call."""
    own = layer.input_quantizer
    return own.all() if isinstance(own, CallQuantizers) else [input_grid_of(layer)]


def kind_of(layer: nn.Module) -> type[LayerKind] | None:
    """Returns the kind of a float, prepared or converted layer, or None if no kind is registered for it.

    >>> kind_of(nn.Linear(2, 2)).__name__, kind_of(nn.ReLU())
    ('Linear', None)
    """
    record = find_record(layer)
    return record.kind if isinstance(record, LayerRecord) else find_kind(type(layer))


def is_layer(module: nn.Module) -> bool:
    """Returns True if `module` is, or could be, quantized as one layer, whatever its code does.

    >>> is_layer(nn.Linear(2, 2)), is_layer(nn.ReLU())
    (True, False)
    """
    if isinstance(find_record(module), LayerRecord):
        return True
    kind = find_kind(type(module))
    if kind is None:
        return False
    return not kind.runs_float_forward or kind.unsupported_reason(module) is None


def quantized_class(cls: type[nn.Module], base: type[DerivedModule] = QuantizedLayer) -> type[DerivedModule]:
    """Returns the class of quantized layers for a class of float layers, with the kind registered for it.

    >>> issubclass(quantized_class(nn.Linear), nn.Linear)
    True
    """
    kind = find_kind(cls)
    if kind is None:
        raise TypeError(
            f"No kind of layer is registered for {cls.__name__}.\nRegister one with @fakequant.nn.register_layer_kind."
        )
    name = base.__name__.removesuffix("Layer") + cls.__name__
    made_by = (_loaded_class, cls, base, kind.__module__, kind.__qualname__)
    return derived_class(base, cls, name, made_by, kind=kind, forward=kind.forward, __module__=__name__)


def _loaded_class(cls: type[nn.Module], base: type[DerivedModule], module: str, name: str) -> type[DerivedModule]:
    load_kind(cls, module, name)
    return quantized_class(cls, base)


# --- calls of F.linear and of convolutions ---------------------------------------------------------


class Arguments(NamedTuple):
    """The arguments of one of `LAYER_FUNCTIONS`."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    # Further arguments, by position and by name.
    rest: tuple[Any, ...]
    named: dict[str, Any]


def split_arguments(args: Any, kwargs: Any) -> Arguments:
    """Returns the arguments of one of `LAYER_FUNCTIONS`, however they were passed.

    >>> import torch
    >>> split_arguments((torch.ones(1), torch.ones(2)), {"bias": None, "stride": 2}).named
    {'stride': 2}
    """
    named = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    return Arguments(named.pop("input"), named.pop("weight"), named.pop("bias", None), args[3:], named)


def compute_product(layer: AnyLayer, function: TorchFunction, given: Arguments) -> Tensor:
    """Returns `function` of the given input and weight, quantized as in `layer`, and of the layer's bias.

    `function` is one of `LAYER_FUNCTIONS`. A layer with codes uses these instead of the given weight.
    """
    operator: Operator = linear if function is F.linear else convolution_call(function, given.rest, given.named)
    return compute(layer, operator, given.input, given.weight)


def with_quantized_weights(layers: Sequence[AnyLayer], arguments: Any) -> Any:
    """Returns the arguments of a function, with the weights of prepared layers among them quantized.

    Their biases become those that the layers add. Weight and bias of a converted layer are such already.
    """
    for layer in layers:
        if getattr(layer, "weight_quantizer", None) is None:
            continue
        kind, weight = layer._fakequant.kind, quantized_weight(layer)
        bias = getattr(layer, kind.bias_name, None)
        arguments = _replaced(arguments, getattr(layer, kind.weight_name), weight)
        if bias is not None:
            arguments = _replaced(arguments, bias, bias_to_add(layer, weight, weight))
    return arguments


def _replaced(value: Any, old: Tensor, new: Tensor | None) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_replaced(part, old, new) for part in value])
    if isinstance(value, dict):
        return {name: _replaced(part, old, new) for name, part in value.items()}
    return new if value is old else value


def compute_call(layer: AnyLayer, function: TorchFunction, args: Any, kwargs: Any) -> Tensor:
    """Returns the result of a call, in the code of another module, with the weight of `layer`.

    Input, weight and result are quantized as in the layer. A bias that does not belong to the layer is added in float.

    `function` is one of `LAYER_FUNCTIONS`.
    """
    given = split_arguments(args, kwargs)
    if layer._fakequant.calls is not None:  # the layer itself is not called, so that its hook does not count
        layer._fakequant.calls.next()
    y = compute_product(layer, function, given)
    if given.bias is not None and getattr(layer, layer._fakequant.kind.bias_name, None) is None:
        y = y + given.bias.reshape(-1, *[1] * (given.weight.dim() - 2))
    return quantize_output(layer, y)
