"""`grouped_linear`: the products of groups of rows, each group with a matrix of its own, as one operator.

Compilers treat the operators as opaque, because the numbers of rows are only known at run time.

    grouped_linear(rows, weight, ends)    y[i] = weight[g] @ rows[i]                  for row i of group g
    grouped_outer(left, right, ends)      w[g] = sum of outer(left[i], right[i])      over the rows i of group g

The derivatives of each are calls of both, so they can be differentiated any number of times.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class _Context(Protocol):
    """What an autograd rule keeps for its backward pass."""

    saved_tensors: tuple[Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, bool, bool]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


@torch.library.custom_op("fakequant::grouped_linear", mutates_args=())
def _grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    result = rows.new_zeros(rows.shape[0], weight.shape[1])
    start = 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        if end > start:
            torch.mm(rows[start:end], matrix.t(), out=result[start:end])
        start = end
    return result


@torch.library.custom_op("fakequant::grouped_outer", mutates_args=())
def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    result = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    start = 0
    for matrix, end in zip(result, ends.tolist(), strict=True):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=matrix)
        start = end
    return result


@_grouped_linear.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: _Context, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    of_rows, of_weight, _ = ctx.needs_input_grad
    return (
        _grouped_linear(dy, weight.transpose(1, 2), ends) if of_rows else None,
        _grouped_outer(dy, rows, ends) if of_weight else None,
        None,
    )


def _outer_backward(ctx: _Context, dw: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    left, right, ends = ctx.saved_tensors
    of_left, of_right, _ = ctx.needs_input_grad
    return (
        _grouped_linear(right, dw, ends) if of_left else None,
        _grouped_linear(left, dw.transpose(1, 2), ends) if of_right else None,
        None,
    )


_grouped_linear.register_autograd(_linear_backward, setup_context=_keep)
_grouped_outer.register_autograd(_outer_backward, setup_context=_keep)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies groups of rows, each with the matrix of its group. It is differentiable.

    Args:
        rows: The rows of all groups, one group after the other. Shape (rows, inputs).
        weight: One matrix per group, of the dtype of `rows`. Shape (groups, outputs, inputs).
        ends: Where the rows of each group end, as integers in rising order. Shape (groups,).

    Returns:
        The products, in the order of the rows. Rows behind the last end are 0.

    >>> rows, weight = torch.ones(3, 2), torch.tensor([[[1.0, 1.0]], [[2.0, 2.0]]])
    >>> grouped_linear(rows, weight, torch.tensor([1, 3]))
    tensor([[2.],
            [4.],
            [4.]])
    """
    result: Tensor = _grouped_linear(rows, weight, ends)
    return result


class Groups(NamedTuple):
    """Rows that are sorted by expert: first expert 0's, then expert 1's, and so on. An expert may have none.

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

        `weight` is one matrix with the weights of all experts, one expert after the other, and so is `bias`.
        """
        y = grouped_linear(x.to(weight.dtype), weight.unflatten(0, (self.number, -1)), self.ends())
        return y if bias is None else y + self.rows_of(bias)

    def ends(self) -> Tensor:
        """Returns where the rows of each expert end."""
        numbers = torch.arange(self.number, device=self.experts.device, dtype=self.experts.dtype)
        return torch.searchsorted(self.experts, numbers, right=True)

    def rows_of(self, value: Tensor) -> Tensor:
        """Returns values per expert and channel, as one vector, as a row of channels for each row. Keeps scalars."""
        return value if value.dim() == 0 else value.unflatten(0, (self.number, -1))[self.experts]
