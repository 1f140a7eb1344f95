"""Downgrades a model to an opset below 18, the lowest one that torch's exporter writes.

onnx's version converter stops at the first operator without an adapter (Relu), so the few operators that differ are
handled here. A node whose schema is the same in both opsets is not changed.
"""

import onnx
import onnx_ir as ir

from fakequant._export.onnx.lowering import UnsupportedOpset, constant_of, input_of, register, remove_unused

# Newer versions only added element types, or an attribute that can be removed.
_WIDENED = {
    "Add", "BatchNormalization", "CumSum", "Div", "Equal", "Greater", "GreaterOrEqual", "Identity", "LeakyRelu", "Less",
    "LessOrEqual", "Mul", "PRelu", "Pad", "Pow", "Relu", "Reshape", "Scan", "Shape", "Split", "Sqrt", "Sub", "Where",
}  # fmt: skip
_REDUCTIONS = {"ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"}


def downgrade(model: ir.Model, opset: int) -> None:
    """Rewrites the model for a lower opset. Raises UnsupportedOpset if an operator does not exist there."""
    now = model.opset_imports[""]
    for node in list(model.graph):
        if node.domain or _since(node.op_type, opset) == _since(node.op_type, now):
            continue
        if _since(node.op_type, opset) is None:
            raise UnsupportedOpset(
                f"Opset {opset} has no {node.op_type}, which the model needs.\n"
                f"Use opset={_first(node.op_type)} or higher."
            )
        _downgrade(node, opset, now)
        node.version = opset
    remove_unused(model.graph)
    model.opset_imports[""] = opset


def _downgrade(node: ir.Node, opset: int, now: int) -> None:
    op = node.op_type
    if op in _REDUCTIONS:
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            node.attributes["axes"] = ir.AttrInt64s("axes", constant_of(input_of(node, 1)).tolist())
            node.resize_inputs(1)
        node.attributes.pop("noop_with_empty_axes", None)
    elif op not in _WIDENED:
        raise UnsupportedOpset(f"{op}, which the model needs, cannot be written in opset {opset}.\nUse opset={now}.")
    if op == "Reshape":
        allows_zero = node.attributes.pop("allowzero", None)
        # A shape that is computed at run time has a 0 only if the tensor is empty.
        is_fixed = input_of(node, 1).const_value is not None
        if allows_zero is not None and allows_zero.as_int() and is_fixed and 0 in constant_of(input_of(node, 1)):
            raise UnsupportedOpset(f"A Reshape to a length of 0 cannot be written in opset {opset}.\nUse opset={now}.")
    if op == "Split":
        node.attributes.pop("num_outputs", None)
    if op == "Shape" and opset < 15:
        _take_part_of_shape(node)


def _take_part_of_shape(node: ir.Node) -> None:
    """Replaces the attributes `start` and `end` of a Shape by a Slice of its result."""
    ends = {"start": 0, "end": 2**31 - 1}
    for name in ends:
        given = node.attributes.pop(name, None)
        ends[name] = ends[name] if given is None else given.as_int()
    if ends == {"start": 0, "end": 2**31 - 1}:
        return
    graph, result = node.graph, node.outputs[0]
    assert graph is not None
    bounds = [register(graph, f"{result.name}_{name}", [number], ir.DataType.INT64) for name, number in ends.items()]
    part = ir.Value(name=f"{result.name}_part", shape=result.shape, type=ir.TensorType(ir.DataType.INT64))
    ir.convenience.replace_all_uses_with(result, part, replace_graph_outputs=True)
    result.shape = None
    graph.insert_after(node, ir.Node("", "Slice", [result, *bounds], outputs=[part], name=f"{part.name}/Slice"))


def _since(op: str, opset: int) -> int | None:
    try:
        return onnx.defs.get_schema(op, opset).since_version
    except onnx.defs.SchemaError:
        return None


def _first(op: str) -> int:
    schemas = onnx.defs.get_all_schemas_with_history()
    return min(schema.since_version for schema in schemas if schema.name == op and schema.domain == "")
