"""The bias that will run: an integer at the scale of the sums it is added to.

An integer runtime adds the bias to sums of products of codes, so it is rounded to a multiple of

    x_scale * weight_scale / 2^weight_shift

With a batch norm folded in, the bias holds the mean and beta of the batch norm too. Evaluation adds this
bias, so that it shows what will run. Training does once batch norms are frozen.
"""

from typing import Any

import torch
from torch import Tensor

from fakequant.nn._batch_norm import bias_rounding, factor_of, lacks_opposite, rounded_bias
from fakequant.spec import QuantSpec


def bias_to_add(layer: Any, x: Tensor, weight: Tensor) -> Tensor | None:
    """The bias that a prepared layer adds: as it will be in integers, or in training as it is; None if there is none.

    A bias that will be a float is returned as it is. Before a batch norm that will be folded, what the rounding
    changes is added here. The gradient passes to the bias of the layer.

    Args:
        layer: The prepared layer.
        x: Its quantized input.
        weight: Its quantized weight.
    """
    record = layer._fakequant
    bias, norm = getattr(layer, record.kind.bias_name), record.norm
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
        # A batch norm that cannot be folded stays behind the layer, and the bias is the layer's own.
        own = torch.zeros_like(rounded) if bias is None else rounded_bias(bias, *scales, None)
        rounded = torch.where(_stays_behind(layer, norm, weight), own, rounded)
    rounded = rounded.to(weight.device, weight.dtype)
    return rounded if bias is None else rounded + (bias - bias.detach())


@torch.no_grad()
def bias_error(layer: Any) -> tuple[Tensor, Any] | None:
    """What rounding the bias adds to the result of a prepared layer, per channel, and the batch norm it is behind.

    None if the bias will be a float, or if there is none.
    """
    kind, norm = layer._fakequant.kind, layer._fakequant.norm
    if layer.weight_quantizer is None:
        return None
    weight, bias = getattr(layer, kind.weight_name), getattr(layer, kind.bias_name, None)
    if norm is not None and weight.dim() == 2 and layer.weight_quantizer.has_tokens:
        norm = None
    scales = scales_of_sums(layer, weight.dim())
    if scales is None or (bias is None and norm is None) or bool(scales[0].isnan().any()):
        return None
    return bias_rounding(bias, *scales, norm), norm


def will_fold(norm: Any, x: Tensor, weight: Tensor) -> bool:
    """Whether `convert` will fold `norm` into a layer with input `x`: it has the layer's channels, and its device."""
    if norm is None or norm.training or norm.running_mean.device != x.device:
        return False
    return weight.dim() > 2 or x.dim() == 2  # behind a linear layer, it normalizes another axis of tokens


def scales_of_sums(layer: Any, weight_dims: int) -> tuple[Tensor, Tensor] | None:
    """The scales of input and weight, the second per output channel; None if they vary within a sum of products."""
    x: Any = layer.input_quantizer or layer._fakequant.input_grid
    weight: Any = layer.weight_quantizer
    for quantizer in (x, weight):
        if quantizer is None or not quantizer._quantizing or quantizer._blocks is None:
            return None
    if x.spec.axis is not None or x.is_dynamic or not has_one_scale_per_sum(layer, weight.spec, weight_dims):
        return None
    scale = weight.scale if layer._fakequant.kind.channel_axis == 0 else along_outputs(layer, weight.scale)
    return x.scale, scale * 2.0 ** -layer._fakequant.weight_shift(weight.spec)


def has_one_scale_per_sum(layer: Any, spec: QuantSpec, weight_dims: int) -> bool:
    """Whether all weights in a sum of products have the same scale."""
    axis = layer._fakequant.kind.channel_axis
    return spec.group_size is None and (spec.axis is None or spec.axis % weight_dims == axis)


def along_outputs(layer: Any, scale: Tensor) -> Tensor:
    """Scales of a weight for all channels of the result: groups of a transposed convolution share theirs."""
    groups = getattr(layer, "groups", 1) if layer._fakequant.kind.channel_axis == 1 else 1
    return scale.repeat(groups) if groups > 1 and scale.dim() == 1 else scale


def _is_narrow(layer: Any) -> bool:
    spec = layer.weight_quantizer.spec
    return spec.qmin == -spec.qmax


@torch.no_grad()
def _stays_behind(layer: Any, norm: Any, weight: Tensor) -> Tensor:
    """As `convert` will find it out."""
    scale = along_outputs(layer, layer.weight_quantizer.scale)
    lowest = torch.round(weight.movedim(layer._fakequant.kind.channel_axis, 0).flatten(1).amin(1) / scale)
    factor = factor_of(norm)
    return lacks_opposite(lowest.to(factor.device), layer.weight_quantizer.spec.qmin, factor)
