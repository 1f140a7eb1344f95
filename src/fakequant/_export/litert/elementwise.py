"""Arithmetic, comparisons and choices, element by element."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fakequant._export.litert.builder import Constant, Grid, Known, Options, Pending, Value, scale_of
from fakequant._export.litert.graph import Tensor
from fakequant._export.litert.layers import FUSED
from fakequant._export.litert.operations import Operations, as_value, shape_of
from fakequant._runtimes.litert.arithmetic import has_addition, has_product

aten = torch.ops.aten


def _integers(t: Operations, code: str, name: str, a: Value, b: Value, grid: Grid) -> Known | None:
    """Adds an operator on codes, if both operands are on grids for which there is a kernel."""
    left, right = t.builder.codes_of(a), t.builder.codes_of(b)
    has_kernel = has_addition if code == "ADD" else has_product
    if left is None or right is None or not has_kernel(scale_of(left.tensor), scale_of(right.tensor), grid.scale):
        return None
    tensors, order, shape = t.operands(left, right)
    out, activation, limited = t.builder.result(grid, shape)
    options = (name, {"fusedActivationFunction": FUSED[activation]})
    return Known(limited(t.graph.add(code, tensors, [out], options)), order)


def _arithmetic(t: Operations, node: Node, code: str, name: str, a: Any, b: Any) -> Value:
    values = [as_value(a), as_value(b)]
    if node.meta["val"].dtype != torch.float32:
        tensors, order, shape = t.operands(*(t.cast(value, node.meta["val"].dtype) for value in values))
        kind = str(node.meta["val"].dtype).removeprefix("torch.")
        return Known(t.graph.add(code, tensors, [Tensor(tuple(shape), kind)], (name, {})), order)
    left, right = (t.cast(value, torch.float32) for value in values)
    path = t.graph.path

    def floats() -> Known:
        t.graph.path = path
        return t.binary(code, (name, {}), left, right)

    def codes(grid: Grid) -> Known | None:
        return _integers(t, code, name, left, right, grid) if code in ("ADD", "MUL") else None

    return Pending(shape_of(node), floats, codes)


def add(t: Operations, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    b = b if alpha == 1 else times(t, b, alpha)
    return _arithmetic(t, node, "ADD", "Add", a, b)


def times(t: Operations, value: Any, number: float) -> Any:
    if not isinstance(value, (Constant, Known, Pending)):
        return value * number
    return Constant(value.value * number) if isinstance(value, Constant) else t.with_number("MUL", value, number)


def sub(t: Operations, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _arithmetic(t, node, "SUB", "Sub", a, b if alpha == 1 else times(t, b, alpha))


def rsub(t: Operations, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return sub(t, node, b, a, alpha)


def mul(t: Operations, node: Node, a: Any, b: Any) -> Value:
    return _arithmetic(t, node, "MUL", "Mul", a, b)


def div(t: Operations, node: Node, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    made = _arithmetic(t, node, "DIV", "Div", a, b)
    return t.unary(made, "FLOOR") if rounding_mode == "floor" else made


def pow_(t: Operations, node: Node, x: Value, exponent: Any) -> Value:
    known = {2: "SQUARE", 0.5: "SQRT", -0.5: "RSQRT"}
    if isinstance(exponent, (int, float)):
        return t.unary(x, known[exponent]) if exponent in known else t.with_number("POW", x, exponent)
    return t.binary("POW", ("Pow", {}), x, as_value(exponent))


def _extreme(code: str) -> Callable[..., Value]:
    return lambda t, node, a, b: t.binary(code, ("MaximumMinimum", {}), as_value(a), as_value(b))


def unary(code: str, options: Options | None = None) -> Callable[..., Value]:
    return lambda t, node, x, *_: t.unary(x, code, options)


def reciprocal(t: Operations, node: Node, x: Value) -> Value:
    return t.binary("DIV", ("Div", {}), Constant(torch.ones(())), x)


def selected(t: Operations, condition: Value, a: Value, b: Value) -> Known:
    values = [as_value(one) for one in (condition, a, b)]
    known = [one if isinstance(one, Constant) else t.builder.floats(one) for one in values]
    tensors, order, shape = t.operands(*known)
    kind = tensors[1].dtype
    return Known(t.graph.add("SELECT_V2", tensors, [Tensor(tuple(shape), kind)], ("SelectV2", {})), order)


def where(t: Operations, node: Node, condition: Value, a: Any, b: Any) -> Value:
    dtype = node.meta["val"].dtype
    return selected(t, condition, t.cast(as_value(a), dtype), t.cast(as_value(b), dtype))


def masked_fill(t: Operations, node: Node, x: Value, mask: Value, number: Any) -> Value:
    return where(t, node, mask, number, x)


def _comparison(code: str, name: str) -> Callable[..., Value]:
    def compare(t: Operations, node: Node, a: Any, b: Any) -> Value:
        values = [as_value(one) for one in (a, b)]
        kinds = [t.builder.known(one).tensor.dtype for one in values if not isinstance(one, Constant)]
        kind = getattr(torch, "float32" if "float32" in kinds or "int8" in kinds else kinds[0])
        return t.binary(code, (name, {}), *(t.cast(one, kind) for one in values), dtype="bool")

    return compare


def _logical(code: str, name: str) -> Callable[..., Value]:
    return lambda t, node, *values: t.binary(code, (name, {}), *values, dtype="bool")


# By the operator of torch.
ELEMENTWISE: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: add,
    aten.add.Scalar: add,
    aten.sub.Tensor: sub,
    aten.sub.Scalar: sub,
    aten.rsub.Scalar: rsub,
    aten.rsub.Tensor: rsub,
    aten.mul.Tensor: mul,
    aten.mul.Scalar: mul,
    aten.div.Tensor: div,
    aten.div.Scalar: div,
    aten.div.Tensor_mode: div,
    aten.pow.Tensor_Scalar: pow_,
    aten.pow.Tensor_Tensor: pow_,
    aten.maximum.default: _extreme("MAXIMUM"),
    aten.minimum.default: _extreme("MINIMUM"),
    aten.reciprocal.default: reciprocal,
    aten.neg.default: unary("NEG", ("Neg", {})),
    aten.abs.default: unary("ABS", ("Abs", {})),
    aten.exp.default: unary("EXP", ("Exp", {})),
    aten.log.default: unary("LOG"),
    aten.log1p.default: lambda t, node, x: t.unary(t.with_number("ADD", x, 1.0), "LOG"),
    aten.expm1.default: lambda t, node, x: t.with_number("SUB", t.unary(x, "EXP", ("Exp", {})), 1.0),
    aten.sqrt.default: unary("SQRT"),
    aten.rsqrt.default: unary("RSQRT"),
    aten.square.default: unary("SQUARE", ("Square", {})),
    aten.sin.default: unary("SIN"),
    aten.cos.default: unary("COS", ("Cos", {})),
    aten.floor.default: unary("FLOOR"),
    aten.ceil.default: unary("CEIL"),
    aten.round.default: unary("ROUND"),
    aten.sign.default: unary("SIGN"),
    aten.where.self: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.eq.Tensor: _comparison("EQUAL", "Equal"),
    aten.eq.Scalar: _comparison("EQUAL", "Equal"),
    aten.ne.Tensor: _comparison("NOT_EQUAL", "NotEqual"),
    aten.ne.Scalar: _comparison("NOT_EQUAL", "NotEqual"),
    aten.lt.Tensor: _comparison("LESS", "Less"),
    aten.lt.Scalar: _comparison("LESS", "Less"),
    aten.le.Tensor: _comparison("LESS_EQUAL", "LessEqual"),
    aten.le.Scalar: _comparison("LESS_EQUAL", "LessEqual"),
    aten.gt.Tensor: _comparison("GREATER", "Greater"),
    aten.gt.Scalar: _comparison("GREATER", "Greater"),
    aten.ge.Tensor: _comparison("GREATER_EQUAL", "GreaterEqual"),
    aten.ge.Scalar: _comparison("GREATER_EQUAL", "GreaterEqual"),
    aten.logical_and.default: _logical("LOGICAL_AND", "LogicalAnd"),
    aten.bitwise_and.Tensor: _logical("LOGICAL_AND", "LogicalAnd"),
    aten.logical_or.default: _logical("LOGICAL_OR", "LogicalOr"),
    aten.bitwise_or.Tensor: _logical("LOGICAL_OR", "LogicalOr"),
    aten.logical_not.default: _logical("LOGICAL_NOT", "LogicalNot"),
    aten.bitwise_not.default: _logical("LOGICAL_NOT", "LogicalNot"),
}
