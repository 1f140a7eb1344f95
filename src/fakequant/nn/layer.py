"""Layers that quantize their tensors: the class of a layer with a forward pass of ours mixed in.

A prepared `nn.Linear` is of a class derived from `nn.Linear`, made when it is first needed. Its
parameters, buffers, hooks and name are what they were; quantizers are children of it. Making it a
float layer again is giving it back its class.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fakequant.nn.folding import factor_of, lacks_opposite, rounded_bias
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.saved_codes import saving_codes
from fakequant.spec import QuantSpec

QUANTIZERS = ("weight_quantizer", "input_quantizer", "output_quantizer")
_FORWARD: "dict[type[nn.Module], type[QuantizedLayer]]" = {}
_QUANTIZED: "dict[type[nn.Module], type[QuantizedLayer]]" = {}
# How many axes the last input of a linear layer with a normalization had. Not in the layer: running it must change
# nothing there.
_INPUT_DIMS: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()
_Layer = TypeVar("_Layer", bound="type[QuantizedLayer]")


class QuantizedLayer(nn.Module):
    """What is mixed into the class of a layer. A quantizer that is None leaves its tensor in float."""

    # The class of the layer in float.
    float_class: ClassVar[type[nn.Module]]
    # Where the weight has its output channels.
    channel_axis: ClassVar[int] = 0
    # The inputs are numbers to quantize, not indices.
    has_input: ClassVar[bool] = True
    # The names of the weight and the bias.
    weight_name: ClassVar[str] = "weight"
    bias_name: ClassVar[str] = "bias"

    # Keep codes for the backward pass instead of floats.
    save_codes: bool = True
    # The quantizer of the module that the input comes from, if the layer needs none of its own.
    input_grid: Quantizer | None = None
    # The batch normalization that will be part of the layer when it is converted.
    norm: nn.Module | None = None

    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | None
    output_quantizer: Quantizer | None

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Why a layer of this kind cannot be quantized, if it cannot."""
        return None

    def quantize_input(self, x: Tensor) -> Tensor:
        """What the layer computes with."""
        return x if self.input_quantizer is None else self.input_quantizer(x)

    def quantized_weight(self) -> Tensor:
        """The weight the layer computes with."""
        return self._quantize_weight(getattr(self, self.weight_name))

    def _quantize_weight(self, weight: Tensor) -> Tensor:
        return weight if self.weight_quantizer is None else self.weight_quantizer(weight)

    def compute(self, operator: Callable[[Tensor, Tensor, Tensor | None], Tensor], input: Tensor) -> Tensor:
        """`operator` of the quantized input and weight and the bias, which keeps codes for the backward pass."""
        source = getattr(self, self.weight_name)  # once: reading a parametrized weight computes it
        x, weight = self.quantize_input(input), self._quantize_weight(source)
        if self.norm is not None and weight.dim() == 2 and not torch.compiler.is_compiling():
            _INPUT_DIMS[self] = x.dim()
        bias = getattr(self, self.bias_name)
        if not self.training:
            bias = self.deployed_bias(bias, x, weight)
        if not self.save_codes:
            return operator(x, weight, bias)
        with saving_codes(x, self.input_quantizer or self.input_grid, weight, self.weight_quantizer, source):
            return operator(x, weight, bias)

    def deployed_bias(self, bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor | None:
        """The bias as it will be in integers, so that evaluation shows what will run; in training it is a float.

        An integer runtime adds it to sums of products, as an integer at their scale. A normalization that will be
        part of the layer brings the most of it: what its rounding changes is added here, before it.
        """
        norm = self.norm if _will_hold(self.norm, x, weight) else None
        if bias is None and norm is None:
            return None
        scales = self._scales_of_sums(weight.dim())
        if scales is None:
            return bias
        rounded = rounded_bias(bias, *scales, norm)
        if norm is not None and not self._is_narrow():
            # A normalization that cannot be part of the layer stays behind it, and the bias is its own.
            own = torch.zeros_like(rounded) if bias is None else rounded_bias(bias, *scales, None)
            rounded = torch.where(self._stays_behind(norm, weight, scales[1]), own, rounded)
        rounded = rounded.to(weight.device, weight.dtype)
        return rounded if bias is None else rounded + (bias - bias.detach())  # whose gradient passes

    def _is_narrow(self) -> bool:
        assert self.weight_quantizer is not None
        spec = self.weight_quantizer.spec
        return spec.qmin == -spec.qmax

    @torch.no_grad()
    def _stays_behind(self, norm: Any, weight: Tensor, scale: Tensor) -> Tensor:
        """As it is found out when the layer is converted."""
        assert self.weight_quantizer is not None
        lowest = torch.round(weight.movedim(self.channel_axis, 0).flatten(1).amin(1) / scale)
        factor = factor_of(norm)
        return lacks_opposite(lowest.to(factor.device), self.weight_quantizer.spec.qmin, factor)

    def _scales_of_sums(self, weight_dims: int) -> tuple[Tensor, Tensor] | None:
        """Of input and weight, per output channel, if they are the same for all terms of a sum; else None."""
        x: Any = self.input_quantizer or self.input_grid
        weight: Any = self.weight_quantizer
        for quantizer in (x, weight):
            if quantizer is None or not quantizer.quantizing or quantizer._blocks is None:
                return None
        if x.spec.axis is not None or x.is_dynamic or not self.has_one_scale_per_sum(weight.spec, weight_dims):
            return None
        return x.scale, self.along_outputs(weight.scale)

    def has_one_scale_per_sum(self, spec: QuantSpec, weight_dims: int) -> bool:
        """Whether all the weights in a sum have the same scale."""
        return spec.group_size is None and (spec.axis is None or spec.axis % weight_dims == self.channel_axis)

    def along_outputs(self, scale: Tensor) -> Tensor:
        """Scales of a weight for all channels of the result: groups of a transposed convolution share theirs."""
        groups = getattr(self, "groups", 1) if self.channel_axis == 1 else 1
        return scale.repeat(groups) if groups > 1 and scale.dim() == 1 else scale

    def quantize_output(self, y: Tensor) -> Tensor:
        """What others see of the result."""
        return y if self.output_quantizer is None else self.output_quantizer(y)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class has no name to be found by.
        return _rebuild, (self.float_class,), self.__getstate__()


def _will_hold(norm: Any, x: Tensor, weight: Tensor) -> bool:
    """Whether a normalization will be part of the layer before it: it is about its channels, and on its device."""
    if norm is None or norm.training or norm.running_mean.device != x.device:
        return False
    return weight.dim() > 2 or x.dim() == 2  # of tokens it normalizes another axis


def input_dims(layer: nn.Module) -> int | None:
    """How many axes the last input of a layer with a normalization had; None: it was not run."""
    return _INPUT_DIMS.get(layer)


def quantizes(*kinds: type[nn.Module]) -> Callable[[_Layer], _Layer]:
    """Says that a class is to be mixed into layers of these kinds: how they compute with quantized tensors.

    >>> class Scaled(nn.Linear):
    ...     def forward(self, x):
    ...         return 2 * torch.nn.functional.linear(x, self.weight, self.bias)
    >>> @quantizes(Scaled)
    ... class QuantizedScaled(QuantizedLayer):
    ...     def forward(self, x):
    ...         return self.quantize_output(2 * self.compute(torch.nn.functional.linear, x))
    >>> import fakequant as fq
    >>> fq.prepare(nn.Sequential(Scaled(4, 2)), fq.recipes.int8())[0].weight_quantizer.spec.bits
    8
    """

    def register(forward: _Layer) -> _Layer:
        for kind in kinds:
            _FORWARD[kind] = forward
        return forward

    return register


def find_forward(cls: type[nn.Module]) -> "type[QuantizedLayer] | None":
    """What is to be mixed into `cls`; None: nothing fits."""
    for base in cls.__mro__:
        if base in _FORWARD:
            return _FORWARD[base] if cls.forward is base.forward else None
    return None


def is_known(cls: type[nn.Module]) -> bool:
    """Whether `cls` is, or is derived from, a layer that can be quantized."""
    return any(base in _FORWARD for base in cls.__mro__)


def quantized_class(cls: type[nn.Module]) -> type[QuantizedLayer]:
    """The class of a quantized layer for the class of a float one.

    >>> issubclass(quantized_class(nn.Linear), nn.Linear)
    True
    """
    if cls not in _QUANTIZED:
        forward = find_forward(cls)
        assert forward is not None
        fields = {"float_class": cls, "__module__": __name__}
        _QUANTIZED[cls] = type(f"Quantized{cls.__name__}", (forward, cls), fields)
    return _QUANTIZED[cls]


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    quantized = quantized_class(cls)
    return quantized.__new__(quantized)
