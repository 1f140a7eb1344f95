"""Which elements a program handles, and which scale belongs to each.

Data are `batch * outer * blocks * inner` elements in memory, with one scale per (batch, block), as for the CPU
kernels; see csrc/kernels.h. Elementwise kernels see them as rows of 8 neighbours: 8 bits of a mask are a byte, and 8
elements of 16 bits are the 16 bytes that a thread loads at once.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fakequant._backends.blocks import KernelShape
from fakequant._backends.torch.tensor_blocks import place
from fakequant._backends.torch.tensor_kernels import Grid, Order, in_order
from fakequant._backends.torch.triton.launch import PROGRAMS
from fakequant._backends.torch.triton.rounding import has_offset

# Rows of 8 elements per program.
ROWS = 256
# Offsets beyond it need 64 bits. Programs may start a little after the end.
_LARGEST_OFFSET = 2**31 - 2**16


class Placed(NamedTuple):
    """Scales in the memory order of dense data."""

    shape: KernelShape
    order: Order
    scale: Tensor
    zero_point: Tensor | None


def placed(x: Tensor, grid: Grid) -> Placed:
    """Returns scale and zero point of a grid in the memory order of `x`, which is dense."""
    scale, zero_point = grid.scale, grid.zero_point
    assert isinstance(scale, Tensor)
    blocks = () if scale.numel() == 1 else tuple(scale.shape)
    shape, order, expand = place(tuple(x.shape), x.stride(), blocks)
    scale = in_order(scale, torch.float32, order, expand)
    if isinstance(zero_point, Tensor):
        dtype = torch.float32 if has_offset(grid.numerics) else zero_point.dtype
        zero_point = in_order(zero_point, dtype, order, expand)
    return Placed(shape, order, scale, zero_point if isinstance(zero_point, Tensor) else None)


class Rows(NamedTuple):
    """How an elementwise kernel is started."""

    programs: tuple[int]
    # size, row_size, blocks, inner: where the scale of an element is.
    sizes: tuple[int, int, int, int]
    constants: dict[str, Any]


def rows_of(shape: KernelShape) -> Rows:
    """Returns how an elementwise kernel handles data of this shape."""
    batch, outer, blocks, inner = shape
    size = batch * outer * blocks * inner
    one = batch * blocks == 1
    return Rows(
        (triton.cdiv(max(size, 1), 8 * ROWS),),
        (size, outer * blocks * inner, blocks, inner),
        {
            "SCALES": "one" if one else "row" if inner % 8 == 0 else "element",
            "BATCHES": batch > 1,
            "TAIL": size % 8 != 0,
            "WIDE": size > _LARGEST_OFFSET,
            "ROWS": ROWS,
        },
    )


@triton.jit
def first_row(WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Returns the first row of this program."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    return program * ROWS


@triton.jit
def is_last_program():
    """Returns True in the program that also handles the last row, if it is shorter."""
    return tl.program_id(0) == tl.num_programs(0) - 1


@triton.jit
def last_row(size):
    """Returns the last row if it is shorter than 8, as one row in a tile, and which of its elements exist."""
    row = size // 8 + tl.arange(0, 1)
    return row, (row * 8)[:, None] + tl.arange(0, 8)[None, :] < size, row * 8 < size


@triton.jit
def scale_index(row, row_size, blocks, inner, SCALES: tl.constexpr, BATCHES: tl.constexpr):
    """Returns where the scales of rows of 8 elements are: one index, one per row, or one per element."""
    if SCALES == "one":
        return 0
    else:
        first = row[:, None] * 8
        if SCALES == "element":
            first = first + tl.arange(0, 8)[None, :]
        index = first // inner % blocks
        if BATCHES:
            index += first // row_size * blocks
        return index


@triton.jit
def load_scales(
    scale_ptr, zero_ptr, row, valid, whole, row_size, blocks, inner,
    HAS_ZERO: tl.constexpr, SCALES: tl.constexpr, BATCHES: tl.constexpr,
):  # fmt: skip
    """Returns scale and zero point of rows of 8 elements; `valid` and `whole` say which elements and rows exist."""
    at = scale_index(row, row_size, blocks, inner, SCALES, BATCHES)
    if SCALES == "one":
        scale = tl.load(scale_ptr)
        zero = tl.load(zero_ptr).to(tl.float32) if HAS_ZERO else 0.0
    else:
        there = valid if SCALES == "element" else whole[:, None]
        scale = tl.load(scale_ptr + at, mask=there, other=1.0)
        zero = tl.load(zero_ptr + at, mask=there, other=0).to(tl.float32) if HAS_ZERO else 0.0
    return scale, zero


@triton.jit
def packed(values, BITS: tl.constexpr):
    """Returns rows of 8 values of up to 8 bits as words, the first value in the lowest bits."""
    if BITS <= 4:
        word = values.to(tl.int32) << (BITS * tl.arange(0, 8))[None, :]
    else:
        word = values.to(tl.int64) << (BITS * tl.arange(0, 8)).to(tl.int64)[None, :]
    return tl.sum(word, axis=1)


# --- reductions -----------------------------------------------------------------------------------
#
# A program reduces all elements of some blocks, or a part of each. How many depends on the shape alone, and therefore
# the order in which sums are taken.


class Parts(NamedTuple):
    """How a kernel that reduces blocks is started."""

    # Tiles of blocks, and parts of the elements of each block.
    programs: tuple[int, int]
    # blocks, inner, batch_size, count and part: elements of a block, and of a part of it.
    sizes: tuple[int, int, int, int, int]
    constants: dict[str, Any]

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.programs[1]


def parts_of(shape: KernelShape, tile: int) -> Parts:
    """Returns how a kernel reduces the blocks of data of this shape. `tile` is how many elements it loads at once."""
    batch, outer, blocks, inner = shape
    if outer == 1:
        batch, blocks = 1, batch * blocks
    count = outer * inner
    fitting = tile // min(triton.next_power_of_2(count), tile)
    # Where neighbours in memory are in different blocks, a program handles several, to load neighbours at once.
    columns = min(max(fitting, 64 if inner < 16 else 1), triton.next_power_of_2(blocks))
    steps = min(triton.next_power_of_2(count), tile // columns)
    tiles = batch * triton.cdiv(blocks, columns)
    parts = max(1, min(PROGRAMS // tiles, triton.cdiv(count, steps)))
    part = triton.cdiv(triton.cdiv(count, parts), steps) * steps
    return Parts(
        (tiles, triton.cdiv(count, part)),
        (blocks, inner, outer * blocks * inner, count, part),
        {
            "OUTER": outer > 1,
            "WIDE": batch * outer * blocks * inner > _LARGEST_OFFSET,
            "BLOCKS": columns,
            "STEPS": steps,
        },
    )


@triton.jit
def blocks_of_program(blocks, inner, batch_size, count, part, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """Returns first elements, scales and existence of the blocks of this program, and its part of their elements."""
    tiles = tl.cdiv(blocks, BLOCKS)
    tile = tl.program_id(0)
    block = tile % tiles * BLOCKS + tl.arange(0, BLOCKS)
    batch = tile // tiles
    at = batch * blocks + block
    first = tl.program_id(1) * part
    if WIDE:
        first = tl.program_id(1).to(tl.int64) * part
    end = tl.minimum(first + part, count)
    if WIDE:
        start = batch.to(tl.int64) * batch_size + block.to(tl.int64) * inner
    else:
        start = batch * batch_size + block * inner
    return start, at, block < blocks, first, end


@triton.jit
def element_offsets(start, step, blocks, inner, OUTER: tl.constexpr):
    """Returns where elements `step` of the blocks that begin at `start` are in memory."""
    if OUTER:
        return start[None, :] + (step // inner * (blocks * inner) + step % inner)[:, None]
    else:
        return start[None, :] + step[:, None]
