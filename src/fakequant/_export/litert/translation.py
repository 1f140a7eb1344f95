"""From a traced model to the graph of a file: a function for each operator of torch."""

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import Node

from fakequant._export.litert.builder import (
    HIGH,
    LOW,
    Builder,
    Constant,
    Grid,
    Known,
    Options,
    Pending,
    Value,
    identity,
    is_long,
)
from fakequant._export.litert.exported_modules import Tables, Weight
from fakequant._export.litert.graph import AnyLength, Graph, Order, Tensor
from fakequant._export.litert.layers import ACTIVATIONS, SAME, VALID, Layer, layer, pad_zeros
from fakequant._export.litert.operators import GRID, TOKEN_GRID, WEIGHT
from fakequant._export.notes import call_name
from fakequant._runtimes.litert.arithmetic import has_addition, has_product

aten = torch.ops.aten
_NO_OPERATOR = "{where} calls {name}, for which LiteRT has no operator.\nUse other operations there."


class NoOperator(ValueError):
    """LiteRT has no operator for a function of torch."""


class _Weight:
    """The result of the operator that stands for a quantized weight."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight


class _Tokens:
    """The result of a grid whose scales the kernel of the layer that reads it computes."""

    def __init__(self, x: Value) -> None:
        self.x = x


def shape_of(node: Node) -> tuple[int, ...]:
    """Returns the shape of a node's result, with the lengths of the example."""
    return tuple(length_of(size) for size in node.meta["val"].shape)


def length_of(size: Any) -> int:
    return size if isinstance(size, int) else AnyLength(int(size.node.hint))


def path_of(node: Node) -> str:
    """Returns the path of the module whose code calls an operator."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if isinstance(path, str) and not path.startswith("_empty")]
    return paths[-1] if paths else ""


def translate(program: ExportedProgram, tables: Tables, results: list[str]) -> Graph:
    """Returns the graph of a file for a traced model."""
    return _Translation(program, tables).run(results)


class _Translation:
    """Walks through the nodes of a traced model."""

    def __init__(self, program: ExportedProgram, tables: Tables) -> None:
        self.program, self.tables, self.builder = program, tables, Builder()
        self.graph, self.values = self.builder.graph, dict[Node, Any]()
        self.calls: dict[str, int] = {}

    def run(self, results: list[str]) -> Graph:
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
        return self.graph

    def placeholder(self, node: Node, spec: Any) -> Any:
        program = self.program
        if spec.kind == InputKind.USER_INPUT:
            if not isinstance(spec.arg, TensorArgument):
                return None
            shape, kind = shape_of(node), str(node.meta["val"].dtype).removeprefix("torch.")
            tensor = Tensor(shape, kind)
            self.graph.inputs.append((node.name, tensor))
            return Known(tensor, identity(len(shape)))
        found = program.state_dict.get(spec.target)
        return Constant(program.constants[spec.target] if found is None else found)

    def outputs(self, node: Node, names: list[str]) -> None:
        taken: set[int] = {id(tensor) for _, tensor in self.graph.inputs}
        for name, result in zip(names, node.args[0], strict=True):  # type: ignore[arg-type]
            found = self.builder.floats(self.values[result])
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
        if not any(isinstance(leaf, (Known, Pending, _Weight, _Tokens)) for leaf in leaves):
            return self.folded(node, args, kwargs)
        if target not in HANDLERS:
            raise NoOperator(_NO_OPERATOR.format(where=path_of(node) or "The model", name=str(target)))
        args, kwargs = _map(args, self.plain), _map(kwargs, self.plain)
        return HANDLERS[target](self, node, *args, **kwargs)

    def plain(self, value: Any) -> Any:
        """Returns a weight that is read by a function as a constant."""
        if isinstance(value, _Weight):
            return Constant(value.weight.floats)
        return value.x if isinstance(value, _Tokens) else value

    def folded(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Computes what does not depend on inputs."""
        target: Any = node.target
        if any(isinstance(leaf, AnyLength) for leaf in [*_leaves(args), *_leaves(list(kwargs.values()))]):
            raise NotImplementedError(f"a constant as long as the batch, in {path_of(node) or 'the model'}")
        value = target(*_map(args, _torch_value), **_map(kwargs, _torch_value))
        if isinstance(value, torch.Tensor):
            return Constant(value)
        return [Constant(one) for one in value] if isinstance(value, (tuple, list)) else value

    def value(self, arg: Any) -> Any:
        """Returns an argument of a call, with values for nodes."""
        if isinstance(arg, Node):
            if arg not in self.values:
                raise NoOperator(f"an unknown node {arg}")
            found = self.values[arg]
            return found
        if isinstance(arg, (list, tuple)):
            return [self.value(one) for one in arg]
        return arg

    # --- quantizers and layers

    def grid(self, node: Node, x: Value, scale: float, zero_point: int, low: int, high: int, path: str) -> Value:
        shift = -128 if high > HIGH else 0
        grid = Grid(float(np.float32(scale)), zero_point + shift, low + shift, high + shift)
        found = self.builder.on_grid(self.plain(x), grid)
        number = self.calls[path] = self.calls.get(path, -1) + 1
        self.graph.codes[call_name(path, number)] = found.tensor, found.order
        return found

    def token_grid(self, node: Node, x: Value, path: str) -> _Tokens:
        return _Tokens(self.plain(x))

    def weight(self, node: Node, floats: Constant, key: str) -> _Weight:
        return _Weight(self.tables.weights[key])

    def layer(self, node: Node, x: Any, weight: Any, bias: Any, **settings: Any) -> Value:
        is_dynamic = isinstance(x, _Tokens)
        if isinstance(bias, (Known, Pending)) or isinstance(weight, (Known, Pending)):
            raise NoOperator(
                f"{path_of(node) or 'The model'} computes a weight or a bias, which LiteRT must know.\n"
                "Use a layer with parameters."
            )
        found = weight.weight if isinstance(weight, _Weight) else Weight(path=self.graph.path, floats=weight.value)
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

    # --- what handlers use

    def op(
        self, code: str, inputs: Sequence[Tensor | None], like: Tensor | Sequence[int], options: Options | None = None
    ) -> Tensor:
        shape = like.shape if isinstance(like, Tensor) else tuple(like)
        return self.graph.add(code, inputs, [Tensor(shape, "float32")], options)

    def unary(self, value: Value, code: str, options: Options | None = None) -> Known:
        x = self.builder.floats(value)
        return x.like(self.op(code, [x.tensor], x.tensor, options))

    def number(self, value: float) -> Tensor:
        return self.graph.constant(np.float32(value).reshape(()), "float32")

    def with_number(self, code: str, value: Value, number: float) -> Known:
        x = self.builder.floats(value)
        name = {"ADD": "Add", "MUL": "Mul", "SUB": "Sub", "DIV": "Div", "POW": "Pow"}.get(code, "MaximumMinimum")
        return x.like(self.op(code, [x.tensor, self.number(number)], x.tensor, (name, {})))

    def operands(self, *values: Value, dtype: str | None = None) -> tuple[list[Tensor], Order, list[int]]:
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

    def widened(self, found: Known, rank: int) -> Known:
        """Returns a tensor with more axes of length 1 in front."""
        more = rank - len(found.order)
        if more == 0:
            return found
        made = self.builder.reshaped(found.tensor, (1,) * more + tuple(found.tensor.shape))
        return Known(made, (*identity(more), *(axis + more for axis in found.order)))

    def binary(self, code: str, options: Options | None, *values: Value, dtype: str = "float32") -> Known:
        floats = [value if isinstance(value, Constant) else self.builder.floats(value) for value in values]
        tensors, order, shape = self.operands(*floats)
        return Known(self.graph.add(code, tensors, [Tensor(tuple(shape), dtype)], options), order)


def broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    rank = max(map(len, shapes))
    padded_shapes = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return [next((size for size in sizes if is_long(size)), 1) for sizes in zip(*padded_shapes, strict=True)]


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


def _torch_value(arg: Any) -> Any:
    return arg.value if isinstance(arg, Constant) else arg


# --- arithmetic


def as_value(operand: Any) -> Value:
    return operand if isinstance(operand, (Constant, Known, Pending)) else Constant(torch.tensor(operand))


def _scale(tensor: Tensor) -> float:
    return float(np.asarray(tensor.scale).reshape(-1)[0])


def _integers(t: _Translation, code: str, name: str, a: Value, b: Value, grid: Grid) -> Known | None:
    """Adds an operator on codes, if both operands are on grids for which there is a kernel."""
    left, right = t.builder.codes_of(a), t.builder.codes_of(b)
    has_kernel = has_addition if code == "ADD" else has_product
    if left is None or right is None or not has_kernel(_scale(left.tensor), _scale(right.tensor), grid.scale):
        return None
    tensors, order, shape = t.operands(left, right)
    out, activation, limited = t.builder.result(grid, shape)
    options = (name, {"fusedActivationFunction": ACTIVATIONS[activation]})
    return Known(limited(t.graph.add(code, tensors, [out], options)), order)


def _arithmetic(t: _Translation, node: Node, code: str, name: str, a: Any, b: Any) -> Value:
    values = [as_value(a), as_value(b)]
    if node.meta["val"].dtype != torch.float32:
        tensors, order, shape = t.operands(*(_cast(t, value, node.meta["val"].dtype) for value in values))
        kind = str(node.meta["val"].dtype).removeprefix("torch.")
        return Known(t.graph.add(code, tensors, [Tensor(tuple(shape), kind)], (name, {})), order)
    left, right = (_cast(t, value, torch.float32) for value in values)
    path = t.graph.path

    def floats() -> Known:
        t.graph.path = path
        return t.binary(code, (name, {}), left, right)

    def codes(grid: Grid) -> Known | None:
        return _integers(t, code, name, left, right, grid) if code in ("ADD", "MUL") else None

    return Pending(shape_of(node), floats, codes)


def _cast(t: _Translation, value: Value, dtype: torch.dtype) -> Value:
    if isinstance(value, Constant):
        return Constant(value.value.to(dtype))
    if isinstance(value, Pending):
        return value if dtype == torch.float32 else _cast(t, t.builder.floats(value), dtype)
    kind = str(dtype).removeprefix("torch.").replace("float64", "float32")
    if value.tensor.dtype == kind or (value.tensor.is_codes and kind == "float32"):
        return value
    value = t.builder.floats(value)
    return value.like(t.graph.add("CAST", [value.tensor], [Tensor(value.tensor.shape, kind)], ("Cast", {})))


def add(t: _Translation, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    b = b if alpha == 1 else _times(t, b, alpha)
    return _arithmetic(t, node, "ADD", "Add", a, b)


def _times(t: _Translation, value: Any, number: float) -> Any:
    if not isinstance(value, (Constant, Known, Pending)):
        return value * number
    return Constant(value.value * number) if isinstance(value, Constant) else t.with_number("MUL", value, number)


def sub(t: _Translation, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _arithmetic(t, node, "SUB", "Sub", a, b if alpha == 1 else _times(t, b, alpha))


def rsub(t: _Translation, node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    return sub(t, node, b, a, alpha)


def mul(t: _Translation, node: Node, a: Any, b: Any) -> Value:
    return _arithmetic(t, node, "MUL", "Mul", a, b)


def div(t: _Translation, node: Node, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    made = _arithmetic(t, node, "DIV", "Div", a, b)
    return t.unary(made, "FLOOR") if rounding_mode == "floor" else made


def pow_(t: _Translation, node: Node, x: Value, exponent: Any) -> Value:
    known = {2: "SQUARE", 0.5: "SQRT", -0.5: "RSQRT"}
    if isinstance(exponent, (int, float)):
        return t.unary(x, known[exponent]) if exponent in known else t.with_number("POW", x, exponent)
    return t.binary("POW", ("Pow", {}), x, as_value(exponent))


def _extreme(code: str) -> Callable[..., Value]:
    return lambda t, node, a, b: t.binary(code, ("MaximumMinimum", {}), as_value(a), as_value(b))


def _unary(code: str, options: Options | None = None) -> Callable[..., Value]:
    return lambda t, node, x, *_: t.unary(x, code, options)


def reciprocal(t: _Translation, node: Node, x: Value) -> Value:
    return t.binary("DIV", ("Div", {}), Constant(torch.ones(())), x)


# --- activations


def _clamped(t: _Translation, node: Node, x: Value, low: float | None, high: float | None) -> Value:
    """Limits a value. Before a quantizer, this limits codes: rounding is monotonic."""
    codes_given = t.builder.codes_of(x)
    if codes_given is not None and low == 0 and high is None:  # a ReLU keeps the grid
        grid = Grid(_scale(codes_given.tensor), codes_given.tensor.zero_point)
        limits = Grid(grid.scale, grid.zero_point, max(grid.zero_point, LOW), HIGH)
        return codes_given.like(t.builder.limited(codes_given.tensor, limits))

    def floats() -> Known:
        if (low, high) in ((0, None), (0, 6)):
            return t.unary(x, "RELU" if high is None else "RELU6")
        found = t.builder.floats(x)
        for code, bound in (("MAXIMUM", low), ("MINIMUM", high)):
            found = found if bound is None else t.with_number(code, found, bound)
        return found

    def codes(grid: Grid) -> Known | None:
        if isinstance(x, Pending):
            return x.codes(grid.limited(low, high))
        found = t.builder.codes_of(x)
        return None if found is not None else t.builder.on_grid(x, grid.limited(low, high))

    return Pending(shape_of(node), floats, codes)


def relu(t: _Translation, node: Node, x: Value) -> Value:
    return _clamped(t, node, x, 0.0, None)


def relu6(t: _Translation, node: Node, x: Value) -> Value:
    return _clamped(t, node, x, 0.0, 6.0)


def hardtanh(t: _Translation, node: Node, x: Value, low: float = -1.0, high: float = 1.0) -> Value:
    return _clamped(t, node, x, low, high)


def clamp(t: _Translation, node: Node, x: Value, low: float | None = None, high: float | None = None) -> Value:
    return _clamped(t, node, x, low, high)


def silu(t: _Translation, node: Node, x: Value) -> Value:
    x = t.builder.floats(x)
    return t.binary("MUL", ("Mul", {}), x, t.unary(x, "LOGISTIC"))


def hardsigmoid(t: _Translation, node: Node, x: Value) -> Value:
    x = t.builder.floats(x)
    options = ("Add", {"fusedActivationFunction": ACTIVATIONS["RELU6"]})
    made = x.like(t.op("ADD", [x.tensor, t.number(3.0)], x.tensor, options))
    return t.with_number("MUL", made, 1 / 6)


def gelu(t: _Translation, node: Node, x: Value, approximate: str = "none") -> Value:
    return t.unary(x, "GELU", ("Gelu", {"approximate": approximate == "tanh"}))


def leaky_relu(t: _Translation, node: Node, x: Value, slope: float = 0.01) -> Value:
    return t.unary(x, "LEAKY_RELU", ("LeakyRelu", {"alpha": slope}))


def elu(
    t: _Translation, node: Node, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> Value:
    x = x if input_scale == 1 else t.with_number("MUL", x, input_scale)
    found = t.builder.floats(x)
    if alpha == 1:
        made = t.unary(found, "ELU")
    else:  # max(x, 0) + alpha * (exp(min(x, 0)) - 1)
        below = t.with_number("SUB", t.unary(t.with_number("MINIMUM", found, 0.0), "EXP"), 1.0)
        made = t.binary("ADD", ("Add", {}), t.unary(found, "RELU"), t.with_number("MUL", below, alpha))
    return made if scale == 1 else t.with_number("MUL", made, scale)


def prelu(t: _Translation, node: Node, x: Value, slope: Constant) -> Value:
    rank = len(x.shape)
    shape = [1] * rank
    shape[1 if rank > 1 else 0] = slope.value.numel()
    found = t.builder.floats(x)
    tensors, order, result = t.operands(found, Constant(slope.value.reshape(shape)))
    alpha = t.builder.reshaped(tensors[1], tensors[1].shape[1:]) if rank > 1 else tensors[1]
    return Known(t.op("PRELU", [tensors[0], alpha], result), order)


def softmax(t: _Translation, node: Node, x: Value, axis: int, *_: Any) -> Value:
    found = t.builder.with_last(t.builder.floats(x), axis)
    return found.like(t.op("SOFTMAX", [found.tensor], found.tensor, ("Softmax", {"beta": 1.0})))


def log_softmax(t: _Translation, node: Node, x: Value, axis: int, *_: Any) -> Value:
    found = t.builder.with_last(t.builder.floats(x), axis)
    return found.like(t.op("LOG_SOFTMAX", [found.tensor], found.tensor, ("LogSoftmax", {})))


# --- reductions and norms


def _reduced(t: _Translation, found: Known, code: str, axes: Sequence[int], dtype: str | None = None) -> Known:
    """Reduces axes, which are kept with length 1."""
    places = sorted(found.axis(axis) for axis in axes)
    shape = [1 if place in places else length for place, length in enumerate(found.tensor.shape)]
    constant = t.graph.constant(places, "int32")
    made = Tensor(tuple(shape), dtype or found.tensor.dtype)
    return found.like(t.graph.add(code, [found.tensor, constant], [made], ("Reducer", {"keepDims": True})))


def without_axes(t: _Translation, found: Known, axes: Sequence[int]) -> Known:
    """Removes axes of length 1."""
    rank = len(found.order)
    gone = {axis % rank for axis in axes}
    left = [axis for axis in range(rank) if axis not in gone]
    order = tuple(left.index(axis) for axis in found.order if axis not in gone)
    shape = [length for axis, length in zip(found.order, found.tensor.shape, strict=True) if axis not in gone]
    return Known(t.builder.reshaped(found.tensor, shape), order)


def _reduction(code: str) -> Callable[..., Value]:
    def reduce(t: _Translation, node: Node, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
        axes = [axes] if isinstance(axes, int) else list(axes or range(len(x.shape)))
        axes = [axis % len(x.shape) for axis in axes]
        made = _reduced(t, t.builder.floats(x), code, axes)
        return made if keepdim else without_axes(t, made, axes)

    return reduce


def mean(t: _Translation, node: Node, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
    axes = [axes] if isinstance(axes, int) else list(axes or range(len(x.shape)))
    axes = [axis % len(x.shape) for axis in axes]

    def end(found: Known) -> Known:
        return found if keepdim else without_axes(t, found, axes)

    def codes(grid: Grid) -> Known | None:
        found = t.builder.codes_of(x)
        if found is None or not 2**-8 <= _scale(found.tensor) / grid.scale < 2**8:
            return None
        places = sorted(found.axis(axis) for axis in axes)
        shape = [1 if place in places else length for place, length in enumerate(found.tensor.shape)]
        out, _, _ = t.builder.result(Grid(grid.scale, grid.zero_point), shape)
        inputs = [found.tensor, t.graph.constant(places, "int32")]
        made = t.graph.add("MEAN", inputs, [out], ("Reducer", {"keepDims": True}))
        return end(found.like(t.builder.limited(made, grid)))

    return Pending(shape_of(node), lambda: end(_reduced(t, t.builder.floats(x), "MEAN", axes)), codes)


def _variance(t: _Translation, x: Known, axes: Sequence[int]) -> tuple[Known, Known]:
    """Returns x minus its mean, and the mean of the square of that."""
    centred = t.binary("SUB", ("Sub", {}), x, _reduced(t, x, "MEAN", axes))
    return centred, _reduced(t, t.unary(centred, "SQUARE"), "MEAN", axes)


def variance(
    t: _Translation, node: Node, x: Value, axes: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Value:
    axes = [axis % len(x.shape) for axis in (axes or range(len(x.shape)))]
    number = prod(int(x.shape[axis]) for axis in axes)
    _, made = _variance(t, t.builder.floats(x), axes)
    made = t.with_number("MUL", made, number / (number - (1 if correction is None else correction)))
    return made if keepdim else without_axes(t, made, axes)


def vector_norm(
    t: _Translation, node: Node, x: Value, power: Any = 2, axes: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    if power not in (1, 2):
        raise NoOperator(_NO_OPERATOR.format(where=path_of(node) or "The model", name=f"a norm of order {power}"))
    axes = [axis % len(x.shape) for axis in (axes or range(len(x.shape)))]
    terms = t.unary(x, "SQUARE", ("Square", {})) if power == 2 else t.unary(x, "ABS", ("Abs", {}))
    total = _reduced(t, terms, "SUM", axes)
    total = t.unary(total, "SQRT") if power == 2 else total
    return total if keepdim else without_axes(t, total, axes)


def _normalized(t: _Translation, x: Known, axes: Sequence[int], eps: float) -> Known:
    centred, spread = _variance(t, x, axes)
    factor = t.unary(t.with_number("ADD", spread, eps), "RSQRT")
    return t.binary("MUL", ("Mul", {}), centred, factor)


def _affine(t: _Translation, x: Value, weight: Any, bias: Any) -> Value:
    for code, name, value in (("MUL", "Mul", weight), ("ADD", "Add", bias)):
        x = x if value is None else t.binary(code, (name, {}), x, value)
    return x


def layer_norm(
    t: _Translation, node: Node, x: Value, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, *_: Any
) -> Value:  # fmt: skip
    axes = list(range(len(x.shape) - len(shape), len(x.shape)))
    return _affine(t, _normalized(t, t.builder.floats(x), axes, eps), weight, bias)


def group_norm(
    t: _Translation, node: Node, x: Value, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    *_: Any
) -> Value:  # fmt: skip
    batch, channels, *sizes = x.shape
    split = reshaped(t, t.builder.floats(x), (batch, groups, channels // groups, *sizes))
    found = t.builder.floats(split)
    made = _normalized(t, found, list(range(2, len(found.order))), eps)
    whole = reshaped(t, made, (batch, channels, *sizes))
    shape = (-1, *[1] * len(sizes))
    parameters = [None if one is None else Constant(one.value.reshape(shape)) for one in (weight, bias)]
    return _affine(t, whole, *parameters)


def batch_norm(
    t: _Translation, node: Node, x: Value, weight: Any, bias: Any, mean_: Any, variance: Any, *rest: Any
) -> Any:
    eps = rest[-1]
    factor = 1 / torch.sqrt(variance.value + eps)
    factor = factor if weight is None else factor * weight.value
    added = -mean_.value * factor if bias is None else bias.value - mean_.value * factor
    shape = (-1, *[1] * (len(x.shape) - 2))
    return [_affine(t, x, Constant(factor.reshape(shape)), Constant(added.reshape(shape)))]


# --- products


def transposed(t: _Translation, x: Value) -> Value:
    return permuted(t, x, (*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2))


def permuted(t: _Translation, x: Value, axes: Sequence[int]) -> Value:
    if isinstance(x, Constant):
        return Constant(x.value.permute(tuple(axes)))
    axes = [axis % len(x.shape) for axis in axes]

    def move(found: Known) -> Known:
        return Known(found.tensor, tuple(axes.index(axis) for axis in found.order))

    return t.builder.moving(x, tuple(x.shape[axis] for axis in axes), move)


def matmul(t: _Translation, node: Node, a: Value, b: Value) -> Value:
    if len(a.shape) == 1 or len(b.shape) == 1:
        raise NoOperator(_NO_OPERATOR.format(where=path_of(node) or "The model", name="a product with a vector"))
    return _product(t, a, b, shape_of(node))


def _product(t: _Translation, a: Value, b: Value, shape: Sequence[int]) -> Known:
    operands, flips = [], []
    rank = max(len(a.shape), len(b.shape))
    for value in (a, b):
        found = t.builder.floats(value)
        found = t.widened(found, rank)
        swapped = (*identity(rank - 2), rank - 1, rank - 2)
        flips.append(found.order == swapped)
        operands.append(t.builder.arranged(found, swapped if flips[-1] else identity(rank)).tensor)
    made = Tensor(tuple(shape), "float32")
    options = ("BatchMatMul", {"adjX": flips[0], "adjY": flips[1]})
    inputs = a.shape[-1]
    products = prod(shape) * inputs
    why = "products of two activations are not quantized for this target"
    return Known(
        t.graph.add("BATCH_MATMUL", operands, [made], options, products=products, why_float=why), identity(rank)
    )


def addmm(t: _Translation, node: Node, bias: Value, a: Value, b: Any, beta: float = 1, alpha: float = 1) -> Value:
    product: Value = _product(t, a, b, shape_of(node))
    product = product if alpha == 1 else t.with_number("MUL", product, alpha)
    return t.binary("ADD", ("Add", {}), product, bias if beta == 1 else _times(t, bias, beta))


def attention(
    t: _Translation, node: Node, query: Value, key: Value, value: Value, mask: Any = None, dropout: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
) -> Value:  # fmt: skip
    if enable_gqa:
        raise NoOperator(_NO_OPERATOR.format(where=path_of(node) or "The model", name="attention with enable_gqa"))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    rows, columns = query.shape[-2], key.shape[-2]
    weights: Value = t.with_number("MUL", query, factor)
    weights = _product(t, weights, transposed(t, key), (*query.shape[:-1], columns))
    if is_causal:
        mask = Constant(torch.ones(int(rows), int(columns), dtype=torch.bool).tril())
    if isinstance(mask, Constant) and mask.value.dtype == torch.bool:
        mask = Constant(torch.zeros(mask.value.shape).masked_fill(~mask.value, float("-inf")))
    elif mask is not None and not isinstance(mask, Constant) and t.builder.known(mask).tensor.dtype == "bool":
        kept = Constant(torch.zeros(())), Constant(torch.tensor(float("-inf")))
        mask = _select(t, mask, *kept)
    weights = weights if mask is None else t.binary("ADD", ("Add", {}), weights, mask)
    return _product(t, softmax(t, node, weights, -1), value, shape_of(node))


# --- moves


def reshaped(t: _Translation, x: Value, shape: Sequence[int]) -> Value:
    """Returns a value with another shape. Axes stay where they are if only neighbours are joined or split."""
    shape = tuple(shape)
    if isinstance(x, Constant):
        return Constant(x.value.reshape(tuple(int(one) for one in shape)))

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


def view(t: _Translation, node: Node, x: Value, *_: Any) -> Value:
    return reshaped(t, x, shape_of(node))


def permute(t: _Translation, node: Node, x: Value, axes: Sequence[int]) -> Value:
    return permuted(t, x, axes)


def transpose(t: _Translation, node: Node, x: Value, a: int, b: int) -> Value:
    axes = list(range(len(x.shape)))
    axes[a], axes[b] = axes[b], axes[a]
    return permuted(t, x, axes)


def same(t: _Translation, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    return x


def to(t: _Translation, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    return _cast(t, x, node.meta["val"].dtype)


def _slice_of(t: _Translation, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
    """Returns the elements from `start` to `stop` along an axis."""
    axis %= len(x.shape)
    length = len(range(start, stop, step))
    shape = tuple(length if a == axis else size for a, size in enumerate(x.shape))

    def move(found: Known) -> Known:
        place, tensor = found.axis(axis), found.tensor
        new = [length if p == place else size for p, size in enumerate(tensor.shape)]
        begin = [start if p == place else 0 for p in range(len(new))]
        if step == 1:
            sizes = [-1 if isinstance(size, AnyLength) else size for size in new]
            constants = [t.graph.constant(one, "int32") for one in (begin, sizes)]
            made = t.graph.add("SLICE", [tensor, *constants], [t.builder.moved(tensor, new)], ("Slice", {}))
        else:
            end = [stop if p == place else 0 for p in range(len(new))]
            steps = [step if p == place else 1 for p in range(len(new))]
            mask = sum(1 << p for p in range(len(new)) if p != place)
            constants = [t.graph.constant(one, "int32") for one in (begin, end, steps)]
            options = ("StridedSlice", {"beginMask": mask, "endMask": mask})
            made = t.graph.add("STRIDED_SLICE", [tensor, *constants], [t.builder.moved(tensor, new)], options)
        return found.like(made)

    return x if shape == tuple(x.shape) and step == 1 else t.builder.moving(x, shape, move)


def slice_(
    t: _Translation, node: Node, x: Value, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Value:
    length = x.shape[axis]
    if isinstance(length, AnyLength) and shape_of(node)[axis] == length:
        return x
    first, last, _ = slice(start, stop, step).indices(int(length))
    return _slice_of(t, x, axis, first, last, step)


def select(t: _Translation, node: Node, x: Value, axis: int, index: int) -> Value:
    index = index % int(x.shape[axis])
    part = _slice_of(t, x, axis, index, index + 1)
    shape = shape_of(node)
    return t.builder.moving(part, shape, lambda found: without_axes(t, found, [axis]))


def split(t: _Translation, node: Node, x: Value, sizes: Any, axis: int = 0) -> list[Value]:
    length = int(x.shape[axis])
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [_slice_of(t, x, axis, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def chunk(t: _Translation, node: Node, x: Value, number: int, axis: int = 0) -> list[Value]:
    return split(t, node, x, -(-int(x.shape[axis]) // number), axis)


def unbind(t: _Translation, node: Node, x: Value, axis: int = 0) -> list[Value]:
    shape = tuple(size for a, size in enumerate(x.shape) if a != axis % len(x.shape))
    parts = [_slice_of(t, x, axis, index, index + 1) for index in range(int(x.shape[axis]))]
    return [t.builder.moving(part, shape, lambda found: without_axes(t, found, [axis])) for part in parts]


def cat(t: _Translation, node: Node, parts: Sequence[Value], axis: int = 0) -> Value:
    parts = [part for part in parts if tuple(part.shape) != (0,)]
    axis %= len(parts[0].shape)
    shape = shape_of(node)

    def joined(tensors: list[Known]) -> Known:
        order = max(tensors, key=lambda one: prod(one.shape)).order
        arranged = [t.builder.arranged(one, order).tensor for one in tensors]
        made = t.builder.moved(arranged[0], [shape[a] for a in order])
        options = ("Concatenation", {"axis": order.index(axis)})
        return Known(t.graph.add("CONCATENATION", list(arranged), [made], options), order)

    if node.meta["val"].dtype != torch.float32:
        return joined([t.builder.known(_cast(t, part, node.meta["val"].dtype)) for part in parts])
    if len(parts) == 1:
        return parts[0]
    return Pending(
        shape,
        lambda: joined([t.builder.floats(part) for part in parts]),
        lambda grid: joined([t.builder.on_grid(part, grid) for part in parts]),
    )


def stack(t: _Translation, node: Node, parts: Sequence[Value], axis: int = 0) -> Value:
    axis %= len(shape_of(node))
    wider = []
    for part in parts:
        shape = list(part.shape)
        shape.insert(axis, 1)
        wider.append(reshaped(t, part, shape))
    return cat(t, node, wider, axis)


def pad(t: _Translation, node: Node, x: Value, pads: Sequence[int], value: float = 0.0) -> Value:
    rank = len(x.shape)
    given = {rank - 1 - number: (pads[2 * number], pads[2 * number + 1]) for number in range(len(pads) // 2)}
    for axis, (before, after) in given.items():
        if before < 0 or after < 0:
            stop = int(x.shape[axis]) - max(-after, 0)
            x = _slice_of(t, x, axis, max(-before, 0), stop)
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


def expand(t: _Translation, node: Node, x: Value, *_: Any) -> Value:
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


def repeat(t: _Translation, node: Node, x: Value, times: Sequence[int]) -> Value:
    def move(found: Known) -> Known:
        found = t.widened(found, len(times))
        numbers = t.graph.constant([times[axis] for axis in found.order], "int32")
        made = t.builder.moved(found.tensor, [shape_of(node)[axis] for axis in found.order])
        return found.like(t.graph.add("TILE", [found.tensor, numbers], [made], ("Tile", {})))

    return t.builder.moving(x, shape_of(node), move)


def flip(t: _Translation, node: Node, x: Value, axes: Sequence[int]) -> Value:
    def move(found: Known) -> Known:
        for axis in axes:
            places = t.graph.constant([found.axis(axis)], "int32")
            made = t.builder.moved(found.tensor, found.tensor.shape)
            found = found.like(t.graph.add("REVERSE_V2", [found.tensor, places], [made], ("ReverseV2", {})))
        return found

    return t.builder.moving(x, x.shape, move)


def _gathered(t: _Translation, x: Value, index: Value, axis: int) -> Value:
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


def index_select(t: _Translation, node: Node, x: Value, axis: int, index: Value) -> Value:
    places = _positive(index, x.shape[axis]) if isinstance(index, Constant) else index
    return _gathered(t, x, places, axis % len(x.shape))


def _positive(index: Constant, length: int) -> Constant:
    """Returns indices that count from the front."""
    return Constant(torch.where(index.value < 0, index.value + int(length), index.value))


def index(t: _Translation, node: Node, x: Value, indices: Sequence[Any]) -> Value:
    given = [(axis, one) for axis, one in enumerate(indices) if one is not None]
    if len(given) == 2 and all(isinstance(one, Constant) for _, one in given) and given[1][0] == given[0][0] + 1:
        (axis, a), (_, b) = given  # neighbouring axes become one
        length = int(x.shape[axis + 1])
        rows, columns = (_positive(one, x.shape[axis + n]).value for n, one in enumerate((a, b)))
        shape = (*x.shape[:axis], int(x.shape[axis]) * length, *x.shape[axis + 2 :])
        return _gathered(t, reshaped(t, x, shape), Constant(rows * length + columns), axis)
    if len(given) != 1 or (isinstance(given[0][1], Constant) and given[0][1].value.dtype == torch.bool):
        raise NoOperator(_NO_OPERATOR.format(where=path_of(node) or "The model", name="indexing by several tensors"))
    axis, one = given[0]
    return _gathered(t, x, _positive(one, x.shape[axis]) if isinstance(one, Constant) else one, axis)


def embedding(t: _Translation, node: Node, weight: Any, index: Value, *_: Any) -> Value:
    if not isinstance(weight, _Weight) or weight.weight.codes is None:
        table = weight.weight.floats if isinstance(weight, _Weight) else weight
        return _gathered(t, table if isinstance(table, (Known, Pending)) else _table(t, table), index, 0)
    found = weight.weight
    assert found.scale is not None
    codes = Tensor(tuple(found.codes.shape), "int8", f"{found.path}.weight", found.codes.numpy())  # type: ignore
    rows = t.builder.known(_gathered(t, Known(codes, (0, 1)), index, 0))
    t.graph.weights.setdefault(found.path, (codes, []))
    numbers = rows.like(t.graph.add("CAST", [rows.tensor], [Tensor(rows.tensor.shape, "float32")], ("Cast", {})))
    if found.axis == 1 or float(found.scale.min()) == float(found.scale.max()):
        scale: Value = Constant(found.scale if found.axis == 1 else found.scale[0])
    else:
        scales = Tensor((len(found.scale), 1), "float32", f"{found.path}.scale", found.scale.reshape(-1, 1).numpy())
        scale = _gathered(t, Known(scales, (0, 1)), index, 0)
    return t.binary("MUL", ("Mul", {}), numbers, scale)


def _table(t: _Translation, value: Any) -> Known:
    data = value.value if isinstance(value, Constant) else value
    array = data.detach().numpy()
    return Known(Tensor(tuple(array.shape), array.dtype.name, f"{t.graph.path}.weight", array), identity(array.ndim))


# --- pools and images


def _per_axis(given: Any, axes: int) -> tuple[int, ...]:
    numbers = (given,) if isinstance(given, int) else tuple(given)
    return numbers * axes if len(numbers) == 1 else numbers


class _Windows:
    """The settings of a pool, as `padded` takes them."""

    def __init__(self, shape: Sequence[int], size: Any, stride: Any, padding: Any, dilation: Any = 1) -> None:
        axes = 2
        self.size = _per_axis(size, axes)
        self.stride = self.size if stride in (None, [], ()) else _per_axis(stride, axes)
        self.padding, self.dilation = _per_axis(padding, axes), _per_axis(dilation, axes)
        self.shape = tuple(shape)

    def options(self, padding: int) -> Options:
        return (
            "Pool2D",
            {
                "padding": padding,
                "strideH": self.stride[0],
                "strideW": self.stride[1],
                "filterHeight": self.size[0],
                "filterWidth": self.size[1],
            },
        )


def max_pool2d(
    t: _Translation, node: Node, x: Value, size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False
) -> Value:  # fmt: skip
    result = node.meta["val"][0] if isinstance(node.meta["val"], (tuple, list)) else node.meta["val"]
    shape = tuple(length_of(one) for one in result.shape)
    if len(shape) != 4 or any(one != 1 for one in _per_axis(dilation, 2)):
        raise NoOperator(_NO_OPERATOR.format(where=path_of(node) or "The model", name="a max pool with dilation"))
    windows = _Windows(shape, size, stride, padding)

    def move(found: Known) -> Known:
        order = (0, 2, 3, 1)
        image = t.builder.arranged(found, order).tensor
        pads, kind = _pads(image.shape, windows)
        if kind is None:
            lowest = (LOW if image.zero_point != LOW else None) if image.is_codes else float("-inf")
            image, kind = pad_zeros(t.builder, image, pads, lowest), VALID
        made = t.builder.moved(image, [shape[axis] for axis in order])
        return Known(t.graph.add("MAX_POOL_2D", [image], [made], windows.options(kind)), order)

    return t.builder.moving(x, shape, move)


def _pads(shape: Sequence[int], windows: Any) -> tuple[list[tuple[int, int]], int | None]:
    """Returns the paddings of a pool, and the kind that the operator adds. None if it does not add them."""
    before, after, same = [], [], []
    for length, number, size, stride, one in zip(
        shape[1:3], windows.shape[2:], windows.size, windows.stride, windows.padding, strict=True
    ):
        needed = max((number - 1) * stride + size - length, 0)
        same.append(number == -(-length // stride) and needed // 2 == one)
        before.append(one)
        after.append(max(needed - one, 0))
    if not any(before) and not any(after):
        return [], VALID
    return [(0, 0), *zip(before, after, strict=True), (0, 0)], SAME if all(same) else None


def max_pool_with_indices(t: _Translation, node: Node, *args: Any, **kwargs: Any) -> list[Any]:
    return [max_pool2d(t, node, *args, **kwargs), None]


def avg_pool2d(
    t: _Translation, node: Node, x: Value, size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    counts_padding: bool = True, divisor: Any = None
) -> Value:  # fmt: skip
    shape = shape_of(node)
    windows = _Windows(shape, size, stride, padding)
    order = (0, 2, 3, 1)
    image = t.builder.arranged(t.builder.floats(x), order).tensor
    pads, kind = _pads(image.shape, windows)
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


def adaptive_avg_pool2d(t: _Translation, node: Node, x: Value, size: Any) -> Value:
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
            part = _slice_of(t, found, axis, one * length // number, -(-(one + 1) * length // number))
            parts.append(_reduced(t, t.builder.floats(part), "MEAN", [axis]))
        made = Tensor(
            tuple(number if a == axis else n for a, n in zip(found.order, found.tensor.shape, strict=True)), "float32"
        )
        options = ("Concatenation", {"axis": found.axis(axis)})
        found = found.like(t.graph.add("CONCATENATION", [part.tensor for part in parts], [made], options))
    return found


def _resized(t: _Translation, node: Node, x: Value, code: str, options: Options) -> Known:
    shape, order = shape_of(node), (0, 2, 3, 1)
    image = t.builder.arranged(t.builder.floats(x), order).tensor
    sizes = t.graph.constant([int(one) for one in shape[2:]], "int32")
    return Known(t.op(code, [image, sizes], [shape[axis] for axis in order], options), order)


def nearest(t: _Translation, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    shape = shape_of(node)

    def move(found: Known) -> Known:
        order = (0, 2, 3, 1)
        image = t.builder.arranged(found, order).tensor
        sizes = t.graph.constant([int(one) for one in shape[2:]], "int32")
        made = t.builder.moved(image, [shape[axis] for axis in order])
        options = ("ResizeNearestNeighbor", {"alignCorners": False, "halfPixelCenters": False})
        return Known(t.graph.add("RESIZE_NEAREST_NEIGHBOR", [image, sizes], [made], options), order)

    return t.builder.moving(x, shape, move)


def bilinear(t: _Translation, node: Node, x: Value, size: Any, align_corners: bool = False, *_: Any) -> Value:
    options = ("ResizeBilinear", {"alignCorners": align_corners, "halfPixelCenters": not align_corners})
    return _resized(t, node, x, "RESIZE_BILINEAR", options)


# --- conditions


def _select(t: _Translation, condition: Value, a: Value, b: Value) -> Known:
    values = [as_value(one) for one in (condition, a, b)]
    known = [one if isinstance(one, Constant) else t.builder.floats(one) for one in values]
    tensors, order, shape = t.operands(*known)
    kind = tensors[1].dtype
    return Known(t.graph.add("SELECT_V2", tensors, [Tensor(tuple(shape), kind)], ("SelectV2", {})), order)


def where(t: _Translation, node: Node, condition: Value, a: Any, b: Any) -> Value:
    dtype = node.meta["val"].dtype
    return _select(t, condition, _cast(t, as_value(a), dtype), _cast(t, as_value(b), dtype))


def masked_fill(t: _Translation, node: Node, x: Value, mask: Value, number: Any) -> Value:
    return where(t, node, mask, number, x)


def _comparison(code: str, name: str) -> Callable[..., Value]:
    def compare(t: _Translation, node: Node, a: Any, b: Any) -> Value:
        values = [as_value(one) for one in (a, b)]
        kinds = [t.builder.known(one).tensor.dtype for one in values if not isinstance(one, Constant)]
        kind = getattr(torch, "float32" if "float32" in kinds or "int8" in kinds else kinds[0])
        return t.binary(code, (name, {}), *(_cast(t, one, kind) for one in values), dtype="bool")

    return compare


def _logical(code: str, name: str) -> Callable[..., Value]:
    return lambda t, node, *values: t.binary(code, (name, {}), *values, dtype="bool")


def cumsum(t: _Translation, node: Node, x: Value, axis: int, **_: Any) -> Value:
    found = t.builder.floats(x)
    place = t.graph.constant(np.int32(found.axis(axis)), "int32")
    made = Tensor(found.tensor.shape, found.tensor.dtype)
    return found.like(t.graph.add("CUMSUM", [found.tensor, place], [made], ("Cumsum", {})))


def argmax(t: _Translation, node: Node, x: Value, axis: Any = None, keepdim: bool = False) -> Value:
    found = t.builder.floats(x)
    if axis is None:
        raise NoOperator(_NO_OPERATOR.format(where=path_of(node) or "The model", name="argmax of a whole tensor"))
    found = t.builder.with_last(found, axis)
    place = t.graph.constant(np.int32(len(found.order) - 1), "int32")
    out = Tensor(tuple(found.tensor.shape[:-1]), "int64")
    made = t.graph.add("ARG_MAX", [found.tensor, place], [out], ("ArgMax", {"outputType": 4}))
    axis %= len(found.order)
    order = tuple(one if one < axis else one - 1 for one in found.order[:-1])
    result: Value = Known(made, order)
    return reshaped(t, result, shape_of(node)) if keepdim else result


_OWN: dict[Any, Callable[..., Any]] = {
    GRID: _Translation.grid,
    TOKEN_GRID: _Translation.token_grid,
    WEIGHT: _Translation.weight,
    aten.linear.default: _Translation.linear,
    aten.convolution.default: _Translation.convolution,
    aten.embedding.default: embedding,
}

HANDLERS: dict[Any, Callable[..., Any]] = {
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
    aten.neg.default: _unary("NEG", ("Neg", {})),
    aten.abs.default: _unary("ABS", ("Abs", {})),
    aten.exp.default: _unary("EXP", ("Exp", {})),
    aten.log.default: _unary("LOG"),
    aten.log1p.default: lambda t, node, x: t.unary(t.with_number("ADD", x, 1.0), "LOG"),
    aten.expm1.default: lambda t, node, x: t.with_number("SUB", t.unary(x, "EXP", ("Exp", {})), 1.0),
    aten.sqrt.default: _unary("SQRT"),
    aten.rsqrt.default: _unary("RSQRT"),
    aten.square.default: _unary("SQUARE", ("Square", {})),
    aten.sin.default: _unary("SIN"),
    aten.cos.default: _unary("COS", ("Cos", {})),
    aten.floor.default: _unary("FLOOR"),
    aten.ceil.default: _unary("CEIL"),
    aten.round.default: _unary("ROUND"),
    aten.sign.default: _unary("SIGN"),
    aten.sigmoid.default: _unary("LOGISTIC"),
    aten.tanh.default: _unary("TANH"),
    aten.hardswish.default: _unary("HARD_SWISH", ("HardSwish", {})),
    aten.relu.default: relu,
    aten.relu6.default: relu6,
    aten.hardtanh.default: hardtanh,
    aten.clamp.default: clamp,
    aten.clamp_min.default: lambda t, node, x, low: _clamped(t, node, x, low, None),
    aten.clamp_max.default: lambda t, node, x, high: _clamped(t, node, x, None, high),
    aten.silu.default: silu,
    aten.hardsigmoid.default: hardsigmoid,
    aten.gelu.default: gelu,
    aten.leaky_relu.default: leaky_relu,
    aten.elu.default: elu,
    aten.prelu.default: prelu,
    aten.softmax.int: softmax,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: softmax,
    aten.log_softmax.int: log_softmax,
    aten._log_softmax.default: log_softmax,
    aten.mean.dim: mean,
    aten.mean.default: mean,
    aten.sum.dim_IntList: _reduction("SUM"),
    aten.amax.default: _reduction("REDUCE_MAX"),
    aten.amin.default: _reduction("REDUCE_MIN"),
    aten.var.correction: variance,
    aten.linalg_vector_norm.default: vector_norm,
    aten.layer_norm.default: layer_norm,
    aten.group_norm.default: group_norm,
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten.matmul.default: matmul,
    aten.bmm.default: matmul,
    aten.mm.default: matmul,
    aten.addmm.default: addmm,
    aten.scaled_dot_product_attention.default: attention,
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
    aten.slice.Tensor: slice_,
    aten.select.int: select,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    aten.chunk.default: chunk,
    aten.unbind.int: unbind,
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.constant_pad_nd.default: pad,
    aten.expand.default: expand,
    aten.repeat.default: repeat,
    aten.flip.default: flip,
    aten.index_select.default: index_select,
    aten.index.Tensor: index,
    aten.max_pool2d.default: max_pool2d,
    aten.max_pool2d_with_indices.default: max_pool_with_indices,
    aten.avg_pool2d.default: avg_pool2d,
    aten.adaptive_avg_pool2d.default: adaptive_avg_pool2d,
    aten._adaptive_avg_pool2d.default: adaptive_avg_pool2d,
    aten.upsample_nearest2d.default: nearest,
    aten.upsample_nearest2d.vec: nearest,
    aten.upsample_bilinear2d.default: bilinear,
    aten.upsample_bilinear2d.vec: bilinear,
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
    aten.cumsum.default: cumsum,
    aten.argmax.default: argmax,
}

# The operators of torch that are translated as they are. Others are decomposed first.
KNOWN = {*_OWN, *HANDLERS}
