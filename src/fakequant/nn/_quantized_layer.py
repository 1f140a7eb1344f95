"""Prepared layers: layers that quantize their tensors.

The class of a prepared layer is derived from the layer's own, with the forward pass of its `LayerKind`. Its record is a
`Quantization`. `fakequant._prepare.attach` makes a layer a prepared one, and back.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant import _targets
from fakequant.nn._deployed_bias import bias_to_add
from fakequant.nn._layer_kinds import LayerKind, find_kind, load_kind
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import LayerRecord
from fakequant.nn._saved_codes import saving_codes
from fakequant.spec import QuantSpec

QUANTIZERS = ("weight_quantizer", "input_quantizer", "output_quantizer")
# The names that a prepared or a converted layer needs for itself.
RESERVED = ("_fakequant", "weight_codes", "weight_scale", "weight_zero_point", "bias_codes")

Operator = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_CLASSES: "dict[tuple[type[nn.Module], type[LayerKind], type[QuantizedLayer]], type[QuantizedLayer]]" = {}


class QuantizedLayer(nn.Module):
    """The base of all prepared and converted layers, for `isinstance`. It adds nothing that a layer may have too."""

    _fakequant: Any
    weight_quantizer: Quantizer | None
    input_quantizer: Any
    output_quantizer: Any

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, QuantizedLayer)


@dataclasses.dataclass(eq=False, kw_only=True)
class Quantization(LayerRecord):
    """The record of a prepared layer: `layer._fakequant`."""

    base = QuantizedLayer

    # Keep codes for the backward pass instead of floats.
    save_codes: bool = True
    # The quantizer of the module that computes the input, if the layer has no `input_quantizer`.
    input_grid: Any = None
    # The batch norm that `convert` will fold into the layer.
    norm: nn.Module | None = None
    # What the model is to run on, by name: it decides how codes of the weight are stored.
    target: str = "generic"
    # Add the bias that will run in training too, not only in evaluation.
    deploys_bias: bool = False
    # What `weight_shift` returned last, and for which spec and target.
    _shift: tuple[QuantSpec, str, int] | None = dataclasses.field(default=None, init=False)

    def weight_shift(self, spec: QuantSpec) -> int:
        """The k for which codes of a weight with this spec will be stored times 2^k; see `Target.weight_shift`."""
        if torch.compiler.is_compiling():  # which would compile again when `_shift` has changed
            return _targets.find(self.target).weight_shift(spec)
        if self._shift is None or self._shift[:2] != (spec, self.target):
            self._shift = spec, self.target, _targets.find(self.target).weight_shift(spec)
        return self._shift[2]

    def quantize_input(self, layer: Any, x: Tensor) -> Tensor:
        """`x` on the grid of the layer's input."""
        return x if layer.input_quantizer is None else layer.input_quantizer(x)

    def quantized_weight(self, layer: Any) -> Tensor:
        """The weight on its grid."""
        weight = getattr(layer, self.kind.weight_name)
        return weight if layer.weight_quantizer is None else layer.weight_quantizer(weight)

    def compute(self, layer: Any, operator: Operator, input: Tensor) -> Tensor:
        """`operator` of the quantized input, the quantized weight and the bias."""
        source = getattr(layer, self.kind.weight_name)  # once: reading a parametrized weight computes it
        quantize_input, quantize_weight = layer.input_quantizer, layer.weight_quantizer
        x = input if quantize_input is None else quantize_input(input)
        weight = source if quantize_weight is None else quantize_weight(source)
        if self.norm is not None and weight.dim() == 2 and not torch.compiler.is_compiling():
            layer.weight_quantizer.note_tokens(x.dim() > 2)
        bias = bias_to_add(layer, x, weight)
        if not self.save_codes:
            return operator(x, weight, bias)
        with saving_codes(x, quantize_input or self.input_grid, weight, quantize_weight, source):
            return operator(x, weight, bias)

    def compute_rows(self, layer: Any, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
        """`operator` of each input with its part of the weight, which is cut into equal parts along axis 0."""
        weight = self.quantized_weight(layer)
        bias = bias_to_add(layer, inputs[0], weight)
        quantized: list[Tensor] = []
        for number, x in enumerate(inputs):
            same = next((i for i in range(number) if inputs[i] is x), None)
            quantized.append(self.quantize_input(layer, x) if same is None else quantized[same])
        biases = [None] * len(inputs) if bias is None else bias.chunk(len(inputs))
        return [operator(x, w, b) for x, w, b in zip(quantized, weight.chunk(len(inputs)), biases, strict=True)]


def compute(layer: Any, operator: Operator, input: Tensor) -> Tensor:
    """`operator(x, weight, bias)` of the quantized input and weight of a layer.

    A prepared layer keeps codes for the backward pass. A converted layer computes with integers.
    """
    return layer._fakequant.compute(layer, operator, input)


def compute_rows(layer: Any, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
    """`operator` of each input with its part of the weight and the bias, cut into equal parts along axis 0."""
    return layer._fakequant.compute_rows(layer, operator, inputs)


def quantize_input(layer: Any, x: Tensor) -> Tensor:
    """`x` on the grid of the layer's input."""
    return layer._fakequant.quantize_input(layer, x)


def quantized_weight(layer: Any) -> Tensor:
    """The weight of a layer on its grid."""
    return layer._fakequant.quantized_weight(layer)


def quantize_output(layer: Any, y: Tensor) -> Tensor:
    """`y` on the grid of the layer's result. Call it last."""
    return y if layer.output_quantizer is None else layer.output_quantizer(y)


def input_grid_of(layer: Any) -> Any:
    """The quantizer or grid of a layer's input: its own, or that of the module that computes the input."""
    return layer.input_quantizer or layer._fakequant.input_grid


def quantized_class(cls: type[nn.Module], base: type[QuantizedLayer] = QuantizedLayer) -> type[QuantizedLayer]:
    """The class of quantized layers for a class of float layers, with the kind that is registered now.

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


def reduced(layer: QuantizedLayer, base: type[QuantizedLayer]) -> tuple[Any, ...]:
    """For `__reduce_ex__`: the class of a layer is made at run time, so pickle cannot find it by its name."""
    record, kind = layer._fakequant, layer._fakequant.kind
    return _rebuild, (base, record.float_class, kind.__module__, kind.__qualname__), layer.__getstate__()


def _rebuild(base: type[QuantizedLayer], cls: type[nn.Module], module: str, name: str) -> nn.Module:
    load_kind(cls, module, name)
    made = quantized_class(cls, base)
    return made.__new__(made)
