"""Pools, and images of another size."""

from collections.abc import Callable, Sequence
from math import isclose, prod
from typing import Any, cast

import torch
from torch.fx import Node

from fakequant._export.litert.builder import Constant, Grid, Known, Options, Value
from fakequant._export.litert.graph import Tensor
from fakequant._export.litert.layers import VALID, pad_zeros, paddings
from fakequant._export.litert.moves import slice_of
from fakequant._export.litert.operations import NoOperator, Operations, no_operator, path_of, shape_of
from fakequant._export.litert.reductions import mean, reduced
from fakequant._export.litert.selections import gathered

aten = torch.ops.aten


def _pair(given: Any) -> tuple[int, int]:
    height, *rest = (given,) if isinstance(given, int) else tuple(given)
    return (height, *rest) if rest else (height, height)


class _Windows:
    """The windows of a pool."""

    def __init__(self, shape: Sequence[int], size: Any, stride: Any, padding: Any) -> None:
        self.shape, self.size, self.padding = shape, _pair(size), _pair(padding)
        self.stride = self.size if stride in (None, [], ()) else _pair(stride)

    def paddings(self, image: Tensor) -> tuple[list[tuple[int, int]], int | None]:
        return paddings(image.shape, self.shape, self.size, self.stride, self.padding)

    def options(self, padding: int) -> Options:
        (height, width), (down, right) = self.size, self.stride
        settings = {"padding": padding, "strideH": down, "strideW": right, "filterHeight": height, "filterWidth": width}
        return "Pool2D", settings


def max_pool2d(
    t: Operations, node: Node, x: Value, size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False
) -> Value:  # fmt: skip
    shape = shape_of(node)
    if len(shape) != 4 or any(one != 1 for one in _pair(dilation)):
        raise no_operator(node, "a max pool with dilation")
    windows = _Windows(shape, size, stride, padding)

    def move(found: Known) -> Known:
        order = (0, 2, 3, 1)
        image = t.builder.arranged(found, order).tensor
        pads, kind = windows.paddings(image)
        if kind is None:
            lowest: float | None = Grid.of(image).low if image.is_codes else float("-inf")
            lowest = None if lowest == image.zero_point else lowest  # what PAD adds
            image, kind = pad_zeros(t.builder, image, pads, lowest), VALID
        made = t.builder.moved(image, [shape[axis] for axis in order])
        return Known(t.graph.add("MAX_POOL_2D", [image], [made], windows.options(kind)), order)

    return t.builder.moving(x, shape, move)


def max_pool_with_indices(t: Operations, node: Node, *args: Any, **kwargs: Any) -> list[Any]:
    return [max_pool2d(t, node, *args, **kwargs), None]


def avg_pool2d(
    t: Operations, node: Node, x: Value, size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    counts_padding: bool = True, divisor: Any = None
) -> Value:  # fmt: skip
    shape = shape_of(node)
    windows = _Windows(shape, size, stride, padding)
    order = (0, 2, 3, 1)
    image = t.builder.arranged(t.builder.floats(x), order).tensor
    pads, kind = windows.paddings(image)
    number = prod(windows.size)
    factor = None
    if divisor is not None:
        factor = torch.full(shape[2:], number / divisor)
    elif kind != VALID and (not counts_padding or ceil_mode):
        ones = torch.ones(1, 1, *x.shape[2:])
        factor = torch.nn.functional.avg_pool2d(
            ones, windows.size, windows.stride, windows.padding, ceil_mode, counts_padding
        )[0, 0]
        plain = torch.nn.functional.pad(ones, [pads[2][0], pads[2][1], pads[1][0], pads[1][1]])
        share = torch.nn.functional.avg_pool2d(plain, windows.size, windows.stride)[0, 0]
        factor = factor / share
    if kind != VALID:
        image = pad_zeros(t.builder, image, pads)
    made = t.op("AVERAGE_POOL_2D", [image], [shape[axis] for axis in order], windows.options(VALID))
    found = Known(made, order)
    return (
        found if factor is None else t.binary("MUL", ("Mul", {}), found, Constant(factor.reshape(1, 1, *factor.shape)))
    )


def adaptive_avg_pool2d(t: Operations, node: Node, x: Value, size: Any) -> Value:
    rank = len(x.shape)
    if all(one == 1 for one in size):
        return mean(t, node, x, [rank - 2, rank - 1], True)
    found = t.builder.floats(x)
    for axis, number in zip((rank - 2, rank - 1), size, strict=True):
        length = int(found.shape[axis])
        if number in (None, length):
            continue
        parts = []
        for one in range(number):
            part = slice_of(t, found, axis, one * length // number, -(-(one + 1) * length // number))
            parts.append(reduced(t, t.builder.floats(part), "MEAN", [axis]))
        made = Tensor(
            tuple(number if a == axis else n for a, n in zip(found.order, found.tensor.shape, strict=True)), "float32"
        )
        options = ("Concatenation", {"axis": found.axis(axis)})
        found = found.like(t.graph.add("CONCATENATION", [part.tensor for part in parts], [made], options))
    return found


def _resized(t: Operations, node: Node, found: Known, code: str, options: Options) -> Known:
    shape, order = shape_of(node), (0, 2, 3, 1)
    image = t.builder.arranged(found, order).tensor
    sizes = t.graph.constant([int(one) for one in shape[2:]], "int32")
    made = t.builder.moved(image, [shape[axis] for axis in order])
    return Known(t.graph.add(code, [image, sizes], [made], options), order)


def nearest(t: Operations, node: Node, x: Value, *sizes_and_scales: Any) -> Value:
    """Takes elements from where torch takes them. LiteRT has an operator that takes them by the ratio of the sizes."""
    shape, target = shape_of(node), cast(Any, node.target)
    rows, columns = (int(length) for length in x.shape[2:])
    places = target(torch.arange(float(rows * columns)).reshape(1, 1, rows, columns), *sizes_and_scales)[0, 0].long()
    indices = places[:, 0] // columns, places[0] % columns
    if all(map(torch.equal, indices, map(_by_ratio, (rows, columns), shape[2:]))):
        options = ("ResizeNearestNeighbor", {"alignCorners": False, "halfPixelCenters": False})
        return t.builder.moving(x, shape, lambda found: _resized(t, node, found, "RESIZE_NEAREST_NEIGHBOR", options))
    for axis, one in enumerate(indices, start=2):
        x = gathered(t, x, Constant(one), axis)
    return x


def _by_ratio(length: int, number: int) -> torch.Tensor:
    """Returns which elements of an axis LiteRT takes: floor(i * (length / number)), in float32."""
    ratio = torch.tensor(float(length)) / int(number)
    return (torch.arange(int(number)) * ratio).floor().clamp(max=length - 1).long()


def bilinear(t: Operations, node: Node, x: Value, size: Any, align_corners: bool = False, *scales: Any) -> Value:
    given = [one for scale in scales if scale is not None for one in (scale if isinstance(scale, list) else [scale])]
    pairs = zip(given, x.shape[2:], shape_of(node)[2:], strict=False)
    if not align_corners and not all(isclose(scale * int(old), int(new)) for scale, old, new in pairs):
        raise NoOperator(
            f"{path_of(node) or 'The model'} resizes an image of {int(x.shape[2])} x {int(x.shape[3])} by the factors "
            f"{tuple(given)}, and LiteRT by the ratios of the sizes, which differ from them.\n"
            "Use interpolate(..., size=...), or recompute_scale_factor=True."
        )
    options = ("ResizeBilinear", {"alignCorners": align_corners, "halfPixelCenters": not align_corners})
    return _resized(t, node, t.builder.floats(x), "RESIZE_BILINEAR", options)


# By the operator of torch.
IMAGES: dict[Any, Callable[..., Any]] = {
    aten.max_pool2d.default: max_pool2d,
    aten.max_pool2d_with_indices.default: max_pool_with_indices,
    aten.avg_pool2d.default: avg_pool2d,
    aten.adaptive_avg_pool2d.default: adaptive_avg_pool2d,
    aten._adaptive_avg_pool2d.default: adaptive_avg_pool2d,
    aten.upsample_nearest2d.default: nearest,
    aten.upsample_nearest2d.vec: nearest,
    aten.upsample_bilinear2d.default: bilinear,
    aten.upsample_bilinear2d.vec: bilinear,
}
