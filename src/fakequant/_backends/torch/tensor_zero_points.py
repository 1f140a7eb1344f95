"""How a zero point with a fraction becomes an integer, on tensors. csrc/torch/autograd.cc does the same."""

import torch
from torch import Tensor

from fakequant._backends.checks import refuse_nan_zero_point
from fakequant._backends.torch.plain_memory import is_memory


def wide_dtype(x: Tensor) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def round_forward(zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """`clamp(rint(zero_point), qmin, qmax)` as int32; NaN is refused if there are values to look at."""
    # Not in float32, where the end of a wide range may be rounded to a number outside it.
    rounded = zero_point.detach().to(wide_dtype(zero_point)).round()
    if not torch.compiler.is_compiling() and is_memory(rounded) and rounded.isnan().any():
        refuse_nan_zero_point()
    return rounded.clamp(qmin, qmax).to(torch.int32)


def round_backward(zero_point: Tensor, qmin: int, qmax: int, numerics: str) -> Tensor:
    """The same, but in torch's rule for one scale: its backward cuts off the fraction of `zero_point + 0.5`."""
    if numerics == "torch_tensor":
        zero_point = (zero_point.float() + 0.5).clamp(qmin, qmax).trunc()
    return round_forward(zero_point, qmin, qmax)
