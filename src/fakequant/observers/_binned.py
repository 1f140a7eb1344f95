"""The base of observers that keep a histogram. Histograms can be merged exactly.

A bin is 2^exponent wide. Bins are numbered outwards from zero, separately for each sign:

    bin of x  =  floor(|x| / 2^exponent)

If a value does not fit, the exponent grows and neighbouring bins are merged. Every bin lies within one bin of the next
width, so the counts depend only on the values: not on their order, their batches, or the ranks that saw them.
"""

import dataclasses
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.types import Device

from fakequant._backends.torch import formula, tensor_kernels
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.tensor_checks import block_shape, filled
from fakequant._backends.torch.tensor_kernels import Observation, updated_range
from fakequant.observers._observer import Observer, State, no_range
from fakequant.observers._ranks import ALONE, Ranks
from fakequant.qparams import min_max
from fakequant.spec import QuantSpec

_WIDEST = Observation("min_max")
# The exponent of the narrowest bins. 1 / width still fits in float32; smaller values are practically zero.
_SMALLEST_EXPONENT = -126
_MOST_COUNTS = 1 << 25  # 256 MB in int64


class Bins(NamedTuple):
    """A histogram per block. The last axis holds the bins, from the lowest to the highest."""

    counts: Tensor
    # The middle of every bin, in float32.
    centers: Tensor
    # The left edge of every bin, followed by the right edge of the last.
    edges: Tensor


@dataclasses.dataclass(frozen=True)
class _Binned(Observer):
    # The number of bins, half of them for each sign. A power of two.
    bins: int = dataclasses.field(default=4096, kw_only=True)

    def __post_init__(self) -> None:
        if (
            isinstance(self.bins, bool)
            or not isinstance(self.bins, int)
            or self.bins < 4
            or self.bins & (self.bins - 1)
        ):
            raise ValueError(f"`bins` must be a power of two and at least 4, got {self.bins!r}.")

    def init(self, blocks: tuple[int, ...], device: Device = None) -> State:
        """Returns counts of 0 in the narrowest bins."""
        number = prod(blocks) * self.bins
        if number > _MOST_COUNTS:
            raise ValueError(
                f"{type(self).__name__} keeps {self.bins} counts per scale: {number * 8 >> 20} MB for {prod(blocks)} "
                "scales.\nUse MSE() or MinMax() for that many, or fewer bins."
            )
        return {
            **no_range(blocks, device),
            "exponent": torch.full(blocks, _SMALLEST_EXPONENT, dtype=torch.int32, device=device),
            "counts": torch.zeros((*blocks, self.bins), dtype=torch.int64, device=device),
        }

    def update(self, state: State, x: Tensor, spec: QuantSpec, ranks: Ranks = ALONE) -> Tensor:
        """Counts the values of all ranks, in bins wide enough for all values seen."""
        x = x.detach()
        seen = min_max(x, spec)
        lo, hi = ranks.range(seen.min, seen.max)
        lo, hi = updated_range(state["running_min"], state["running_max"], lo, hi, _WIDEST)
        exponent = torch.maximum(state["exponent"], self._exponent_for(torch.maximum(-lo, hi)))
        merged = self._merged(state["counts"], exponent - state["exponent"])
        merged += ranks.total(self._counts(x, exponent, spec))
        for name, value in (("running_min", lo), ("running_max", hi), ("exponent", exponent), ("counts", merged)):
            state[name].copy_(value)
        return (seen.nan + seen.posinf + seen.neginf).sum()

    def binned(self, state: State) -> Bins:
        """Returns the counts with the centers and edges of their bins."""
        half = self.bins // 2
        width = torch.ldexp(torch.ones_like(state["running_min"], dtype=torch.float64), state["exponent"])[..., None]
        edges = torch.arange(-half, half + 1, device=width.device) * width
        centers = (edges[..., 1:] - width / 2).to(torch.float32)
        return Bins(state["counts"], centers, edges.to(torch.float32))

    def _exponent_for(self, absmax: Tensor) -> Tensor:
        """Returns the smallest exponent with absmax < bins / 2 * 2^exponent."""
        _, exponent = torch.frexp(absmax.clamp(min=0))  # -inf if nothing was seen
        log_half = (self.bins // 2).bit_length() - 1
        return torch.where(absmax > 0, exponent - log_half, _SMALLEST_EXPONENT).clamp(_SMALLEST_EXPONENT).int()

    def _merged(self, counts: Tensor, shift: Tensor) -> Tensor:
        """Returns the counts in bins that are 2^shift times as wide."""
        half = self.bins // 2
        places = torch.arange(-half, half, device=counts.device)
        distance = torch.where(places < 0, -1 - places, places)  # from zero, on either side
        distance = distance >> shift.clamp(max=62)[..., None]
        target = torch.where(places < 0, half - 1 - distance, half + distance)
        return torch.zeros_like(counts).scatter_add_(-1, target, counts)

    def _counts(self, x: Tensor, exponent: Tensor, spec: QuantSpec) -> Tensor:
        """Returns the number of finite values of `x` in every bin."""
        limit = torch.finfo(torch.float32).max
        shape = block_shape(tuple(x.shape), spec)
        inverse = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), -exponent)
        if x.dtype == torch.float64:  # values may exceed the limits of float32, the dtype of ranges
            x = torch.where(x.isinf(), x, x.clamp(-limit, limit))
        x = filled(x.to(torch.float32), spec, torch.nan)  # which is not counted
        if torch.compiler.is_compiling() or not is_eager(x):
            return self._counts_by_formula(x, inverse.reshape(shape)).reshape(*exponent.shape, self.bins)
        return tensor_kernels.histogram(x, inverse.reshape(shape), self.bins).reshape(*exponent.shape, self.bins)

    def _counts_by_formula(self, x: Tensor, inverse: Tensor) -> Tensor:
        half = self.bins // 2
        first = torch.arange(inverse.numel(), device=x.device).reshape(inverse.shape) * self.bins
        finite = x.isfinite()
        distance = torch.where(finite, x.abs() * formula.spread(inverse, x), 0).to(torch.int64)
        place = torch.where(x < 0, half - 1 - distance, half + distance) + formula.spread(first, x)
        counts = torch.zeros(inverse.numel() * self.bins, dtype=torch.int64, device=x.device)
        return counts.index_add_(0, place.flatten(), finite.flatten().to(torch.int64))
