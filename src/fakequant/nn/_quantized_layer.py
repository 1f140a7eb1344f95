"""Prepared layers: layers that quantize their tensors.

The class of a prepared layer is derived from the layer's original class, with the forward pass of its `LayerKind`. Its
record is a `Quantization`. `fakequant._prepare.attach` turns a layer into a prepared layer, and back.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fakequant import _targets
from fakequant.nn._batch_norm import BatchNorm
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._deployed_bias import bias_to_add
from fakequant.nn._layer_kinds import AnyLayer, LayerKind, find_kind, load_kind
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import LayerRecord, Operands, Operator as Operator, RecordedLayer, find_record
from fakequant.nn._saved_codes import saving_codes
from fakequant.spec import QuantSpec

QUANTIZERS = ("weight_quantizer", "input_quantizer", "output_quantizer")
# Those that only `nn.MultiheadAttention` has.
ATTENTION_QUANTIZERS = ("projection_quantizer", "attention_quantizer")
# Attributes that prepared and converted layers add. A user's layer must not have them.
RESERVED = ("_fakequant", "weight_codes", "weight_scale", "weight_zero_point", "bias_codes")

_CLASSES: "dict[tuple[type[nn.Module], type[LayerKind], type[nn.Module]], type[nn.Module]]" = {}


class QuantizedLayer(nn.Module):
    """The base of all prepared and converted layers, for `isinstance`. It adds no public methods."""

    # A `Quantization`; of a converted layer another `LayerRecord`.
    _fakequant: Any
    weight_quantizer: Quantizer | None
    # Quantizers, or `CallQuantizers` if the layer is called several times; of a converted layer grids.
    input_quantizer: Any
    output_quantizer: Any

    if TYPE_CHECKING:

        def __getstate__(self) -> dict[str, Any]:
            """Returns the attributes to pickle."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, QuantizedLayer)


@dataclasses.dataclass(eq=False, kw_only=True)
class Quantization(LayerRecord):
    """The record of a prepared layer: `layer._fakequant`."""

    base = QuantizedLayer

    # Whether codes are kept for the backward pass instead of floats.
    save_codes: bool = True
    # The quantizer of the module that computes the input, if the layer has no `input_quantizer`.
    input_grid: Quantizer | None = None
    # The batch norm that `convert` will fold into the layer.
    norm: BatchNorm | None = None
    # The name of the target. It decides how the codes of the weight are stored.
    target: str = "generic"
    # Whether training adds the deployed bias too, not only evaluation.
    deploys_bias: bool = False
    # The last result of `weight_shift`, with the spec and target it is for.
    _shift: tuple[QuantSpec, str, int] | None = dataclasses.field(default=None, init=False)

    def weight_shift(self, spec: QuantSpec) -> int:
        """Returns k if codes of a weight with this spec will be stored times 2^k; see `Target.weight_shift`."""
        if torch.compiler.is_compiling():  # which would compile again after `_shift` has changed
            return _targets.find(self.target).weight_shift(spec)
        if self._shift is None or self._shift[:2] != (spec, self.target):
            self._shift = spec, self.target, _targets.find(self.target).weight_shift(spec)
        return self._shift[2]

    def quantize_input(self, layer: AnyLayer, x: Tensor) -> Tensor:
        """Returns `x` on the grid of the layer's input."""
        quantized: Tensor = x if layer.input_quantizer is None else layer.input_quantizer(x)
        return quantized

    def quantized_weight(self, layer: AnyLayer) -> Tensor:
        """Returns the weight on its grid."""
        weight = self.kind.read_weight(layer)
        quantizer: Quantizer | None = layer.weight_quantizer
        return weight if quantizer is None else quantizer(weight)

    def operands(self, layer: AnyLayer) -> Operands:
        """Returns the quantized weight and the bias, for several calls of `compute`. No batch norm may follow."""
        assert self.norm is None
        weight = self.quantized_weight(layer)
        return weight, bias_to_add(layer, weight, weight)

    def compute(
        self,
        layer: AnyLayer,
        operator: Operator,
        input: Tensor,
        operands: Operands | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Returns `operator` of the quantized input, the quantized weight and the bias."""
        if operands is not None:
            x = self.quantize_input(layer, input)
            if not self.save_codes:
                return operator(x, *operands)
            # The calls share the weight, so it is kept once and not quantized again in the backward pass of each.
            with saving_codes(x, input_grid_of(layer), operands[0], None, operands[0]):
                return operator(x, *operands)
        # Read once, because reading a parametrized weight computes it.
        source: Tensor = getattr(layer, self.kind.weight_name) if weight is None else weight
        is_given = weight is not None
        quantize_input = layer.input_quantizer
        quantize_weight: Quantizer | None = layer.weight_quantizer
        x = input if quantize_input is None else quantize_input(input)
        weight = source if quantize_weight is None else quantize_weight(source)
        if self.norm is not None and weight.dim() == 2 and not torch.compiler.is_compiling():
            layer.weight_quantizer.note_tokens(x.dim() > 2)
        bias = bias_to_add(layer, x, weight)
        if is_given and bias is not None:
            bias = bias.to(weight.dtype)  # code that computes a weight may have cast it
        if not self.save_codes:
            return operator(x, weight, bias)
        with saving_codes(x, input_grid_of(layer), weight, quantize_weight, source):
            return operator(x, weight, bias)

    def compute_rows(self, layer: AnyLayer, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
        """Returns `operator` of each input with its part of weight and bias, cut into equal parts along axis 0."""
        weight = self.quantized_weight(layer)
        bias = bias_to_add(layer, inputs[0], weight)
        quantized: list[Tensor] = []
        for number, x in enumerate(inputs):
            same = next((i for i in range(number) if inputs[i] is x), None)
            quantized.append(self.quantize_input(layer, x) if same is None else quantized[same])
        biases = [None] * len(inputs) if bias is None else bias.chunk(len(inputs))
        return [operator(x, w, b) for x, w, b in zip(quantized, weight.chunk(len(inputs)), biases, strict=True)]


def compute(layer: RecordedLayer, operator: Operator, input: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns `operator(x, weight, bias)` of the quantized input and weight of a layer.

    A prepared layer keeps codes for the backward pass. A converted layer computes with integers.

    Args:
        layer: A prepared or converted layer.
        operator: A function of input, weight and bias that computes sums of products.
        input: The input, which need not be quantized.
        weight: The weight to quantize, if it is computed from the parameters of the layer. The kind of the layer must
            then also have a `read_weight` that returns it. None for the weight itself. A converted layer ignores it.
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
    quantizer: Quantizer | None = layer.output_quantizer  # a grid if the layer is converted
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
    """Returns the kind of a float, prepared or converted layer, or None if the module is no such layer.

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


def quantized_class(cls: type[nn.Module], base: type[nn.Module] = QuantizedLayer) -> type[nn.Module]:
    """Returns the class of quantized layers for a class of float layers, with the kind registered for it.

    >>> issubclass(quantized_class(nn.Linear), nn.Linear)
    True
    """
    kind = find_kind(cls)
    if kind is None:
        raise TypeError(
            f"No kind of layer is registered for {cls.__name__}.\nRegister one with @fakequant.nn.quantizes."
        )
    key = (cls, kind, base)
    if key not in _CLASSES:
        name = base.__name__.removesuffix("Layer") + cls.__name__
        _CLASSES[key] = type(name, (base, cls), {"forward": kind.forward, "__module__": __name__})
    return _CLASSES[key]


def reduced(layer: AnyLayer, base: type[nn.Module]) -> tuple[Any, ...]:
    """Returns the value of `__reduce_ex__`. Pickle cannot find the class of a layer, which is made at run time."""
    record, kind = layer._fakequant, layer._fakequant.kind
    return _rebuild, (base, record.float_class, kind.__module__, kind.__qualname__), layer.__getstate__()


def _rebuild(base: type[nn.Module], cls: type[nn.Module], module: str, name: str) -> nn.Module:
    load_kind(cls, module, name)
    made = quantized_class(cls, base)
    return made.__new__(made)
