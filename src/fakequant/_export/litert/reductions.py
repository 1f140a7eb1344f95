"""Reductions along axes, and norms, which are made of them."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from fakequant._export.litert.builder import Constant, Grid, Known, Pending, Value, scale_of
from fakequant._export.litert.graph import Tensor
from fakequant._export.litert.moves import reshaped, without_axes
from fakequant._export.litert.operations import Operations, dtype_of, no_operator, shape_of

aten = torch.ops.aten


def reduced(t: Operations, found: Known, code: str, axes: Sequence[int], dtype: str | None = None) -> Known:
    """Reduces axes, which are kept with length 1."""
    places = sorted(found.axis(axis) for axis in axes)
    shape = [1 if place in places else length for place, length in enumerate(found.tensor.shape)]
    constant = t.graph.constant(places, "int32")
    made = Tensor(tuple(shape), dtype or found.tensor.dtype)
    return found.like(t.graph.add(code, [found.tensor, constant], [made], ("Reducer", {"keepDims": True})))


def _reduction(code: str) -> Callable[..., Value]:
    def reduce(t: Operations, node: Node, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
        axes = [axes] if isinstance(axes, int) else list(axes or range(len(x.shape)))
        axes = [axis % len(x.shape) for axis in axes]
        made = reduced(t, t.builder.floats(t.cast(x, dtype_of(node))), code, axes)
        return made if keepdim else without_axes(t, made, axes)

    return reduce


def _extreme(values: str, indices: str) -> Callable[..., list[Value]]:
    """Returns the function for the largest or smallest elements along an axis, and their indices."""

    def find(t: Operations, node: Node, x: Value, axis: int, keepdim: bool = False) -> list[Value]:
        return [_reduction(values)(t, node, x, axis, keepdim), _index_of(indices)(t, node, x, axis, keepdim)]

    return find


def mean(t: Operations, node: Node, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
    axes = [axes] if isinstance(axes, int) else list(axes or range(len(x.shape)))
    axes = [axis % len(x.shape) for axis in axes]

    def end(found: Known) -> Known:
        return found if keepdim else without_axes(t, found, axes)

    def codes(grid: Grid) -> Known | None:
        operands, kernels = t.builder.operands_of(grid, x), t.builder.kernels(grid)
        largest = prod(x.shape[axis] for axis in axes) * 2.0**grid.bits
        if operands is None or not kernels.has_average(scale_of(operands[0].tensor), grid.scale, largest):
            return None
        (found,) = operands
        places = sorted(found.axis(axis) for axis in axes)
        shape = [1 if place in places else length for place, length in enumerate(found.tensor.shape)]
        # Of LiteRT's own kernels, one for images rounds otherwise. It is chosen only if axes are kept.
        keeps = not kernels.rounds_twice
        kept = shape if keeps else [length for place, length in enumerate(shape) if place not in places]
        out, _, _ = t.builder.result(grid.whole, kept)
        inputs = [found.tensor, t.graph.constant(places, "int32")]
        made = t.graph.add("MEAN", inputs, [out], ("Reducer", {"keepDims": keeps}))
        return end(found.like(t.builder.limited(t.builder.reshaped(made, shape), grid)))

    return Pending(shape_of(node), lambda: end(reduced(t, t.builder.floats(x), "MEAN", axes)), codes)


def _variance(t: Operations, x: Known, axes: Sequence[int]) -> tuple[Known, Known]:
    """Returns x minus its mean, and the mean of the square of that."""
    centred = t.binary("SUB", ("Sub", {}), x, reduced(t, x, "MEAN", axes))
    return centred, reduced(t, t.unary(centred, "SQUARE"), "MEAN", axes)


def variance(
    t: Operations, node: Node, x: Value, axes: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Value:
    axes = [axis % len(x.shape) for axis in (axes or range(len(x.shape)))]
    number = prod(int(x.shape[axis]) for axis in axes)
    _, made = _variance(t, t.builder.floats(x), axes)
    made = t.with_number("MUL", made, number / (number - (1 if correction is None else correction)))
    return made if keepdim else without_axes(t, made, axes)


def vector_norm(
    t: Operations, node: Node, x: Value, power: Any = 2, axes: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    if power not in (1, 2):
        raise no_operator(node, f"a norm of order {power}")
    axes = [axis % len(x.shape) for axis in (axes or range(len(x.shape)))]
    terms = t.unary(x, "SQUARE", ("Square", {})) if power == 2 else t.unary(x, "ABS", ("Abs", {}))
    total = reduced(t, terms, "SUM", axes)
    total = t.unary(total, "SQRT") if power == 2 else total
    return total if keepdim else without_axes(t, total, axes)


def _normalized(t: Operations, x: Known, axes: Sequence[int], eps: float) -> Known:
    centred, spread = _variance(t, x, axes)
    factor = t.unary(t.with_number("ADD", spread, eps), "RSQRT")
    return t.binary("MUL", ("Mul", {}), centred, factor)


def _affine(t: Operations, x: Value, weight: Any, bias: Any) -> Value:
    for code, name, value in (("MUL", "Mul", weight), ("ADD", "Add", bias)):
        x = x if value is None else t.binary(code, (name, {}), x, value)
    return x


def layer_norm(
    t: Operations, node: Node, x: Value, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, *_: Any
) -> Value:  # fmt: skip
    axes = list(range(len(x.shape) - len(shape), len(x.shape)))
    return _affine(t, _normalized(t, t.builder.floats(x), axes, eps), weight, bias)


def group_norm(
    t: Operations, node: Node, x: Value, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    *_: Any
) -> Value:  # fmt: skip
    batch, channels, *sizes = x.shape
    split = reshaped(t, t.builder.floats(x), (batch, groups, channels // groups, *sizes))
    found = t.builder.floats(split)
    made = _normalized(t, found, list(range(2, len(found.order))), eps)
    return _per_channel(t, reshaped(t, made, (batch, channels, *sizes)), weight, bias)


def _per_channel(t: Operations, x: Value, weight: Any, bias: Any) -> Value:
    shape = (-1, *[1] * (len(x.shape) - 2))
    return _affine(t, x, *(None if one is None else Constant(one.value.reshape(shape)) for one in (weight, bias)))


def instance_norm(
    t: Operations, node: Node, x: Value, weight: Any, bias: Any, mean_: Any, variance: Any, is_own: bool,
    momentum: float, eps: float, *_: Any
) -> Value:  # fmt: skip
    if not is_own:  # the mean and the variance of the training data
        (made,) = batch_norm(t, node, x, weight, bias, mean_, variance, eps)
        return made  # type: ignore[no-any-return]
    made = _normalized(t, t.builder.floats(x), list(range(2, len(x.shape))), eps)
    return _per_channel(t, made, weight, bias)


def batch_norm(
    t: Operations, node: Node, x: Value, weight: Any, bias: Any, mean_: Any, variance: Any, *rest: Any
) -> Any:
    eps = rest[-1]
    factor = 1 / torch.sqrt(variance.value + eps)
    factor = factor if weight is None else factor * weight.value
    added = -mean_.value * factor if bias is None else bias.value - mean_.value * factor
    return [_per_channel(t, x, Constant(factor), Constant(added))]


def cumsum(t: Operations, node: Node, x: Value, axis: int, **_: Any) -> Value:
    found = t.builder.floats(t.cast(x, dtype_of(node)))
    place = t.graph.constant(np.int32(found.axis(axis)), "int32")
    made = Tensor(found.tensor.shape, found.tensor.dtype)
    return found.like(t.graph.add("CUMSUM", [found.tensor, place], [made], ("Cumsum", {})))


def _index_of(name: str) -> Callable[..., Value]:
    """Returns the function for the indices of the largest elements, "ArgMax", or of the smallest, "ArgMin"."""

    def find(t: Operations, node: Node, x: Value, axis: Any = None, keepdim: bool = False) -> Value:
        found = t.builder.floats(x)
        if axis is None:
            raise no_operator(node, f"{name.lower()} of a whole tensor")
        found = t.builder.with_last(found, axis)
        place = t.graph.constant(np.int32(len(found.order) - 1), "int32")
        out = Tensor(tuple(found.tensor.shape[:-1]), "int64")
        code = {"ArgMax": "ARG_MAX", "ArgMin": "ARG_MIN"}[name]
        made = t.graph.add(code, [found.tensor, place], [out], (name, {"outputType": 4}))
        axis %= len(found.order)
        order = tuple(one if one < axis else one - 1 for one in found.order[:-1])
        result: Value = Known(made, order)
        return reshaped(t, result, shape_of(node)) if keepdim else result

    return find


# By the operator of torch.
REDUCTIONS: dict[Any, Callable[..., Any]] = {
    aten.mean.dim: mean,
    aten.mean.default: mean,
    aten.sum.dim_IntList: _reduction("SUM"),
    aten.amax.default: _reduction("REDUCE_MAX"),
    aten.amin.default: _reduction("REDUCE_MIN"),
    aten.max.default: _reduction("REDUCE_MAX"),
    aten.min.default: _reduction("REDUCE_MIN"),
    aten.max.dim: _extreme("REDUCE_MAX", "ArgMax"),
    aten.min.dim: _extreme("REDUCE_MIN", "ArgMin"),
    aten.any.dim: _reduction("REDUCE_ANY"),
    aten.any.dims: _reduction("REDUCE_ANY"),
    aten.any.default: _reduction("REDUCE_ANY"),
    aten.all.dim: _reduction("REDUCE_ALL"),
    aten.all.dims: _reduction("REDUCE_ALL"),
    aten.all.default: _reduction("REDUCE_ALL"),
    aten.var.correction: variance,
    aten.linalg_vector_norm.default: vector_norm,
    aten.layer_norm.default: layer_norm,
    aten.group_norm.default: group_norm,
    aten.instance_norm.default: instance_norm,
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten.cumsum.default: cumsum,
    aten.argmax.default: _index_of("ArgMax"),
    aten.argmin.default: _index_of("ArgMin"),
}
