"""`Groups`: which expert each row of a tensor goes to."""

from typing import NamedTuple

import torch
from torch import Tensor

from fakequant._backends.torch.grouped_linear import grouped_linear


class Groups(NamedTuple):
    """Rows that are sorted by expert: the rows of expert 0, those of expert 1, and so on. An expert may have none.

    >>> groups = Groups(torch.tensor([0, 2, 2]), 3)
    >>> groups.linear(torch.ones(3, 1), torch.tensor([[1.0], [2.0], [3.0]]), None)
    tensor([[1.],
            [3.],
            [3.]])
    """

    # The expert of every row, in rising order.
    experts: Tensor
    # The number of experts.
    number: int

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of every row with the weight of its expert, plus the bias.

        Args:
            x: The rows.
            weight: The weights of all experts as one matrix, one expert after the other.
            bias: The biases likewise, or None.
        """
        numbers = torch.arange(self.number, device=self.experts.device, dtype=self.experts.dtype)
        ends = torch.searchsorted(self.experts, numbers, right=True)
        y = grouped_linear(x.to(weight.dtype), weight.unflatten(0, (self.number, -1)), ends)
        return y if bias is None else y + self.rows_of(bias)

    def rows_of(self, value: Tensor) -> Tensor:
        """Returns values per expert and channel, as one vector, as a row of channels for each row. Keeps scalars."""
        return value if value.dim() == 0 else value.unflatten(0, (self.number, -1))[self.experts]
