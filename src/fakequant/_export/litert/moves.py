"""Operators that give a tensor another shape, another order of axes, or more elements. Codes are moved as codes."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from fakequant._export.litert.builder import Constant, Grid, Known, Pending, Value, identity, is_long, stored_shape
from fakequant._export.litert.graph import AnyLength
from fakequant._export.litert.layers import pad_zeros
from fakequant._export.litert.operations import Operations, dtype_of, shape_of

aten = torch.ops.aten


def slice_of(t: Operations, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
    """Returns the elements from `start` to `stop` along an axis."""
    axis %= len(x.shape)
    length = len(range(start, stop, step))
    shape = tuple(length if a == axis else size for a, size in enumerate(x.shape))

    def move(found: Known) -> Known:
        place, tensor = found.axis(axis), found.tensor
        new = [length if p == place else size for p, size in enumerate(tensor.shape)]
        begin = [start if p == place else 0 for p in range(len(new))]
        if step == 1:
            made = t.builder.sliced(tensor, begin, new)
        else:
            end = [stop if p == place else 0 for p in range(len(new))]
            steps = [step if p == place else 1 for p in range(len(new))]
            mask = sum(1 << p for p in range(len(new)) if p != place)
            constants = [t.graph.constant(one, "int32") for one in (begin, end, steps)]
            options = ("StridedSlice", {"beginMask": mask, "endMask": mask})
            made = t.graph.add("STRIDED_SLICE", [tensor, *constants], [t.builder.moved(tensor, new)], options)
        return found.like(made)

    return x if shape == tuple(x.shape) and step == 1 else t.builder.moving(x, shape, move)


def without_axes(t: Operations, found: Known, axes: Sequence[int]) -> Known:
    """Removes axes of length 1."""
    rank = len(found.order)
    gone = {axis % rank for axis in axes}
    left = [axis for axis in range(rank) if axis not in gone]
    order = tuple(left.index(axis) for axis in found.order if axis not in gone)
    shape = [length for axis, length in zip(found.order, found.tensor.shape, strict=True) if axis not in gone]
    return Known(t.builder.reshaped(found.tensor, shape), order)


def permuted(t: Operations, x: Value, axes: Sequence[int]) -> Value:
    if isinstance(x, Constant):
        long_shape = None if x.long_shape is None else tuple(x.long_shape[axis] for axis in axes)
        return Constant(x.value.permute(tuple(axes)), long_shape)
    axes = [axis % len(x.shape) for axis in axes]

    def move(found: Known) -> Known:
        return Known(found.tensor, tuple(axes.index(axis) for axis in found.order))

    return t.builder.moving(x, tuple(x.shape[axis] for axis in axes), move)


def transposed(t: Operations, x: Value) -> Value:
    return permuted(t, x, (*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2))


def reshaped(t: Operations, x: Value, shape: Sequence[int]) -> Value:
    """Returns a value with another shape. Axes stay where they are if only neighbours are joined or split."""
    shape = tuple(shape)
    if isinstance(x, Constant):
        value = x.value.reshape(stored_shape(shape))
        return Constant(value, None if x.long_shape is None else shape)

    def move(found: Known) -> Known:
        groups = _groups(found.shape, shape)
        places = None if groups is None else _order_of_groups(found, groups)
        if groups is None or places is None:
            tensor = t.builder.arranged(found, identity(len(found.order))).tensor
            return Known(t.builder.reshaped(tensor, shape), identity(len(shape)))
        order = tuple(axis for place in places for axis in groups[place][1])
        return Known(t.builder.reshaped(found.tensor, [shape[axis] for axis in order]), order)

    return t.builder.moving(x, shape, move)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """Returns pairs of neighbouring axes of two shapes that have the same elements, or None."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i == len(old) or j == len(new):
            rest = list(range(i, len(old))), list(range(j, len(new)))
            if not found or any(is_long(old[a]) for a in rest[0]) or any(is_long(new[a]) for a in rest[1]):
                return None
            found[-1][0].extend(rest[0])
            found[-1][1].extend(rest[1])
            return found
        left, right, a, b = [i], [j], int(old[i]), int(new[j])
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                if i == len(old):
                    return None
                a, left, i = a * int(old[i]), [*left, i], i + 1
            else:
                if j == len(new):
                    return None
                b, right, j = b * int(new[j]), [*right, j], j + 1
        found.append((left, right))
    return found


def _order_of_groups(found: Known, groups: list[tuple[list[int], list[int]]]) -> list[int] | None:
    """Returns the groups in the order of the tensor's axes, or None if the axes of a group are apart."""
    group_of = {axis: number for number, (left, _) in enumerate(groups) for axis in left}
    shape = found.shape
    long = [axis for axis in found.order if is_long(shape[axis])]
    places: list[int] = []
    last: dict[int, int] = {}
    for axis in long:
        number = group_of[axis]
        if number in last and (places[-1] != number or axis < last[number]):
            return None
        if number not in last:
            places.append(number)
        last[number] = axis
    return places + [number for number in range(len(groups)) if number not in places]


def view(t: Operations, node: Node, x: Value, *_: Any) -> Value:
    return reshaped(t, x, shape_of(node))


def permute(t: Operations, node: Node, x: Value, axes: Sequence[int]) -> Value:
    return permuted(t, x, axes)


def transpose(t: Operations, node: Node, x: Value, a: int, b: int) -> Value:
    axes = list(range(len(x.shape)))
    axes[a], axes[b] = axes[b], axes[a]
    return permuted(t, x, axes)


def same(t: Operations, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    return x


def to(t: Operations, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    return t.cast(x, dtype_of(node))


def cat(t: Operations, node: Node, parts: Sequence[Value], axis: int = 0) -> Value:
    parts = [t.with_rows(part) for part in parts if tuple(part.shape) != (0,)]
    axis %= len(parts[0].shape)
    shape = shape_of(node)

    def joined(tensors: list[Known]) -> Known:
        order = max(tensors, key=lambda one: prod(one.shape)).order
        arranged = [t.builder.arranged(one, order).tensor for one in tensors]
        made = t.builder.moved(arranged[0], [shape[a] for a in order])
        options = ("Concatenation", {"axis": order.index(axis)})
        return Known(t.graph.add("CONCATENATION", list(arranged), [made], options), order)

    if dtype_of(node) != torch.float32:
        return joined([t.builder.known(t.cast(part, dtype_of(node))) for part in parts])
    if len(parts) == 1:
        return parts[0]
    codes = [one for one in map(t.builder.codes_of, parts) if one is not None]
    if len(codes) == len(parts) and len({Grid.of(one.tensor) for one in codes}) == 1:
        return joined(codes)  # such as parts of one tensor, with which circular padding begins and ends
    return Pending(
        shape,
        lambda: joined([t.builder.floats(part) for part in parts]),
        lambda grid: joined([t.builder.on_grid(part, grid) for part in parts]),
    )


def stack(t: Operations, node: Node, parts: Sequence[Value], axis: int = 0) -> Value:
    axis %= len(shape_of(node))
    wider = []
    for part in parts:
        shape = list(part.shape)
        shape.insert(axis, 1)
        wider.append(reshaped(t, part, shape))
    return cat(t, node, wider, axis)


def pad(t: Operations, node: Node, x: Value, pads: Sequence[int], value: float = 0.0) -> Value:
    rank = len(x.shape)
    given = {rank - 1 - number: (pads[2 * number], pads[2 * number + 1]) for number in range(len(pads) // 2)}
    for axis, (before, after) in given.items():
        if before < 0 or after < 0:
            stop = int(x.shape[axis]) - max(-after, 0)
            x = slice_of(t, x, axis, max(-before, 0), stop)
    sizes = [tuple(max(one, 0) for one in given.get(axis, (0, 0))) for axis in range(rank)]

    def move(found: Known) -> Known:
        return found.like(
            pad_zeros(t.builder, found.tensor, [sizes[a] for a in found.order], None if value == 0 else value)  # type: ignore
        )

    if not any(map(sum, sizes)):
        return x
    if value != 0:
        return move(t.builder.floats(x))
    return t.builder.moving(x, shape_of(node), move)


def expand(t: Operations, node: Node, x: Value, *_: Any) -> Value:
    shape = shape_of(node)

    def move(found: Known) -> Known:
        found = t.widened(found, len(shape))
        target = [shape[axis] for axis in found.order]
        if target == list(found.tensor.shape):
            return found
        if any(isinstance(one, AnyLength) for one in target):
            raise NotImplementedError("an axis of any length is repeated")
        sizes = t.graph.constant(target, "int32")
        made = t.builder.moved(found.tensor, target)
        return found.like(t.graph.add("BROADCAST_TO", [found.tensor, sizes], [made], ("BroadcastTo", {})))

    return t.builder.moving(x, shape, move)


def repeat(t: Operations, node: Node, x: Value, times: Sequence[int]) -> Value:
    def move(found: Known) -> Known:
        found = t.widened(found, len(times))
        numbers = t.graph.constant([times[axis] for axis in found.order], "int32")
        made = t.builder.moved(found.tensor, [shape_of(node)[axis] for axis in found.order])
        return found.like(t.graph.add("TILE", [found.tensor, numbers], [made], ("Tile", {})))

    return t.builder.moving(x, shape_of(node), move)


def flip(t: Operations, node: Node, x: Value, axes: Sequence[int]) -> Value:
    def move(found: Known) -> Known:
        for axis in axes:
            places = t.graph.constant([found.axis(axis)], "int32")
            made = t.builder.moved(found.tensor, found.tensor.shape)
            found = found.like(t.graph.add("REVERSE_V2", [found.tensor, places], [made], ("ReverseV2", {})))
        return found

    return t.builder.moving(x, x.shape, move)


# By the operator of torch.
MOVES: dict[Any, Callable[..., Any]] = {
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.reshape.default: view,
    aten.unsqueeze.default: view,
    aten.squeeze.default: view,
    aten.squeeze.dim: view,
    aten.squeeze.dims: view,
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.t.default: lambda t, node, x: permuted(t, x, range(len(x.shape))[::-1]),
    aten.clone.default: same,
    aten.contiguous.default: same,
    aten.alias.default: same,
    aten.detach.default: same,
    aten.lift_fresh_copy.default: same,
    aten.dropout.default: same,
    aten._to_copy.default: to,
    aten.to.dtype: to,
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.constant_pad_nd.default: pad,
    aten.expand.default: expand,
    aten.repeat.default: repeat,
    aten.flip.default: flip,
}
