"""Which elements of a tensor share a scale, for any memory layout.

A scale tensor has the same number of axes as the data, and its length on each axis divides the length of the data:

    scale of x[i, j, ...]  =  scale[i // (x.shape[0] // scale.shape[0]), j // ..., ...]

Scales have shape `()` per tensor, `(1, C, 1, 1)` per channel, and `(rows, columns // group)` per group. Under `vmap` a
batched scale has one more axis and follows the same rule.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

from fakequant._backends.blocks import KernelShape, memory_order


class Placement(NamedTuple):
    """How the kernels traverse a dense tensor."""

    shape: KernelShape
    # The axes from the outermost in memory to the innermost, or None for C order.
    order: tuple[int, ...] | None
    # The shape to which scales have to be expanded first, or None.
    expand: tuple[int, ...] | None


@lru_cache(maxsize=4096)
def place(shape: tuple[int, ...], strides: tuple[int, ...], blocks: tuple[int, ...]) -> Placement:
    """Returns how the kernels traverse a dense tensor of `shape` and `strides` with scales of the shape `blocks`.

    >>> place((8, 64), (64, 1), (8, 2))
    Placement(shape=(1, 1, 16, 32), order=None, expand=None)
    >>> place((8, 3, 5, 5), (75, 1, 15, 3), (1, 3, 1, 1)).shape  # channels last
    (1, 200, 3, 1)
    """
    order = memory_order(shape, strides)
    if not blocks:
        return Placement((1, 1, 1, prod(shape)), order, None)
    axes = order or tuple(range(len(shape)))
    expanded = blocks
    for axis in axes:
        kernel = _collapse([(expanded[a], shape[a] // expanded[a] if expanded[a] else 0) for a in axes])
        if kernel is not None:
            return Placement(kernel, order, None if expanded == blocks else expanded)
        # The blocks do not fit the kernels' shape: give every index on this axis its own scale.
        expanded = (*expanded[:axis], shape[axis], *expanded[axis + 1 :])
    return Placement((1, 1, prod(shape), 1), order, shape)


def along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """Returns one value per index on `axis` of `x`, reshaped to the shape of a scale."""
    return values.view([-1 if a == axis else 1 for a in range(x.dim())])


def _collapse(factors: list[tuple[int, int]]) -> KernelShape | None:
    """Returns the kernels' `(batch, outer, blocks, inner)` for axes of (blocks, elements per block), or None."""
    runs: list[list[int]] = []  # [1 if the scale varies along it, 0 if it is shared; length]
    for varying, shared in factors:
        for kind, length in ((1, varying), (0, shared)):
            if length == 1:
                continue
            if runs and runs[-1][0] == kind:
                runs[-1][1] *= length
            else:
                runs.append([kind, length])
    lengths = [1, 1, 1, 1]
    at = 4
    for kind, length in reversed(runs):
        at -= 1 if at % 2 == kind else 2  # odd places are shared, even ones vary
        if at < 0:
            return None
        lengths[at] = length
    return lengths[0], lengths[1], lengths[2], lengths[3]
