"""Rewrites a graph into forms that runtimes have integer kernels for, without changing any code.

- A mean over all spatial positions becomes a GlobalAveragePool.
- A quantizer after an operator that only moves or selects elements is repeated before that operator, so that the
  layer before it ends in codes.
- A ReLU before a quantizer whose zero point is not qmin becomes a clip of the codes at the zero point.
- A Clip that clips nothing is inserted between two quantizers with different grids. ONNX Runtime would otherwise
  merge them into one quantizer with a new scale.
- The same Clip is inserted before a layer with a float weight, which ONNX Runtime would otherwise quantize.
- A Max that changes no finite number is inserted between a node with operands in float formats and a quantizer to
  integers. ONNX Runtime would otherwise merge a convolution of integers and FP8 weights into an integer kernel, and
  refuse the file. It removes a Clip at this place.
- The same Clip is inserted between a Pad and a MaxPool. ONNX Runtime would otherwise merge them into a MaxPool whose
  padding is ignored, although a padded 0 is larger than a negative element.

Forms that only one runtime needs are in `onnx_forms.py` of its room.

In embeddings, rows of codes are gathered first, and only these are dequantized:

    DequantizeLinear(codes) -> Gather(indices)                  every row of the table, at every call
    Gather(codes, indices) -> DequantizeLinear                  with one scale for the table
    Gather(codes), Gather(scale) by flat indices                with one scale or one zero point per row or per group
        -> DequantizeLinear -> Reshape
    Gather(bytes) -> Cast -> Gather(pairs) -> Reshape           instead of Gather(codes), with codes of 4 bits

ONNX Runtime cannot gather codes of 4 bits, so two of a row are in a byte, and a table of 256 pairs has the codes of
each byte. Tables of 2 bits, and of groups of rows, are left as they are.
"""

from collections.abc import Callable, Set
from typing import Any

import numpy as np
import onnx_ir as ir

from fakequant._export.onnx.lowering import (
    DOMAIN,
    Array,
    constant_of,
    copy_of,
    input_of,
    insert_node,
    register,
    remove_unused,
)
from fakequant._moves import ONNX_MOVES
from fakequant._runtimes import part
from fakequant._runtimes.target import Target

# The nodes of `format_lowering`.
FORMAT_NODES = {"FormatGrid", "Rounded", "StoredFormat"}
_LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
# The shapes and bytes of a grid's scale and zero point.
_QParams = tuple[tuple[tuple[int, ...], bytes] | None, ...]


def rewrite(model: ir.Model, target: Target) -> None:
    """Applies the rewrites that precede lowering, while quantizers are still Grid nodes."""
    for node in list(model.graph):
        if node.op_type == "ReduceMean" and not node.domain:
            _pool(node)
    before = -1
    while before != len(list(model.graph)):  # repeat until nothing changes
        before = len(list(model.graph))
        _merge(model)
        for change in (_take_in_relu, _repeat_before_moves):
            for node in list(model.graph):
                if is_grid(node):
                    change(node)
    for node in list(model.graph):
        if is_grid(node):
            _separate_from_previous_grid(node)
        elif not node.domain and node.op_type in _LAYERS:
            _keep_float_weights(node)
        elif not node.domain and node.op_type == "MaxPool":
            _keep_padding(node)
    part(target.runtime.room, "onnx_forms").rewrite(model, target)


def is_grid(node: ir.Node) -> bool:
    """Returns True for a quantizer of an activation."""
    return node.domain == DOMAIN and node.op_type == "Grid"


def _is_move(node: ir.Node) -> bool:
    return not node.domain and node.op_type in ONNX_MOVES


def producer_behind_moves(value: ir.Value, moves: Set[str] = ONNX_MOVES) -> ir.Node | None:
    """Returns the node that computes a value, skipping operators that only move or select elements."""
    node = value.producer()
    while node is not None and not node.domain and node.op_type in moves:
        node = input_of(node, 0).producer()
    return node


def _pool(node: ir.Node) -> None:
    """Replaces a mean over all axes but the first two by GlobalAveragePool."""
    x = node.inputs[0]
    axes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if axes is None or x is None or x.shape is None or len(x.shape) != 4:
        return
    rank, graph, out = len(x.shape), node.graph, node.outputs[0]
    if sorted(int(axis) % rank for axis in axes.numpy()) != list(range(2, rank)):
        return
    assert graph is not None
    keep = node.attributes.get("keepdims")
    shape = ir.Shape([*x.shape[:2], *[1] * (rank - 2)])
    result = insert_node(node, "GlobalAveragePool", [x], f"{out.name}_pooled", ir.DataType.FLOAT, shape)
    if keep is not None and keep.as_int() == 0:
        to = register(graph, f"{out.name}_shape", [0, -1], ir.DataType.INT64)
        result = insert_node(node, "Reshape", [result, to], f"{out.name}_flat", ir.DataType.FLOAT, out.shape)
    ir.convenience.replace_all_uses_with(out, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _separate_from_previous_grid(node: ir.Node) -> None:
    source = producer_behind_moves(input_of(node, 0))
    is_other = source is not None and is_grid(source) and not _holds(node, source)
    if _has_float_formats(source):
        insert_before(node, "Max", node.attributes["name"].as_string(), ("lowest",))
    elif is_other:
        clip_nothing_before(node, node.attributes["name"].as_string())


def _has_float_formats(node: ir.Node | None) -> bool:
    """Returns True if a node, or the one before a ReLU, reads tensors in float formats."""
    if node is not None and node.op_type == "Relu":
        node = producer_behind_moves(input_of(node, 0))
    sources = [producer_behind_moves(x) for x in node.inputs if x is not None] if node is not None else []
    return any(source is not None and source.op_type in FORMAT_NODES for source in sources)


def _keep_float_weights(node: ir.Node) -> None:
    """Stops ONNX Runtime from quantizing the float weight of a layer between quantizers."""
    source = producer_behind_moves(input_of(node, 0))
    if source is None or not is_grid(source):
        return
    weight = input_of(node, 1)
    producer = weight.producer()
    while producer is not None and producer.op_type in ("Transpose", "Reshape", "Identity"):
        weight = input_of(producer, 0)
        producer = weight.producer()
    if producer is None and weight.const_value is not None:
        clip_nothing_before(node, str(node.outputs[0].name))


def _keep_padding(node: ir.Node) -> None:
    """Stops ONNX Runtime from merging a MaxPool with a Pad before it."""
    producer = input_of(node, 0).producer()
    if producer is not None and producer.op_type == "Pad" and not producer.domain:
        clip_nothing_before(node, str(node.outputs[0].name))


def clip_nothing_before(node: ir.Node, name: str) -> None:
    """Inserts a Clip over the full float range before the first input of a node."""
    insert_before(node, "Clip", name, ("lowest", "highest"))


_ENDS = {"lowest": np.finfo(np.float32).min, "highest": np.finfo(np.float32).max}


def insert_before(node: ir.Node, op: str, name: str, ends: tuple[str, ...]) -> None:
    """Inserts an operator of the first input of a node and of ends of the float range."""
    assert node.graph is not None
    apart = _apart(node.graph, input_of(node, 0), op, name, ends)
    node.graph.insert_before(node, apart)
    node.replace_input_with(0, apart.outputs[0])


def insert_max_behind(node: ir.Node) -> None:
    """Inserts a Max that changes no finite number behind the first result of a node."""
    y = node.outputs[0]
    assert node.graph is not None
    apart = _apart(node.graph, y, "Max", str(y.name), ("lowest",))
    ir.convenience.replace_all_uses_with(y, apart.outputs[0], replace_graph_outputs=True)
    apart.replace_input_with(0, y)
    node.graph.insert_after(node, apart)


def _apart(graph: ir.Graph, x: ir.Value, op: str, name: str, ends: tuple[str, ...]) -> ir.Node:
    """Returns an operator of a value and of ends of the float range, which are registered in the graph."""
    bounds = [register(graph, f"{name}_{end}", _ENDS[end], ir.DataType.FLOAT) for end in ends]
    out = ir.Value(name=f"{name}_apart", shape=x.shape, type=ir.TensorType(ir.DataType.FLOAT))
    return ir.Node("", op, [x, *bounds], outputs=[out], name=f"{name}_apart/{op}")


def _holds(node: ir.Node, source: ir.Node) -> bool:
    """Returns True if the grid of `node` has the same qparams as that of `source` and contains all its codes."""
    if _qparams(node) != _qparams(source):
        return False
    (low, high), (first, last) = _range(node), _range(source)
    return low <= first and last <= high


def _merge(model: ir.Model) -> None:
    """Merges quantizers of the same tensor that have equal grids, so that the layer before has a single consumer."""
    seen: dict[tuple[ir.Value, _QParams, tuple[int, int]], ir.Node] = {}
    for node in list(model.graph):
        if not is_grid(node):
            continue
        key = (input_of(node, 0), _qparams(node), _range(node))
        if key in seen:
            also = seen[key].attributes.get("also")
            paths = (also.as_string() if also is not None else "") + "\n" + node.attributes["name"].as_string()
            seen[key].attributes["also"] = ir.AttrString("also", paths)
            ir.convenience.replace_all_uses_with(node.outputs[0], seen[key].outputs[0], replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
        else:
            seen[key] = node


def _qparams(node: ir.Node) -> _QParams:
    """Returns the scale and the zero point of a grid in a form that can be compared."""
    arrays = [None if value is None else constant_of(value) for value in node.inputs[1:]]
    return tuple(None if array is None else (array.shape, array.tobytes()) for array in arrays)


def _range(node: ir.Node) -> tuple[int, int]:
    return node.attributes["qmin"].as_int(), node.attributes["qmax"].as_int()


def is_per_tensor(node: ir.Node) -> bool:
    """Returns True for a quantizer with one scale."""
    scale = node.inputs[1]
    return scale is not None and scale.const_value is not None and scale.const_value.numpy().size == 1


def _repeat_before_moves(node: ir.Node) -> None:
    at = node
    while is_per_tensor(node):
        value = input_of(at, 0)
        producer = value.producer()
        if producer is None or not _is_move(producer):
            return
        if len(value.uses()) != 1 or value.is_graph_output():
            return  # the float has another consumer
        source = input_of(producer, 0)
        before, graph = source.producer(), producer.graph
        if before is not None and before.domain == DOMAIN:
            return  # the source is already on a grid
        assert graph is not None
        name = f"{node.attributes['name'].as_string()}.before_{producer.op_type.lower()}"
        out = ir.Value(name=f"{source.name}_moved", shape=source.shape, type=ir.TensorType(ir.DataType.FLOAT))
        copy = copy_of(node, [source, *node.inputs[1:]], out, name=name)
        graph.insert_before(producer, copy)
        producer.replace_input_with(0, out)
        at = copy


def _take_in_relu(node: ir.Node) -> None:
    value = input_of(node, 0)
    producer = value.producer()
    if producer is None or producer.op_type != "Relu" or producer.domain or not is_per_tensor(node):
        return
    zero_point = int(constant_of(input_of(node, 2)).reshape(()))
    source = input_of(producer, 0).producer()
    if zero_point == node.attributes["qmin"].as_int() and (source is None or source.op_type not in ONNX_MOVES):
        return  # runtimes fuse this form already
    node.replace_input_with(0, input_of(producer, 0))
    node.attributes["qmin"] = ir.AttrInt64("qmin", zero_point)
    if not value.uses() and not value.is_graph_output() and producer.graph is not None:
        producer.graph.remove(producer, safe=True)


# --- embeddings


def gather_codes(graph: ir.Graph) -> None:
    """Rewrites every Gather of rows from a dequantized table. Runs after lowering."""
    for node in list(graph):
        if node.op_type != "Gather" or node.domain or _axis(node) != 0 or node.inputs[0] is None:
            continue
        table = node.inputs[0].producer()
        if table is not None and _can_gather(table):
            _Gathered(graph, node, table).run()
    remove_unused(graph)


# The types of codes in bytes, and the types of 4 bits with the type of their codes after they are unpacked.
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)
_PAIRS = {ir.DataType.INT4: ir.DataType.INT8, ir.DataType.UINT4: ir.DataType.UINT8}


def _can_gather(table: ir.Node) -> bool:
    codes = table.inputs[0] if table.op_type == "DequantizeLinear" and not table.domain else None
    if codes is None or codes.const_value is None or codes.shape is None or len(codes.shape) != 2:
        return False
    if "block_size" in table.attributes and _axis(table) == 0:
        return False  # rows share their scales
    has_type = codes.dtype in (*_BYTES, *_PAIRS)
    return has_type and table.inputs[1] is not None and table.inputs[1].dtype == ir.DataType.FLOAT


def _axis(node: Any) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else int(axis.as_int())


# What is added to the names of tensors of a table with codes of 4 bits: to its codes in bytes, to the codes of each
# byte, and to its zero points.
PACKED, PAIRS, IN_BYTES = "_packed", "_pairs", "_bytes"


def pack_rows(codes: Array) -> Array:
    """Returns a matrix of 4-bit codes with two neighbours of a row in a byte, the first in the low bits.

    A row of odd length ends with half a byte of 0.
    """
    low = codes.astype(np.int8).view(np.uint8) & 15
    low = np.pad(low, ((0, 0), (0, low.shape[1] % 2)))
    return low[:, ::2] | low[:, 1::2] << 4


def pairs_of_bytes(signed: bool) -> Array:
    """Returns the two codes of every byte as a matrix of 256 rows."""
    byte = np.arange(256)
    codes = np.stack([byte & 15, byte >> 4], axis=1)
    return (codes ^ 8) - 8 if signed else codes


class _Gathered:
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
        if codes.dtype in _BYTES and (has_one_scale or (scales_follow_columns and result.shape is not None)):
            if not has_one_scale:
                attributes["axis"] = len(result.shape) - 1
            rows = self._emit("Gather", [codes, indices], "codes", codes.dtype, result.shape, {"axis": 0})
            made = self._emit("DequantizeLinear", [rows, *parameters], "rows", result.dtype, result.shape, attributes)
        elif codes.dtype in _BYTES and scales_follow_columns:
            return
        else:
            made = self._by_flat_indices(has_one_scale or scales_follow_columns, attributes)
        ir.convenience.replace_all_uses_with(result, made, replace_graph_outputs=True)
        self.graph.remove(self.node, safe=True)
        if not self.table.outputs[0].uses() and not self.table.outputs[0].is_graph_output():
            self.graph.remove(self.table, safe=True)

    def _by_flat_indices(self, rows_share_scales: bool, attributes: dict[str, Any]) -> ir.Value:
        """DequantizeLinear has scales along one axis, so the rows are gathered as a matrix."""
        codes, *parameters = self.table.inputs
        indices, result = self.node.inputs[1], self.node.outputs[0]
        flat = self._emit("Reshape", [indices, self._constant("flat", [-1])], "flat", indices.dtype, None, {})
        if codes.dtype in _PAIRS:
            rows = self._unpacked_rows(codes, flat)
            parameters = [self._in_bytes(one) if one is not None and one.dtype in _PAIRS else one for one in parameters]
        else:
            rows = self._emit("Gather", [codes, flat], "codes", codes.dtype, None, {"axis": 0})
        lengths = self._emit("Shape", [indices], "shape", ir.DataType.INT64, None, {})
        width = self._constant("width", [self.width])
        full = self._emit("Concat", [lengths, width], "full_shape", ir.DataType.INT64, None, {"axis": 0})
        if rows_share_scales:
            if attributes.get("axis") == 1:
                made = self._emit("DequantizeLinear", [rows, *parameters], "rows", result.dtype, None, attributes)
                return self._emit("Reshape", [made, full], "gathered", result.dtype, result.shape, {})
            # ONNX Runtime would move a DequantizeLinear with one scale behind the Reshape, with a wrong type.
            rows = self._emit("Reshape", [rows, full], "gathered", rows.dtype, result.shape, {})
            return self._emit("DequantizeLinear", [rows, *parameters], "rows", result.dtype, result.shape, attributes)
        own = [
            self._emit("Gather", [one, flat], kind, one.dtype, None, {"axis": 0})
            for kind, one in zip(("scale", "zero_point"), parameters, strict=False)
            if one is not None
        ]
        if "block_size" in attributes:
            made = self._in_blocks(rows, own, attributes["block_size"])
        else:
            made = self._emit("DequantizeLinear", [rows, *own], "rows", result.dtype, None, attributes)
        return self._emit("Reshape", [made, full], "gathered", result.dtype, result.shape, {})

    def _in_blocks(self, rows: ir.Value, parameters: list[ir.Value], size: int) -> ir.Value:
        """Returns (code - zero point) * scale. OpenVINO has no DequantizeLinear in blocks of a length that varies."""
        to_float = {"to": int(ir.DataType.FLOAT)}
        blocks = self._constant("blocks", [-1, self.width // size, size])
        inner = self._constant("inner", [2])
        made = self._emit("Reshape", [rows, blocks], "code_blocks", rows.dtype, None, {})
        made = self._emit("Cast", [made], "levels", ir.DataType.FLOAT, None, to_float)
        scale, *zero_point = (
            self._emit("Unsqueeze", [one, inner], f"{kind}_blocks", one.dtype, None, {})
            for kind, one in zip(("scale", "zero_point"), parameters, strict=False)
        )
        for one in zero_point:
            offset = self._emit("Cast", [one], "offset", ir.DataType.FLOAT, None, to_float)
            made = self._emit("Sub", [made, offset], "differences", ir.DataType.FLOAT, None, {})
        return self._emit("Mul", [made, scale], "values", ir.DataType.FLOAT, None, {})

    def _unpacked_rows(self, codes: Any, flat: ir.Value) -> ir.Value:
        """Gathers rows of bytes, and looks up the two codes of each byte."""
        dtype = _PAIRS[codes.dtype]
        packed = self._shared(f"{codes.name}{PACKED}", lambda: pack_rows(constant_of(codes)), ir.DataType.UINT8)
        pairs = self._shared(f"{codes.name}{PAIRS}", lambda: pairs_of_bytes(dtype == ir.DataType.INT8), dtype)
        read = self._emit("Gather", [packed, flat], "bytes", ir.DataType.UINT8, None, {"axis": 0})
        places = self._emit("Cast", [read], "places", ir.DataType.INT32, None, {"to": int(ir.DataType.INT32)})
        found = self._emit("Gather", [pairs, places], "pairs", dtype, None, {"axis": 0})
        whole = self._constant("whole", [-1, self.width + self.width % 2])
        rows = self._emit("Reshape", [found, whole], "codes", dtype, None, {})
        if self.width % 2 == 0:
            return rows
        cut = [self._constant(kind, [value]) for kind, value in (("start", 0), ("end", self.width), ("axis", 1))]
        return self._emit("Slice", [rows, *cut], "row_codes", dtype, None, {})

    def _in_bytes(self, zero_point: Any) -> ir.Value:
        dtype = _PAIRS[zero_point.dtype]
        return self._shared(f"{zero_point.name}{IN_BYTES}", lambda: constant_of(zero_point), dtype)

    def _shared(self, name: str, values: Callable[[], Any], dtype: ir.DataType) -> ir.Value:
        """Returns a constant that all Gather nodes of a table read."""
        return self.graph.initializers.get(name) or register(self.graph, name, values(), dtype)

    def _emit(self, op: str, inputs: list[Any], kind: str, dtype: Any, shape: Any, attributes: Any) -> ir.Value:
        return insert_node(self.node, op, inputs, f"{self.name}_{kind}", dtype, shape, attributes)

    def _constant(self, kind: str, values: list[int]) -> ir.Value:
        return register(self.graph, f"{self.name}_{kind}_value", values, ir.DataType.INT64)
