"""The range of the current tensor."""

import dataclasses
from typing import ClassVar

from fakequant.observers._observer import InKernel, _Running


@dataclasses.dataclass(frozen=True)
class Dynamic(_Running):
    """The smallest and largest value of the current tensor only.

        lo = min(x)        hi = max(x)

    For weights, whose exact range is known at every step, and for activations that are quantized dynamically, e.g. per
    token. A quantizer with this observer also observes in evaluation mode, until it is frozen.

    Empty tensors and blocks without a finite value have the range 0 to 0. NaN and infinities are ignored. Zeros give
    the range 0 to 0, a constant c the range c to c, and positive data a range that starts above 0, which
    `choose_qparams` extends to include 0. Ranks share the minimum of lo and the maximum of hi, except for ranges per
    token: they are those of each rank's tokens.

    >>> import torch
    >>> from fakequant import QuantSpec
    >>> observer, spec = Dynamic(), QuantSpec()
    >>> state = observer.init(())
    >>> for x in ([-8.0, 8.0], [-1.0, 2.0]):
    ...     nonfinite = observer.update(state, torch.tensor(x), spec)
    >>> observer.range(state, spec)
    (tensor(-1.), tensor(2.))
    """

    dynamic: ClassVar[bool] = True

    @property
    def _in_kernel(self) -> InKernel:
        return InKernel("dynamic")
