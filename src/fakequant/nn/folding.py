"""Batch normalization as part of the layer before it.

y = (x w + b - mean) * factor + beta         factor = gamma / sqrt(variance + eps)

weight_scale' = weight_scale * |factor|      b' = (b - mean) * factor + beta
"""

from typing import Any

import torch
from torch import Tensor

LARGEST = 2**31 - 1


def factor_of(norm: Any) -> Tensor:
    """gamma / sqrt(variance + eps), in float64."""
    deviation = (norm.running_var.double() + norm.eps).sqrt()
    return (1.0 if norm.weight is None else norm.weight.detach().double()) / deviation


def folded_bias(bias: Tensor | None, norm: Any) -> Tensor:
    """The bias of layer and normalization together, in float64."""
    factor = factor_of(norm)
    before = torch.zeros_like(factor) if bias is None else bias.detach().double()
    beta = torch.zeros_like(factor) if norm.bias is None else norm.bias.detach().double()
    return (before - norm.running_mean.double()) * factor + beta


def folded_scale(scale: Tensor, factor: Tensor) -> Tensor:
    """The scale of a weight, or of its products, with the normalization in it: positive, in float32."""
    return (scale.double() * factor.abs()).clamp(min=torch.finfo(torch.float32).tiny).float()


def bias_codes(bias: Tensor, scale: Tensor) -> Tensor:
    """The bias as integers at the scale of the sums, in float64."""
    return (bias.double() / scale.double()).round().clamp(-LARGEST, LARGEST)


@torch.no_grad()
def rounded_bias(bias: Tensor | None, x_scale: Tensor, weight_scale: Tensor, norm: Any) -> Tensor:
    """What the layer has to add, before a normalization if there is one, so that the sum is that of integers."""
    if norm is None:
        assert bias is not None
        step = x_scale * weight_scale
        return (bias_codes(bias, step) * step.double()).to(bias.dtype)
    factor = factor_of(norm)
    exact = folded_bias(bias, norm)
    step = (x_scale * folded_scale(weight_scale, factor)).double()
    change = torch.where(factor == 0, 0, (bias_codes(exact, step) * step - exact) / factor)
    return (change if bias is None else bias.double() + change).to(norm.running_mean.dtype)
