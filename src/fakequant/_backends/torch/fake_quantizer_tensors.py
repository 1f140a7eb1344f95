"""`FakeQuantizer` on tensors: its forward, with the gradient passed through."""

import torch
from torch import Tensor

from fakequant._backends.torch import gradients
from fakequant._backends.torch.operator_calls import ops
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.tensor_checks import check_data
from fakequant._backends.torch.tensor_kernels import Grid, scale_dtype


def forward(x: Tensor, grid: Grid) -> Tensor:
    """`FakeQuantizer.forward` on a tensor; `grid` holds numbers."""
    check_data(x)
    if not torch.compiler.is_compiling() and is_eager(x):
        return gradients.pass_through(x, grid)
    scale, zero_point, *rest = grid
    assert isinstance(scale, float)
    assert isinstance(zero_point, int)
    scales = torch.full((), scale, dtype=scale_dtype(x.dtype, grid.numerics), device=x.device)
    zeros = torch.full((), zero_point, dtype=torch.int32, device=x.device)
    return ops.fake_quantize(x, scales, zeros, *rest, False)


def backward_clamped(dy: Tensor, x: Tensor, lo: float, hi: float) -> Tensor:
    """`FakeQuantizer.backward_clamped` on tensors."""
    check_data(dy, "dy")
    check_data(x)
    if dy.shape != x.shape:
        raise ValueError(f"`dy` must have the shape of `x`, {tuple(x.shape)}, got {tuple(dy.shape)}.")
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # or the bounds would be rounded to 16 bits
    return torch.where((x < lo) | (x > hi), 0, dy)
