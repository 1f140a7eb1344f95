"""The arithmetic of runtimes: how floats, sums of products, additions and means become codes.

The reference runs the operators of the ONNX graph one after the other, in float32. ONNX Runtime fuses a layer, an
addition or a mean with the quantizer that follows it into one kernel. Its codes differ from those of the reference
only at ties, and by one.

The docstrings below give the formulas, which are computed in float32 in the order written. They use

    clamped(v) = rint(clip(v, qmin - zero_point, qmax - zero_point)) + zero_point

Codes are integers in float32.
"""

import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.formula import onnx_steps
from fakequant._backends.torch.fused_multiply_add import fma
from fakequant._convert.golden.tracked_codes import Accumulated, GridOf, Joined, codes_of, plain, quantized
from fakequant.spec import QuantSpec


class Reference:
    """The operators of the graph, one after the other."""

    def from_float(self, x: Tensor, grid: GridOf) -> Tensor:
        """quantize(x), by the rule of ONNX."""
        return quantized(x, grid)

    def dynamic_grid(self, x: Tensor, spec: QuantSpec, eps: float) -> GridOf:
        """Returns choose_qparams(min(x), max(x)), or that of each token."""
        x = plain(x)
        seen = tensor_functions.min_max(x, spec)
        empty = seen.min > seen.max
        lo, hi = seen.min.masked_fill(empty, 0), seen.max.masked_fill(empty, 0)
        scale, zero_point = tensor_functions.choose_qparams(lo, hi, spec, eps=eps)
        shape = (*x.shape[:-1], 1) if spec.granularity == "token" else scale.shape
        return GridOf(scale.reshape(shape), zero_point.reshape(shape), spec)

    def from_layer(self, layer: Accumulated, grid: GridOf) -> Tensor:
        """Returns the codes of the output of a layer."""
        return self.from_sums(layer.sums, layer.scale, grid)

    def from_layer_addition(self, layer: Accumulated, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """quantize(sums * scale + b)."""
        return self.from_float(layer.sums.float() * layer.scale + b, grid)

    def from_sums(self, sums: Tensor, scale: Tensor, grid: GridOf) -> Tensor:
        """quantize(sums * scale)."""
        return quantized(sums.float() * scale, grid)

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """quantize(a + b)."""
        return quantized(a + b, grid)

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """quantize(mean(x))."""
        return quantized(x.mean(axes, keepdim=True), grid)

    def from_join(self, join: Joined, grid: GridOf) -> Tensor:
        """quantize(cat(operands))."""
        return self.from_float(join.value, grid)


class OnnxRuntime(Reference):
    """The kernels of ONNX Runtime for x86: QLinearConv, QGemm, QLinearMatMul, QLinearAdd, QLinearGlobalAveragePool."""

    def from_sums(self, sums: Tensor, scale: Tensor, grid: GridOf) -> Tensor:
        """clamped(sums * (scale / grid.scale))."""
        return _clamped(sums.float() * (scale / grid.scale), grid)

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """clip(rint(fma(a, ra, fma(b, rb, zero_point - fma(ra, za, rb * zb))))), where a and b are codes.

        ra and rb are the scales of a and b divided by `grid.scale`. za and zb are their zero points.
        """
        ra, rb = a_grid.scale / grid.scale, b_grid.scale / grid.scale
        za, zb = a_grid.zero_point.float(), b_grid.zero_point.float()
        fixed = grid.zero_point.float() - fma(ra, za, rb * zb)
        q = torch.round(fma(codes_of(a, a_grid), ra, fma(codes_of(b, b_grid), rb, fixed)))
        return q.clamp(grid.spec.qmin, grid.spec.qmax)

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """clamped(sum(codes - zero_point) * (scale / (grid.scale * number))), for means over height and width.

        Other means are computed as in the reference.
        """
        if axes != (2, 3) or x.dim() != 4:
            return super().from_average(x, x_grid, axes, grid)
        number = x.shape[2] * x.shape[3]
        sums = onnx_steps(x.double(), x_grid.scale).sum(axes, keepdim=True)
        return _clamped(sums.float() * (x_grid.scale / (grid.scale * number)), grid)


def _clamped(levels: Tensor, grid: GridOf) -> Tensor:
    low, high = grid.spec.qmin - grid.zero_point, grid.spec.qmax - grid.zero_point
    return torch.round(torch.minimum(torch.maximum(levels, low.float()), high.float())) + grid.zero_point
