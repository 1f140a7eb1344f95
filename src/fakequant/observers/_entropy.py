"""The range that keeps the most information at little error, found on a histogram of everything seen."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from fakequant._backends.torch import operators
from fakequant._backends.torch.tensor_functions import quantize
from fakequant.observers._binned import _Binned
from fakequant.observers._histogram import Histogram, errors_on_bins
from fakequant.observers._observer import State
from fakequant.observers._search import candidates_at_once, check_steps, search_between
from fakequant.qparams import choose_qparams
from fakequant.spec import QuantSpec

# The probability of a bin that the quantized histogram leaves empty, so that the divergence stays finite.
_EMPTY = 1e-12
# The largest allowed error of a range, relative to the least error: 3 dB.
_MOST_ERROR = 2.0


@dataclasses.dataclass(frozen=True)
class Entropy(_Binned):
    """The range whose codes preserve the most information: the least Kullback-Leibler divergence.

        minimize  sum of p * log(p / q)
        p         the histogram, with everything outside the range moved to its outermost bins
        q         the histogram inside the range, spread evenly over the non-empty bins of every code

    The candidates lie between the ranges of the data and of `Histogram()`, which has the least squared error. Their
    ends are cut at `steps` thresholds. A divergence ignores distances: for data with a peak, such as the zeros after a
    ReLU, it would clip everything else. So a candidate clips nothing that `Histogram()` keeps, and its squared error on
    the bins is at most twice the least. For activations with long tails: the range clips less, at a cost of up to 3 dB.

    A range with fewer bins than the grid has levels is not a candidate, because its divergence does not depend on the
    grid. The range of the data always is. If no candidate is left, `Histogram()` gives the range.

    Empty tensors change nothing. NaN and infinities are ignored. Zeros give the range 0 to 0, a constant c a range
    between 0 and c, one-sided data a range that starts at 0. The histograms of all ranks are summed, which is exact.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.cat([torch.randn(10000, generator=generator), torch.tensor([30.0])])
    >>> observer, spec = Entropy(), QuantSpec(bits=4)
    >>> state = observer.init(())
    >>> nonfinite = observer.update(state, x, spec)
    >>> observer.range(state, spec)[1] < 6
    tensor(True)
    """

    steps: int = 128

    searches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps(self.steps)

    def range(self, state: State, spec: QuantSpec) -> tuple[Tensor, Tensor]:
        """Searches for the range with the least divergence on the bins."""
        counts, centers, _ = self.binned(state)
        grid = spec.to_numbers()
        outer = state["running_min"], state["running_max"]
        inner = Histogram(bins=self.bins).range(state, spec)
        ends = (torch.where(outer[0] <= outer[1], end, 0)[None] for end in inner)  # valid ends where nothing was seen
        limit = _MOST_ERROR * errors_on_bins(counts, centers, *ends, grid, 2.0)

        def errors(lo: Tensor, hi: Tensor) -> Tensor:
            allowed = errors_on_bins(counts, centers, lo, hi, grid, 2.0) <= limit
            return torch.where(allowed, divergence_on_bins(counts, centers, lo, hi, grid), torch.inf)

        return search_between(errors, inner, outer, self.steps)


# An operator, so that compilers do not unroll the loop.
@operators.add(
    "divergence_on_bins(Tensor counts, Tensor centers, Tensor lo, Tensor hi, int[] spec) -> Tensor",
    lambda counts, centers, lo, *_: lo.new_empty(lo.shape, dtype=torch.float64),
)
def divergence_on_bins(counts: Tensor, centers: Tensor, lo: Tensor, hi: Tensor, spec: list[int]) -> Tensor:
    """Returns the divergence of the quantized histogram for every candidate range.

    Bins are in the last axis of `counts` and `centers`. Candidates are along the first axis of `lo` and `hi`, and the
    first is the range of the data. `spec` is encoded by `QuantSpec.to_numbers`.
    """
    grid = QuantSpec.from_numbers(spec)
    errors = torch.empty(lo.shape, dtype=torch.float64, device=lo.device)
    for part in candidates_at_once(len(lo), counts):
        low, high = lo[part], hi[part]
        shape = (len(low), *counts.shape)
        errors[part] = _divergence(counts.expand(shape), centers.expand(shape), low, high, grid)
    # The first candidate is the range of the data, which is always allowed.
    width = centers[..., 1] - centers[..., 0]
    errors[1:].masked_fill_((hi - lo)[1:] < grid.levels * width, torch.inf)
    return errors


def _divergence(counts: Tensor, centers: Tensor, lo: Tensor, hi: Tensor, spec: QuantSpec) -> Tensor:
    scale, zero_point = choose_qparams(lo, hi, spec)
    q = quantize(centers, scale[..., None], zero_point[..., None], spec.per_token()).to(torch.int64) - spec.qmin
    # A bin that contains an end of the range counts as inside: it holds the smallest or the largest value.
    half = (centers[..., 1:2] - centers[..., :1]) / 2
    below, above = centers + half < lo[..., None], centers - half > hi[..., None]
    inside = ~(below | above)
    kept = torch.where(inside, counts, 0)
    first, last = _outermost(inside)
    p = kept.double()
    p.scatter_add_(-1, first, torch.where(below, counts, 0).sum(-1, keepdim=True).double())
    p.scatter_add_(-1, last, torch.where(above, counts, 0).sum(-1, keepdim=True).double())
    # With more levels than bins, every bin has its own code.
    codes = min(spec.levels, counts.shape[-1])
    if spec.levels > codes:
        q = torch.arange(codes, device=q.device).expand_as(q)
    per_code = torch.zeros((*q.shape[:-1], codes), dtype=torch.float64, device=q.device)
    mass = per_code.scatter_add(-1, q, kept.double())
    used = per_code.scatter_add(-1, q, (kept > 0).double())
    spread = torch.where(kept > 0, mass.gather(-1, q) / used.gather(-1, q).clamp(min=1), 0)
    p = p / p.sum(-1, keepdim=True).clamp(min=1)
    spread = (spread / spread.sum(-1, keepdim=True).clamp(min=1)).clamp(min=_EMPTY)
    return torch.where(p > 0, p * torch.log(p / spread), 0).sum(-1)


def _outermost(inside: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the indices of the first and the last bin inside."""
    places = torch.arange(inside.shape[-1], device=inside.device)
    first = torch.where(inside, places, inside.shape[-1] - 1).amin(-1, keepdim=True)
    return first, torch.where(inside, places, 0).amax(-1, keepdim=True)
