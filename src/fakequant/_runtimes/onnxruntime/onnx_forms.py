"""Rewrites a graph into forms that ONNX Runtime computes exactly, without changing any code.

`Max` stands for a Max that changes no finite number; see `fakequant._export.onnx.graph_forms`.

- A Max is inserted between a quantizer and a Softmax. ONNX Runtime would otherwise compute it with a kernel that
  rounds the inverse of the result's scale to an integer.
- The same Max is inserted between a quantizer to a float format and an operator that ONNX Runtime applies to codes,
  and has no kernel for if they are FP8.
- A quantizer before an operator that selects elements is repeated after it, if an operator that reads codes follows.
  ONNX Runtime would otherwise compute that operator in float. The quantizer is always repeated if its codes are signed:
  ONNX Runtime would otherwise do so itself, with two types for the same codes, and refuse the file.
"""

import onnx_ir as ir

from fakequant._export.onnx.graph_forms import (
    FORMAT_NODES,
    insert_before,
    is_grid,
    is_per_tensor,
    producer_behind_moves,
)
from fakequant._export.onnx.lowering import copy_of, input_of
from fakequant._runtimes.target import Target

# Operators that ONNX Runtime has integer kernels for, and whose codes the golden model computes in integers.
_READ_CODES = {"Conv", "Gemm", "MatMul", "Add", "Mul", "AveragePool", "GlobalAveragePool"}
# Operators that only move or select elements: those before which ONNX Runtime moves quantizers itself, and others.
_PASSED = {"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"}
_SELECTING = {"Split", "Gather", "GatherElements", "Expand", "Tile", "DepthToSpace", "Flatten"}
# Operators that ONNX Runtime applies to FP8 codes without having a kernel for them.
_WITHOUT_FP8 = {"MaxPool", "Squeeze", "Unsqueeze", "Slice", "ArgMax"}


def rewrite(model: ir.Model, target: Target) -> None:
    """Applies all rewrites, after those of `graph_forms`."""
    for node in list(model.graph):
        if is_grid(node):
            _repeat_after_moves(node, target)
        elif not node.domain:
            _keep_floats(node)


def _keep_floats(node: ir.Node) -> None:
    """Stops ONNX Runtime from computing a node with codes, if it has no kernel for it or an inexact one."""
    if not node.inputs or node.inputs[0] is None:
        return
    source = producer_behind_moves(node.inputs[0], _PASSED)
    if source is None:
        return
    is_fp8 = source.op_type in FORMAT_NODES
    is_inexact = node.op_type == "Softmax" and is_grid(source)
    if is_inexact or (is_fp8 and (node.op_type in _WITHOUT_FP8 or _is_product_of_formats(node))):
        insert_before(node, "Max", str(node.outputs[0].name), ("lowest",))


def _is_product_of_formats(node: ir.Node) -> bool:
    """Returns True for a product of two tensors that are quantized to float formats, and not stored."""
    if node.op_type != "MatMul":
        return False
    sources = [producer_behind_moves(input_of(node, number)) for number in (0, 1)]
    return all(source is not None and source.op_type in FORMAT_NODES - {"StoredFormat"} for source in sources)


def _repeat_after_moves(node: ir.Node, target: Target) -> None:
    lowest = node.attributes["lowest"].as_int()
    is_signed = -128 <= lowest < 0 and not target.activations.is_stored_unsigned
    pending = [node.outputs[0]] if is_per_tensor(node) else []
    while pending:
        for move in [user for user, number in pending.pop().uses() if number == 0 and not user.domain]:
            if move.op_type not in _SELECTING | _PASSED:
                continue
            for value in list(move.outputs):
                if value.uses() and (is_signed or (move.op_type in _SELECTING and _is_read_as_codes(value))):
                    value = _repeated_after(node, move, value)
                pending.append(value)


def _is_read_as_codes(value: ir.Value) -> bool:
    """Returns True if an operator with an integer kernel reads a value, perhaps behind moves."""
    users = [user for user, _ in value.uses() if not user.domain]
    moved = [out for user in users if user.op_type in _SELECTING | _PASSED for out in user.outputs]
    return any(user.op_type in _READ_CODES for user in users) or any(map(_is_read_as_codes, moved))


def _repeated_after(node: ir.Node, move: ir.Node, value: ir.Value) -> ir.Value:
    """Inserts a copy of a grid between a result of a move and its readers that are not grids. Returns its result."""
    graph, users = move.graph, [use for use in value.uses() if not is_grid(use[0])]
    assert graph is not None
    name = f"{node.attributes['name'].as_string()}.after_{move.op_type.lower()}"
    out = ir.Value(name=f"{value.name}_again", shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT))
    graph.insert_after(move, copy_of(node, [value, *node.inputs[1:]], out, name=name, is_within=1))
    for user, number in users:
        user.replace_input_with(number, out)
    return out
