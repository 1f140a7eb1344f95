"""Ranges of data, and fake quantization with the range of the data themselves, without reading anything back.

rows      blocks that are neighbours in memory and fit into a program are observed and quantized in one launch,
          for which data are read once
tensor    with one scale, a launch reduces data to a range per program, and the next combines these and quantizes
other     with other blocks, a third launch is needed between the two, unless a program sees whole blocks
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fakequant._backends.blocks import KernelShape
from fakequant._backends.torch.gpu_kernels import fits_rows
from fakequant._backends.torch.tensor_blocks import place
from fakequant._backends.torch.tensor_kernels import (
    Grid,
    Observed,
    ObserverOptions,
    dense,
    from_order,
    in_order,
    observable,
    zero_dtype,
)
from fakequant._backends.torch.triton.fake_quantize import (
    MASKS,
    fake_quantize_kernel,
    mask_memory,
    new_mask,
    quantize_rows,
    quantized,
)
from fakequant._backends.torch.triton.launch import launch
from fakequant._backends.torch.triton.qparams import choice_of, choose, keeps_both_ends, tensor_factor, updated_range
from fakequant._backends.torch.triton.rounding import levels_of, to_dtype, to_float32
from fakequant._backends.torch.triton.tiles import (
    blocks_of_program,
    element_offsets,
    first_row,
    is_last_program,
    last_row,
    packed,
    parts_of,
    rows_of,
)
from fakequant._kernels import SIGNED_RULES, is_per_block

# How many elements a program holds, unless a block has more.
_ELEMENTS = 4096


# --- ranges ---------------------------------------------------------------------------------------


@triton.jit
def range_of(x, valid, axis: tl.constexpr):
    """Returns the range of the finite values along an axis, and the numbers of NaN, +inf and -inf."""
    finite = valid & (tl.abs(x) < float("inf"))
    lo = tl.min(tl.where(finite, x, float("inf")), axis=axis)
    hi = tl.max(tl.where(finite, x, float("-inf")), axis=axis)
    nan = tl.sum((valid & (x != x)).to(tl.int32), axis=axis)
    posinf = tl.sum((valid & (x == float("inf"))).to(tl.int32), axis=axis)
    neginf = tl.sum((valid & (x == float("-inf"))).to(tl.int32), axis=axis)
    return lo, hi, nan, posinf, neginf


@triton.jit
def store_scales(
    at, exists, lo, hi, nonfinite, running_min, running_max, factor, min_ptr, max_ptr, scale_ptr, zero_ptr,
    nonfinite_ptr, constant, levels, eps, exponent, added, qmin, qmax,
    UPDATE: tl.constexpr, SCALE_RULE: tl.constexpr, SYMMETRIC: tl.constexpr, BOTH_ENDS: tl.constexpr,
):  # fmt: skip
    """Writes running ranges, scales and zero points of blocks, and returns the last two.

    `nonfinite` is the number of values that are not finite, of all blocks.
    """
    new_min, new_max = updated_range(lo, hi, running_min, running_max, constant, UPDATE, BOTH_ENDS)
    scale, zero = choose(
        new_min, new_max, factor, levels, eps, exponent, added, qmin, qmax, SCALE_RULE, SYMMETRIC
    )  # fmt: skip
    tl.store(min_ptr + at, new_min, mask=exists)
    tl.store(max_ptr + at, new_max, mask=exists)
    tl.store(scale_ptr + at, scale, mask=exists)
    tl.store(zero_ptr + at, zero.to(zero_ptr.dtype.element_ty), mask=exists)
    if nonfinite > 0:
        tl.atomic_add(nonfinite_ptr, nonfinite.to(tl.int64), sem="relaxed")
    return scale, zero


@triton.jit
def range_kernel(
    x_ptr, lo_ptr, hi_ptr, count_ptr, running_min_ptr, running_max_ptr, old_ptr, scale_ptr, zero_ptr, nonfinite_ptr,
    all_blocks, blocks, inner, batch_size, count, part,
    constant, levels, eps, exponent, added, qmin, qmax,
    UPDATE: tl.constexpr, SCALE_RULE: tl.constexpr, SYMMETRIC: tl.constexpr, BOTH_ENDS: tl.constexpr,
    CHOOSE: tl.constexpr, KEEP: tl.constexpr,
    OUTER: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Reduces the elements of some blocks, or a part of each, to ranges; with CHOOSE, to scales."""
    start, at, exists, first, end = blocks_of_program(blocks, inner, batch_size, count, part, WIDE, BLOCKS)
    lo = tl.full([BLOCKS], float("inf"), tl.float32)
    hi = tl.full([BLOCKS], float("-inf"), tl.float32)
    nan = tl.zeros([BLOCKS], tl.int32)
    posinf = tl.zeros([BLOCKS], tl.int32)
    neginf = tl.zeros([BLOCKS], tl.int32)
    for from_step in range(first, end, STEPS):
        step = from_step + tl.arange(0, STEPS)
        valid = exists[None, :] & (step < end)[:, None]
        offset = element_offsets(start, step, blocks, inner, OUTER)
        x = to_float32(tl.load(x_ptr + offset, mask=valid, other=0.0))
        found = range_of(x, valid, 0)
        lo = tl.minimum(lo, found[0])
        hi = tl.maximum(hi, found[1])
        nan += found[2]
        posinf += found[3]
        neginf += found[4]
    lo += 0.0  # no -0.0
    hi += 0.0
    if CHOOSE:
        store_scales(
            at, exists, lo, hi, tl.sum(nan + posinf + neginf, axis=0),
            tl.load(running_min_ptr + at, mask=exists, other=0.0),
            tl.load(running_max_ptr + at, mask=exists, other=0.0), 1.0,
            running_min_ptr, running_max_ptr, scale_ptr, zero_ptr, nonfinite_ptr,
            constant, levels, eps, exponent, added, qmin, qmax, UPDATE, SCALE_RULE, SYMMETRIC, BOTH_ENDS,
        )  # fmt: skip
    else:
        slot = tl.program_id(1).to(tl.int64) * all_blocks + at
        tl.store(lo_ptr + slot, lo, mask=exists)
        tl.store(hi_ptr + slot, hi, mask=exists)
        stride = tl.num_programs(1).to(tl.int64) * all_blocks
        tl.store(count_ptr + slot, nan, mask=exists)
        tl.store(count_ptr + stride + slot, posinf, mask=exists)
        tl.store(count_ptr + 2 * stride + slot, neginf, mask=exists)
        if KEEP:  # the next launch changes the running range, in one of its programs, while others still read it
            if tl.program_id(1) == 0:
                tl.store(old_ptr, tl.load(running_min_ptr))
                tl.store(old_ptr + 1, tl.load(running_max_ptr))


@triton.jit
def join_parts(lo_ptr, hi_ptr, count_ptr, at, exists, parts, all_blocks, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Joins the ranges and counts of the parts of each block."""
    part = tl.arange(0, PARTS)[:, None]
    slot = part.to(tl.int64) * all_blocks + at[None, :]
    valid = (part < parts) & exists[None, :]
    lo = tl.min(tl.load(lo_ptr + slot, mask=valid, other=float("inf")), axis=0)
    hi = tl.max(tl.load(hi_ptr + slot, mask=valid, other=float("-inf")), axis=0)
    stride = tl.cast(parts, tl.int64) * all_blocks
    nan = tl.sum(tl.load(count_ptr + slot, mask=valid, other=0), axis=0)
    posinf = tl.sum(tl.load(count_ptr + stride + slot, mask=valid, other=0), axis=0)
    neginf = tl.sum(tl.load(count_ptr + 2 * stride + slot, mask=valid, other=0), axis=0)
    return lo, hi, nan, posinf, neginf


@triton.jit
def join_kernel(
    lo_ptr, hi_ptr, count_ptr, new_lo_ptr, new_hi_ptr, new_count_ptr, running_min_ptr, running_max_ptr, scale_ptr,
    zero_ptr, nonfinite_ptr, all_blocks, parts, constant, levels, eps, exponent, added, qmin, qmax,
    UPDATE: tl.constexpr, SCALE_RULE: tl.constexpr, SYMMETRIC: tl.constexpr, BOTH_ENDS: tl.constexpr,
    CHOOSE: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Combines the ranges of parts to ranges; with CHOOSE, to scales."""
    at = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    exists = at < all_blocks
    lo, hi, nan, posinf, neginf = join_parts(
        lo_ptr, hi_ptr, count_ptr, at, exists, parts, all_blocks, PARTS, BLOCKS
    )  # fmt: skip
    if CHOOSE:
        store_scales(
            at, exists, lo, hi, tl.sum(nan + posinf + neginf, axis=0),
            tl.load(running_min_ptr + at, mask=exists, other=0.0),
            tl.load(running_max_ptr + at, mask=exists, other=0.0), 1.0,
            running_min_ptr, running_max_ptr, scale_ptr, zero_ptr, nonfinite_ptr,
            constant, levels, eps, exponent, added, qmin, qmax, UPDATE, SCALE_RULE, SYMMETRIC, BOTH_ENDS,
        )  # fmt: skip
    else:
        tl.store(new_lo_ptr + at, lo, mask=exists)
        tl.store(new_hi_ptr + at, hi, mask=exists)
        tl.store(new_count_ptr + at, nan, mask=exists)
        tl.store(new_count_ptr + all_blocks + at, posinf, mask=exists)
        tl.store(new_count_ptr + 2 * all_blocks + at, neginf, mask=exists)


# What kernels take to choose scales, for launches that only find ranges.
_NO_CHOICE = (0.0, 1.0, 1.0, 0, 0, 0.0, 0.0)
_NO_RULE: dict[str, Any] = {
    "UPDATE": "dynamic",
    "SCALE_RULE": "any",
    "SYMMETRIC": True,
    "BOTH_ENDS": True,
    "CHOOSE": False,
}


class Ranges(NamedTuple):
    """Ranges per block or per part of a block, and counts of NaN, +inf and -inf."""

    lo: Tensor
    hi: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, x: Tensor, *shape: int) -> "Ranges":
        """Returns uninitialized ranges."""
        lo, hi = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
        return cls(lo, hi, x.new_empty((3, *shape), dtype=torch.int64))


def _ranges(x: Tensor, shape: KernelShape, running: tuple[Tensor, Tensor] | None = None) -> tuple[Ranges, Tensor]:
    """Returns the ranges of all parts of dense data, and a copy of a running range of one block."""
    parts = parts_of(shape, _ELEMENTS if shape[0] * shape[2] == 1 else _ELEMENTS // 2)
    blocks = shape[0] * shape[2]
    found = Ranges.empty(x, parts.parts, blocks)
    old = x.new_empty(2, dtype=torch.float32)
    unused = found.lo
    launch(
        range_kernel, parts.programs, x, *found, *(running or (unused, unused)), old, unused, unused, found.counts,
        blocks, *parts.sizes, *_NO_CHOICE, **_NO_RULE, KEEP=running is not None, **parts.constants,
    )  # fmt: skip
    return found, old


def min_max(x: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the lowest and highest finite value of every block, and the numbers of NaN, +inf and -inf."""
    x, shape, order = observable(x, blocks)
    found = _ranges(x, shape)[0]
    parts, count = found.lo.shape
    if parts > 1:
        joined = Ranges.empty(x, 1, count)
        unused = joined.lo
        columns = _join_columns(parts)
        launch(
            join_kernel, (triton.cdiv(count, columns),), *found, *joined, unused, unused, unused, unused,
            joined.counts, count, parts, *_NO_CHOICE, **_NO_RULE,
            PARTS=triton.next_power_of_2(parts), BLOCKS=columns,
        )  # fmt: skip
        found = joined
    lo, hi = (from_order(v, blocks, order) for v in found[:2])
    if order is None or count == 1:
        return lo, hi, found.counts.view(3, *blocks)
    return lo, hi, torch.stack([from_order(c, blocks, order) for c in found.counts])


def _join_columns(parts: int) -> int:
    """Returns how many blocks a program of `join_kernel` combines."""
    columns: int = max(1, 512 // triton.next_power_of_2(parts))
    return columns


# --- observing and quantizing ---------------------------------------------------------------------


@triton.jit
def tensor_scale(
    lo_ptr, hi_ptr, count_ptr, old_ptr, running_min_ptr, running_max_ptr, scale_ptr, zero_ptr,
    nonfinite_ptr, parts, constant, levels, eps, exponent, added, qmin, qmax,
    UPDATE: tl.constexpr, SCALE_RULE: tl.constexpr, SYMMETRIC: tl.constexpr, BOTH_ENDS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Returns the scale and zero point of a tensor from the ranges of its parts. One program also stores them."""
    part = tl.arange(0, PARTS)
    lo = tl.min(tl.load(lo_ptr + part, mask=part < parts, other=float("inf")), axis=0)
    hi = tl.max(tl.load(hi_ptr + part, mask=part < parts, other=float("-inf")), axis=0)
    new_min, new_max = updated_range(
        lo, hi, tl.load(old_ptr), tl.load(old_ptr + 1), constant, UPDATE, BOTH_ENDS
    )  # fmt: skip
    scale, zero = choose(
        new_min, new_max, 1.0, levels, eps, exponent, added, qmin, qmax, SCALE_RULE, SYMMETRIC
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(running_min_ptr, new_min)
        tl.store(running_max_ptr, new_max)
        tl.store(scale_ptr, scale)
        tl.store(zero_ptr, zero.to(zero_ptr.dtype.element_ty))
        nonfinite = tl.load(nonfinite_ptr)
        for kind in range(3):
            nonfinite += tl.sum(tl.load(count_ptr + kind * parts + part, mask=part < parts, other=0), axis=0)
        tl.store(nonfinite_ptr, nonfinite)
    return scale, zero


@triton.jit
def observe_tensor_kernel(
    x_ptr, y_ptr, mask_ptr, lo_ptr, hi_ptr, count_ptr, old_ptr, running_min_ptr, running_max_ptr, scale_ptr, zero_ptr,
    nonfinite_ptr, parts, size, row_size, blocks, inner, lo, hi, smallest_normal, spacing,
    constant, levels, eps, exponent, added, qmin, qmax,
    RULE: tl.constexpr, MASK: tl.constexpr, UPDATE: tl.constexpr, SCALE_RULE: tl.constexpr, SYMMETRIC: tl.constexpr,
    BOTH_ENDS: tl.constexpr, PARTS: tl.constexpr,
    SCALES: tl.constexpr, BATCHES: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Fake-quantizes a tensor with one scale, which follows from the ranges of its parts."""
    scale, zero = tensor_scale(
        lo_ptr, hi_ptr, count_ptr, old_ptr, running_min_ptr, running_max_ptr, scale_ptr,
        zero_ptr, nonfinite_ptr, parts, constant, levels, eps, exponent, added, qmin, qmax,
        UPDATE, SCALE_RULE, SYMMETRIC, BOTH_ENDS, PARTS,
    )  # fmt: skip
    row = first_row(WIDE, ROWS) + tl.arange(0, ROWS)
    whole = row < size // 8
    quantize_rows(
        x_ptr, y_ptr, mask_ptr, row, whole[:, None], whole, scale, zero, lo, hi, smallest_normal, spacing, RULE, MASK
    )
    if TAIL:
        if is_last_program():
            last, exists, is_row = last_row(size)
            quantize_rows(
                x_ptr, y_ptr, mask_ptr, last, exists, is_row, scale, zero, lo, hi, smallest_normal, spacing, RULE, MASK
            )


@triton.jit
def largest_first(x, absmax, column, valid):
    """Returns the range from 0 to the first value of each row with the largest magnitude."""
    is_it = valid & (tl.abs(x) == absmax[:, None])
    first = tl.min(tl.where(is_it, column, 1 << 30), axis=1)
    value = tl.sum(tl.where(column == first[:, None], x, 0.0), axis=1)
    return tl.where(value < 0.0, -absmax, 0.0), tl.where(value < 0.0, 0.0, absmax)


@triton.jit
def observe_rows_kernel(
    x_ptr, y_ptr, mask_ptr, running_min_ptr, running_max_ptr, scale_ptr, zero_ptr, nonfinite_ptr, lo_ptr, hi_ptr,
    parts, all_blocks, inner, lo, hi, smallest_normal, spacing,
    constant, levels, eps, exponent, added, qmin, qmax,
    RULE: tl.constexpr, MASK: tl.constexpr, UPDATE: tl.constexpr, SCALE_RULE: tl.constexpr, SYMMETRIC: tl.constexpr,
    BOTH_ENDS: tl.constexpr, SIGNED: tl.constexpr, PARTS: tl.constexpr,
    WIDE: tl.constexpr, BLOCKS: tl.constexpr, LENGTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Observes and fake-quantizes blocks of neighbours, each in a row of a tile. PARTS is 0 without a tensor scale."""
    at = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    exists = at < all_blocks
    column = tl.arange(0, LENGTH)[None, :]
    start = at.to(tl.int64) * inner if WIDE else at * inner
    offset = start[:, None] + column
    valid = exists[:, None]
    if not FULL:
        valid = valid & (column < inner)
    x = to_float32(tl.load(x_ptr + offset, mask=valid, other=0.0))
    found = range_of(x, valid, 1)
    low = found[0] + 0.0
    high = found[1] + 0.0
    if SIGNED:
        nothing = low > high
        signed_low, signed_high = largest_first(x, tl.abs(tl.where(high > -low, high, -low)), column, valid)
        low = tl.where(nothing, low, signed_low)
        high = tl.where(nothing, high, signed_high)
    factor = 1.0
    if PARTS > 0:
        part = tl.arange(0, PARTS)
        lowest = tl.min(tl.load(lo_ptr + part, mask=part < parts, other=0.0), axis=0)
        highest = tl.max(tl.load(hi_ptr + part, mask=part < parts, other=0.0), axis=0)
        largest = tl.where(highest > -lowest, highest, -lowest)
        # Parts without finite values have the range inf to -inf.
        factor = tensor_factor(tl.where(lowest > highest, 0.0, largest), SCALE_RULE)
    scale, zero = store_scales(
        at, exists, low, high, tl.sum(found[2] + found[3] + found[4], axis=0),
        tl.load(running_min_ptr + at, mask=exists, other=0.0), tl.load(running_max_ptr + at, mask=exists, other=0.0),
        factor, running_min_ptr, running_max_ptr, scale_ptr, zero_ptr, nonfinite_ptr,
        constant, levels, eps, exponent, added, qmin, qmax, UPDATE, SCALE_RULE, SYMMETRIC, BOTH_ENDS,
    )  # fmt: skip
    y, inside = quantized(x, scale[:, None], zero[:, None], lo, hi, smallest_normal, spacing, RULE)
    tl.store(y_ptr + offset, to_dtype(y, y_ptr.dtype.element_ty), mask=valid)
    if MASK == "packed":
        bits = tl.reshape(inside & valid, [BLOCKS * LENGTH // 8, 8])
        words = tl.reshape(packed(bits, 1), [BLOCKS, LENGTH // 8])
        byte = tl.arange(0, LENGTH // 8)[None, :]
        # Rows start at whole bytes, or there is one row.
        there = exists[:, None] & (byte < (inner + 7) // 8)
        tl.store(mask_ptr + (start // 8)[:, None] + byte, words.to(tl.uint8), mask=there)


def observe_into(
    x: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    nonfinite: Tensor,
    options: ObserverOptions,
) -> tuple[Tensor, Tensor | None]:
    """Fake-quantizes, and updates all other tensors in place; the number of non-finite values is added to the last."""
    state = (running_min, running_max, scale, zero_point)
    y = torch.empty_like(x)
    mask = new_mask(y, options.mask_kind)
    x = dense(x, y)
    blocks = tuple(running_min.shape)
    shape, order, expand = place(tuple(x.shape), x.stride(), () if running_min.numel() == 1 else blocks)
    assert expand is None
    ordered = [in_order(v, v.dtype, order, None) for v in state]
    _observe(x, y, mask, shape, ordered, nonfinite, options)
    for value, updated in zip(state, ordered, strict=True):
        if updated.data_ptr() != value.data_ptr():
            value.copy_(from_order(updated, tuple(value.shape), order))
    return y, mask


def _observe(
    x: Tensor,
    y: Tensor,
    mask: Tensor | None,
    shape: KernelShape,
    state: list[Tensor],
    nonfinite: Tensor,
    options: ObserverOptions,
) -> None:
    """Does the work of `observe_into` with everything in the order of memory."""
    running_min, running_max, scale, zero_point = state
    qmin, qmax, numerics, symmetric, scale_rule, update, constant, eps, clipped = options
    choice, rule = choice_of(qmin, qmax, numerics, symmetric, scale_rule, eps)
    numbers = (constant, *choice)
    rules: dict[str, Any] = {
        "UPDATE": update,
        "SCALE_RULE": rule,
        "SYMMETRIC": symmetric or levels_of(Grid(scale, None, qmin, qmax, numerics))[1].startswith("float"),
        "BOTH_ENDS": keeps_both_ends(scale_rule),
    }
    grid = Grid(scale, zero_point, qmin, qmax, numerics)
    levels, numerics_rule = levels_of(grid)
    rounding: dict[str, Any] = {"RULE": numerics_rule, "MASK": MASKS[options.mask_kind]}
    count, inner = scale.numel(), shape[3]
    if fits_rows(shape, clipped) and (count > 1 or inner <= _ELEMENTS or not is_per_block(scale_rule)):
        parts, found = 0, None
        if rule.startswith("e4m3fn"):
            found = _ranges(x, (1, 1, 1, x.numel()))[0]
            parts = len(found.lo)
        length = max(triton.next_power_of_2(inner), 8 if clipped else 1)
        per_program = max(1, _ELEMENTS // length)
        launch(
            observe_rows_kernel, (triton.cdiv(count, per_program),), x, y, mask_memory(mask, y), *state, nonfinite,
            *((scale, scale) if found is None else found[:2]), parts, count, inner, *levels, *numbers,
            **rounding, **rules, SIGNED=scale_rule in SIGNED_RULES, PARTS=triton.next_power_of_2(parts) if parts else 0,
            WIDE=rows_of(shape).constants["WIDE"], BLOCKS=per_program, LENGTH=length, FULL=length == inner,
        )  # fmt: skip
    elif count == 1:
        found, old = _ranges(x, shape, (running_min, running_max))
        rows = rows_of(shape)
        parts = len(found.lo)
        launch(
            observe_tensor_kernel, rows.programs, x, y, mask_memory(mask, y), *found, old, *state, nonfinite, parts,
            *rows.sizes, *levels, *numbers, **rounding, **rules, PARTS=triton.next_power_of_2(parts), **rows.constants,
        )  # fmt: skip
    else:
        _choose_scales(x, shape, state, nonfinite, numbers, rules)
        rows = rows_of(shape)
        launch(
            fake_quantize_kernel, rows.programs, x, y, mask_memory(mask, y), scale, zero_point, *rows.sizes, *levels,
            **rounding, HAS_ZERO=True, **rows.constants,
        )  # fmt: skip


def _choose_scales(
    x: Tensor,
    shape: KernelShape,
    state: list[Tensor],
    nonfinite: Tensor,
    numbers: tuple[float, ...],
    rules: dict[str, Any],
) -> None:
    """Updates ranges and scales with dense data, in one launch if a program sees whole blocks, otherwise in two."""
    parts = parts_of(shape, _ELEMENTS if shape[0] * shape[2] == 1 else _ELEMENTS // 2)
    count = state[0].numel()
    if parts.parts == 1:
        unused = state[2]
        launch(
            range_kernel, parts.programs, x, unused, unused, nonfinite, *state[:2], unused, *state[2:], nonfinite,
            count, *parts.sizes, *numbers, **rules, CHOOSE=True, KEEP=False, **parts.constants,
        )  # fmt: skip
        return
    found = _ranges(x, shape)[0]
    columns = _join_columns(parts.parts)
    launch(
        join_kernel, (triton.cdiv(count, columns),), *found, *found, *state, nonfinite, count, parts.parts, *numbers,
        **rules, CHOOSE=True, PARTS=triton.next_power_of_2(parts.parts), BLOCKS=columns,
    )  # fmt: skip


def observe_fake_quantize(x: Tensor, running_min: Tensor, running_max: Tensor, options: ObserverOptions) -> Observed:
    """Updates the running range in place, chooses scales and fake-quantizes."""
    scale = torch.empty_like(running_min, memory_format=torch.contiguous_format)
    zero_point = torch.empty_like(scale, dtype=zero_dtype(options.scale_rule))
    nonfinite = torch.zeros((), dtype=torch.int64, device=x.device)
    y, mask = observe_into(x, running_min, running_max, scale, zero_point, nonfinite, options)
    return Observed(y, mask, scale, zero_point, nonfinite)
