"""Search for the range with the least error among candidates, block by block."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fakequant._backends.torch.formula import with_positive_zeros
from fakequant._backends.torch.torch_annotations import broadcast_tensors

Ends = tuple[Tensor, Tensor]
# Returns the errors of candidate ranges. The first axis counts the candidates; the other axes are the blocks.
Errors = Callable[[Tensor, Tensor], Tensor]


def check_steps(steps: object) -> None:
    """Raises ValueError if `steps` is not a positive int."""
    if type(steps) is not int or steps < 1:
        raise ValueError(f"`steps` must be an int of at least 1, got {steps!r}.")


def search(errors: Errors, lo: Tensor, hi: Tensor, steps: int, *, each_end: bool) -> Ends:
    """Returns the range within `lo` to `hi` with the least error, block by block.

    First both ends are cut at the same magnitude, from the largest magnitude downwards. The range always includes 0.
    An empty range (lo > hi) is not changed.

    There are `steps` candidates in equal steps. With `each_end`, each end is then moved inwards separately.
    """
    seen = lo <= hi
    low, high = torch.where(seen, lo, 0).clamp(max=0), torch.where(seen, hi, 0).clamp(min=0)
    fractions = _fractions(steps, low)
    threshold = torch.maximum(-low, high) * fractions
    low, high = _best(errors, torch.maximum(low, -threshold), torch.minimum(high, threshold))
    if each_end:
        low, high = _best(errors, *broadcast_tensors(low * fractions, high))
        low, high = _best(errors, *broadcast_tensors(low, high * fractions))
    return with_positive_zeros(torch.where(seen, low, lo)), with_positive_zeros(torch.where(seen, high, hi))


def search_between(errors: Errors, inner: Ends, outer: Ends, steps: int) -> Ends:
    """Returns the range between `inner` and `outer` with the least error, block by block.

    Both ends of `outer` are cut at the same magnitude, from the largest magnitude downwards, but not below the ends of
    `inner`. If no candidate has a finite error, the range is `inner`.

    There are `steps` candidates in equal steps.
    """
    seen = outer[0] <= outer[1]
    low, high = torch.where(seen, outer[0], 0).clamp(max=0), torch.where(seen, outer[1], 0).clamp(min=0)
    threshold = torch.maximum(-low, high) * _fractions(steps, low)
    lo = torch.minimum(torch.maximum(low, -threshold), torch.where(seen, inner[0], 0))
    hi = torch.maximum(torch.minimum(high, threshold), torch.where(seen, inner[1], 0))
    found = errors(lo, hi)
    low, high = _least(found, lo, hi)
    possible = seen & (found < torch.inf).any(0)
    low, high = torch.where(possible, low, inner[0]), torch.where(possible, high, inner[1])
    return with_positive_zeros(low), with_positive_zeros(high)


def candidates_at_once(number: int, counts: Tensor) -> Iterator[slice]:
    """Yields slices of the candidates that are small enough to limit memory: `counts` is copied for each candidate."""
    size = max(1, (1 << 16) // max(1, counts.numel()))
    for start in range(0, number, size):
        yield slice(start, min(start + size, number))


def _fractions(steps: int, like: Tensor) -> Tensor:
    """Returns `steps` fractions from 1 downwards, along a new first axis before the axes of `like`."""
    numbers = torch.arange(steps, 0, -1, dtype=torch.float32, device=like.device)
    return numbers.reshape(-1, *[1] * like.dim()) / steps


def _best(errors: Errors, lo: Tensor, hi: Tensor) -> Ends:
    return _least(errors(lo, hi), lo, hi)


def _least(errors: Tensor, lo: Tensor, hi: Tensor) -> Ends:
    """Returns the first of the candidates with the least error, block by block."""
    found = errors.nan_to_num(nan=torch.inf)  # NaN if values on the grid are infinite
    number = torch.arange(len(lo), device=lo.device).reshape(-1, *[1] * (lo.dim() - 1))
    best = torch.where(found == found.amin(0), number, len(lo) - 1).amin(0, keepdim=True)
    return lo.gather(0, best)[0], hi.gather(0, best)[0]
