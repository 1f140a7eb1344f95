"""Reductions over the processes of distributed training."""

import torch
import torch.distributed as dist
from torch import Tensor

from fakequant._backends.torch.formula import with_positive_zeros


class Ranks:
    """Reductions over a process group. With a single process they return their arguments.

    Every rank gets the same bits. Minimum, maximum and integer sums are the same as in one process with all the data.
    Sums of float64 may differ from it by the order of their terms.

    >>> low, high = Ranks(None).range(torch.tensor(-1.0), torch.tensor(2.0))
    >>> low, high
    (tensor(-1.), tensor(2.))
    """

    def __init__(self, group: "dist.ProcessGroup | None", *, several: bool = False) -> None:
        self.group = group
        self.several = several

    def range(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the lowest `lo` and the highest `hi` of all ranks, with one all-reduce."""
        if not self.several:
            return lo, hi
        ends = torch.stack([-lo, hi])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group)
        return with_positive_zeros(-ends[0]), ends[1]

    def total(self, value: Tensor) -> Tensor:
        """Returns the sum over all ranks."""
        if self.several:
            value = value.clone()
            dist.all_reduce(value, dist.ReduceOp.SUM, group=self.group)
        return value


# A single process.
ALONE = Ranks(None)


def ranks_of(group: "dist.ProcessGroup | None" = None) -> Ranks:
    """Returns the ranks of a process group, or of all processes for None. `ALONE` if there is only one process."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    return Ranks(group, several=True) if dist.get_world_size(group) > 1 else ALONE
