"""Searching a range: candidates, and the one with the least error in every block."""

from collections.abc import Callable

import torch
from torch import Tensor

Ends = tuple[Tensor, Tensor]
# The errors of candidates, whose number is the length of the first axis; the other axes are the blocks.
Errors = Callable[[Tensor, Tensor], Tensor]


def search(errors: Errors, lo: Tensor, hi: Tensor, steps: int, *, each_end: bool) -> Ends:
    """The range within `lo` to `hi` with the least error, block by block.

    First both ends are cut at the same magnitude, from the largest in `steps` equal steps down; then,
    with `each_end`, each is moved inwards alone. A range without values stays as it is.
    """
    seen = lo <= hi
    low, high = torch.where(seen, lo, 0), torch.where(seen, hi, 0)
    fractions = torch.arange(steps, 0, -1, device=lo.device).reshape(-1, *[1] * lo.dim()) / steps
    threshold = torch.maximum(-low, high) * fractions
    low, high = _least(errors, torch.maximum(low, -threshold), torch.minimum(high, threshold))
    if each_end:
        low, high = _least(errors, *torch.broadcast_tensors(low * fractions, high))
        low, high = _least(errors, *torch.broadcast_tensors(low, high * fractions))
    return torch.where(seen, low, lo), torch.where(seen, high, hi)


def _least(errors: Errors, lo: Tensor, hi: Tensor) -> Ends:
    """The first of the candidates with the least error."""
    found = errors(lo, hi)
    number = torch.arange(len(lo), device=lo.device).reshape(-1, *[1] * (lo.dim() - 1))
    best = torch.where(found == found.amin(0), number, len(lo) - 1).amin(0, keepdim=True)
    return lo.gather(0, best)[0], hi.gather(0, best)[0]
