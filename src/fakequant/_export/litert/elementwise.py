"""Arithmetic, comparisons and choices, element by element."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fakequant._export.litert.builder import Constant, Grid, Known, Options, Pending, Value, scale_of, stored_shape
from fakequant._export.litert.graph import Tensor
from fakequant._export.litert.layers import FUSED
from fakequant._export.litert.operations import Operations, as_value, dtype_of, no_operator, shape_of

aten = torch.ops.aten


def _integers(t: Operations, code: str, name: str, a: Value, b: Value, grid: Grid) -> Known | None:
    """Adds an operator on codes, if both operands are on grids for which there is a kernel."""
    operands, kernels = t.builder.operands_of(grid, a, b), t.builder.kernels(grid)
    if operands is None:
        return None
    left, right = operands
    has_kernel = kernels.has_addition if code == "ADD" else kernels.has_product
    if not has_kernel(scale_of(left.tensor), scale_of(right.tensor), grid.scale):
        return None
    tensors, order, shape = t.operands(left, right)
    out, activation, limited = t.builder.result(grid, shape)
    # Scales of 16-bit codes are no powers of two.
    more = {"potScaleInt16": False} if code == "ADD" and grid.bits == 16 else {}
    options = (name, {"fusedActivationFunction": FUSED[activation], **more})
    return Known(limited(t.graph.add(code, tensors, [out], options)), order)


def _promoted(t: Operations, node: Node, *operands: Any) -> list[Value]:
    """Returns operands with the type of a node's result."""
    return [t.cast(as_value(one), dtype_of(node)) for one in operands]


def _arithmetic(t: Operations, node: Node, code: str, name: str, a: Any, b: Any) -> Value:
    left, right = _promoted(t, node, a, b)
    if dtype_of(node) == torch.bool and code in ("ADD", "MUL"):
        return (_or if code == "ADD" else _and)(t, node, left, right)
    if dtype_of(node) != torch.float32:
        return t.binary(code, (name, {}), left, right)
    path = t.graph.path

    def floats() -> Known:
        t.graph.path = path
        return t.binary(code, (name, {}), left, right)

    def codes(grid: Grid) -> Known | None:
        return _integers(t, code, name, left, right, grid) if code in ("ADD", "MUL") else None

    return Pending(shape_of(node), floats, codes)


def add(t: Operations, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _arithmetic(t, node, "ADD", "Add", a, times(t, node, b, alpha))


def times(t: Operations, node: Node, value: Any, number: float) -> Any:
    """Returns a multiple of an operand, with the type of a node's result."""
    if number == 1:
        return value
    (value,) = _promoted(t, node, value)
    if isinstance(value, Constant):
        return Constant(value.value * number, value.long_shape)
    return t.with_number("MUL", value, number)


def sub(t: Operations, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _arithmetic(t, node, "SUB", "Sub", a, times(t, node, b, alpha))


def rsub(t: Operations, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return sub(t, node, b, a, alpha)


def mul(t: Operations, node: Node, a: Any, b: Any) -> Value:
    return _arithmetic(t, node, "MUL", "Mul", a, b)


def div(t: Operations, node: Node, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    is_whole = not dtype_of(node).is_floating_point
    if rounding_mode == "floor" and is_whole:
        return _arithmetic(t, node, "FLOOR_DIV", "FloorDiv", a, b)
    if rounding_mode == "floor":  # torch does not round the quotient down: it may have been rounded up
        left, right = _promoted(t, node, a, b)
        rest = t.binary("FLOOR_MOD", ("FloorMod", {}), left, right)
        multiple = t.binary("SUB", ("Sub", {}), left, rest)
        return t.unary(t.binary("DIV", ("Div", {}), multiple, right), "ROUND")
    made = _arithmetic(t, node, "DIV", "Div", a, b)
    return made if rounding_mode is None or is_whole else trunc(t, node, made)  # DIV truncates integers


def trunc(t: Operations, node: Node, x: Value) -> Value:
    """Rounds down, or up below 0."""
    is_negative = t.binary("LESS", ("Less", {}), x, Constant(torch.zeros(())), dtype="bool")
    return selected(t, is_negative, t.unary(x, "CEIL"), t.unary(x, "FLOOR"))


def pow_(t: Operations, node: Node, x: Any, exponent: Any) -> Value:
    base, power = _promoted(t, node, x, exponent)
    known = {0.5: "SQRT", -0.5: "RSQRT"}
    if exponent == 2:
        return square(t, node, base)
    return t.unary(base, known[exponent]) if exponent in known else t.binary("POW", ("Pow", {}), base, power)


def square(t: Operations, node: Node, x: Value) -> Value:
    if dtype_of(node) == torch.float32:
        return t.unary(x, "SQUARE", ("Square", {}))
    return t.binary("MUL", ("Mul", {}), x, x)


def absolute(t: Operations, node: Node, x: Value) -> Value:
    if dtype_of(node) == torch.float32:
        return t.unary(x, "ABS", ("Abs", {}))
    return t.binary("MAXIMUM", ("MaximumMinimum", {}), x, t.unary(x, "NEG", ("Neg", {})))


def binary(code: str, name: str) -> Callable[..., Value]:
    return lambda t, node, a, b: t.binary(code, (name, {}), *_promoted(t, node, a, b))


def unary(code: str, options: Options | None = None) -> Callable[..., Value]:
    return lambda t, node, x, *_: t.unary(t.cast(x, dtype_of(node)), code, options)


def reciprocal(t: Operations, node: Node, x: Value) -> Value:
    return _arithmetic(t, node, "DIV", "Div", 1.0, x)


def full_like(t: Operations, node: Node, x: Value, number: Any, **_: Any) -> Constant:
    shape = shape_of(node)
    stored = torch.full(stored_shape(shape), number, dtype=dtype_of(node))
    return Constant(stored, None if shape == stored.shape else shape)


def isnan(t: Operations, node: Node, x: Value) -> Value:
    return t.binary("NOT_EQUAL", ("NotEqual", {}), x, x, dtype="bool")


def clamp_by_tensors(t: Operations, node: Node, x: Value, low: Any = None, high: Any = None) -> Value:
    for code, bound in (("MAXIMUM", low), ("MINIMUM", high)):
        x = x if bound is None else binary(code, "MaximumMinimum")(t, node, x, bound)
    return x


def selected(t: Operations, condition: Value, a: Value, b: Value) -> Known:
    values = [as_value(one) for one in (condition, a, b)]
    known = [one if isinstance(one, Constant) else t.builder.floats(one) for one in values]
    tensors, order, shape = t.operands(*known)
    kind = tensors[1].dtype
    return Known(t.graph.add("SELECT_V2", tensors, [Tensor(tuple(shape), kind)], ("SelectV2", {})), order)


def where(t: Operations, node: Node, condition: Value, a: Any, b: Any) -> Value:
    return selected(t, condition, *_promoted(t, node, a, b))


def masked_fill(t: Operations, node: Node, x: Value, mask: Value, number: Any) -> Value:
    return where(t, node, mask, number, x)


def _comparison(code: str, name: str) -> Callable[..., Value]:
    def compare(t: Operations, node: Node, a: Any, b: Any) -> Value:
        given: Any = [one.meta["val"] if isinstance(one, Node) else one for one in node.args]
        kind = torch.result_type(*given)
        return t.binary(code, (name, {}), *(t.cast(as_value(one), kind) for one in (a, b)), dtype="bool")

    return compare


def _logical(code: str, name: str) -> Callable[..., Value]:
    def compute(t: Operations, node: Node, *operands: Any) -> Value:
        if dtype_of(node) != torch.bool:
            raise no_operator(node, f"{node.target} of integers")
        return t.binary(code, (name, {}), *_promoted(t, node, *operands))

    return compute


def bitwise_not(t: Operations, node: Node, x: Value) -> Value:
    """Of integers: -1 - x."""
    return logical_not(t, node, x) if dtype_of(node) == torch.bool else sub(t, node, -1, x)


logical_not = _logical("LOGICAL_NOT", "LogicalNot")
_equal, _unequal = _comparison("EQUAL", "Equal"), _comparison("NOT_EQUAL", "NotEqual")
_and, _or = _logical("LOGICAL_AND", "LogicalAnd"), _logical("LOGICAL_OR", "LogicalOr")
_xor = _logical("NOT_EQUAL", "NotEqual")
_maximum, _minimum = binary("MAXIMUM", "MaximumMinimum"), binary("MINIMUM", "MaximumMinimum")
_remainder = binary("FLOOR_MOD", "FloorMod")


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
    aten.pow.Scalar: pow_,
    aten.maximum.default: _maximum,
    aten.minimum.default: _minimum,
    aten.clamp.Tensor: clamp_by_tensors,
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.reciprocal.default: reciprocal,
    aten.neg.default: unary("NEG", ("Neg", {})),
    aten.abs.default: absolute,
    aten.exp.default: unary("EXP", ("Exp", {})),
    aten.log.default: unary("LOG"),
    aten.log1p.default: lambda t, node, x: t.unary(add(t, node, x, 1.0), "LOG"),
    aten.expm1.default: lambda t, node, x: t.with_number("SUB", unary("EXP", ("Exp", {}))(t, node, x), 1.0),
    aten.sqrt.default: unary("SQRT"),
    aten.rsqrt.default: unary("RSQRT"),
    aten.square.default: square,
    aten.sin.default: unary("SIN"),
    aten.cos.default: unary("COS", ("Cos", {})),
    aten.floor.default: unary("FLOOR"),
    aten.ceil.default: unary("CEIL"),
    aten.round.default: unary("ROUND"),
    aten.trunc.default: trunc,
    aten.sign.default: unary("SIGN"),
    aten.isnan.default: isnan,
    aten.full_like.default: full_like,
    aten.where.self: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.eq.Tensor: _equal,
    aten.eq.Scalar: _equal,
    aten.ne.Tensor: _unequal,
    aten.ne.Scalar: _unequal,
    aten.lt.Tensor: _comparison("LESS", "Less"),
    aten.lt.Scalar: _comparison("LESS", "Less"),
    aten.le.Tensor: _comparison("LESS_EQUAL", "LessEqual"),
    aten.le.Scalar: _comparison("LESS_EQUAL", "LessEqual"),
    aten.gt.Tensor: _comparison("GREATER", "Greater"),
    aten.gt.Scalar: _comparison("GREATER", "Greater"),
    aten.ge.Tensor: _comparison("GREATER_EQUAL", "GreaterEqual"),
    aten.ge.Scalar: _comparison("GREATER_EQUAL", "GreaterEqual"),
    aten.logical_and.default: _and,
    aten.bitwise_and.Tensor: _and,
    aten.bitwise_and.Scalar: _and,
    aten.logical_or.default: _or,
    aten.bitwise_or.Tensor: _or,
    aten.bitwise_or.Scalar: _or,
    aten.logical_xor.default: _xor,
    aten.bitwise_xor.Tensor: _xor,
    aten.logical_not.default: logical_not,
    aten.bitwise_not.default: bitwise_not,
}
