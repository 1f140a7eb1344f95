"""`integer_linear`: a linear layer whose sums of products are exact.

Input and weight are on grids of at most 8 bits: every value is an integer, its level, times a scale.

    y = float32(sum_j x_level_j * weight_level_j) * (x_scale * weight_scale) + bias
    y = float32(sum_j x_level_j * weight_level_j * factor + bias_code) * (x_scale * (weight_scale / factor))

The sums are the same integers however they are computed: with instructions for products of 8-bit integers, with float
products in parts so short that no partial sum is rounded, or in float64. The gradients are those of `F.linear`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant import _native
from fakequant._backends.torch import compiled_nodes
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.torch_private import innermost_transform, int_mm

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


def has_int8_products() -> bool:
    """Returns True if products of 8-bit integers are computed with instructions for them."""
    if compiled_nodes.compiled is None or not _native.has_int8_products():
        return False
    return bool(torch.backends.mkldnn.enabled)


def integer_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_grid: IntegerGrid,
    weight_grid: IntegerGrid,
    bias_codes: BiasCodes | None = None,
    kept: object = None,
) -> Tensor | None:
    """Returns the result of a linear layer, or None if values are found that are not on their grid.

    Args:
        x: The input, float32, on its grid. NaN makes a row of NaN.
        weight: The weight, of shape (outputs, inputs), float32, on its grid.
        bias: The bias. If there are `bias_codes`, it only gets a gradient.
        x_grid: The grid of the input.
        weight_grid: The grid of the weight.
        bias_codes: The bias as integers.
        kept: What `weight_levels` returned for the weight.
    """
    codes, factor = (None, 1.0) if bias_codes is None else bias_codes
    arguments = x, weight, bias, *x_grid, *weight_grid, codes, factor
    if torch.compiler.is_compiling():
        compiled_result: Tensor = _integer_linear(*arguments)
        return compiled_result
    if is_eager(x) and is_eager(weight):
        y = by_kernels(*arguments, kept)
        if y is not None:
            return y
        if not are_on_grids(x, weight, x_grid.scale, weight_grid.scale):
            return None
    result: Tensor = _IntegerLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def weight_levels(weight: Tensor, grid: IntegerGrid) -> object:
    """Returns the levels of a weight for several calls of `integer_linear`, or None if the calls find them faster."""
    if compiled_nodes.compiled is None or torch.compiler.is_compiling() or not is_eager(weight):
        return None
    return compiled_nodes.compiled.weight_levels(weight, *grid, _native.has_int8_products())


def by_kernels(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor, x_zero: Tensor | None, x_low: int, x_high: int,
    weight_scale: Tensor, weight_zero: Tensor | None, weight_low: int, weight_high: int, bias_codes: Tensor | None,
    factor: float, kept: object = None,
) -> Tensor | None:  # fmt: skip
    """Returns the result of a linear layer on ordinary CPU memory, or None for anything else."""
    if compiled_nodes.compiled is None:
        return None
    return compiled_nodes.compiled.integer_linear(
        x, x_scale, x_zero, x_low, x_high, weight, weight_scale, weight_zero, weight_low, weight_high, bias,
        bias_codes, factor, _native.has_int8_products(), kept,
    )  # fmt: skip


def _along(scale: Tensor, x: Tensor) -> Tensor:
    """Reshapes scales, one or one per row, to broadcast with the rows of `x`."""
    return scale.reshape(()) if scale.numel() == 1 else scale.reshape(*x.shape[:-1], 1)


def is_on_grid(x: Tensor, scale: Tensor) -> bool:
    """Returns True if all values are multiples of their scales, which broadcast with them, or NaN."""
    return bool((((x / scale).round() * scale == x) | x.isnan()).all())


def are_on_grids(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> bool:
    """Returns True if all values of input and weight are on their grids, or NaN."""
    return is_on_grid(x, _along(x_scale, x)) and is_on_grid(weight, _along(weight_scale, weight))


def by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor, x_zero: Tensor | None, x_low: int, x_high: int,
    weight_scale: Tensor, weight_zero: Tensor | None, weight_low: int, weight_high: int, bias_codes: Tensor | None,
    factor: float,
) -> Tensor:  # fmt: skip
    """Returns the result of a linear layer with torch's operators."""
    largest = (
        IntegerGrid(x_scale, x_zero, x_low, x_high).largest,
        IntegerGrid(weight_scale, weight_zero, weight_low, weight_high).largest,
    )
    column_scale = weight_scale.reshape(-1) if weight_scale.numel() > 1 else weight_scale.reshape(())
    x_scale = _along(x_scale, x)
    levels, weight_levels = (x / x_scale).round(), (weight / _along(weight_scale, weight)).round()
    if (
        x.is_cuda
        and innermost_transform() is None
        and largest[1] <= 127
        and not bool(levels.isnan().any() | weight.isnan().any())
    ):
        sums = _on_tensor_cores(levels.flatten(0, -2), weight_levels).unflatten(0, levels.shape[:-1])
    else:
        # float32 products on GPUs, and on the CPU if precision is not the highest, may round their operands.
        exact = x.is_cpu and torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
        exact = exact and x.shape[-1] * largest[0] * largest[1] < EXACT_IN_FLOAT32
        dtype = torch.float32 if exact else torch.float64
        sums = levels.to(dtype) @ weight_levels.to(dtype).t()
    if bias_codes is not None:
        y: Tensor = (sums.double() * factor + bias_codes).float() * (x_scale * (column_scale / factor))
        return y
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
    sums = int_mm(near.to(torch.int8), right) + int_mm(far.clamp(-128, 127).to(torch.int8), right)
    rest = far - far.clamp(-128, 127)
    return (sums + int_mm(rest.to(torch.int8), right))[:rows, :columns]


def _gradients(
    dy: Tensor, saved: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = saved
    rows = dy.reshape(-1, dy.shape[-1])
    return (
        rows.mm(weight).reshape(x.shape) if needed[0] else None,
        rows.t().mm(x.reshape(-1, x.shape[-1])) if needed[1] else None,
        rows.sum(0) if needed[2] else None,
    )


def tangent(
    product: Callable[[Tensor, Tensor], Tensor],
    saved: Sequence[Tensor],
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> Tensor:
    """Returns the directional derivative of `product(x, weight) + bias`, where `saved` are x and the weight."""
    x, weight = saved
    parts = [product(dx, weight)] if dx is not None else []
    parts += [product(x, dweight)] if dweight is not None else []
    total = sum(parts[1:], parts[0]) if parts else torch.zeros_like(product(x, weight))
    return total if dbias is None else total + dbias


class _IntegerLinear(torch.autograd.Function):
    """For transforms, other devices, and without compiled nodes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return by_torch(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.save_for_forward(inputs[0], inputs[1])

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, *rest: Any) -> Tensor:
        return tangent(F.linear, ctx.saved_tensors, dx, dweight, dbias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(dy, ctx.saved_tensors, ctx.needs_input_grad), *[None] * 10


# --- for compilers --------------------------------------------------------------------------------


@torch.library.custom_op("fakequant::integer_linear", mutates_args=())
def _integer_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor, x_zero: Tensor | None, x_low: int, x_high: int,
    weight_scale: Tensor, weight_zero: Tensor | None, weight_low: int, weight_high: int, bias_codes: Tensor | None,
    factor: float,
) -> Tensor:  # fmt: skip
    arguments = (
        x, weight, bias, x_scale, x_zero, x_low, x_high, weight_scale, weight_zero, weight_low, weight_high, bias_codes,
        factor,
    )  # fmt: skip
    with torch.no_grad():
        y = by_kernels(*arguments)
        return by_torch(*arguments) if y is None else y


@_integer_linear.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(dy, ctx.saved_tensors, ctx.needs_input_grad), *[None] * 10


_integer_linear.register_autograd(_backward, setup_context=_keep)
