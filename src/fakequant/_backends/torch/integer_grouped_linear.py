"""`integer_grouped_linear`: products of groups of rows, each group with a matrix of its own, with exact sums.

It is `integer_linear` for every group. The gradients are those of `grouped_linear`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant._backends.torch.grouped_linear import Groups, _grouped_linear, _grouped_outer
from fakequant._backends.torch.integer_linear import BiasCodes, IntegerGrid, are_on_grids, by_kernels, by_torch
from fakequant._backends.torch.plain_memory import is_eager


def integer_grouped_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    grid: IntegerGrid,
    weight_grid: IntegerGrid,
    bias_codes: BiasCodes | None = None,
) -> Tensor:
    """Returns the product of every row with the weight of its group, plus the bias. Groups off their grid are floats.

    Args:
        rows: The rows of all groups, float32.
        weight: The weights of all groups, one below the other, float32.
        bias: The biases of all groups, one after the other. If there are `bias_codes`, it only gets a gradient.
        groups: Which rows belong to which group.
        grid: The grid of the rows.
        weight_grid: The grid of the weight.
        bias_codes: The bias as integers.
    """
    codes, factor = (None, 1.0) if bias_codes is None else bias_codes
    result: Tensor = _integer_grouped_linear(
        rows, weight, bias, groups.experts, groups.ends(), *grid, *weight_grid, codes, factor
    )
    return result


@torch.library.custom_op("fakequant::integer_grouped_linear", mutates_args=())
def _integer_grouped_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Tensor, ends: Tensor, scale: Tensor, zero: Tensor | None,
    low: int, high: int, weight_scale: Tensor, weight_zero: Tensor | None, weight_low: int, weight_high: int,
    bias_codes: Tensor | None, factor: float,
) -> Tensor:  # fmt: skip
    outputs, start = weight.shape[0] // ends.shape[0], 0
    result = rows.new_empty(rows.shape[0], outputs)
    grid = IntegerGrid(scale.reshape(-1), None if zero is None else zero.reshape(-1), low, high)
    weight_grid = IntegerGrid(weight_scale, weight_zero, weight_low, weight_high)
    for number, end in enumerate(ends.tolist()):
        if end > start:
            of_group, part = slice(number * outputs, (number + 1) * outputs), slice(start, end)
            codes = None if bias_codes is None else bias_codes[of_group]
            given = rows[part], weight[of_group], None if bias is None else bias[of_group]
            result[part] = _product(*given, grid.part(part), weight_grid.part(of_group), codes, factor)
        start = end
    return result


@torch.no_grad()
def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: IntegerGrid, weight_grid: IntegerGrid, codes: Tensor | None,
    factor: float,
) -> Tensor:  # fmt: skip
    arguments = x, weight, bias, *grid, *weight_grid, codes, factor
    y = by_kernels(*arguments) if is_eager(x) and is_eager(weight) else None
    if y is not None:
        return y
    return by_torch(*arguments) if are_on_grids(x, weight, grid.scale, weight_grid.scale) else F.linear(x, weight, bias)


@_integer_grouped_linear.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0] // ends.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, _, groups, ends, *_ = inputs
    ctx.save_for_backward(rows, weight, groups, ends)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, groups, ends = ctx.saved_tensors
    of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
    matrices = weight.unflatten(0, (ends.shape[0], -1))
    dbias = dy.new_zeros(ends.shape[0], dy.shape[1])
    return (
        _grouped_linear(dy, matrices.transpose(1, 2), ends) if of_rows else None,
        _grouped_outer(dy, rows, ends).flatten(0, 1) if of_weight else None,
        dbias.index_add(0, groups, dy).flatten() if of_bias else None,
        *[None] * 12,
    )


_integer_grouped_linear.register_autograd(_backward, setup_context=_keep)
