"""Folding of a batch norm into the layer before it.

y = (x w + b - mean) * factor + beta         factor = gamma / sqrt(variance + eps)

weight_scale' = weight_scale * |factor|      b' = (b - mean) * factor + beta
"""

from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from fakequant.nn._bounded_parameters import whole

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

    Args:
        bias: The bias of the layer. Only None if there is a batch norm.
        x_scale: The scale of the input.
        weight_scale: The scales of the weight.
        norm: The batch norm that will be folded into the layer. The error is that of its result.
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

    Args:
        bias: The bias of the layer. Only None if there is a batch norm.
        x_scale: The scale of the input.
        weight_scale: The scales of the weight.
        norm: The batch norm that will be folded into the layer.
    """
    if norm is None:
        assert bias is not None
        exact = _exact(bias)
        return exact + _rounding(exact, _exact(x_scale * weight_scale))
    factor = factor_of(norm)
    change = torch.where(factor == 0, 0, bias_rounding(bias, x_scale, weight_scale, norm) / factor)
    return change if bias is None else _exact(bias) + change
