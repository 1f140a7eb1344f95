"""A range that follows the data as a moving average."""

import dataclasses

import numpy as np

from fakequant.observers._observer import InKernel, _Running, number


@dataclasses.dataclass(frozen=True)
class MovingAverage(_Running):
    """Exponential moving averages of the minimum and maximum of the tensors seen.

        lo = lo + constant * (min(x) - lo)        hi = hi + constant * (max(x) - hi)

    computed in float32, as in torch's `MovingAverageMinMaxObserver`. The first tensor sets the range. For activations
    in training: the effect of an outlier fades after about 1 / constant steps.

    Empty tensors and tensors without a finite value change nothing. NaN and infinities are ignored. Zeros give the
    range 0 to 0, a constant c moves it towards c to c, and positive data gives a range that starts above 0, which
    `choose_qparams` extends to include 0. The tensors of all ranks in a step count as one tensor.

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
