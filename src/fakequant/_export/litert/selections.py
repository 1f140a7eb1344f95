"""Operators that select elements: slices, and elements by their indices."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fakequant._export.litert.builder import Constant, Known, Pending, Value, identity
from fakequant._export.litert.elementwise import selected
from fakequant._export.litert.graph import AnyLength, Tensor
from fakequant._export.litert.moves import reshaped, slice_of, without_axes
from fakequant._export.litert.operations import Operations, QuantizedWeight, no_operator, shape_of

aten = torch.ops.aten


def slice_(
    t: Operations, node: Node, x: Value, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Value:
    length = x.shape[axis]
    if isinstance(length, AnyLength) and shape_of(node)[axis] == length:
        return x
    first, last, _ = slice(start, stop, step).indices(int(length))
    return slice_of(t, x, axis, first, last, step)


def select(t: Operations, node: Node, x: Value, axis: int, index: int) -> Value:
    index = index % int(x.shape[axis])
    part = slice_of(t, x, axis, index, index + 1)
    shape = shape_of(node)
    return t.builder.moving(part, shape, lambda found: without_axes(t, found, [axis]))


def split(t: Operations, node: Node, x: Value, sizes: Any, axis: int = 0) -> list[Value]:
    length = int(x.shape[axis])
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [slice_of(t, x, axis, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def chunk(t: Operations, node: Node, x: Value, number: int, axis: int = 0) -> list[Value]:
    return split(t, node, x, -(-int(x.shape[axis]) // number), axis)


def unbind(t: Operations, node: Node, x: Value, axis: int = 0) -> list[Value]:
    shape = tuple(size for a, size in enumerate(x.shape) if a != axis % len(x.shape))
    parts = [slice_of(t, x, axis, index, index + 1) for index in range(int(x.shape[axis]))]
    return [t.builder.moving(part, shape, lambda found: without_axes(t, found, [axis])) for part in parts]


def gathered(t: Operations, x: Value, index: Value, axis: int) -> Value:
    """Selects elements along an axis by a tensor of indices."""
    indices = t.builder.in_order(index)
    rank = len(index.shape)
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])

    def move(found: Known) -> Known:
        place = found.axis(axis)
        new = [*found.tensor.shape[:place], *index.shape, *found.tensor.shape[place + 1 :]]
        options = ("Gather", {"axis": place})
        made = t.graph.add("GATHER", [found.tensor, indices], [t.builder.moved(found.tensor, new)], options)
        order: list[int] = []
        for one in found.order:
            order += range(axis, axis + rank) if one == axis else [one if one < axis else one + rank - 1]
        return Known(made, tuple(order))

    return t.builder.moving(x, shape, move)


def index_select(t: Operations, node: Node, x: Value, axis: int, index: Value) -> Value:
    return gathered(t, x, index, axis % len(x.shape))  # torch refuses negative indices


def _positive(index: Constant, length: int) -> Constant:
    """Returns indices that count from the front."""
    return Constant(torch.where(index.value < 0, index.value + int(length), index.value))


def _from_the_front(t: Operations, index: Value, length: int) -> Value:
    """Returns indices that count from the front. Indices of an axis of any length stay as they are."""
    if isinstance(index, Constant):
        return _positive(index, length)
    if isinstance(length, AnyLength):
        return index
    found = t.builder.known(index)
    zero = Constant(torch.zeros((), dtype=getattr(torch, found.tensor.dtype)))
    is_negative = t.binary("LESS", ("Less", {}), found, zero, dtype="bool")
    return selected(t, is_negative, t.with_number("ADD", found, int(length)), found)


def index(t: Operations, node: Node, x: Value, indices: Sequence[Any]) -> Value:
    given = [(axis, one) for axis, one in enumerate(indices) if one is not None]
    if len(given) == 2 and all(isinstance(one, Constant) for _, one in given) and given[1][0] == given[0][0] + 1:
        (axis, a), (_, b) = given  # neighbouring axes become one
        length = int(x.shape[axis + 1])
        rows, columns = (_positive(one, x.shape[axis + n]).value for n, one in enumerate((a, b)))
        shape = (*x.shape[:axis], int(x.shape[axis]) * length, *x.shape[axis + 2 :])
        return gathered(t, reshaped(t, x, shape), Constant(rows * length + columns), axis)
    if len(given) != 1 or (isinstance(given[0][1], Constant) and given[0][1].value.dtype == torch.bool):
        raise no_operator(node, "indexing by several tensors")
    axis, one = given[0]
    return gathered(t, x, _from_the_front(t, one, x.shape[axis]), axis)


def embedding(t: Operations, node: Node, weight: Any, index: Value, *_: Any) -> Value:
    if not isinstance(weight, QuantizedWeight) or weight.weight.codes is None:
        table = weight.weight.floats if isinstance(weight, QuantizedWeight) else weight
        return gathered(t, table if isinstance(table, (Known, Pending)) else _table(t, table), index, 0)
    found = weight.weight
    assert found.scale is not None
    codes = Tensor(tuple(found.codes.shape), "int8", f"{found.path}.weight", found.codes.numpy())  # type: ignore
    rows = t.builder.known(gathered(t, Known(codes, (0, 1)), index, 0))
    numbers = rows.like(t.graph.add("CAST", [rows.tensor], [Tensor(rows.tensor.shape, "float32")], ("Cast", {})))
    if found.axis == 1 or float(found.scale.min()) == float(found.scale.max()):
        scale: Value = Constant(found.scale if found.axis == 1 else found.scale[0])
    else:
        scales = Tensor((len(found.scale), 1), "float32", f"{found.path}.scale", found.scale.reshape(-1, 1).numpy())
        scale = gathered(t, Known(scales, (0, 1)), index, 0)
    return t.binary("MUL", ("Mul", {}), numbers, scale)


def _table(t: Operations, value: Any) -> Known:
    data = value.value if isinstance(value, Constant) else value
    array = data.detach().numpy()
    return Known(Tensor(tuple(array.shape), array.dtype.name, f"{t.graph.path}.weight", array), identity(array.ndim))


# By the operator of torch.
SELECTIONS: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: slice_,
    aten.select.int: select,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    aten.chunk.default: chunk,
    aten.unbind.int: unbind,
    aten.index_select.default: index_select,
    aten.index.Tensor: index,
}
