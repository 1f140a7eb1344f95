"""Batch norm as part of the layer before it.

y = (x w + b - mean) * factor + beta         factor = gamma / sqrt(variance + eps)

weight_scale' = weight_scale * |factor|      b' = (b - mean) * factor + beta
"""

from typing import Any

import torch
from torch import Tensor

from fakequant.nn._bounded_parameters import whole

# The most that a bias may be at the scale of the sums: with the sums themselves it fits 32 bits.
_LARGEST = 2**30


def factor_of(norm: Any) -> Tensor:
    """gamma / sqrt(variance + eps), in float64."""
    deviation = (_exact(norm.running_var) + norm.eps).sqrt()
    return (1.0 if norm.weight is None else _exact(norm.weight)) / deviation


def _exact(value: Tensor) -> Tensor:
    """All values of a tensor in float64, which Apple's GPUs do not have."""
    value = whole(value) if hasattr(value, "full_tensor") else value.detach()
    return (value.cpu() if value.device.type == "mps" else value).double()


def lacks_opposite(lowest: Tensor, qmin: int, factor: Tensor) -> Tensor:
    """True for channels that folding would negate and that use the lowest code; `lowest` are their lowest levels."""
    return ((factor < 0) & (lowest == qmin)).any()


def folded_bias(bias: Tensor | None, norm: Any) -> Tensor:
    """The bias of layer and batch norm together, in float64."""
    factor = factor_of(norm)
    before = torch.zeros_like(factor) if bias is None else _exact(bias)
    beta = torch.zeros_like(factor) if norm.bias is None else _exact(norm.bias)
    return (before - _exact(norm.running_mean)) * factor + beta


def folded_scale(scale: Tensor, factor: Tensor) -> Tensor:
    """The scale of a weight, or of its products, with the batch norm in it: positive, in float32."""
    return (scale.double() * factor.abs()).clamp(min=torch.finfo(torch.float32).tiny).float()


def bias_codes(bias: Tensor, scale: Tensor) -> Tensor:
    """The bias as integers at the scale of the sums, in float64."""
    return (bias.double() / scale.double()).round()


def widened_scale(weight_scale: Tensor, x_scale: Tensor, bias: Tensor) -> Tensor:
    """Scales of a weight that are large enough for the bias to be an integer beside the sums.

    Smaller scales occur only where the bias dwarfs the weights, e.g. before a batch norm with a factor of 0.
    """
    return torch.maximum(weight_scale.double(), bias.double().abs() / (x_scale.double() * _LARGEST)).float()


def bias_rounding(bias: Tensor | None, x_scale: Tensor, weight_scale: Tensor, norm: Any) -> Tensor:
    """What rounding the bias adds to the result, after the batch norm if there is one; per channel, in float64."""
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
def rounded_bias(bias: Tensor | None, x_scale: Tensor, weight_scale: Tensor, norm: Any) -> Tensor:
    """What the layer has to add, before a batch norm if there is one, so that the sum is that of integers.

    In float64, on a device that has it. A bias that is too large for its scale stays as it is: the scale will be
    another, see `widened_scale`.
    """
    if norm is None:
        assert bias is not None
        exact = _exact(bias)
        return exact + _rounding(exact, _exact(x_scale * weight_scale))
    factor = factor_of(norm)
    change = torch.where(factor == 0, 0, bias_rounding(bias, x_scale, weight_scale, norm) / factor)
    return change if bias is None else _exact(bias) + change
