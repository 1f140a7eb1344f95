"""The operators of a model that is being exported for float formats: a fixed grid, stored codes, and rounding.

As those of `onnx_operators`, they stay single nodes in torch's export. `format_lowering.py` replaces them. Scales have
the shape (), (channels,) or one entry per block. `block` is how many elements share a scale along `axis`, or 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fakequant._backends.torch.float_formula import round_to_format as nearest, values_of_codes
from fakequant.formats import FLOAT_FORMATS

_LIBRARY = torch.library.Library("fakequant_export", "FRAGMENT")
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
    return nearest(x, to).clamp(-to.largest, to.largest)


def _grid(x: Tensor, scale: Tensor, format: str, axis: int, block: int, name: str) -> Tensor:
    s = spread(scale, x.shape, axis, block)
    return _rounded(x / s, format, name) * s


def _stored(codes: Tensor, scale: Tensor, format: str, scale_format: str, axis: int, block: int, name: str) -> Tensor:
    values = codes.float() if format == "int" else values_of_codes(codes, FLOAT_FORMATS[format])
    return values * spread(scale, codes.shape, axis, block)


_LIBRARY.impl("format_grid", _grid, "CompositeExplicitAutograd")
_LIBRARY.impl("stored_format", _stored, "CompositeExplicitAutograd")
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
