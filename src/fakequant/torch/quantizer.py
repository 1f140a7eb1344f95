"""`FakeQuantizer` on tensors: its forward, with the gradient passed through."""

from typing import Any

import torch
from torch import Tensor

from fakequant import native
from fakequant.torch import dispatched, kernels
from fakequant.torch.kernels import Grid
from fakequant.torch.plain import is_eager
from fakequant.torch.tensors import check_data


class _PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, nan_is_code_zero: bool) -> Tensor:
        scale, zero_point, qmin, qmax, _ = grid
        assert isinstance(scale, float)
        assert isinstance(zero_point, int)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if is_eager(x):
            y, _ = kernels.fake_quantize(x, grid, native.MASK_NONE)
        else:
            scales = torch.tensor(scale, dtype=wide, device=x.device)
            zeros = torch.tensor(zero_point, dtype=torch.int32, device=x.device)
            y, _ = dispatched.fake_quantize(x, grid._replace(scale=scales, zero_point=zeros), native.MASK_NONE)
        if nan_is_code_zero:
            zero = (min(max(0, qmin), qmax) - zero_point) * scale
            y = torch.where(x.isnan(), torch.tensor(zero, dtype=wide, device=x.device).to(x.dtype), y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        return dy, None, None


def forward(x: Tensor, grid: Grid, nan_is_code_zero: bool) -> Tensor:
    """`FakeQuantizer.forward` on a tensor."""
    check_data(x)
    return _PassThrough.apply(x, grid, nan_is_code_zero)


def backward_clamped(dy: Tensor, x: Tensor, lo: float, hi: float) -> Tensor:
    """`FakeQuantizer.backward_clamped` on tensors."""
    check_data(dy, "dy")
    check_data(x)
    if dy.shape != x.shape:
        raise ValueError(f"`dy` must have the shape of `x`, {tuple(x.shape)}, got {tuple(dy.shape)}.")
    return torch.where((x < lo) | (x > hi), 0, dy)
