"""The gradients of learned scales and zero points, in one launch, or two if several programs share a block.

Terms are computed in float32 and summed in float64, in an order that depends on the shape alone;
csrc/learned_backward.cc has the formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fakequant._backends.torch.tensor_kernels import Grid, by_block, dense
from fakequant._backends.torch.triton.launch import launch
from fakequant._backends.torch.triton.rounding import (
    bounds_of,
    clamp,
    inverse_of,
    level_of,
    levels_of,
    rint,
    steps_of,
    to_dtype,
    to_float32,
)
from fakequant._backends.torch.triton.tiles import blocks_of_program, element_offsets, parts_of, placed

# How many elements a program holds. Terms need many registers.
_ELEMENTS = 2048


@triton.jit
def own_terms(dy, x, scale, zero, factor, lo, hi, smallest_normal, spacing, RULE: tl.constexpr):
    """Returns dx, and the terms of dscale and dzero_point."""
    inverse = inverse_of(scale, RULE)
    level = level_of(x, inverse, zero, hi, smallest_normal, spacing, RULE)
    low, high = bounds_of(lo, hi, zero, RULE)
    inside = (level >= low) & (level <= high)
    level = clamp(level, low, high)
    dz = dy * -scale * factor
    if RULE == "half_away":
        level = level - zero
    if RULE == "onnx" or RULE == "half_away" or RULE == "float" or RULE == "float_unsigned_zero":
        steps = tl.div_rn(x, scale)
    else:
        steps = steps_of(x, inverse, zero, RULE)
        dz = dy * factor
    ds = dy * tl.where(inside, level - steps, level) * factor
    finite = tl.abs(x) < float("inf")
    return tl.where(inside & finite, dy, 0.0), tl.where(finite, ds, 0.0), tl.where(finite & (inside == 0), dz, 0.0)


@triton.jit
def terms_of_torch(dy, x, scale, zero, factor, lo, hi):
    """The same in torch's rules, which round after adding the zero point and multiply dy by the mask."""
    inverse = tl.div_rn(1.0, scale)
    code = rint(tl.fma(x, inverse + tl.zeros_like(x), zero + tl.zeros_like(x)))
    code = tl.where(tl.abs(code) < 9223372036854775808.0, code, float("-inf"))
    inside = (code >= lo) & (code <= hi)
    level = clamp(code, lo, hi) - zero
    distance = tl.where(inside, tl.fma(level, scale + tl.zeros_like(x), -x), level)
    ds = dy * distance * tl.where(inside, inverse, 1.0) * factor
    return dy * tl.where(inside, 1.0, 0.0), ds, tl.where(inside, 0.0, dy * -scale * factor)


@triton.jit
def learned_kernel(
    dy_ptr, x_ptr, dx_ptr, scale_ptr, zero_ptr, ds_ptr, dz_ptr, factor,
    all_blocks, blocks, inner, batch_size, count, part, lo, hi, smallest_normal, spacing,
    RULE: tl.constexpr, HAS_ZERO: tl.constexpr,
    OUTER: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes dx of some blocks, or a part of each, and sums of the other terms."""
    start, at, exists, first, end = blocks_of_program(blocks, inner, batch_size, count, part, WIDE, BLOCKS)
    scale = tl.load(scale_ptr + at, mask=exists, other=1.0)[None, :]
    zero = 0.0
    if HAS_ZERO:
        zero = tl.load(zero_ptr + at, mask=exists, other=0).to(tl.float32)[None, :]
    ds_sum = tl.zeros([BLOCKS], tl.float64)
    dz_sum = tl.zeros([BLOCKS], tl.float64)
    for from_step in range(first, end, STEPS):
        step = from_step + tl.arange(0, STEPS)
        valid = exists[None, :] & (step < end)[:, None]
        offset = element_offsets(start, step, blocks, inner, OUTER)
        dy = to_float32(tl.load(dy_ptr + offset, mask=valid, other=0.0))
        x = to_float32(tl.load(x_ptr + offset, mask=valid, other=0.0))
        if RULE == "torch_tensor" or RULE == "torch_channel":
            dx, ds, dz = terms_of_torch(dy, x, scale, zero, factor, lo, hi)
        else:
            dx, ds, dz = own_terms(dy, x, scale, zero, factor, lo, hi, smallest_normal, spacing, RULE)
        tl.store(dx_ptr + offset, to_dtype(dx, dx_ptr.dtype.element_ty), mask=valid)
        ds_sum += tl.sum(tl.where(valid, ds, 0.0).to(tl.float64), axis=0)
        dz_sum += tl.sum(tl.where(valid, dz, 0.0).to(tl.float64), axis=0)
    slot = tl.program_id(1).to(tl.int64) * all_blocks + at
    tl.store(ds_ptr + slot, ds_sum.to(ds_ptr.dtype.element_ty), mask=exists)
    tl.store(dz_ptr + slot, dz_sum.to(dz_ptr.dtype.element_ty), mask=exists)


@triton.jit
def sum_kernel(
    partial_ptr, ds_ptr, dz_ptr, all_blocks, parts, PARTS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Adds the sums of the parts of blocks."""
    at = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    part = tl.arange(0, PARTS)[:, None]
    slot = part.to(tl.int64) * all_blocks + at[None, :]
    valid = (part < parts) & (at < all_blocks)[None, :]
    ds = tl.sum(tl.load(partial_ptr + slot, mask=valid, other=0.0), axis=0)
    dz = tl.sum(tl.load(partial_ptr + tl.cast(parts, tl.int64) * all_blocks + slot, mask=valid, other=0.0), axis=0)
    tl.store(ds_ptr + at, ds.to(ds_ptr.dtype.element_ty), mask=at < all_blocks)
    tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=at < all_blocks)


def learned_backward(dy: Tensor, x: Tensor, grid: Grid, grad_factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx, dscale and dzero_point. The last two have the shape and dtype of the scale."""
    assert isinstance(grid.scale, Tensor)
    dx = torch.empty_like(x)
    x, dy = dense(x, dx), dense(dy, dx)
    at = placed(x, grid)
    parts = parts_of(at.shape, _ELEMENTS)
    count = at.scale.numel()
    # Sums of expanded blocks are added again below.
    dtype = grid.scale.dtype if count == grid.scale.numel() else torch.float64
    sums = [x.new_empty(count, dtype=dtype) for _ in range(2)]  # results of an operator have memory of their own
    partial = x.new_empty((2, parts.parts, count), dtype=torch.float64) if parts.parts > 1 else None
    first = sums if partial is None else partial
    levels, rule = levels_of(grid)
    zero_point = at.scale if at.zero_point is None else at.zero_point
    launch(
        learned_kernel, parts.programs, dy, x, dx, at.scale, zero_point, first[0], first[1], grad_factor,
        count, *parts.sizes, *levels, RULE=rule, HAS_ZERO=at.zero_point is not None, **parts.constants,
    )  # fmt: skip
    if partial is not None:
        columns = max(1, 1024 // triton.next_power_of_2(parts.parts))
        launch(
            sum_kernel, (triton.cdiv(count, columns),), partial, sums[0], sums[1], count, parts.parts,
            PARTS=triton.next_power_of_2(parts.parts), BLOCKS=columns,
        )  # fmt: skip
    dscale, dzero_point = (by_block(s, x, grid.scale).to(grid.scale.dtype) for s in sums)
    return dx, dscale, dzero_point
