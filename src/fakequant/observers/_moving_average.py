"""A range that follows the data slowly."""

import dataclasses

import numpy as np

from fakequant.observers._observer import InKernel, _Running, number


@dataclasses.dataclass(frozen=True)
class MovingAverage(_Running):
    """The ends of the range, each an exponential moving average over the tensors seen.

        lo = lo + constant * (min(x) - lo)        hi = hi + constant * (max(x) - hi)

    in float32, as torch's `MovingAverageMinMaxObserver` computes it. The first tensor is taken as it
    is. For activations in training: an outlier is forgotten after some 1 / constant steps.

    An empty tensor changes nothing. NaN and infinities are left out; a tensor with nothing else changes
    nothing. Zeros give the range 0 to 0, a constant c moves it to c to c, and positive data gives a
    range that starts above 0: `choose_qparams` extends it to hold 0. Over several ranks: the minimum
    and maximum of the ranks' tensors are averaged, as if they were one.

    >>> import torch
    >>> from fakequant import QuantSpec
    >>> observer, spec = MovingAverage(0.5), QuantSpec()
    >>> state = observer.init(())
    >>> for x in ([-1.0, 1.0], [-1.0, 2.0]):
    ...     nonfinite = observer.update(state, torch.tensor(x), spec)
    >>> observer.range(state, spec)
    (tensor(-1.), tensor(1.5000))
    """

    # The weight of the latest tensor: 0 < constant <= 1.
    constant: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "constant", number("constant", self.constant))
        if not 0 < np.float32(self.constant) <= 1:
            raise ValueError(
                f"`constant` must be greater than 0 and at most 1, got {self.constant}.\n"
                "It is the weight of the latest tensor; use Dynamic() for a range of that tensor alone."
            )

    @property
    def _in_kernel(self) -> InKernel:
        return InKernel("moving_average", self.constant)
