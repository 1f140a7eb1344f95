"""The smallest and largest value ever seen."""

import dataclasses

from fakequant.observers._observer import InKernel, _Running


@dataclasses.dataclass(frozen=True)
class MinMax(_Running):
    """The smallest and largest value ever seen.

        lo = min(lo, min(x))        hi = max(hi, max(x))

    For calibration data without outliers: nothing is ever clipped, and a single outlier widens the range for good.

    Empty tensors change nothing. NaN and infinities are ignored. Zeros give the range 0 to 0, a constant c the range
    c to c, and positive data a range that starts above 0, which `choose_qparams` extends to include 0. Ranks share the
    minimum of lo and the maximum of hi.

    >>> import torch
    >>> from fakequant import QuantSpec
    >>> observer, spec = MinMax(), QuantSpec()
    >>> state = observer.init(())
    >>> for x in ([3.0, float("nan")], [-1.0, 2.0]):
    ...     nonfinite = observer.update(state, torch.tensor(x), spec)
    >>> observer.range(state, spec)
    (tensor(-1.), tensor(3.))
    """

    @property
    def _in_kernel(self) -> InKernel:
        return InKernel("min_max")
