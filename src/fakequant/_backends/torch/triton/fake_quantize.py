"""Fake quantization with a mask, and its gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.torch.tensor_kernels import Grid, Order, dense, empty_gradient, in_bit_order
from fakequant._backends.torch.triton.launch import launch
from fakequant._backends.torch.triton.rounding import (
    bounds_of,
    clamp_level,
    inverse_of,
    level_of,
    levels_of,
    to_dtype,
    to_float32,
    value_of,
    value_scale,
)
from fakequant._backends.torch.triton.tiles import (
    first_row,
    is_last_program,
    last_row,
    load_scales,
    packed,
    placed,
    rows_of,
)

# The names of the forms of masks in kernels.
MASKS = {_kernels.MASK_NONE: "none", _kernels.MASK_PACKED: "packed", _kernels.MASK_BYTES: "bytes"}


@triton.jit
def quantized(x, scale, zero, lo, hi, smallest_normal, spacing, RULE: tl.constexpr):
    """Returns the fake-quantized values as float32, and which were inside the range."""
    inverse = inverse_of(scale, RULE)
    level = level_of(x, inverse, zero, hi, smallest_normal, spacing, RULE)
    low, high = bounds_of(lo, hi, zero, RULE)
    inside = (level >= low) & (level <= high)
    y = value_of(clamp_level(level, low, high, RULE), value_scale(scale, inverse, RULE), zero, RULE)
    return y, inside


@triton.jit
def store_rows(y_ptr, mask_ptr, row, valid, whole, y, inside, MASK: tl.constexpr):
    """Writes rows of 8 results and their mask. `valid` and `whole` say which elements and rows exist."""
    offset = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(y_ptr + offset, to_dtype(y, y_ptr.dtype.element_ty), mask=valid)
    if MASK == "packed":
        tl.store(mask_ptr + row, packed(inside & valid, 1).to(tl.uint8), mask=whole)
    elif MASK == "bytes":
        tl.store(mask_ptr + offset, inside.to(tl.uint8), mask=valid)


@triton.jit
def quantize_rows(
    x_ptr, y_ptr, mask_ptr, row, valid, whole, scale, zero, lo, hi, smallest_normal, spacing,
    RULE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Fake-quantizes rows of 8 elements with given scales."""
    offset = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = to_float32(tl.load(x_ptr + offset, mask=valid, other=0.0))
    y, inside = quantized(x, scale, zero, lo, hi, smallest_normal, spacing, RULE)
    store_rows(y_ptr, mask_ptr, row, valid, whole, y, inside, MASK)


@triton.jit
def rows_with_scales(
    x_ptr, y_ptr, mask_ptr, scale_ptr, zero_ptr, row, valid, whole, row_size, blocks, inner,
    lo, hi, smallest_normal, spacing,
    RULE: tl.constexpr, MASK: tl.constexpr, HAS_ZERO: tl.constexpr, SCALES: tl.constexpr, BATCHES: tl.constexpr,
):  # fmt: skip
    """Fake-quantizes rows of 8 elements with the scales at `scale_ptr`."""
    scale, zero = load_scales(
        scale_ptr, zero_ptr, row, valid, whole, row_size, blocks, inner, HAS_ZERO, SCALES, BATCHES
    )  # fmt: skip
    quantize_rows(x_ptr, y_ptr, mask_ptr, row, valid, whole, scale, zero, lo, hi, smallest_normal, spacing, RULE, MASK)


@triton.jit
def fake_quantize_kernel(
    x_ptr, y_ptr, mask_ptr, scale_ptr, zero_ptr, size, row_size, blocks, inner, lo, hi, smallest_normal, spacing,
    RULE: tl.constexpr, MASK: tl.constexpr, HAS_ZERO: tl.constexpr, SCALES: tl.constexpr, BATCHES: tl.constexpr,
    TAIL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = first_row(WIDE, ROWS) + tl.arange(0, ROWS)
    whole = row < size // 8
    valid = whole[:, None]
    rows_with_scales(
        x_ptr, y_ptr, mask_ptr, scale_ptr, zero_ptr, row, valid, whole, row_size, blocks, inner,
        lo, hi, smallest_normal, spacing, RULE, MASK, HAS_ZERO, SCALES, BATCHES,
    )  # fmt: skip
    if TAIL:
        if is_last_program():
            last, exists, is_row = last_row(size)
            rows_with_scales(
                x_ptr, y_ptr, mask_ptr, scale_ptr, zero_ptr, last, exists, is_row, row_size, blocks, inner,
                lo, hi, smallest_normal, spacing, RULE, MASK, HAS_ZERO, SCALES, BATCHES,
            )  # fmt: skip


def new_mask(y: Tensor, kind: int) -> Tensor | None:
    """Returns an uninitialized mask for `y`, or None if `kind` is MASK_NONE."""
    if kind == _kernels.MASK_NONE:
        return None
    if kind == _kernels.MASK_BYTES:
        return torch.empty_like(y, dtype=torch.bool)
    return torch.empty((y.numel() + 7) // 8, dtype=torch.uint8, device=y.device)


def mask_memory(mask: Tensor | None, y: Tensor) -> Tensor:
    """Returns the memory of a mask as bytes. Kernels do not use `y`, which stands for no mask."""
    return y if mask is None else mask.view(torch.uint8)


def fake_quantize(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor | None]:
    """Returns the fake-quantized values, and a mask unless `mask_kind` is MASK_NONE."""
    y = torch.empty_like(x)
    mask = new_mask(y, mask_kind)
    x = dense(x, y)
    at = placed(x, grid)
    rows = rows_of(at.shape)
    levels, rule = levels_of(grid)
    zero_point = at.scale if at.zero_point is None else at.zero_point
    launch(
        fake_quantize_kernel, rows.programs, x, y, mask_memory(mask, y), at.scale, zero_point, *rows.sizes, *levels,
        RULE=rule, MASK=MASKS[mask_kind], HAS_ZERO=at.zero_point is not None, **rows.constants,
    )  # fmt: skip
    return y, mask


# --- gradient -------------------------------------------------------------------------------------


@triton.jit
def masked_rows(dy_ptr, mask_ptr, dx_ptr, row, valid, whole, PACKED: tl.constexpr, MULTIPLY: tl.constexpr):
    """Writes rows of 8 gradients."""
    offset = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    dy = tl.load(dy_ptr + offset, mask=valid, other=0)
    if PACKED:
        byte = tl.load(mask_ptr + row, mask=whole, other=0).to(tl.int32)
        inside = (byte[:, None] >> tl.arange(0, 8)[None, :]) & 1 != 0
    else:
        inside = tl.load(mask_ptr + offset, mask=valid, other=0) != 0
    if MULTIPLY:
        product = to_float32(dy) * tl.where(inside, 1.0, 0.0)
        tl.store(dx_ptr + offset, to_dtype(product, dx_ptr.dtype.element_ty), mask=valid)
    else:
        tl.store(dx_ptr + offset, tl.where(inside, dy, 0), mask=valid)


@triton.jit
def mask_backward_kernel(
    dy_ptr, mask_ptr, dx_ptr, size,
    PACKED: tl.constexpr, MULTIPLY: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = first_row(WIDE, ROWS) + tl.arange(0, ROWS)
    whole = row < size // 8
    valid = whole[:, None]
    masked_rows(dy_ptr, mask_ptr, dx_ptr, row, valid, whole, PACKED, MULTIPLY)
    if TAIL:
        if is_last_program():
            last, exists, is_row = last_row(size)
            masked_rows(dy_ptr, mask_ptr, dx_ptr, last, exists, is_row, PACKED, MULTIPLY)


def mask_backward(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """Returns `dy` where the mask is set, otherwise 0. See `gradients.masked` for the arguments."""
    dx = empty_gradient(dy, mask, order)
    is_packed = mask.dtype == torch.uint8
    if not is_packed:
        mask = dense(mask, dx).view(torch.uint8)
    target = dx if not is_packed or (dy.is_contiguous() and order is None) else in_bit_order(dx, order)
    rows = rows_of((1, 1, 1, dy.numel()))
    # Selecting does not change bits, whatever they mean.
    memory = [t if multiply else t.view(_BITS[t.itemsize]) for t in (dense(dy, target), target)]
    launch(
        mask_backward_kernel, rows.programs, memory[0], mask, memory[1], rows.sizes[0],
        PACKED=is_packed, MULTIPLY=multiply, **{k: rows.constants[k] for k in ("TAIL", "WIDE", "ROWS")},
    )  # fmt: skip
    return dx if target is dx else dx.copy_(target)


_BITS = {2: torch.int16, 4: torch.int32}
