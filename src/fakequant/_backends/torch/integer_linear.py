"""`integer_linear`: a linear layer whose sums of products are exact.

Input and weight are on grids of at most 8 bits: every value is an integer, its level, times a scale.

    y = float32(sum_j x_level_j * weight_level_j) * (x_scale * weight_scale) + bias
    y = float32(sum_j x_level_j * weight_level_j * factor + bias_code) * (x_scale * (weight_scale / factor))

The sums are the same integers however they are computed: with instructions for products of 8-bit integers, with float
products in parts so short that no partial sum is rounded, or in float64. The gradients are those of `F.linear`.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fakequant import _native
from fakequant._backends.torch import compiled_nodes
from fakequant._backends.torch.plain_memory import is_direct

# Partial sums of integers are exact in float32 up to here.
EXACT_IN_FLOAT32 = 2**24


class IntegerGrid(NamedTuple):
    """A grid of at most 8 bits. Scales are one for the tensor, or one per row of its matrix."""

    scale: Tensor
    zero_point: Tensor | None  # int32, None for zeros
    low: int
    high: int

    def part(self, rows: slice) -> "IntegerGrid":
        """Returns the grid of some rows."""
        if self.scale.numel() == 1:
            return self
        return self._replace(
            scale=self.scale[rows], zero_point=None if self.zero_point is None else self.zero_point[rows]
        )

    @property
    def largest(self) -> int:
        """The largest magnitude that a level can have."""
        return self.high - self.low if self.zero_point is not None else max(self.high, -self.low)


class BiasCodes(NamedTuple):
    """A bias as integers in float64, to be added to sums times `factor`, a power of two."""

    codes: Tensor
    factor: float


class _Context(Protocol):
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, Tensor]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def has_int8_products() -> bool:
    """Returns True if products of 8-bit integers are computed with instructions for them."""
    return compiled_nodes.compiled is not None and _native.has_int8_products() and torch.backends.mkldnn.enabled


def integer_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_grid: IntegerGrid,
    weight_grid: IntegerGrid,
    bias_codes: BiasCodes | None = None,
) -> Tensor | None:
    """Returns the result of a linear layer, or None if values are found that are not on their grid.

    Args:
        x: The input, float32, on its grid. NaN makes a row of NaN.
        weight: The weight, of shape (outputs, inputs), float32, on its grid.
        bias: The bias. If there are `bias_codes`, it only gets a gradient.
        x_grid: The grid of the input.
        weight_grid: The grid of the weight.
        bias_codes: The bias as integers.
    """
    codes, factor = (None, 1.0) if bias_codes is None else bias_codes
    direct = is_direct(x) and is_direct(weight)
    if direct and compiled_nodes.compiled is not None:
        y = compiled_nodes.compiled.integer_linear(
            x, *x_grid, weight, *weight_grid, bias, codes, factor, _native.has_int8_products()
        )
        if y is not None:
            return y
    if direct and not (_is_on(x, x_grid.scale) and _is_on(weight, weight_grid.scale)):
        return None
    largest = x_grid.largest, weight_grid.largest
    result: Tensor = _integer_linear(x, weight, bias, x_grid.scale, weight_grid.scale, *largest, codes, factor)
    return result


def _along(scale: Tensor, x: Tensor) -> Tensor:
    """Reshapes scales, one or one per row, to broadcast with the rows of `x`."""
    return scale.reshape(()) if scale.numel() == 1 else scale.reshape(*x.shape[:-1], 1)


def _is_on(x: Tensor, scale: Tensor) -> bool:
    scale = _along(scale, x)
    return bool((((x / scale).round() * scale == x) | x.isnan()).all())


@torch.library.custom_op("fakequant::integer_linear", mutates_args=())
def _integer_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    weight_scale: Tensor,
    x_largest: int,
    weight_largest: int,
    bias_codes: Tensor | None,
    factor: float,
) -> Tensor:
    x_scale, column_scale = _along(x_scale, x), weight_scale.reshape(-1)
    levels, weight_levels = (x / x_scale).round(), (weight / _along(weight_scale, weight)).round()
    if x.is_cuda and weight_largest <= 127 and not bool(levels.isnan().any() | weight_levels.isnan().any()):
        sums = _on_tensor_cores(levels.flatten(0, -2), weight_levels).unflatten(0, levels.shape[:-1])
    else:
        bound = x.shape[-1] * x_largest * weight_largest
        # float32 products on GPUs, and on the CPU if precision is not the highest, may round their operands.
        exact = x.is_cpu and bound < EXACT_IN_FLOAT32 and torch.get_float32_matmul_precision() == "highest"
        dtype = torch.float32 if exact else torch.float64
        sums = levels.to(dtype) @ weight_levels.to(dtype).t()
    if bias_codes is not None:
        return (sums.double() * factor + bias_codes).float() * (x_scale * (column_scale / factor))
    y = sums.float() * (x_scale * column_scale)
    return y if bias is None else y + bias


def _on_tensor_cores(levels: Tensor, weight: Tensor) -> Tensor:
    """Returns the sums as int32. Levels beyond 8 bits are the sum of two that are not."""
    rows, columns = levels.shape[0], weight.shape[0]
    inner = -levels.shape[1] % 8
    # The operator wants more than 16 rows, and multiples of 8.
    levels = torch.nn.functional.pad(levels, (0, inner, 0, max(17 - rows, 0)))
    right = torch.nn.functional.pad(weight, (0, inner, 0, -columns % 8)).to(torch.int8).t()
    near = levels.clamp(-128, 127)
    far = levels - near
    sums = torch._int_mm(near.to(torch.int8), right) + torch._int_mm((far).clamp(-128, 127).to(torch.int8), right)
    rest = far - far.clamp(-128, 127)
    return (sums + torch._int_mm(rest.to(torch.int8), right))[:rows, :columns]


@_integer_linear.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _keep(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _backward(ctx: _Context, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    rows = dy.reshape(-1, dy.shape[-1])
    of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
    return (
        rows.mm(weight).reshape(x.shape) if of_x else None,
        rows.t().mm(x.reshape(-1, x.shape[-1])) if of_weight else None,
        rows.sum(0) if of_bias else None,
        *[None] * 6,
    )


_integer_linear.register_autograd(_backward, setup_context=_keep)


@_integer_linear.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """Computes one example after the other."""
    parts = [
        _integer_linear(*(a if axis is None else a.select(axis, i) for a, axis in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return torch.stack(parts), 0
