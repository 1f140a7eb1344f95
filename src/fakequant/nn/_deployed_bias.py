"""The bias that will be deployed: an integer at the scale of the sums it is added to.

An integer runtime adds the bias to sums of products of codes, so the bias is rounded to a multiple of

    x_scale * weight_scale / 2^weight_shift

If a batch norm will be folded into the layer, the deployed bias includes its mean and beta. Evaluation adds the
deployed bias, so that its results are those of the deployed model. Training adds it once batch norms are frozen.
Products of float formats are summed as floats, and so their bias stays a float.
"""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fakequant._backends.torch.formula import onnx_steps
from fakequant.nn._batch_norm import AnyNorm, BatchNorm, bias_rounding, factor_of, lacks_opposite, rounded_bias
from fakequant.nn._call_quantizers import CallQuantizers, current_quantizer
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._recomputation import as_first, runs
from fakequant.nn._records import RecordedLayer
from fakequant.spec import QuantSpec

if TYPE_CHECKING:
    from fakequant.nn._quantized_layer import Quantization


class PreparedLayer(Protocol):
    """A layer that `prepare` has changed."""

    training: bool
    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | CallQuantizers | None

    @property
    def _fakequant(self) -> "Quantization": ...


def bias_to_add(layer: PreparedLayer, x: Tensor, weight: Tensor) -> Tensor | None:
    """Returns the bias that a prepared layer adds, or None.

    In training this is the layer's bias. In evaluation, and once its batch norm is frozen, it is the deployed bias.
    If a batch norm follows that will be folded, the result compensates for the rounding of the folded bias. A bias
    that will be deployed as a float is not changed. Gradients pass straight through to the layer's bias.

    Args:
        layer: The prepared layer.
        x: Its quantized input.
        weight: Its quantized weight.
    """
    record = layer._fakequant
    bias: Tensor | None = getattr(layer, record.kind.bias_name, None)
    norm = record.norm
    norm_is_frozen = norm is not None and not norm.training
    if layer.training and not record.deploys_bias and not norm_is_frozen:
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
    if norm is not None and weight.dim() == 2 and layer.weight_quantizer.has_tokens:
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
