"""The operators of a model that is being exported: a fixed grid, stored codes, dynamic grids and dynamic products.

This is the only place that writes the rules of `quantize`, `dequantize` and `choose_qparams` in exportable operations.
`exported_modules` calls them.

torch's exporter keeps `grid`, `stored` and `dynamic_product` as single nodes, which it neither folds nor rewrites.
`lowering.py` then replaces them by QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear and MatMulInteger. Scales
have one entry per block, in the shape (), (1, C, 1, 1) or (rows, groups).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fakequant._backends.torch.formula import onnx_steps
from fakequant._targets import DYNAMIC_SPEC, SMALLEST_DYNAMIC_SCALE
from fakequant.spec import QuantSpec

_LIBRARY = torch.library.Library("fakequant_export", "DEF")
_LIBRARY.define("grid(Tensor x, Tensor scale, Tensor zero_point, int qmin, int qmax, str name) -> Tensor")
_LIBRARY.define("stored(Tensor codes, Tensor scale, Tensor? zero_point, int bits, str name) -> Tensor")
_LIBRARY.define(
    "dynamic_product(Tensor x, Tensor codes, Tensor scale, Tensor? zero_point, str name, str grid) -> Tensor"
)


def _spread(value: Tensor, shape: torch.Size) -> Tensor:
    """Repeats values per block so that they broadcast to `shape`."""
    for axis, n in enumerate(value.shape):
        if n not in (1, shape[axis]):
            value = value.repeat_interleave(shape[axis] // n, axis)
    return value


def _grid(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, name: str) -> Tensor:
    s, z = _spread(scale, x.shape), _spread(zero_point, x.shape)
    return (torch.clamp(onnx_steps(x, s) + z, qmin, qmax) - z) * s


def _stored(codes: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, name: str) -> Tensor:
    levels = codes.float() if zero_point is None else codes.float() - _spread(zero_point, codes.shape)
    return levels * _spread(scale, codes.shape)


def _dynamic_product(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, name: str, grid: str
) -> Tensor:
    return dynamic_grid(x, DYNAMIC_SPEC, SMALLEST_DYNAMIC_SCALE) @ _stored(codes, scale, zero_point, 8, name)


_LIBRARY.impl("grid", _grid, "CompositeExplicitAutograd")
_LIBRARY.impl("stored", _stored, "CompositeExplicitAutograd")
_LIBRARY.impl("dynamic_product", _dynamic_product, "CompositeExplicitAutograd")
torch.library.register_fake("fakequant_export::grid", lambda x, *rest: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_fake(
    "fakequant_export::stored", lambda codes, *rest: torch.empty_like(codes, dtype=torch.float32), lib=_LIBRARY
)
torch.library.register_fake(
    "fakequant_export::dynamic_product",
    lambda x, codes, *rest: x.new_empty((*x.shape[:-1], codes.shape[1])),
    lib=_LIBRARY,
)

grid: Callable[[Tensor, Tensor, Tensor, int, int, str], Tensor] = torch.ops.fakequant_export.grid.default
stored: Callable[[Tensor, Tensor, Tensor | None, int, str], Tensor] = torch.ops.fakequant_export.stored.default
# The product of a tensor, quantized with its own range, and a matrix of codes (inputs, outputs).
dynamic_product: Callable[[Tensor, Tensor, Tensor, Tensor | None, str, str], Tensor] = (
    torch.ops.fakequant_export.dynamic_product.default
)


def dynamic_grid(x: Tensor, spec: QuantSpec, eps: float) -> Tensor:
    """Fake-quantizes `x` with a scale that is computed at run time, in operations that ONNX has.

    Equals `min_max`, `choose_qparams` and `fake_quantize` for a finite tensor that is not empty.
    """
    axes = tuple(range(x.dim())) if spec.axis is None else (spec.axis,)
    lo, hi = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
    if spec.symmetric:
        scale = (torch.maximum(-lo, hi) / ((spec.qmax - spec.qmin) / 2)).clamp(min=eps)
        zero = torch.zeros(())
    else:
        scale = ((hi - lo) / (spec.qmax - spec.qmin)).clamp(min=eps)
        zero = (spec.qmin - onnx_steps(lo, scale)).clamp(spec.qmin, spec.qmax)
    return (torch.clamp(onnx_steps(x, scale) + zero, spec.qmin, spec.qmax) - zero) * scale
