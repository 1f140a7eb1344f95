"""From a traced model to the graph of a file: walks through its nodes, and calls the function for each operator."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import Node

from fakequant._export.litert.activations import ACTIVATIONS
from fakequant._export.litert.builder import Constant, Grid, Known, Pending, Value, identity
from fakequant._export.litert.elementwise import ELEMENTWISE, add
from fakequant._export.litert.exported_modules import Tables, Weight
from fakequant._export.litert.graph import AnyLength, Graph, Tensor
from fakequant._export.litert.images import IMAGES
from fakequant._export.litert.kernels import require_kernels
from fakequant._export.litert.layers import Layer, layer
from fakequant._export.litert.moves import MOVES, transposed
from fakequant._export.litert.operations import (
    NoOperator,
    Operations,
    QuantizedWeight,
    Tokens,
    dtype_of,
    length_of,
    name_of,
    no_operator,
    path_of,
    shape_of,
)
from fakequant._export.litert.operators import GRID, TOKEN_GRID, WEIGHT
from fakequant._export.litert.products import PRODUCTS, matmul
from fakequant._export.litert.reductions import REDUCTIONS
from fakequant._export.litert.selections import SELECTIONS, embedding
from fakequant._export.notes import call_name
from fakequant._runtimes.target import Target

aten = torch.ops.aten
_HANDLERS = {**ELEMENTWISE, **ACTIVATIONS, **REDUCTIONS, **PRODUCTS, **MOVES, **SELECTIONS, **IMAGES}


def translate(program: ExportedProgram, tables: Tables, target: Target, results: list[str]) -> Graph:
    """Returns the graph of a file for a traced model."""
    return _Translation(program, tables, target).run(results)


class _Translation(Operations):
    """Walks through the nodes of a traced model."""

    def __init__(self, program: ExportedProgram, tables: Tables, target: Target) -> None:
        super().__init__(target)
        self.program, self.tables = program, tables
        self.values: dict[Node, Any] = {}
        self.calls: dict[str, int] = {}

    def run(self, results: list[str]) -> Graph:
        _drop_checks(self.program)
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs if hasattr(spec.arg, "name")}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.placeholder(node, specs[node.name])
            elif node.op == "call_function":
                self.graph.path = path_of(node)
                self.values[node] = self.call(node)
            elif node.op == "output":
                self.outputs(node, results)
        self.graph.drop_unused()
        require_kernels(self.graph)
        return self.graph

    def placeholder(self, node: Node, spec: Any) -> Any:
        program = self.program
        if spec.kind == InputKind.USER_INPUT:
            if not isinstance(spec.arg, TensorArgument):
                return None
            shape = shape_of(node)
            tensor = Tensor(shape, name_of(dtype_of(node)))
            self.graph.inputs.append((node.name, tensor))
            return Known(tensor, identity(len(shape)))
        found = program.state_dict.get(spec.target)
        return Constant(program.constants[spec.target] if found is None else found)

    def outputs(self, node: Node, names: list[str]) -> None:
        taken: set[int] = {id(tensor) for _, tensor in self.graph.inputs}
        for name, result in zip(names, node.args[0], strict=True):  # type: ignore[arg-type]
            found = self.builder.floats(self.with_rows(self.values[result]))
            tensor = self.builder.arranged(found, identity(len(found.order))).tensor
            if tensor.data is not None or id(tensor) in taken:  # an output is computed, and by itself
                sizes = self.graph.constant([int(one) for one in tensor.signature], "int32")
                tensor = self.graph.add(
                    "RESHAPE", [tensor, sizes], [Tensor(tensor.shape, tensor.dtype)], ("Reshape", {})
                )
            taken.add(id(tensor))
            self.graph.outputs.append((name, tensor))

    def call(self, node: Node) -> Any:
        target: Any = node.target
        if isinstance(node.meta.get("val"), (torch.SymInt, int)):
            return length_of(node.meta["val"])
        if target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore
        args = tuple(self.value(arg) for arg in node.args)
        kwargs = {name: self.value(arg) for name, arg in node.kwargs.items()}
        if target in _OWN:
            return _OWN[target](self, node, *args, **kwargs)
        leaves = [*_leaves(args), *_leaves(list(kwargs.values()))]
        if not any(isinstance(leaf, (Known, Pending, QuantizedWeight, Tokens)) for leaf in leaves):
            return self.folded(node, args, kwargs)
        if target not in _HANDLERS:
            raise no_operator(node, str(target))
        args, kwargs = _map(args, self.plain), _map(kwargs, self.plain)
        return _HANDLERS[target](self, node, *args, **kwargs)

    def plain(self, value: Any) -> Any:
        """Returns a weight that is read by a function as a constant."""
        if isinstance(value, QuantizedWeight):
            return Constant(value.weight.floats)
        return value.x if isinstance(value, Tokens) else value

    def folded(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Computes what does not depend on inputs."""
        target: Any = node.target
        value = target(*_map(args, _one_row), **_map(kwargs, _one_row))
        if not isinstance(value, torch.Tensor):
            return [Constant(one) for one in value] if isinstance(value, (tuple, list)) else value
        shape = shape_of(node)
        if not any(isinstance(length, AnyLength) for length in shape):
            return Constant(value)
        whole = target(*_map(args, _all_rows), **_map(kwargs, _all_rows))
        if not torch.equal(value.expand_as(whole), whole):
            raise NotImplementedError(f"a constant as long as the batch, in {path_of(node) or 'the model'}")
        return Constant(value, shape)

    def value(self, arg: Any) -> Any:
        """Returns an argument of a call, with values for nodes."""
        if isinstance(arg, Node):
            if arg not in self.values:
                raise NoOperator(f"an unknown node {arg}")
            return self.values[arg]
        if isinstance(arg, (list, tuple)):
            return [self.value(one) for one in arg]
        return arg

    # --- quantizers and layers

    def grid(self, node: Node, x: Value, scale: float, zero_point: int, low: int, high: int, path: str) -> Value:
        bits = 8 if high - low < 256 else 16
        shift = -128 if bits == 8 and high > 127 else 0  # unsigned codes are stored as int8
        grid = Grid(float(np.float32(scale)), zero_point + shift, low + shift, high + shift, bits)
        found = self.builder.on_grid(self.plain(x), grid)
        number = self.calls[path] = self.calls.get(path, -1) + 1
        self.graph.codes[call_name(path, number)] = found.tensor, found.order
        return found

    def token_grid(self, node: Node, x: Value, path: str) -> Tokens:
        return Tokens(self.plain(x))

    def weight(self, node: Node, floats: Constant, key: str) -> QuantizedWeight:
        return QuantizedWeight(self.tables.weights[key])

    def layer(self, node: Node, x: Any, weight: Any, bias: Any, **settings: Any) -> Value:
        is_dynamic = isinstance(x, Tokens)
        if isinstance(bias, (Known, Pending)) or isinstance(weight, (Known, Pending)):
            raise NoOperator(
                f"{path_of(node) or 'The model'} computes a weight or a bias, which LiteRT must know.\n"
                "Use a layer with parameters."
            )
        found = (
            weight.weight if isinstance(weight, QuantizedWeight) else Weight(path=self.graph.path, floats=weight.value)
        )
        if isinstance(x, Constant):
            x = self.builder.known(x)
        return layer(
            self.builder,
            Layer(
                x=self.plain(x),
                weight=found,
                bias=None if bias is None else bias.value,
                shape=shape_of(node),
                is_dynamic=is_dynamic,
                **settings,
            ),
        )

    def linear(self, node: Node, x: Any, weight: Any, bias: Any = None) -> Value:
        if isinstance(weight, (Known, Pending)):
            product = matmul(self, node, self.plain(x), transposed(self, weight))
            return product if bias is None else add(self, node, product, bias)
        return self.layer(node, x, weight, bias)

    def convolution(
        self,
        node: Node,
        x: Any,
        weight: Any,
        bias: Any,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        is_transposed: bool,
        output_padding: list[int],
        groups: int,
    ) -> Value:
        axes = len(shape_of(node)) - 2

        def per_axis(given: list[int]) -> tuple[int, ...]:
            return tuple(given) * axes if len(given) == 1 else tuple(given)

        return self.layer(
            node,
            x,
            weight,
            bias,
            stride=per_axis(stride),
            padding=per_axis(padding),
            dilation=per_axis(dilation),
            is_transposed=is_transposed,
            groups=groups,
        )


def _drop_checks(program: ExportedProgram) -> None:
    """Removes nodes that nothing reads, such as the checks that casts leave behind. A file has none."""
    for node in reversed(program.graph.nodes):
        if node.op == "call_function" and not node.users and node.target is not GRID:  # calls of grids are counted
            program.graph.erase_node(node)


def _leaves(args: Any) -> list[Any]:
    if isinstance(args, (list, tuple)):
        return [leaf for arg in args for leaf in _leaves(arg)]
    return [args]


def _map(args: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(args, dict):
        return {name: _map(arg, function) for name, arg in args.items()}
    if isinstance(args, (list, tuple)):
        return type(args)(_map(arg, function) for arg in args)
    return function(args)


def _one_row(arg: Any) -> Any:
    """Returns an argument with length 1 for axes of any length."""
    if isinstance(arg, Constant):
        return arg.value
    return 1 if isinstance(arg, AnyLength) else arg


def _all_rows(arg: Any) -> Any:
    """Returns an argument with the lengths of the example."""
    if isinstance(arg, Constant):
        return arg.value.expand(tuple(int(length) for length in arg.shape))
    return int(arg) if isinstance(arg, AnyLength) else arg


# Operators whose arguments may be quantized weights.
_OWN: dict[Any, Callable[..., Any]] = {
    GRID: _Translation.grid,
    TOKEN_GRID: _Translation.token_grid,
    WEIGHT: _Translation.weight,
    aten.linear.default: _Translation.linear,
    aten.convolution.default: _Translation.convolution,
    aten.embedding.default: embedding,
}

# The operators of torch that are translated as they are. Others are decomposed first.
KNOWN = {*_OWN, *_HANDLERS}
