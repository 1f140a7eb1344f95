"""Products of layers as products of matrices.

A linear layer or a convolution computes, for every group g of its channels,

    y[g, n, o] = sum over k of rows[g, n, k] * matrix[g, o, k]

where a row holds the inputs of one output position, and a row of the matrix the weights of one output channel.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.nn._expert_groups import Groups

# Changes the form of a weight, or of a tensor with one value per weight.
Reshape: TypeAlias = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The options of a convolution, with one number per axis of the image.

    Padding is given as (before, after), and output padding is included in it.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    is_transposed: bool = False


def convolution_geometry(
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Geometry:
    """Returns the options of `F.conv1d`, `F.conv2d` or `F.conv3d`, given as its arguments after the bias."""
    kernel = tuple(weight.shape[2:])
    strides, dilations = _per_axis(stride, kernel), _per_axis(dilation, kernel)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        pads = tuple((total // 2, total - total // 2) for total in totals)
    else:
        pads = tuple((p, p) for p in _per_axis(0 if padding == "valid" else padding, kernel))
    return Geometry(kernel, strides, pads, dilations, groups)


def transposed_geometry(
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Geometry:
    """Returns the options of `F.conv_transpose1d` and the like, given as its arguments after the bias.

    A transposed convolution is a convolution, with the kernel flipped, of the input with zeros between its elements.
    """
    kernel = tuple(weight.shape[2:])
    strides, dilations = _per_axis(stride, kernel), _per_axis(dilation, kernel)
    axes = zip(kernel, dilations, _per_axis(padding, kernel), _per_axis(output_padding, kernel), strict=True)
    pads = tuple((d * (k - 1) - p, d * (k - 1) - p + more) for k, d, p, more in axes)
    return Geometry(kernel, strides, pads, dilations, groups, is_transposed=True)


def linear_rows(x: Tensor, limit: int) -> Tensor:
    """Returns at most `limit` rows of the input of a linear layer, with the shape (1, rows, inputs)."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[_chosen(rows.shape[0], limit, x)][None]


def expert_rows(x: Tensor, groups: Groups) -> Tensor:
    """Returns the rows of every expert, followed by rows of zeros up to the same number."""
    counts = torch.bincount(groups.experts, minlength=groups.number)
    rows = x.new_zeros(groups.number, int(counts.max()), x.shape[-1])
    starts = counts.cumsum(0) - counts
    rows[groups.experts, torch.arange(len(x), device=x.device) - starts[groups.experts]] = x
    return rows


def convolution_rows(x: Tensor, geometry: Geometry, limit: int) -> Tensor:
    """Returns at most `limit` rows of the input of a convolution, with the shape (groups, rows, inputs of a sum)."""
    axes = len(geometry.kernel)
    x = x[None] if x.dim() == axes + 1 else x
    stride = geometry.stride
    if geometry.is_transposed:
        x, stride = _with_zeros_between(x, stride), (1,) * axes
    x = F.pad(x, [side for pair in reversed(geometry.padding) for side in pair])
    for axis, (k, s, d) in enumerate(zip(geometry.kernel, stride, geometry.dilation, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    positions = (x.shape[0], *x.shape[2 : 2 + axes])
    chosen = _chosen(math.prod(positions), limit, x)
    first, *rest = torch.unravel_index(chosen, positions)
    rows = x.movedim(1, axes + 1)[(first, *rest)]  # (rows, channels, kernel)
    return rows.reshape(len(chosen), geometry.groups, -1).transpose(0, 1)


def matrix_of(weight: Tensor, geometry: Geometry | None, parts: int = 1, *, is_transposed: bool = False) -> Tensor:
    """Returns a weight as matrices, with the shape (groups, outputs of a group, inputs of a sum).

    Args:
        weight: The weight, or a tensor of its shape.
        geometry: The options of a convolution. None for a linear layer.
        parts: For a linear layer: the number of equal parts of its outputs that have inputs of their own.
        is_transposed: For a linear layer: whether the outputs are on axis 1.
    """
    if geometry is None:
        matrix = weight.t() if is_transposed else weight
        return matrix.reshape(parts, -1, matrix.shape[1])
    groups = geometry.groups
    if not geometry.is_transposed:
        return weight.reshape(groups, weight.shape[0] // groups, -1)
    inputs, outputs = weight.shape[:2]
    flipped = weight.flip(tuple(range(2, weight.dim())))
    return flipped.reshape(groups, inputs // groups, outputs, -1).transpose(1, 2).flatten(2)


def weight_of(matrix: Tensor, like: Tensor, geometry: Geometry | None, *, is_transposed: bool = False) -> Tensor:
    """Returns the weight of which `matrix_of` returned the matrices, with the shape of `like`."""
    if geometry is None:
        flat = matrix.flatten(0, 1)
        return flat.t() if is_transposed else flat
    if not geometry.is_transposed:
        return matrix.reshape(like.shape)
    inputs, outputs = like.shape[:2]
    split = matrix.reshape(geometry.groups, outputs, inputs // geometry.groups, -1).transpose(1, 2)
    return split.reshape(like.shape).flip(tuple(range(2, like.dim())))


def _with_zeros_between(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    every = [slice(None), slice(None), *(slice(None, None, s) for s in stride)]
    wide[tuple(every)] = x
    return wide


def _chosen(number: int, limit: int, x: Tensor) -> Tensor:
    """Returns the indices of `limit` rows, spread evenly over all, or of all rows if there are no more."""
    if number <= limit:
        return torch.arange(number, device=x.device)
    # Uneven steps, so that they do not fall into step with the rows of an image.
    offsets = torch.rand(limit, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    found = ((torch.arange(limit, dtype=torch.float64) + offsets) * (number / limit)).long()
    return found.clamp(max=number - 1).to(x.device)


def _per_axis(value: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Iterable) else (value,)
    return tuple(int(v) for v in (values * len(kernel) if len(values) == 1 else values))
