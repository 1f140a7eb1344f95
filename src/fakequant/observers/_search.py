"""Searching a range: candidates, and the one with the least error in every block."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Ends = tuple[Tensor, Tensor]
# The errors of candidates, whose number is the length of the first axis; the other axes are the blocks.
Errors = Callable[[Tensor, Tensor], Tensor]


def check_steps(steps: object) -> None:
    """A number of candidates."""
    if type(steps) is not int or steps < 1:
        raise ValueError(f"`steps` must be an int of at least 1, got {steps!r}.")


def search(errors: Errors, lo: Tensor, hi: Tensor, steps: int, *, each_end: bool) -> Ends:
    """The range within `lo` to `hi` with the least error, block by block.

    First both ends are cut at the same magnitude, from the largest in `steps` equal steps down; then,
    with `each_end`, each is moved inwards alone. The range always holds 0; one without values stays as
    it is.
    """
    seen = lo <= hi
    low, high = torch.where(seen, lo, 0).clamp(max=0), torch.where(seen, hi, 0).clamp(min=0)
    fractions = _fractions(steps, low)
    threshold = torch.maximum(-low, high) * fractions
    low, high = _best(errors, torch.maximum(low, -threshold), torch.minimum(high, threshold))
    if each_end:
        low, high = _best(errors, *torch.broadcast_tensors(low * fractions, high))
        low, high = _best(errors, *torch.broadcast_tensors(low, high * fractions))
    # + 0.0: the zeros of a range are positive.
    return torch.where(seen, low, lo) + 0.0, torch.where(seen, high, hi) + 0.0


def search_between(errors: Errors, inner: Ends, outer: Ends, steps: int) -> Ends:
    """The range within `outer` that holds `inner` with the least error, block by block.

    Both ends of `outer` are cut at the same magnitude, from the largest in `steps` equal steps down, as far as
    `inner` lets them. Where no candidate has a finite error, the range is `inner`.
    """
    seen = outer[0] <= outer[1]
    low, high = torch.where(seen, outer[0], 0).clamp(max=0), torch.where(seen, outer[1], 0).clamp(min=0)
    threshold = torch.maximum(-low, high) * _fractions(steps, low)
    lo = torch.minimum(torch.maximum(low, -threshold), torch.where(seen, inner[0], 0))
    hi = torch.maximum(torch.minimum(high, threshold), torch.where(seen, inner[1], 0))
    found = errors(lo, hi)
    low, high = _least(found, lo, hi)
    possible = seen & (found < torch.inf).any(0)
    # + 0.0: the zeros of a range are positive.
    return torch.where(possible, low, inner[0]) + 0.0, torch.where(possible, high, inner[1]) + 0.0


def candidates_at_once(number: int, counts: Tensor) -> Iterator[slice]:
    """The candidates in parts whose histograms together are no burden."""
    size = max(1, (1 << 16) // max(1, counts.numel()))
    for start in range(0, number, size):
        yield slice(start, min(start + size, number))


def _fractions(steps: int, like: Tensor) -> Tensor:
    """From 1 in equal steps down, for candidates of blocks."""
    numbers = torch.arange(steps, 0, -1, dtype=torch.float32, device=like.device)
    return numbers.reshape(-1, *[1] * like.dim()) / steps


def _best(errors: Errors, lo: Tensor, hi: Tensor) -> Ends:
    return _least(errors(lo, hi), lo, hi)


def _least(errors: Tensor, lo: Tensor, hi: Tensor) -> Ends:
    """The first of the candidates with the least error."""
    found = errors.nan_to_num(nan=torch.inf)  # where values on the grid are infinite
    number = torch.arange(len(lo), device=lo.device).reshape(-1, *[1] * (lo.dim() - 1))
    best = torch.where(found == found.amin(0), number, len(lo) - 1).amin(0, keepdim=True)
    return lo.gather(0, best)[0], hi.gather(0, best)[0]
