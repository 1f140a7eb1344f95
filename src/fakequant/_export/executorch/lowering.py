"""Replaces fakequant's operators in an exported graph by ExecuTorch's, in the forms that XNNPACK's partitioner takes.

    grid after a layer       layer -> ReLU or hardtanh, if not all codes of 8 bits are used -> quantize
    grid after an addition   addition -> ReLU, if codes start at the zero point -> quantize
    grid after a grid        quantize
    grid after others        hardtanh, if not all codes are used -> quantize
    reader of a grid         has its own dequantize operator
    grid of tokens           choose_qparams -> quantize -> dequantize, per token

An addition or the like takes no other limits. Its codes are limited afterwards: dequantize -> hardtanh -> quantize.
So are codes of another grid: XNNPACK limits codes as if they were on the grid that follows.

Where XNNPACK has no integer kernel for the scales, a view after dequantize makes it compute with floats.
"""

import operator
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from fakequant._export.executorch.graph import (
    GRID,
    HIGH,
    LAYERS,
    LOW,
    OPERATIONS,
    TOKEN_GRID,
    aten,
    called,
    in_order,
    insert,
    is_call,
    offset_of,
    source_of,
)
from fakequant._runtimes.reciprocal_arithmetic import has_layer
from fakequant._runtimes.xnnpack.arithmetic import has_addition

_quantized = torch.ops.quantized_decomposed
_ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)


def lower(program: ExportedProgram) -> None:
    """Replaces all operators of fakequant in an exported program, in place."""
    graph = program.graph
    for node in called(graph, GRID):
        _Grid(graph, node).lower()
    for node in called(graph, TOKEN_GRID):
        _lower_token_grid(graph, node)
    for node in called(graph, aten.softmax.int, aten._softmax.default):
        _keep_order_of_axes(graph, node)
    for node in called(graph, *LAYERS, *_ADDITIONS):
        if _has_integer_form(node) and not _has_kernel(program, node):
            _use_floats(graph, node)
    for node in called(graph, *LAYERS):
        if is_call(node.args[1], {_quantized.dequantize_per_channel.default}) and not _has_integer_form(node):
            _dequantize_weight(program, node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    _name_outputs(program)


class _Grid:
    """Replaces one grid."""

    def __init__(self, graph: Graph, node: Node) -> None:
        _, scale, zero_point, qmin, qmax, _ = node.args
        assert isinstance(scale, float)
        assert isinstance(zero_point, int)
        assert isinstance(qmin, int)
        assert isinstance(qmax, int)
        offset = offset_of(qmax)
        self.graph, self.node, self.scale = graph, node, scale
        self.zero_point, self.low, self.high = zero_point + offset, qmin + offset, qmax + offset

    def lower(self) -> None:
        x = source_of(self.node)
        is_own = len(x.users) == 1
        with self.graph.inserting_before(self.node):
            is_after_grid = is_call(x, {_quantized.dequantize_per_tensor.default})
            if (is_after_grid or (is_call(x, OPERATIONS) and is_own)) and self._is_limited():
                if is_call(x, {aten.add.Tensor}) and self.low == self.zero_point:
                    x, self.low = insert(self.graph, aten.relu.default, (x,), x), LOW
                codes = self._quantize(x)
                if self._is_limited():
                    codes = self._quantize(self._limit(self._dequantize(codes)))
            else:
                codes = self._quantize(self._limit(x) if self._is_limited() else x)
            for user in list(self.node.users):
                if is_call(user, {aten.cat.default}):  # XNNPACK counts different operands only
                    parts = [self._dequantize(codes) if part is self.node else part for part in user.args[0]]  # type: ignore
                    user.args = (parts, *user.args[1:])
                else:
                    user.replace_input_with(self.node, self._dequantize(codes))
        self.graph.erase_node(self.node)

    def _is_limited(self) -> bool:
        return self.low > LOW or self.high < HIGH

    def _limit(self, x: Node) -> Node:
        if self.low == self.zero_point and self.high == HIGH:
            return insert(self.graph, aten.relu.default, (x,), x)
        low, high = ((code - self.zero_point) * self.scale for code in (self.low, self.high))
        return insert(self.graph, aten.hardtanh.default, (x, low, high), x)

    def _quantize(self, x: Node) -> Node:
        settings = (self.scale, self.zero_point, LOW, HIGH, torch.int8)
        return insert(self.graph, _quantized.quantize_per_tensor.default, (x, *settings), x, torch.int8)

    def _dequantize(self, codes: Node) -> Node:
        settings = (self.scale, self.zero_point, LOW, HIGH, torch.int8)
        return insert(self.graph, _quantized.dequantize_per_tensor.default, (codes, *settings), codes, torch.float32)


def _lower_token_grid(graph: Graph, node: Node) -> None:
    x = source_of(node)
    with graph.inserting_before(node):
        if x.meta["val"].dim() == 4:  # XNNPACK would reorder its axes between the operators of the grid and the layer
            x = in_order(graph, x)
        chosen = insert(graph, _quantized.choose_qparams_per_token_asymmetric.default, (x, torch.int8), x)
        value = x.meta["val"]
        sizes = (*value.shape[:-1], 1)
        chosen.meta["val"] = (value.new_empty(sizes, dtype=torch.float64), value.new_empty(sizes, dtype=torch.int64))
        parts = [graph.call_function(operator.getitem, (chosen, number)) for number in range(2)]
        for part, made in zip(parts, chosen.meta["val"], strict=True):
            part.meta = {**chosen.meta, "val": made}
        settings = (*parts, LOW, HIGH, torch.int8)
        codes = insert(graph, _quantized.quantize_per_token.default, (x, *settings), x, torch.int8)
        for user in list(node.users):
            back = (codes, *settings, torch.float32)
            made = insert(graph, _quantized.dequantize_per_token.default, back, codes, torch.float32)
            user.replace_input_with(node, made)
    graph.erase_node(node)


def _has_integer_form(layer: Node) -> bool:
    """Returns True if the input of an operation is dequantized right before it and its result quantized right after."""
    x = source_of(layer)
    if is_call(x, {_quantized.dequantize_per_token.default}):
        return True
    if not is_call(x, {_quantized.dequantize_per_tensor.default}) or len(layer.users) > 1:
        return False
    return is_call(_reader(layer), {_quantized.quantize_per_tensor.default})


def _reader(operation: Node) -> Node:
    """Returns what reads the result of an operation that has one reader, or the result of the limits that follow it."""
    (user,) = operation.users
    if is_call(user, {aten.relu.default, aten.hardtanh.default}) and len(user.users) == 1:
        (user,) = user.users
    return user


def _keep_order_of_axes(graph: Graph, node: Node) -> None:
    """Inserts a view before a softmax: XNNPACK would compute it along the channels, which a convolution puts last."""
    x = source_of(node)
    if x.meta["val"].dim() == 4:
        with graph.inserting_before(node):
            node.replace_input_with(x, in_order(graph, x))


def _has_kernel(program: ExportedProgram, node: Node) -> bool:
    """Returns True if XNNPACK has a kernel in integers for the scales of an operation with an integer form."""
    if is_call(source_of(node), {_quantized.dequantize_per_token.default}):
        return True
    scale: Any = _reader(node).args[1]
    x, other = (cast(Any, operand) for operand in node.args[:2])
    if is_call(other, {_quantized.dequantize_per_channel.default}):
        scales = _constant(program, other.args[1]).tolist()
        return all(has_layer(x.args[1], weight_scale, scale) for weight_scale in scales)
    is_operand = is_call(other, {_quantized.dequantize_per_tensor.default})
    return not is_operand or has_addition(x.args[1], other.args[1], scale)


def _use_floats(graph: Graph, node: Node) -> None:
    for operand in node.all_input_nodes:
        if is_call(operand, {_quantized.dequantize_per_tensor.default}):
            with graph.inserting_before(node):
                node.replace_input_with(operand, in_order(graph, operand))


def _dequantize_weight(program: ExportedProgram, layer: Node) -> None:
    """Stores the weight of a layer as floats, because XNNPACK multiplies float activations by float weights only."""
    dequantize = layer.args[1]
    assert isinstance(dequantize, Node)
    codes, scale, zero_point = (_constant(program, node) for node in dequantize.args[:3])
    weight = _quantized.dequantize_per_channel.default(codes, scale, zero_point, *dequantize.args[3:])
    holder = source_of(dequantize)
    name = program.graph_signature.inputs_to_lifted_tensor_constants[holder.name]
    program.constants[name] = weight
    holder.meta["val"] = dequantize.meta["val"]
    for reader in list(holder.users):
        reader.replace_all_uses_with(holder)


def _constant(program: ExportedProgram, node: Any) -> Any:
    return program.constants[program.graph_signature.inputs_to_lifted_tensor_constants[node.name]]


def _name_outputs(program: ExportedProgram) -> None:
    """Writes the new names of the graph's outputs into its signature."""
    (outputs,) = next(node for node in reversed(program.graph.nodes) if node.op == "output").args
    assert isinstance(outputs, (tuple, list))
    for spec, node in zip(program.graph_signature.output_specs, outputs, strict=True):
        if isinstance(node, Node):
            spec.arg.name = node.name
