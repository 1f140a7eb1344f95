"""`integer_convolution`: a convolution whose sums of products are exact.

It has the formulas of `integer_linear`, with one scale for the input. The sums are computed by oneDNN's convolutions
of 8-bit integers, by convolutions of floats in which no partial sum is rounded, or in float64. The gradients are
those of torch's convolutions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant import _native
from fakequant._backends.torch import compiled_nodes
from fakequant._backends.torch.integer_linear import BiasCodes, IntegerGrid, is_on_grid, tangent
from fakequant._backends.torch.plain_memory import is_eager

# By the number of axes along which the kernel moves.
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class Geometry(NamedTuple):
    """How the kernel moves, with one number per axis of space."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


def integer_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_grid: IntegerGrid,
    weight_grid: IntegerGrid,
    geometry: Geometry,
    bias_codes: BiasCodes | None = None,
) -> Tensor | None:
    """Returns the result of a convolution, or None if values are found that are not on their grid.

    Args:
        x: The input, of shape (batch, channels, ...), float32, on its grid. NaN makes results that read it NaN.
        weight: The weight, float32, on its grid.
        bias: The bias. If there are `bias_codes`, it only gets a gradient.
        x_grid: The grid of the input, with one scale.
        weight_grid: The grid of the weight, with scales per output channel or one.
        geometry: How the kernel moves.
        bias_codes: The bias as integers.
    """
    codes, factor = (None, 1.0) if bias_codes is None else bias_codes
    arguments = x, weight, bias, *x_grid, *weight_grid, codes, factor, *geometry
    if torch.compiler.is_compiling():
        compiled_result: Tensor = _integer_convolution(*arguments)
        return compiled_result
    if is_eager(x) and is_eager(weight):
        y = _by_kernels(*arguments)
        if y is not None:
            return y
        scale = weight_grid.scale.reshape(-1, *[1] * (weight.dim() - 1))
        if not (is_on_grid(x, x_grid.scale.reshape(())) and is_on_grid(weight, scale)):
            return None
    result: Tensor = _IntegerConvolution.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _by_kernels(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor, x_zero: Tensor | None, x_low: int, x_high: int,
    weight_scale: Tensor, weight_zero: Tensor | None, weight_low: int, weight_high: int, bias_codes: Tensor | None,
    factor: float, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> Tensor | None:  # fmt: skip
    if compiled_nodes.compiled is None:
        return None
    return compiled_nodes.compiled.integer_convolution(
        x, x_scale, x_zero, x_low, x_high, weight, weight_scale, weight_zero, weight_low, weight_high, bias,
        bias_codes, factor, stride, padding, dilation, groups, _native.has_int8_products(),
    )  # fmt: skip


def _by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor, x_zero: Tensor | None, x_low: int, x_high: int,
    weight_scale: Tensor, weight_zero: Tensor | None, weight_low: int, weight_high: int, bias_codes: Tensor | None,
    factor: float, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    space = [1] * (weight.dim() - 2)
    x_scale, per_output = x_scale.reshape(()), weight_scale.reshape(-1, *space)
    levels, weight_levels = (x / x_scale).round(), (weight / per_output.unsqueeze(1)).round()
    convolve = _CONVOLUTIONS[len(space)]
    sums = convolve(levels.double(), weight_levels.double(), None, stride, padding, dilation, groups)
    if bias_codes is not None:
        codes = bias_codes.reshape(-1, *space)
        y: Tensor = (sums * factor + codes).float() * (x_scale * (per_output / factor))
        return y
    y = sums.float() * (x_scale * per_output)
    return y if bias is None else y + bias.reshape(-1, *space)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    nothing = [0] * (weight.dim() - 2)
    found = torch.ops.aten.convolution_backward(
        dy, x, weight, [weight.shape[0]], ctx.stride, ctx.padding, ctx.dilation, False, nothing, ctx.groups,
        ctx.needs_input_grad[:3],
    )  # fmt: skip
    return *found, *[None] * 14


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.stride, ctx.padding, ctx.dilation, ctx.groups = inputs[-4:]


class _IntegerConvolution(torch.autograd.Function):
    """For transforms, and without compiled nodes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return _by_torch(*arguments)

    backward = staticmethod(_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _keep(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, *rest: Any) -> Tensor:
        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            return _CONVOLUTIONS[len(ctx.stride)](x, weight, None, ctx.stride, ctx.padding, ctx.dilation, ctx.groups)

        along = [-1] + [1] * len(ctx.stride)
        return tangent(convolve, ctx.saved_tensors, dx, dweight, None if dbias is None else dbias.reshape(along))


# --- for compilers --------------------------------------------------------------------------------


@torch.library.custom_op("fakequant::integer_convolution", mutates_args=())
def _integer_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor, x_zero: Tensor | None, x_low: int, x_high: int,
    weight_scale: Tensor, weight_zero: Tensor | None, weight_low: int, weight_high: int, bias_codes: Tensor | None,
    factor: float, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    arguments = (
        x, weight, bias, x_scale, x_zero, x_low, x_high, weight_scale, weight_zero, weight_low, weight_high, bias_codes,
        factor, stride, padding, dilation, groups,
    )  # fmt: skip
    with torch.no_grad():
        y = _by_kernels(*arguments)
        return _by_torch(*arguments) if y is None else y


@_integer_convolution.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    stride, padding, dilation, groups = rest[-4:]
    return _CONVOLUTIONS[len(stride)](x, weight, None, stride, padding, dilation, groups)


_integer_convolution.register_autograd(_gradients, setup_context=_keep)
