"""The range of the tensor at hand."""

import dataclasses
from typing import ClassVar

from fakequant.observers._observer import InKernel, _Running


@dataclasses.dataclass(frozen=True)
class Dynamic(_Running):
    """The smallest and largest value of the tensor at hand, and of no other.

        lo = min(x)        hi = max(x)

    For weights, whose range is known exactly at every step, and for activations that are quantized
    dynamically, such as per token. A quantizer with this observer looks at the tensor in evaluation
    too, until it is frozen.

    An empty tensor has the range 0 to 0. NaN and infinities are left out; a block with nothing else has
    the range 0 to 0. Zeros give the range 0 to 0, a constant c the range c to c, and positive data a
    range that starts above 0: `choose_qparams` extends it to hold 0. Over several ranks: the minimum of
    lo and the maximum of hi; but ranges per token are those of the rank's own tokens.

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
