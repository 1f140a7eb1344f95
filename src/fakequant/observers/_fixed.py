"""A range that is known in advance."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor
from torch.types import Device

from fakequant.observers._observer import State, _RangeKeeper, number
from fakequant.observers._ranks import ALONE, Ranks
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class Fixed(_RangeKeeper):
    """A range that is known in advance, e.g. 0 to 1 after a sigmoid or a softmax.

    The data is ignored: empty tensors, NaN, infinities, zeros, constants and one-sided data change nothing, and
    nothing is counted. Every rank has the same range.

    >>> from fakequant import QuantSpec
    >>> observer = Fixed(0.0, 1.0)
    >>> observer.range(observer.init(()), QuantSpec())
    (tensor(0.), tensor(1.))
    """

    lo: float
    hi: float

    needs_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("lo", "hi"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        limit = torch.finfo(torch.float32).max
        if not -limit <= self.lo <= self.hi <= limit:
            raise ValueError(f"`lo` and `hi` must be finite in float32 with lo <= hi, got lo={self.lo}, hi={self.hi}.")

    def init(self, blocks: tuple[int, ...], device: Device = None) -> State:
        """Returns the fixed range, once per block."""
        ends = {"running_min": self.lo, "running_max": self.hi}
        return {name: torch.full(blocks, end, dtype=torch.float32, device=device) for name, end in ends.items()}

    def update(self, state: State, x: Tensor, spec: QuantSpec, ranks: Ranks = ALONE) -> Tensor:
        """Returns 0 and changes nothing."""
        return torch.zeros((), dtype=torch.int64, device=x.device)
