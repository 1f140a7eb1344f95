"""Which elements of an array share a scale, in the form that the kernels take.

The kernels see `batch * outer * blocks * inner` elements in C order with one scale per (batch, block); see
csrc/kernels.h. They know nothing about axes, groups and strides.
"""

from math import prod
from typing import NamedTuple

from fakequant.formats import SUPER_BLOCKS
from fakequant.spec import WHOLE_AXIS, QuantSpec

KernelShape = tuple[int, int, int, int]


class Blocks(NamedTuple):
    """How an array is divided into blocks that share a scale."""

    # If the last block of an axis is shorter, the kernels get one scale per element.
    kernel: KernelShape
    # The shape of the array of scales.
    parameters: tuple[int, ...]


def normalize_axis(axis: int, ndim: int) -> int:
    """Returns `axis` as a non-negative number. Raises IndexError if it is out of range.

    >>> normalize_axis(-1, 3)
    2
    """
    if not -ndim <= axis < ndim:
        raise IndexError(
            f"`axis` {axis} is out of range for an array with {ndim} dimension{'s' if ndim != 1 else ''}: "
            + (f"expected {-ndim} to {ndim - 1}." if ndim else "a 0-d array has no axes; use axis=None.")
        )
    return axis % ndim


def channel_shape(shape: tuple[int, ...], axis: int) -> KernelShape:
    """Returns the kernel shape for one block per index on `axis`.

    >>> channel_shape((8, 3, 5, 5), 1)
    (1, 8, 3, 25)
    """
    return 1, prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


def blocks_of(shape: tuple[int, ...], spec: QuantSpec) -> Blocks:
    """Returns the blocks of an array of `shape` under `spec`.

    Raises IndexError if the array does not have the axis, and ValueError if the group size does not divide it. With
    scales of MX and NVFP4 and in blocks of rows it does not have to: the last block of an axis may be shorter.

    >>> blocks_of((8, 64), QuantSpec(axis=-1, group_size=32))
    Blocks(kernel=(1, 1, 16, 32), parameters=(8, 2))
    >>> blocks_of((8, 64), QuantSpec(axis=-1, group_size=32, group_rows=4))
    Blocks(kernel=(2, 4, 2, 32), parameters=(2, 2))
    >>> blocks_of((2, 6, 5), QuantSpec(axis=1, group_size=3))
    Blocks(kernel=(4, 3, 5, 1), parameters=(2, 2, 5))
    """
    if spec.axis is None:
        return Blocks((1, 1, 1, prod(shape)), ())
    axis = normalize_axis(spec.axis, len(shape))
    if spec.group_size is None:
        return Blocks(channel_shape(shape, axis), (shape[axis],))
    if spec.group_rows is not None:
        return _blocks_of_rows(shape, axis, spec)
    length = shape[axis]
    size = group_length(length, spec)
    if size and length % size:
        if _may_be_shorter(spec):
            parameters = (*shape[:axis], -(-length // size), *shape[axis + 1 :])
            return Blocks((1, 1, prod(shape), 1), parameters)
        raise ValueError(
            f"`group_size` {size} does not divide axis {spec.axis} of length {length} (array of shape {shape}).\n"
            f"Choose a divisor of {length}, or pad the axis to {-(-length // size) * size}."
        )
    if spec.scale_rule in SUPER_BLOCKS and (axis != len(shape) - 1 or length % (SUPER_BLOCKS[spec.scale_rule] * size)):
        raise ValueError(
            f"`{spec.scale_rule}` has super-blocks of 256 along the last axis, got axis {spec.axis} of an array of "
            f"shape {shape}.\nUse axis=-1 and a length that is a multiple of 256, or q4_0 or q8_0."
        )
    groups = length // size if size else 1
    before, after = prod(shape[:axis]), prod(shape[axis + 1 :])
    parameters = (*shape[:axis], groups, *shape[axis + 1 :])
    if after == 1:
        return Blocks((1, 1, before * groups, size), parameters)
    return Blocks((before * groups, size, after, 1), parameters)


def _blocks_of_rows(shape: tuple[int, ...], axis: int, spec: QuantSpec) -> Blocks:
    """Returns blocks of rows. Along an axis with a shorter last block, the kernels get one scale per index."""
    if axis == 0 or axis != len(shape) - 1:
        raise IndexError(
            f"Blocks of {spec.group_rows} rows are on the last two axes, but `axis` {spec.axis} of an array of shape "
            f"{shape} is {'the only one' if len(shape) == 1 else 'another one'}.\nUse axis=-1 and an array with rows."
        )
    (_, rows), (_, columns) = block_lengths(shape, spec)
    *outer, height, width = shape
    parameters = (*outer, -(-height // rows) if rows else 0, -(-width // columns) if columns else 0)
    rows, columns = (size if size and length % size == 0 else 1 for length, size in ((height, rows), (width, columns)))
    return Blocks((prod(outer) * height // rows, rows, width // columns, columns), parameters)


def block_lengths(shape: tuple[int, ...], spec: QuantSpec) -> list[tuple[int, int]]:
    """Returns the axes that are cut into groups, each with the number of neighbours that share a scale.

    >>> block_lengths((8, 64), QuantSpec(axis=-1, group_size=32, group_rows=16))
    [(0, 8), (1, 32)]
    """
    if spec.axis is None or spec.group_size is None:
        return []
    axis = spec.axis % len(shape)
    lengths = [(axis, group_length(shape[axis], spec))]
    if spec.group_rows is not None:
        lengths.insert(0, (axis - 1, min(spec.group_rows, shape[axis - 1])))
    return lengths


def group_length(length: int, spec: QuantSpec) -> int:
    """Returns how many elements of an axis of `length` share a scale under a spec with a group size.

    >>> group_length(64, QuantSpec(axis=-1, group_size=32)), group_length(64, QuantSpec().per_token())
    (32, 64)
    """
    assert spec.group_size is not None
    if spec.group_size == WHOLE_AXIS:
        return length
    return min(spec.group_size, length) if _may_be_shorter(spec) else spec.group_size


def _may_be_shorter(spec: QuantSpec) -> bool:
    """Returns True if the last block of an axis may be shorter than the others."""
    return (spec.has_block_scales and spec.ggml_type is None) or spec.group_rows is not None


def short_blocks(shape: tuple[int, ...], spec: QuantSpec) -> list[tuple[int, int]]:
    """Returns the axes whose last block is shorter than the others, each with the length of the others.

    >>> mx = QuantSpec(format="e2m1", scale_format="e8m0", axis=-1, group_size=32)
    >>> short_blocks((4, 48), mx), short_blocks((4, 10), mx)
    ([(1, 32)], [])
    """
    if not _may_be_shorter(spec):
        return []
    return [(axis, size) for axis, size in block_lengths(shape, spec) if size and shape[axis] % size]


def memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the axes of dense data from the outermost in memory to the innermost, or None for C order.

    >>> memory_order((2, 3, 4, 5), (60, 1, 15, 3))
    (0, 2, 3, 1)
    """
    # The stride of an axis of length 1 means nothing, so it must not move the axis.
    order = sorted(range(len(shape)), key=lambda axis: (-abs(strides[axis]) if shape[axis] > 1 else 0, axis))
    long = [axis for axis in order if shape[axis] > 1]
    if long == sorted(long):
        return None
    return tuple(order)


def order_of_result(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes of an elementwise result from the outermost in memory to the innermost, as torch orders them.

    This is an insertion sort from the last axis to the first. Two axes are compared by the first input that has
    non-zero strides on both. Among equal strides the shorter axis goes inside. Because strides of 0 are skipped, the
    comparison is not transitive and no sort key would give the same order.

    `shape` is the common shape of the inputs, and `strides` has the strides of each.

    >>> order_of_result((3, 4, 2), (16, 0, 8))
    (0, 1, 2)
    """
    inside_first = list(reversed(range(len(shape))))
    for i in range(1, len(shape)):
        here = i
        for other in range(i - 1, -1, -1):
            comparison = _compare(inside_first[other], inside_first[here], shape, strides)
            if comparison > 0:
                inside_first[other], inside_first[here] = inside_first[here], inside_first[other]
                here = other
            elif comparison < 0:
                break
    return tuple(reversed(inside_first))


def _compare(a: int, b: int, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> int:
    for steps in strides:
        stride_a, stride_b = abs(steps[a]), abs(steps[b])
        if stride_a == 0 or stride_b == 0:
            continue
        if stride_a != stride_b:
            return 1 if stride_a > stride_b else -1
        if shape[a] > shape[b]:
            return 1
    return 0
