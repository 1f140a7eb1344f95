"""Embeddings in a file: rows of codes are gathered first, and only these are dequantized.

    DequantizeLinear(codes) -> Gather(indices)                  every row of the table, at every call
    Gather(codes, indices) -> DequantizeLinear                  with one scale for the table
    Gather(codes), Gather(scale) by flat indices                with one scale or one zero point per row or per group
        -> DequantizeLinear -> Reshape

Codes of 4 bits and fewer are left as they are: ONNX Runtime cannot gather them.
"""

from typing import Any

import numpy as np
import onnx_ir as ir


def gather_codes(graph: ir.Graph) -> None:
    """Rewrites every Gather of rows from a dequantized table."""
    for node in list(graph):
        if node.op_type != "Gather" or node.domain or _axis(node) != 0 or node.inputs[0] is None:
            continue
        table = node.inputs[0].producer()
        if table is not None and _dequantizes_bytes(table):
            _Rewrite(graph, node, table).run()


def _dequantizes_bytes(table: ir.Node) -> bool:
    codes = table.inputs[0] if table.op_type == "DequantizeLinear" and not table.domain else None
    if codes is None or codes.const_value is None or codes.shape is None:
        return False
    has_bytes = codes.dtype in (ir.DataType.INT8, ir.DataType.UINT8) and len(codes.shape) == 2
    return has_bytes and table.inputs[1] is not None and table.inputs[1].dtype == ir.DataType.FLOAT


def _axis(node: Any) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else int(axis.as_int())


class _Rewrite:
    """The rewrite of one Gather node of a table (a DequantizeLinear node)."""

    def __init__(self, graph: ir.Graph, node: Any, table: Any) -> None:
        self.graph, self.node, self.table = graph, node, table
        self.name = str(node.outputs[0].name)
        self.width = int(table.inputs[0].shape[1])

    def run(self) -> None:
        codes, *parameters = self.table.inputs
        indices, result = self.node.inputs[1], self.node.outputs[0]
        attributes = {name: attribute.value for name, attribute in self.table.attributes.items()}
        has_one_scale = parameters[0].const_value.size == 1
        scales_follow_columns = attributes.get("axis") == 1 and "block_size" not in attributes
        if has_one_scale or (scales_follow_columns and result.shape is not None):
            if not has_one_scale:
                attributes["axis"] = len(result.shape) - 1
            rows = self._emit("Gather", [codes, indices], "codes", codes.dtype, result.shape, {"axis": 0})
            made = self._emit("DequantizeLinear", [rows, *parameters], "rows", result.dtype, result.shape, attributes)
        elif scales_follow_columns:
            return
        else:
            made = self._by_flat_indices(codes, parameters, indices, result, attributes)
        ir.convenience.replace_all_uses_with(result, made, replace_graph_outputs=True)
        self.graph.remove(self.node, safe=True)
        if not self.table.outputs[0].uses() and not self.table.outputs[0].is_graph_output():
            self.graph.remove(self.table, safe=True)

    def _by_flat_indices(self, codes: Any, parameters: Any, indices: Any, result: Any, attributes: Any) -> ir.Value:
        """DequantizeLinear has scales along one axis, so the rows are gathered as a matrix."""
        flat = self._emit("Reshape", [indices, self._constant("flat", [-1])], "flat", indices.dtype, None, {})
        rows = self._emit("Gather", [codes, flat], "codes", codes.dtype, None, {"axis": 0})
        own = [
            self._emit("Gather", [value, flat], kind, value.dtype, None, {"axis": 0})
            for kind, value in zip(("scale", "zero_point"), parameters, strict=False)
            if value is not None
        ]
        matrix = self._emit("DequantizeLinear", [rows, *own], "rows", result.dtype, None, attributes)
        shape = self._emit("Shape", [indices], "shape", ir.DataType.INT64, None, {})
        width = self._constant("width", [self.width])
        full = self._emit("Concat", [shape, width], "full_shape", ir.DataType.INT64, None, {"axis": 0})
        return self._emit("Reshape", [matrix, full], "gathered", result.dtype, result.shape, {})

    def _emit(self, op: str, inputs: list[Any], kind: str, dtype: Any, shape: Any, attributes: Any) -> ir.Value:
        value = ir.Value(name=f"{self.name}_{kind}", shape=shape, type=ir.TensorType(dtype))
        made = ir.convenience.convert_attributes(attributes)
        self.graph.insert_before(self.node, ir.Node("", op, inputs, made, outputs=[value], name=f"{value.name}/{op}"))
        return value

    def _constant(self, kind: str, values: list[int]) -> ir.Value:
        name = f"{self.name}_{kind}_value"
        value = ir.Value(name=name, shape=ir.Shape([len(values)]), type=ir.TensorType(ir.DataType.INT64))
        value.const_value = ir.tensor(np.array(values, dtype=np.int64), name=name)
        self.graph.register_initializer(value)
        return value
