"""The range between two percentiles."""

import dataclasses

import torch
from torch import Tensor

from fakequant.observers._binned import _Binned
from fakequant.observers._observer import State, number
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class Percentile(_Binned):
    """The range between two percentiles of everything seen.

        lo = percentile(x, 100 - percent)        hi = percentile(x, percent)

    The percentiles are read from a histogram and rounded outwards to the edge of a bin, by at most 4 / bins of the
    largest magnitude. The range is never wider than the data. For activations with rare outliers.

    Empty tensors change nothing. NaN and infinities are ignored. Zeros give the range 0 to 0, a constant c the range
    c to c. Both ends of one-sided data are cut. The histograms of all ranks are summed, which is exact.

    >>> import torch
    >>> from fakequant import QuantSpec
    >>> observer, spec = Percentile(99.0), QuantSpec()
    >>> state = observer.init(())
    >>> x = torch.cat([torch.linspace(-1, 1, 1000), torch.tensor([50.0])])
    >>> nonfinite = observer.update(state, x, spec)
    >>> observer.range(state, spec)
    (tensor(-1.), tensor(1.))
    """

    percent: float = 99.99

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "percent", number("percent", self.percent))
        if not 50 < self.percent <= 100:
            raise ValueError(f"`percent` must be greater than 50 and at most 100, got {self.percent}.")

    def range(self, state: State, spec: QuantSpec) -> tuple[Tensor, Tensor]:
        """Returns the outer edges of the outermost bins that are not entirely within the tails."""
        counts, _, edges = self.binned(state)
        below = counts.cumsum(-1)
        total = below[..., -1:]
        # Slightly more, so that rounding does not turn a whole number of values into fewer.
        tail = total.double() * (100 - self.percent) / 100 * (1 + 1e-12)
        first = (below <= tail).sum(-1, keepdim=True)
        last = self.bins - (total - below + counts <= tail).sum(-1, keepdim=True)
        lo = edges.gather(-1, first.clamp(max=self.bins))[..., 0]
        hi = edges.gather(-1, last.clamp(min=0))[..., 0]
        return torch.maximum(lo, state["running_min"]), torch.minimum(hi, state["running_max"])
