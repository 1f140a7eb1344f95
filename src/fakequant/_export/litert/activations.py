"""Activations. Those that only limit values become limits of codes, or part of the kernel before them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fakequant._export.litert.builder import Constant, Grid, Known, Pending, Value
from fakequant._export.litert.elementwise import unary
from fakequant._export.litert.layers import FUSED
from fakequant._export.litert.operations import Operations, dtype_of, shape_of

aten = torch.ops.aten


def clamped(t: Operations, node: Node, x: Value, low: float | None, high: float | None) -> Value:
    """Limits a value. Before a quantizer, this limits codes: rounding is monotonic."""
    x = t.cast(x, dtype_of(node))
    codes_given = t.builder.codes_of(x)
    if codes_given is not None and low == 0 and high is None:  # a ReLU keeps the grid
        grid = Grid.of(codes_given.tensor)
        limits = dataclasses.replace(grid, low=max(grid.zero_point, grid.low))
        return codes_given.like(t.builder.limited(codes_given.tensor, limits))

    def floats() -> Known:
        found = t.builder.floats(x)
        if (low, high) in ((0, None), (0, 6)) and found.tensor.dtype == "float32":
            return t.unary(found, "RELU" if high is None else "RELU6")
        for code, bound in (("MAXIMUM", low), ("MINIMUM", high)):
            found = found if bound is None else t.with_number(code, found, bound)
        return found

    def codes(grid: Grid) -> Known | None:
        if isinstance(x, Pending):
            return x.codes(grid.limited(low, high))
        found = t.builder.codes_of(x)
        return None if found is not None else t.builder.on_grid(x, grid.limited(low, high))

    return Pending(shape_of(node), floats, codes) if dtype_of(node) == torch.float32 else floats()


def relu(t: Operations, node: Node, x: Value) -> Value:
    return clamped(t, node, x, 0.0, None)


def relu6(t: Operations, node: Node, x: Value) -> Value:
    return clamped(t, node, x, 0.0, 6.0)


def hardtanh(t: Operations, node: Node, x: Value, low: float = -1.0, high: float = 1.0) -> Value:
    return clamped(t, node, x, low, high)


def clamp(t: Operations, node: Node, x: Value, low: float | None = None, high: float | None = None) -> Value:
    return clamped(t, node, x, low, high)


def silu(t: Operations, node: Node, x: Value) -> Value:
    x = t.builder.floats(x)
    return t.binary("MUL", ("Mul", {}), x, t.unary(x, "LOGISTIC"))


def hardsigmoid(t: Operations, node: Node, x: Value) -> Value:
    x = t.builder.floats(x)
    options = ("Add", {"fusedActivationFunction": FUSED["RELU6"]})
    made = x.like(t.op("ADD", [x.tensor, t.number(3.0)], x.tensor, options))
    return t.with_number("MUL", made, 1 / 6)


def gelu(t: Operations, node: Node, x: Value, approximate: str = "none") -> Value:
    return t.unary(x, "GELU", ("Gelu", {"approximate": approximate == "tanh"}))


def leaky_relu(t: Operations, node: Node, x: Value, slope: float = 0.01) -> Value:
    return t.unary(x, "LEAKY_RELU", ("LeakyRelu", {"alpha": slope}))


def elu(t: Operations, node: Node, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    x = x if input_scale == 1 else t.with_number("MUL", x, input_scale)
    found = t.builder.floats(x)
    made = t.unary(found, "ELU")
    if alpha != 1:  # max(x, 0) + alpha * min(elu(x), 0)
        below = t.with_number("MINIMUM", made, 0.0)
        made = t.binary("ADD", ("Add", {}), t.unary(found, "RELU"), t.with_number("MUL", below, alpha))
    return made if scale == 1 else t.with_number("MUL", made, scale)


def prelu(t: Operations, node: Node, x: Value, slope: Constant) -> Value:
    rank = len(x.shape)
    shape = [1] * rank
    shape[1 if rank > 1 else 0] = slope.value.numel()
    found = t.builder.floats(x)
    tensors, order, result = t.operands(found, Constant(slope.value.reshape(shape)))
    alpha = t.builder.reshaped(tensors[1], tensors[1].shape[1:]) if rank > 1 else tensors[1]
    return Known(t.op("PRELU", [tensors[0], alpha], result), order)


def softmax(t: Operations, node: Node, x: Value, axis: int, *_: Any) -> Value:
    found = t.builder.with_last(t.builder.floats(x), axis)
    return found.like(t.op("SOFTMAX", [found.tensor], found.tensor, ("Softmax", {"beta": 1.0})))


def log_softmax(t: Operations, node: Node, x: Value, axis: int, *_: Any) -> Value:
    found = t.builder.with_last(t.builder.floats(x), axis)
    return found.like(t.op("LOG_SOFTMAX", [found.tensor], found.tensor, ("LogSoftmax", {})))


# By the operator of torch.
ACTIVATIONS: dict[Any, Callable[..., Any]] = {
    aten.sigmoid.default: unary("LOGISTIC"),
    aten.tanh.default: unary("TANH"),
    aten.hardswish.default: unary("HARD_SWISH", ("HardSwish", {})),
    aten.relu.default: relu,
    aten.relu6.default: relu6,
    aten.hardtanh.default: hardtanh,
    aten.clamp.default: clamp,
    aten.clamp_min.default: lambda t, node, x, low: clamped(t, node, x, low, None),
    aten.clamp_max.default: lambda t, node, x, high: clamped(t, node, x, None, high),
    aten.silu.default: silu,
    aten.hardsigmoid.default: hardsigmoid,
    aten.gelu.default: gelu,
    aten.leaky_relu.default: leaky_relu,
    aten.elu.default: elu,
    aten.prelu.default: prelu,
    aten.softmax.int: softmax,
    aten._softmax.default: softmax,
    aten.log_softmax.int: log_softmax,
    aten._log_softmax.default: log_softmax,
}
