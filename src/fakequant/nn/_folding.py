"""Folding of batch norms, and the bias that will be deployed.

A batch norm is folded into the layer before it:

    y = (x w + b - mean) * factor + beta         factor = gamma / sqrt(variance + eps)

    weight_scale' = weight_scale * |factor|      b' = (b - mean) * factor + beta

An integer runtime adds the bias to accumulated products of codes, so the bias is rounded to a multiple of

    x_scale * weight_scale / 2^weight_shift

If a batch norm will be folded into the layer, the deployed bias includes its mean and beta. Evaluation adds the
deployed bias, so that it computes what the deployed model computes. Training adds it once batch norms are frozen.
Products of float formats are summed as floats, and so their bias stays a float.
"""

from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn

from fakequant._backends.torch.formula import onnx_steps
from fakequant.nn._bounded_parameters import whole
from fakequant.nn._call_quantizers import CallQuantizers, current_quantizer
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._recomputation import as_first, runs
from fakequant.nn._records import DerivedModule, RecordedLayer, derived_class, has_tokens
from fakequant.spec import QuantSpec

if TYPE_CHECKING:
    from fakequant.nn._quantized_layer import Quantization


# The largest magnitude of a bias as an integer. Added to the sums, it still fits in 32 bits.
_LARGEST = 2**30


class BatchNorm(Protocol):
    """A batch norm of torch with running statistics."""

    training: bool
    eps: float
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor


# A `BatchNorm`. Functions that walk a model have it as an `nn.Module`, whose attributes have no types.
AnyNorm: TypeAlias = Any


def factor_of(norm: AnyNorm) -> Tensor:
    """Returns gamma / sqrt(variance + eps), in float64."""
    deviation = _exact(norm.running_var).add(norm.eps).sqrt()
    return deviation.reciprocal() if norm.weight is None else _exact(norm.weight) / deviation


def _exact(value: Tensor) -> Tensor:
    """Returns all values of a tensor in float64; on the CPU if the device is an Apple GPU, which has no float64."""
    value = whole(value) if hasattr(value, "full_tensor") else value.detach()
    return (value.cpu() if value.device.type == "mps" else value).double()


def lacks_opposite(lowest: Tensor, qmin: int, factor: Tensor) -> Tensor:
    """Returns a bool tensor: whether folding would negate a channel that uses `qmin`, whose negative is not a code.

    `lowest` holds the lowest code of every channel.
    """
    return ((factor < 0) & (lowest == qmin)).any()


def folded_bias(bias: Tensor | None, norm: AnyNorm) -> Tensor:
    """Returns the bias of layer and batch norm together, in float64."""
    factor = factor_of(norm)
    before = torch.zeros_like(factor) if bias is None else _exact(bias)
    beta = torch.zeros_like(factor) if norm.bias is None else _exact(norm.bias)
    return (before - _exact(norm.running_mean)) * factor + beta


def folded_scale(scale: Tensor, factor: Tensor) -> Tensor:
    """Returns the scale of a weight, or of its products, after folding: positive, in float32."""
    return (scale.double() * factor.abs()).clamp(min=torch.finfo(torch.float32).tiny).float()


def bias_codes(bias: Tensor, scale: Tensor) -> Tensor:
    """Returns the bias as integers at the scale of the sums, in float64."""
    return (bias.double() / scale.double()).round()


def widened_scale(weight_scale: Tensor, x_scale: Tensor, bias: Tensor) -> Tensor:
    """Returns the scales of a weight, increased where the bias would not fit in 32 bits.

    This only happens where the bias dwarfs the weights, e.g. before a batch norm with a factor of 0.
    """
    return torch.maximum(weight_scale.double(), bias.double().abs() / (x_scale.double() * _LARGEST)).float()


def bias_rounding(bias: Tensor | None, x_scale: Tensor, weight_scale: Tensor, norm: BatchNorm | None) -> Tensor:
    """Returns the error that rounding the bias adds to the result, per channel, in float64.

    It is the error of the result of `norm`, the batch norm that will be folded into the layer. `bias` is only None if
    there is one.
    """
    if norm is None:
        assert bias is not None
        return _rounding(_exact(bias), _exact(x_scale * weight_scale))
    factor, exact = factor_of(norm), folded_bias(bias, norm)
    step = (x_scale.to(factor.device) * folded_scale(weight_scale.to(factor.device), factor)).double()
    return _rounding(exact, step)


def _rounding(exact: Tensor, step: Tensor) -> Tensor:
    codes = (exact / step).round()  # `bias_codes`
    return torch.where(codes.abs() > _LARGEST, 0, codes * step - exact)


@torch.no_grad()
def rounded_bias(bias: Tensor | None, x_scale: Tensor, weight_scale: Tensor, norm: BatchNorm | None) -> Tensor:
    """Returns the bias with which a float layer, followed by its batch norm, computes what integers will.

    In float64, on a device that supports it. A bias that is too large for its scale is not rounded, because
    `convert` will increase the scale (`widened_scale`).

    `bias` is only None if there is a batch norm.
    """
    if norm is None:
        assert bias is not None
        exact = _exact(bias)
        return exact + _rounding(exact, _exact(x_scale * weight_scale))
    factor = factor_of(norm)
    change = torch.where(factor == 0, 0, bias_rounding(bias, x_scale, weight_scale, norm) / factor)
    return change if bias is None else _exact(bias) + change


class FrozenNorm(DerivedModule):
    """The base of frozen batch norms: these stay in evaluation mode while the model around them trains.

    They use their running statistics and do not update them.
    """

    def train(self, mode: bool = True) -> Self:
        """Keeps the batch norm in evaluation mode. Its children, such as an output quantizer, are set to `mode`."""
        self.training = False
        for child in self.children():
            child.train(mode)
        return self


def frozen_class(cls: type[nn.Module]) -> type[FrozenNorm]:
    """Returns the class of frozen batch norms for a class of batch norms.

    >>> issubclass(frozen_class(nn.BatchNorm2d), nn.BatchNorm2d)
    True
    """
    # The same `__module__`, by which torch.compile and torch.fx recognize torch's modules.
    return derived_class(FrozenNorm, cls, f"Frozen{cls.__name__}", (frozen_class, cls), __module__=cls.__module__)


class PreparedLayer(Protocol):
    """A layer that `prepare` has changed."""

    training: bool
    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | CallQuantizers | None

    @property
    def _fakequant(self) -> "Quantization": ...


def _adds_deployed_bias(layer: PreparedLayer) -> bool:
    """Returns True if a layer adds its bias as integers: in evaluation, and once its batch norm is frozen."""
    record = layer._fakequant
    norm_is_frozen = record.norm is not None and not record.norm.training
    return not record.has_float_bias and (not layer.training or record.deploys_bias or norm_is_frozen)


def deployed_bias_codes(layer: PreparedLayer, x: Tensor, weight: Tensor) -> Tensor | None:
    """Returns the bias as the integers, in float64, that a runtime adds to the sums of products, times 2^weight_shift.

    Returns None if the layer has no bias, adds a float, or is followed by a batch norm that will be folded into it. A
    bias that is too large for its scale is not rounded.
    """
    record = layer._fakequant
    bias: Tensor | None = getattr(layer, record.kind.bias_name, None)
    if bias is None or not _adds_deployed_bias(layer) or will_fold(record.norm, x, weight):
        return None
    scales = scales_of_sums(layer, weight.dim())
    if scales is None:
        return None
    x_scale, weight_scale = scales
    steps = bias.detach().double() / (x_scale * weight_scale).detach().double()
    codes = steps.round()
    return torch.where(codes.abs() > _LARGEST, steps, codes)


def bias_to_add(layer: PreparedLayer, x: Tensor, weight: Tensor) -> Tensor | None:
    """Returns the bias that a prepared layer adds, or None.

    In training this is the layer's bias. In evaluation, and once its batch norm is frozen, it is the deployed bias.
    If a batch norm follows that will be folded, the result compensates for the rounding of the folded bias. A bias
    that will be deployed as a float is not changed. Gradients pass straight through to the layer's bias.

    `x` and `weight` are quantized.
    """
    record = layer._fakequant
    bias: Tensor | None = getattr(layer, record.kind.bias_name, None)
    norm = record.norm
    if bias is None and norm is None:
        return None
    if not _adds_deployed_bias(layer):
        return bias
    if norm is not None and not will_fold(norm, x, weight):
        norm = None
    if bias is None and norm is None:
        return None
    scales = scales_of_sums(layer, weight.dim())
    if scales is None:
        return bias
    rounded = rounded_bias(bias, *scales, norm)
    if norm is not None and not _is_narrow(layer):
        # If the batch norm cannot be folded, it stays behind the layer, and only the layer's bias is rounded.
        own = torch.zeros_like(rounded) if bias is None else rounded_bias(bias, *scales, None)
        rounded = torch.where(_stays_behind(layer, norm, weight), own, rounded)
    rounded = rounded.to(weight.device, weight.dtype)
    return rounded if bias is None else rounded + (bias - bias.detach())


@torch.no_grad()
def bias_error(layer: AnyLayer) -> tuple[Tensor, AnyNorm] | None:
    """Returns the error that rounding the bias adds to the result of a prepared layer, per channel.

    Also returns the batch norm after which the error is measured, or None if it is measured after the layer. Returns
    None instead of both if the bias will be a float or there is no bias.
    """
    record: Quantization = layer._fakequant
    kind, norm = record.kind, record.norm
    if layer.weight_quantizer is None:
        return None
    weight: Tensor = getattr(layer, kind.weight_name)
    bias: Tensor | None = getattr(layer, kind.bias_name, None)
    if norm is not None and weight.dim() == 2 and has_tokens(layer):
        norm = None
    scales = scales_of_sums(layer, weight.dim())
    if scales is None or (bias is None and norm is None) or bool(scales[0].isnan().any()):
        return None
    return bias_rounding(bias, *scales, norm), norm


def will_fold(norm: BatchNorm | None, x: Tensor, weight: Tensor) -> bool:
    """Returns True if `convert` will fold `norm` into a layer with input `x`.

    The batch norm must be in evaluation mode, on the same device, and normalize the output channels of the layer.
    """
    if norm is None or norm.training or norm.running_mean.device != x.device:
        return False
    return weight.dim() > 2 or x.dim() == 2  # after a linear layer on tokens it normalizes another axis


def scales_of_sums(layer: PreparedLayer, weight_dims: int) -> tuple[Tensor, Tensor] | None:
    """Returns the scale of the input, and of the weight per output channel; None if the sums are not integers.

    Sums are integers times a scale if the codes of input and weight are integers, and their scales do not vary within a
    sum.
    """
    x = current_quantizer(layer.input_quantizer) or layer._fakequant.input_grid
    weight = layer.weight_quantizer
    if x is None or not x._quantizing or x._blocks is None:
        return None
    if weight is None or not weight._quantizing or weight._blocks is None:
        return None
    if x.spec.float_format is not None or weight.spec.float_format is not None:
        return None
    if x.spec.axis is not None or x.is_dynamic or not has_one_scale_per_sum(layer, weight.spec, weight_dims):
        return None
    scale = weight.scale if layer._fakequant.kind.channel_axis == 0 else along_outputs(layer, weight.scale)
    x_scale = x.scale
    if not torch.compiler.is_compiling() and runs.stack:
        (x_scale,) = as_first((layer, "input scale"), x_scale)
    return x_scale, scale * 2.0 ** -layer._fakequant.weight_shift(weight.spec)


def has_one_scale_per_sum(layer: RecordedLayer, spec: QuantSpec, weight_dims: int) -> bool:
    """Returns True if all weights in a sum of products are integers with the same scale."""
    axis = layer._fakequant.kind.channel_axis
    is_whole = spec.format == "int" and spec.group_size is None
    return is_whole and (spec.axis is None or spec.axis % weight_dims == axis)


def along_outputs(layer: RecordedLayer, scale: Tensor) -> Tensor:
    """Returns the scales of a weight per output channel: the groups of a transposed convolution share them."""
    groups: int = getattr(layer, "groups", 1) if layer._fakequant.kind.channel_axis == 1 else 1
    return scale.repeat(groups) if groups > 1 and scale.dim() == 1 else scale


def _is_narrow(layer: PreparedLayer) -> bool:
    assert layer.weight_quantizer is not None  # `scales_of_sums` has checked it
    spec = layer.weight_quantizer.spec
    return spec.qmin == -spec.qmax


@torch.no_grad()
def _stays_behind(layer: PreparedLayer, norm: BatchNorm, weight: Tensor) -> Tensor:
    """Returns, as a bool tensor, whether `convert` will find that `norm` cannot be folded."""
    assert layer.weight_quantizer is not None
    scale = along_outputs(layer, layer.weight_quantizer.scale)
    lowest = onnx_steps(weight.movedim(layer._fakequant.kind.channel_axis, 0).flatten(1).amin(1), scale)
    factor = factor_of(norm)
    return lacks_opposite(lowest.to(factor.device), layer.weight_quantizer.spec.qmin, factor)
