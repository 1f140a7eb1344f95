"""Observers of a running range, which the fused kernel updates: `MinMax`, `MovingAverage` and `Dynamic`."""

import abc
import dataclasses
from typing import ClassVar

import numpy as np
from torch import Tensor

from fakequant._backends.torch.tensor_kernels import Observation, updated_range
from fakequant._kernels import scale_rule_name
from fakequant.observers._observer import InKernel, State, _RangeKeeper, number
from fakequant.observers._ranks import ALONE, Ranks
from fakequant.qparams import min_max
from fakequant.spec import QuantSpec


class _Running(_RangeKeeper):
    """The base of observers that the fused kernel implements. Their state is the running range."""

    @property
    @abc.abstractmethod
    def _in_kernel(self) -> InKernel:
        """The rule of `update`."""

    def update(self, state: State, x: Tensor, spec: QuantSpec, ranks: Ranks = ALONE) -> Tensor:
        """Updates the running range with the minimum and maximum of `x`."""
        seen = min_max(x, spec)
        lo, hi = seen.min, seen.max
        if spec.granularity != "token":  # every rank has its own tokens
            lo, hi = ranks.range(lo, hi)
        how = Observation(*self._in_kernel, scale_rule_name(spec))
        new = updated_range(state["running_min"], state["running_max"], lo, hi, how)
        for name, value in zip(("running_min", "running_max"), new, strict=True):
            state[name].copy_(value)
        return (seen.nan + seen.posinf + seen.neginf).sum()


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


@dataclasses.dataclass(frozen=True)
class Dynamic(_Running):
    """The smallest and largest value of the current tensor only.

        lo = min(x)        hi = max(x)

    For weights, whose exact range is known at every step, and for activations that are quantized dynamically, e.g. per
    token. A quantizer with this observer also observes in evaluation mode, until it is frozen.

    Empty tensors and blocks without a finite value have the range 0 to 0. NaN and infinities are ignored. Zeros give
    the range 0 to 0, a constant c the range c to c, and positive data a range that starts above 0, which
    `choose_qparams` extends to include 0. Ranks share the minimum of lo and the maximum of hi, except for ranges per
    token, which belong to each rank's tokens.

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
