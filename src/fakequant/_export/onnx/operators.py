"""The operators of a model that is being exported: fixed grids, stored codes, dynamic products and rounding.

This is the only place that writes the rules of `quantize` and `dequantize` in exportable operations. `exported_modules`
calls them.

torch's exporter keeps them as single nodes, which it neither folds nor rewrites. `lowering.py` and `format_lowering.py`
then replace them by QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear and MatMulInteger. Scales of integers have
one entry per block, in the shape (), (1, C, 1, 1) or (rows, groups).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fakequant._backends.torch.float_formula import round_to_format, values_of_codes
from fakequant._backends.torch.formula import onnx_steps
from fakequant._export.layers import dynamic_grid
from fakequant._runtimes.target import DYNAMIC_SPEC, SMALLEST_DYNAMIC_SCALE
from fakequant.formats import FLOAT_FORMATS

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


def _unused(codes: Tensor) -> Tensor | None:
    """Returns a tensor of the shape of a weight that is not read, or None if its values are needed.

    For operators of constants, torch's exporter also computes the values, and keeps those of one element only. All
    others would be as large as the float model, until Python looks for garbage.
    """
    return torch.full((), torch.nan).expand(codes.shape) if codes.numel() > 1 else None


def _stored(codes: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, name: str) -> Tensor:
    unused = _unused(codes)
    if unused is not None:
        return unused
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


# --- recurrent layers ------------------------------------------------------------------------------
#
# All steps of one layer and direction, from the products of the input for all steps and the first state. They have a
# shape only: the model that is exported is never run.


def _shapes_of_steps(products: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    states = [x for x in rest if isinstance(x, Tensor)]
    y = products.new_empty((*products.shape[:2], states[0].shape[-1]))
    return y, *(torch.empty_like(state) for state in states)


for _states in (1, 2):
    _given = ", ".join(f"Tensor {name}" for name in "hc"[:_states])
    _results = ", ".join(["Tensor"] * (1 + _states))
    _name = f"recurrence_{_states}"
    _LIBRARY.define(f"{_name}(Tensor products, {_given}, str path, str suffix, bool reverse) -> ({_results})")
    torch.library.register_fake(f"fakequant_export::{_name}", _shapes_of_steps, lib=_LIBRARY)

# By the number of tensors of a state. They return the results of all steps, and the last state.
recurrences: dict[int, Callable[..., tuple[Tensor, ...]]] = {
    1: torch.ops.fakequant_export.recurrence_1.default,
    2: torch.ops.fakequant_export.recurrence_2.default,
}


# --- float formats and block scales -----------------------------------------------------------------
#
# Scales have the shape (), (channels,) or one entry per block. `block` is how many elements share a scale along `axis`,
# or 0.

_LIBRARY.define("format_grid(Tensor x, Tensor scale, str format, int axis, int block, str name) -> Tensor")
_LIBRARY.define(
    "stored_format(Tensor codes, Tensor scale, str format, str scale_format, int axis, int block, str name) -> Tensor"
)
_LIBRARY.define("rounded_to_format(Tensor x, str format, str name) -> Tensor")


def spread(scale: Tensor, shape: torch.Size, axis: int, block: int) -> Tensor:
    """Repeats scales so that they broadcast to `shape`. The last block of the axis may be shorter."""
    if scale.dim() == 0:
        return scale
    if not block:
        return scale.reshape([-1 if a == axis % len(shape) else 1 for a in range(len(shape))])
    return scale.repeat_interleave(block, axis).narrow(axis, 0, shape[axis])


def _rounded(x: Tensor, format: str, name: str) -> Tensor:
    to = FLOAT_FORMATS[format]
    return round_to_format(x, to).clamp(-to.largest, to.largest)


def _format_grid(x: Tensor, scale: Tensor, format: str, axis: int, block: int, name: str) -> Tensor:
    s = spread(scale, x.shape, axis, block)
    return _rounded(x / s, format, name) * s


def _stored_format(
    codes: Tensor, scale: Tensor, format: str, scale_format: str, axis: int, block: int, name: str
) -> Tensor:
    unused = _unused(codes)
    if unused is not None:
        return unused
    values = codes.float() if format == "int" else values_of_codes(codes, FLOAT_FORMATS[format])
    return values * spread(scale, codes.shape, axis, block)


_LIBRARY.impl("format_grid", _format_grid, "CompositeExplicitAutograd")
_LIBRARY.impl("stored_format", _stored_format, "CompositeExplicitAutograd")
_LIBRARY.impl("rounded_to_format", _rounded, "CompositeExplicitAutograd")
for _name in ("format_grid", "rounded_to_format"):
    torch.library.register_fake(f"fakequant_export::{_name}", lambda x, *rest: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_fake(
    "fakequant_export::stored_format", lambda codes, *rest: torch.empty_like(codes, dtype=torch.float32), lib=_LIBRARY
)

format_grid: Callable[[Tensor, Tensor, str, int, int, str], Tensor] = torch.ops.fakequant_export.format_grid.default
stored_format: Callable[[Tensor, Tensor, str, str, int, int, str], Tensor] = (
    torch.ops.fakequant_export.stored_format.default
)
# The nearest value of an FP8 format, half to even, saturated.
rounded_to_format: Callable[[Tensor, str, str], Tensor] = torch.ops.fakequant_export.rounded_to_format.default
