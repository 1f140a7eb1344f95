"""The processes whose data together make one batch, and what they tell each other."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """Reductions over a process group; alone, everything stays as it is.

    Every rank ends with the same bits. Minimum, maximum and sums of integers are also those of one
    process with all the data; a sum of float64 is that up to the order of its terms.

    >>> low, high = Ranks(None).range(torch.tensor(-1.0), torch.tensor(2.0))
    >>> low, high
    (tensor(-1.), tensor(2.))
    """

    def __init__(self, group: Any, *, several: bool = False) -> None:
        self.group = group
        self.several = several

    def range(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and the highest over all ranks, in one message."""
        if not self.several:
            return lo, hi
        ends = torch.stack([-lo, hi])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group)
        return -ends[0] + 0.0, ends[1]  # + 0.0: the zeros of a range are positive

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.several:
            value = value.clone()
            dist.all_reduce(value, dist.ReduceOp.SUM, group=self.group)
        return value


# One process by itself.
ALONE = Ranks(None)


def ranks_of(group: Any = None) -> Ranks:
    """The ranks of a process group (None: all of them); alone where there is only one process."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    return Ranks(group, several=True) if dist.get_world_size(group) > 1 else ALONE
