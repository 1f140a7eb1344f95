"""`Operations`: what the functions that translate operators of torch have in common, and the forms they use most."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from fakequant._export.litert.builder import Builder, Constant, Known, Options, Pending, Value, identity, is_long
from fakequant._export.litert.exported_modules import Weight
from fakequant._export.litert.graph import AnyLength, Order, Tensor
from fakequant._runtimes.target import Target


class NoOperator(ValueError):
    """A function of torch has no translation to LiteRT, or LiteRT has no kernel for it."""


class QuantizedWeight:
    """The result of the operator that stands for a quantized weight."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight


class Tokens:
    """The result of a grid whose scales the kernel of the layer that reads it computes."""

    def __init__(self, x: Value) -> None:
        self.x = x


class Operations:
    """Adds operators to a graph, in the order of axes that is at hand."""

    def __init__(self, target: Target) -> None:
        self.builder = Builder(target)
        self.graph = self.builder.graph

    def op(
        self, code: str, inputs: Sequence[Tensor | None], like: Tensor | Sequence[int], options: Options | None = None
    ) -> Tensor:
        """Adds an operator whose result has the type of its first input."""
        shape = like.shape if isinstance(like, Tensor) else tuple(like)
        assert inputs[0] is not None
        return self.graph.add(code, inputs, [Tensor(shape, inputs[0].dtype)], options)

    def unary(self, value: Value, code: str, options: Options | None = None) -> Known:
        """Adds an operator, element by element. Codes count as floats."""
        x = self.builder.floats(value)
        return x.like(self.op(code, [x.tensor], x.tensor, options))

    def number(self, value: float, dtype: str = "float32") -> Tensor:
        return self.graph.constant(np.array(value, dtype), dtype)

    def with_number(self, code: str, value: Value, number: float) -> Known:
        """Adds an operator with a number of the same type. Codes count as floats."""
        x = self.builder.floats(value)
        name = {"ADD": "Add", "MUL": "Mul", "SUB": "Sub", "DIV": "Div", "POW": "Pow"}.get(code, "MaximumMinimum")
        return x.like(self.op(code, [x.tensor, self.number(number, x.tensor.dtype)], x.tensor, (name, {})))

    def operands(self, *values: Value) -> tuple[list[Tensor], Order, list[int]]:
        """Returns operands that are broadcast, in one order of axes, that order, and the shape of the result."""
        rank = max(len(value.shape) for value in values)
        found = [value if isinstance(value, Constant) else self.builder.known(value) for value in values]
        shape = broadcast([value.shape for value in values])
        whole = [one for one in found if isinstance(one, Known) and len(one.order) == rank]
        whole.sort(key=lambda one: prod(one.shape), reverse=True)
        order = whole[0].order if whole else identity(rank)
        tensors = []
        for one in found:
            if isinstance(one, Constant):
                data = one.value.reshape((1,) * (rank - one.value.dim()) + tuple(one.value.shape))
                tensors.append(self.builder.constant(Constant(data), order).tensor)
            else:
                tensors.append(self.builder.arranged(self.widened(one, rank), order).tensor)
        return tensors, order, [shape[axis] for axis in order]

    def with_rows(self, value: Value) -> Value:
        """Returns a value whose rows must all be there. Raises NotImplementedError for constants with one for all."""
        if isinstance(value, Constant) and value.long_shape is not None:
            raise NotImplementedError(f"a constant as long as the batch, in {self.graph.path or 'the model'}")
        return value

    def widened(self, found: Known, rank: int) -> Known:
        """Returns a tensor with more axes of length 1 in front."""
        more = rank - len(found.order)
        if more == 0:
            return found
        made = self.builder.reshaped(found.tensor, (1,) * more + tuple(found.tensor.shape))
        return Known(made, (*identity(more), *(axis + more for axis in found.order)))

    def binary(self, code: str, options: Options | None, *values: Value, dtype: str | None = None) -> Known:
        """Adds an operator on tensors of one type that are broadcast. Codes count as floats."""
        floats = [value if isinstance(value, Constant) else self.builder.floats(value) for value in values]
        tensors, order, shape = self.operands(*floats)
        return Known(self.graph.add(code, tensors, [Tensor(tuple(shape), dtype or tensors[0].dtype)], options), order)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Returns a value with another dtype. Codes count as floats."""
        if isinstance(value, Constant):
            return Constant(value.value.to(dtype), value.long_shape)
        if isinstance(value, Pending):
            return value if dtype == torch.float32 else self.cast(self.builder.floats(value), dtype)
        kind = name_of(dtype).replace("float64", "float32")
        if value.tensor.dtype == kind or (value.tensor.is_codes and kind == "float32"):
            return value
        value = self.builder.floats(value)
        return value.like(self.graph.add("CAST", [value.tensor], [Tensor(value.tensor.shape, kind)], ("Cast", {})))


def broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Returns the shape of the result of operands with these shapes."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return [next((size for size in sizes if is_long(size)), 1) for sizes in zip(*padded, strict=True)]


def as_value(operand: Any) -> Value:
    """Returns an operand as a value. Numbers are constants."""
    return operand if isinstance(operand, (Constant, Known, Pending)) else Constant(torch.tensor(operand))


def _result_of(node: Node) -> torch.Tensor:
    """Returns a node's result as the exporter sees it. Of several, the first."""
    result: Any = node.meta["val"]
    found: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
    return found


def shape_of(node: Node) -> tuple[int, ...]:
    """Returns the shape of a node's result, with the lengths of the example."""
    return tuple(length_of(size) for size in _result_of(node).shape)


def dtype_of(node: Node) -> torch.dtype:
    """Returns the type of the elements of a node's result."""
    return _result_of(node).dtype


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a type in NumPy."""
    return str(dtype).removeprefix("torch.")


def length_of(size: Any) -> int:
    return size if isinstance(size, int) else AnyLength(int(size.node.hint))


def path_of(node: Node) -> str:
    """Returns the path of the module whose code calls an operator."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if isinstance(path, str) and not path.startswith("_empty")]
    return paths[-1] if paths else ""


def no_operator(node: Node, name: str) -> NoOperator:
    """Returns the error for a function of torch that has no translation."""
    return NoOperator(
        f"{path_of(node) or 'The model'} calls {name}, which fakequant cannot translate to LiteRT.\n"
        "Use other operations there."
    )
