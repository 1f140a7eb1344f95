"""Which elements of a tensor share a scale, whatever the order of its memory.

A scale tensor has as many axes as the data, and along each of them its length divides the data's:

    block of x[i, j, ...]  =  scale[i // (x.shape[0] // scale.shape[0]), j // ..., ...]

One scale for the tensor is `()`, per channel `(1, C, 1, 1)`, per group `(rows, columns // group)`. A
batched scale under `vmap` is one more axis and needs no rule of its own.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

from fakequant._backends.blocks import KernelShape, memory_order


class Placement(NamedTuple):
    """How the kernels walk over a dense tensor."""

    shape: KernelShape
    # The axes from the outermost in memory to the innermost; None: C order.
    order: tuple[int, ...] | None
    # What the scale has to be expanded to first; None: nothing.
    expand: tuple[int, ...] | None


@lru_cache(maxsize=4096)
def place(shape: tuple[int, ...], strides: tuple[int, ...], blocks: tuple[int, ...]) -> Placement:
    """How to walk over a dense tensor of `shape` and `strides` with one scale per block.

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
        # The outermost shared axis does not fit: its elements get scales of their own.
        expanded = (*expanded[:axis], shape[axis], *expanded[axis + 1 :])
    return Placement((1, 1, prod(shape), 1), order, shape)


def along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """One value per index on `axis` of `x`, as blocks of it."""
    return values.view([-1 if a == axis else 1 for a in range(x.dim())])


def _collapse(factors: list[tuple[int, int]]) -> KernelShape | None:
    """The kernels' `batch * outer * blocks * inner` for axes of (blocks, elements per block)."""
    runs: list[list[int]] = []  # [1: the scale varies, 0: it is shared; length]
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
