"""Folds a batch norm into the layer before it: the layer gets new scales per channel and a new bias.

    y = (x w + b - mean) * factor + beta        factor = gamma / sqrt(variance + eps)

    weight_scale' = weight_scale * |factor|     codes' = -codes where factor < 0
    b'            = (b - mean) * factor + beta

Codes of a symmetric grid with narrow range can change their sign, and so can those of float formats, so the weights are
not rounded again. Scales of few bits (MX, NVFP4) would leave their format: such a batch norm stays.
"""

import dataclasses
from typing import TypeAlias

from torch import Tensor, nn

from fakequant._convert.golden.integer_layer import IntegerLayer, set_levels, weight_levels
from fakequant.nn._batch_norm import factor_of, folded_bias, folded_scale, lacks_opposite
from fakequant.nn._layer_kinds import LayerKind
from fakequant.nn._quantized_layer import QuantizedLayer

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm


def can_fold(model: nn.Module, path: str, norm_path: str) -> bool:
    """Returns True if the batch norm at `norm_path` can be folded into the layer at `path`.

    The weight must have, or can be given, one scale or group of scales per channel of the batch norm.
    """
    layer, norm = model.get_submodule(path), model.get_submodule(norm_path)
    if not isinstance(norm, BatchNorm) or norm.running_mean is None:
        return False
    if not isinstance(layer, QuantizedLayer) or layer.output_quantizer is not None or layer.weight_quantizer is None:
        return False
    kind: type[LayerKind] = layer._fakequant.kind
    weight: Tensor = getattr(layer, kind.weight_name)
    spec, axis = layer.weight_quantizer.spec, kind.channel_axis
    is_grouped = getattr(layer, "groups", 1) != 1 and axis != 0
    if not spec.symmetric or is_grouped or norm.num_features != weight.shape[axis]:
        return False
    if spec.axis is None:
        return True
    scale_axis = spec.axis % weight.dim()
    return scale_axis == axis if spec.group_size is None else scale_axis != 0 and axis == 0


def find_norm(model: nn.Module, path: str) -> BatchNorm:
    """Returns the batch norm at `path`."""
    norm = model.get_submodule(path)
    assert isinstance(norm, BatchNorm)
    return norm


def reason_not_foldable(layer: IntegerLayer, norm: BatchNorm, has_tokens: bool) -> str | None:
    """Returns why a batch norm cannot be folded into an integer layer, or None if it can.

    `has_tokens` says whether the layer was given inputs with more than two axes.
    """
    record = layer._fakequant
    spec = record.weight_spec
    if len(record.weight_shape) == 2 and has_tokens:
        return "with inputs of more than two axes, it normalizes another axis than the layer's channels"
    if spec.has_block_scales:
        return f"the scales of the weight have the format {spec.scale_format}, which folding would leave"
    if spec.format != "int" or spec.qmin == -spec.qmax:
        return None
    lowest = weight_levels(layer).movedim(record.kind.channel_axis, 0).flatten(1).amin(1) / 2**record.weight_shift
    if bool(lacks_opposite(lowest, spec.qmin, factor_of(norm))):
        return (
            f"a channel with a negative factor has the code {spec.qmin}, which cannot change its sign; "
            "use narrow_range=True"
        )
    return None


def fold(layer: IntegerLayer, bias: Tensor | None, norm: BatchNorm) -> Tensor:
    """Folds a batch norm into the codes and the scale of an integer layer. Returns the new bias in float64."""
    factor, record = factor_of(norm), layer._fakequant
    axis, dims = record.kind.channel_axis, len(record.weight_shape)
    channels = record.weight_shape[axis]
    if record.weight_spec.axis is None:
        record.weight_spec = dataclasses.replace(record.weight_spec, axis=axis)
        layer.weight_scale = layer.weight_scale.expand(channels).clone()
    per_scale = factor.reshape(-1, *[1] * (layer.weight_scale.dim() - 1))
    layer.weight_scale = folded_scale(layer.weight_scale, per_scale)
    sign = factor.sign().reshape([-1 if a == axis else 1 for a in range(dims)])
    set_levels(layer, weight_levels(layer) * sign.float())
    # A batch norm normalizes axis 1. After a linear layer these are the channels only if inputs have two axes.
    record.takes_vectors = dims == 2
    return folded_bias(bias, norm)
