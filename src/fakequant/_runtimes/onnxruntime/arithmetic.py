"""The arithmetic of ONNX Runtime for x86: how accumulators, additions, products and means become codes.

A layer, an addition or a mean is one kernel together with the quantizer that follows it. The docstrings below give the
formulas, which are computed in float32 in the order written. They use

    clamped(v) = rint(clip(v, qmin - zero_point, qmax - zero_point)) + zero_point

Codes are integers in float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant._backends.torch.formula import onnx_steps
from fakequant._backends.torch.fused_multiply_add import fma
from fakequant._convert.golden.tracked_codes import GridOf, Windows, codes_of, plain
from fakequant._runtimes.arithmetic import Reference


class OnnxRuntime(Reference):
    """The kernels of ONNX Runtime for x86.

    These are QLinearConv, QGemm, QLinearMatMul, QLinearAdd, QLinearMul, QLinearGlobalAveragePool and
    QLinearAveragePool. Codes and zero points are those in the file, where signed codes are stored with an offset.
    """

    def from_sums(self, sums: Tensor, scale: Tensor, grid: GridOf) -> Tensor:
        """clamped(sums * (scale / grid.scale))."""
        return _clamped(sums.float() * (scale / grid.scale), grid)

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """clip(rint(fma(a, ra, fma(b, rb, zero_point - fma(ra, za, rb * zb))))), where a and b are codes.

        ra and rb are the scales of a and b divided by `grid.scale`. za and zb are their zero points.
        """
        if not _are_bytes(a_grid, b_grid, grid):
            return super().from_addition(a, a_grid, b, b_grid, grid)
        ra, rb = a_grid.scale / grid.scale, b_grid.scale / grid.scale
        za, zb, zero_point = (_stored_zero_point(of) for of in (a_grid, b_grid, grid))
        a, b = (codes_of(plain(x), of) + _offset(of) for x, of in ((a, a_grid), (b, b_grid)))
        q = torch.round(fma(a, ra, fma(*torch.broadcast_tensors(b, rb, zero_point - fma(ra, za, rb * zb)))))
        return _on(grid, q)

    def from_product(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """clip(rint((a - za) * (b - zb) * (a_grid.scale * b_grid.scale / grid.scale) + zero_point))."""
        if not _are_bytes(a_grid, b_grid, grid):
            return super().from_product(a, a_grid, b, b_grid, grid)
        levels = onnx_steps(plain(a), a_grid.scale) * onnx_steps(plain(b), b_grid.scale)
        return _on(grid, torch.round(levels * (a_grid.scale * b_grid.scale / grid.scale) + _stored_zero_point(grid)))

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """clamped(sum(codes - zero_point) * (scale / (grid.scale * number))), for means over height and width.

        Other means are computed as in the reference.
        """
        if axes != (2, 3) or x.dim() != 4:
            return super().from_average(x, x_grid, axes, grid)
        number = x.shape[2] * x.shape[3]
        sums = onnx_steps(x.double(), x_grid.scale).sum(axes, keepdim=True)
        return _clamped(sums.float() * (x_grid.scale / (grid.scale * number)), grid)

    def from_pool(self, x: Tensor, x_grid: GridOf, windows: Windows, grid: GridOf) -> Tensor:
        """clip(rint(sum(x) / number / grid.scale + zero_point)). The sum adds one element after the other."""
        if not _are_bytes(x_grid, grid):
            return super().from_pool(x, x_grid, windows, grid)
        total = torch.zeros(())
        for part in _elements_of(plain(x), windows):
            total = total + part
        number = torch.tensor(float(math.prod(windows.size)))
        if not windows.counts_padding:
            number = torch.stack(_elements_of(torch.ones_like(plain(x)), windows)).sum(0)
        return _on(grid, torch.round(total / number / grid.scale + _stored_zero_point(grid)))


def _elements_of(x: Tensor, windows: Windows) -> list[Tensor]:
    """Returns the first element of every window, the second element of every window, and so on."""
    x = F.pad(x, [n for padding in reversed(windows.padding) for n in (padding, padding)])
    for axis, (size, stride) in enumerate(zip(windows.size, windows.stride, strict=True), start=2):
        x = x.unfold(axis, size, stride)
    return list(x.flatten(2 + len(windows.size)).unbind(-1))


def _are_bytes(*grids: GridOf) -> bool:
    """Returns True if the kernels take these grids. With more bits, ONNX Runtime computes as the graph says."""
    return all(grid.scale.dim() == 0 and grid.spec.bits <= 8 for grid in grids)


def _offset(grid: GridOf) -> int:
    """Returns what is added to codes that are stored as unsigned integers."""
    return 128 if grid.spec.qmin == -128 else max(-grid.spec.qmin, 0)


def _stored_zero_point(grid: GridOf) -> Tensor:
    return (grid.zero_point + _offset(grid)).float()


def _on(grid: GridOf, stored: Tensor) -> Tensor:
    return (stored - _offset(grid)).clamp(grid.spec.qmin, grid.spec.qmax)


def _clamped(levels: Tensor, grid: GridOf) -> Tensor:
    low, high = grid.spec.qmin - grid.zero_point, grid.spec.qmax - grid.zero_point
    return torch.round(torch.minimum(torch.maximum(levels, low.float()), high.float())) + grid.zero_point


ARITHMETIC = OnnxRuntime()
