"""Rounding of learned zero points to integers, on tensors. csrc/torch/autograd.cc has the same rules."""

import torch
from torch import Tensor

from fakequant._backends.checks import refuse_nan_zero_point
from fakequant._backends.torch.plain_memory import is_memory


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns float64, or float32 on devices without float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def round_forward(zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """Returns `clamp(rint(zero_point), qmin, qmax)` as int32.

    Raises ValueError for NaN on plain memory. Fake tensors and other devices are not checked.
    """
    # Not in float32, which may round the end of a wide range to a number outside it.
    rounded = zero_point.detach().to(wide_dtype(zero_point)).round()
    if not torch.compiler.is_compiling() and is_memory(rounded) and rounded.isnan().any():
        refuse_nan_zero_point()
    return rounded.clamp(qmin, qmax).to(torch.int32)


def round_backward(zero_point: Tensor, qmin: int, qmax: int, numerics: str) -> Tensor:
    """Returns the zero point of the backward. torch's per-tensor rule truncates `zero_point + 0.5` there."""
    if numerics == "torch_tensor":
        zero_point = (zero_point.float() + 0.5).clamp(qmin, qmax).trunc()
    return round_forward(zero_point, qmin, qmax)
