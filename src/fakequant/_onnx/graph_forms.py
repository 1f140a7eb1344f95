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

For ONNX Runtime only:

- The same Max is inserted between a quantizer and a Softmax. ONNX Runtime would otherwise compute it with a kernel that
  rounds the inverse of the result's scale to an integer.
- The same Max is inserted between a quantizer to a float format and an operator that ONNX Runtime applies to codes,
  and has no kernel for if they are FP8.
- A quantizer before an operator that selects elements is repeated after it, if an operator that reads codes follows.
  ONNX Runtime would otherwise compute that operator in float. The quantizer is always repeated if its codes are signed:
  ONNX Runtime would otherwise do so itself, with two types for the same codes, and refuse the file.

For OpenVINO only:

- The same Clip is inserted between a product with two axes and a Reshape. OpenVINO would otherwise multiply by the
  scales of the channels behind the Reshape, along the wrong axis.
- The same Max is inserted before an AveragePool that counts its padding, unless 0 has the code 0. OpenVINO would
  otherwise pad with the code 0 in any case.
- The same Max is inserted behind a convolution without a bias whose result is read more than once, not only by
  quantizers. OpenVINO 2026.4 would otherwise lose the scale of the result for some of the readers.
- The same Max is inserted behind a ReduceMax and a ReduceMin. OpenVINO 2026.4 would otherwise merge it with a quantizer
  behind it, and compute other codes.
- The same Max is inserted before a normalization. OpenVINO would otherwise normalize the sums of a layer before it
  multiplies them by their scale, and add the normalization's epsilon to another variance.
- Each convolution in groups has its own copy of a weight that several read. OpenVINO multiplies the weight by a factor
  that follows one of them, and all others would be multiplied too.
"""

from collections.abc import Set

import numpy as np
import onnx_ir as ir

from fakequant._moves import ONNX_MOVES
from fakequant._onnx.lowering import DOMAIN, constant_of, input_of
from fakequant._targets import Target

# The nodes of `format_lowering`.
FORMAT_NODES = {"FormatGrid", "Rounded", "StoredFormat"}
_LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
# Operators that ONNX Runtime has integer kernels for, and whose codes the golden model computes in integers.
_READ_CODES = {"Conv", "Gemm", "MatMul", "Add", "Mul", "AveragePool", "GlobalAveragePool"}
# Operators that only move or select elements: those before which ONNX Runtime moves quantizers itself, and others.
_PASSED = {"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"}
_SELECTING = {"Split", "Gather", "GatherElements", "Expand", "Tile", "DepthToSpace", "Flatten"}
# Operators that ONNX Runtime applies to FP8 codes without having a kernel for them.
_WITHOUT_FP8 = {"MaxPool", "Squeeze", "Unsqueeze", "Slice", "ArgMax"}
_NORMS = {"LayerNormalization", "GroupNormalization", "InstanceNormalization"}
# The shapes and bytes of a grid's scale and zero point.
_QParams = tuple[tuple[tuple[int, ...], bytes] | None, ...]


def rewrite(model: ir.Model, target: Target) -> None:
    """Applies all rewrites. Runs before lowering, while quantizers are still Grid nodes."""
    for node in list(model.graph):
        if node.op_type == "ReduceMean" and not node.domain:
            _pool(node)
    before = -1
    while before != len(list(model.graph)):  # repeat until nothing changes
        before = len(list(model.graph))
        _merge(model)
        for change in (_take_in_relu, _repeat_before_moves):
            for node in list(model.graph):
                if _is_grid(node):
                    change(node)
    for node in list(model.graph):
        if _is_grid(node):
            _separate_from_previous_grid(node)
        elif not node.domain and node.op_type in _LAYERS:
            _keep_float_weights(node)
        elif not node.domain and node.op_type == "MaxPool":
            _keep_padding(node)
    if target.runtime == "onnxruntime":
        for node in list(model.graph):
            if _is_grid(node):
                _repeat_after_moves(node, target)
            elif not node.domain:
                _keep_floats(node)
    if target.runtime == "openvino":
        for node in list(model.graph):
            if node.op_type == "Reshape" and not node.domain:
                _keep_scales(node)
            elif node.op_type == "AveragePool" and not node.domain:
                _keep_zeros(node)
            elif node.op_type == "Conv" and not node.domain:
                _keep_scale(node)
            elif node.op_type in ("ReduceMax", "ReduceMin") and node.outputs[0].dtype == ir.DataType.FLOAT:
                _insert_max_behind(node)
            elif node.op_type in _NORMS and not node.domain:
                _insert_before(node, "Max", str(node.outputs[0].name), ("lowest",))
            elif node.op_type == "Stored":
                _keep_weights(node)


def _is_grid(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == "Grid"


def _is_move(node: ir.Node) -> bool:
    return not node.domain and node.op_type in ONNX_MOVES


def _producer_behind_moves(value: ir.Value, moves: Set[str] = ONNX_MOVES) -> ir.Node | None:
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
    pooled = ir.Value(name=f"{out.name}_pooled", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
    graph.insert_before(node, ir.Node("", "GlobalAveragePool", [x], outputs=[pooled], name=f"{node.name}_pool"))
    result = pooled
    if keep is not None and keep.as_int() == 0:
        to = ir.Value(name=f"{out.name}_shape", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.INT64))
        to.const_value = ir.tensor(np.array([0, -1], dtype=np.int64), name=to.name)
        graph.register_initializer(to)
        result = ir.Value(name=f"{out.name}_flat", type=ir.TensorType(ir.DataType.FLOAT), shape=out.shape)
        graph.insert_before(node, ir.Node("", "Reshape", [pooled, to], outputs=[result], name=f"{node.name}_flat"))
    ir.convenience.replace_all_uses_with(out, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _separate_from_previous_grid(node: ir.Node) -> None:
    source = _producer_behind_moves(input_of(node, 0))
    is_other = source is not None and _is_grid(source) and not _holds(node, source)
    if _has_float_formats(source):
        _insert_before(node, "Max", node.attributes["name"].as_string(), ("lowest",))
    elif is_other:
        _clip_nothing_before(node, node.attributes["name"].as_string())


def _has_float_formats(node: ir.Node | None) -> bool:
    """Returns True if a node, or the one before a ReLU, reads tensors in float formats."""
    if node is not None and node.op_type == "Relu":
        node = _producer_behind_moves(input_of(node, 0))
    sources = [_producer_behind_moves(x) for x in node.inputs if x is not None] if node is not None else []
    return any(source is not None and source.op_type in FORMAT_NODES for source in sources)


def _keep_float_weights(node: ir.Node) -> None:
    """Stops ONNX Runtime from quantizing the float weight of a layer between quantizers."""
    source = _producer_behind_moves(input_of(node, 0))
    if source is None or not _is_grid(source):
        return
    weight = input_of(node, 1)
    producer = weight.producer()
    while producer is not None and producer.op_type in ("Transpose", "Reshape", "Identity"):
        weight = input_of(producer, 0)
        producer = weight.producer()
    if producer is None and weight.const_value is not None:
        _clip_nothing_before(node, str(node.outputs[0].name))


def _keep_padding(node: ir.Node) -> None:
    """Stops ONNX Runtime from merging a MaxPool with a Pad before it."""
    producer = input_of(node, 0).producer()
    if producer is not None and producer.op_type == "Pad" and not producer.domain:
        _clip_nothing_before(node, str(node.outputs[0].name))


def _keep_floats(node: ir.Node) -> None:
    """Stops ONNX Runtime from computing a node with codes, if it has no kernel for it or an inexact one."""
    if not node.inputs or node.inputs[0] is None:
        return
    source = _producer_behind_moves(node.inputs[0], _PASSED)
    if source is None:
        return
    is_fp8 = source.op_type in FORMAT_NODES
    is_inexact = node.op_type == "Softmax" and _is_grid(source)
    if is_inexact or (is_fp8 and (node.op_type in _WITHOUT_FP8 or _is_product_of_formats(node))):
        _insert_before(node, "Max", str(node.outputs[0].name), ("lowest",))


def _keep_scales(node: ir.Node) -> None:
    """Stops OpenVINO from moving the scales of a product behind a Reshape of it."""
    x = input_of(node, 0)
    source = x.producer()
    if source is not None and source.op_type == "Relu" and not source.domain:
        source = input_of(source, 0).producer()
    is_product = source is not None and not source.domain and source.op_type in ("Gemm", "MatMul")
    if is_product and x.shape is not None and len(x.shape) == 2:
        _clip_nothing_before(node, str(node.outputs[0].name))


def _keep_zeros(node: ir.Node) -> None:
    """Stops OpenVINO from computing an average pool with codes, if it pads and then counts the wrong numbers."""
    counts = node.attributes.get("count_include_pad")
    pads = node.attributes.get("pads")
    is_padded = pads is not None and any(pads.as_ints())
    if is_padded and counts is not None and counts.as_int() and not _has_code_0_for_0(input_of(node, 0)):
        _insert_before(node, "Max", str(node.outputs[0].name), ("lowest",))


def _keep_scale(node: ir.Node) -> None:
    """Stops OpenVINO from multiplying the sums of a convolution by their scale once for each reader."""
    y = node.outputs[0]
    is_read_as_float = y.is_graph_output() or any(not _is_grid(reader) for reader, _ in y.uses())
    if is_read_as_float and len(y.uses()) + y.is_graph_output() > 1 and not _has_bias(node):
        _insert_max_behind(node)


def _has_bias(node: ir.Node) -> bool:
    """Returns True if a convolution has a bias that is not 0, or not known."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    source = None if bias is None else bias.producer()
    value = bias if source is None else source.inputs[0] if source.op_type == "Stored" else None
    return bias is not None and (value is None or value.const_value is None or bool(value.const_value.numpy().any()))


def _keep_weights(node: ir.Node) -> None:
    """Copies a weight for each convolution in groups but the first."""
    uses = [use for use in node.outputs[0].uses() if use[0].op_type == "Conv" and use[1] == 1]
    grouped = [use for use in uses if "group" in use[0].attributes and use[0].attributes["group"].as_int() > 1]
    for count, (user, number) in enumerate(grouped[1:], 1):
        attributes = {key: attribute.value for key, attribute in node.attributes.items()}
        attributes["name"] = f"{attributes['name']}[{count}]"
        weight = node.outputs[0]
        out = ir.Value(name=f"{weight.name}_{count}", shape=weight.shape, type=weight.type)
        made = ir.convenience.convert_attributes(attributes)
        assert node.graph is not None
        node.graph.insert_after(node, ir.Node(DOMAIN, "Stored", node.inputs, made, outputs=[out]))
        user.replace_input_with(number, out)


def _has_code_0_for_0(value: ir.Value) -> bool:
    """Returns True if the file stores a tensor in codes whose zero point is 0."""
    node = _producer_behind_moves(value)
    if node is not None and node.op_type == "Concat" and not node.domain:
        return all(_has_code_0_for_0(input_of(node, number)) for number in range(len(node.inputs)))
    if node is None or not _is_grid(node) or not _is_per_tensor(node):
        return False
    return int(constant_of(input_of(node, 2)).reshape(())) == node.attributes["lowest"].as_int()


def _is_product_of_formats(node: ir.Node) -> bool:
    """Returns True for a product of two tensors that are quantized to float formats, and not stored."""
    if node.op_type != "MatMul":
        return False
    sources = [_producer_behind_moves(input_of(node, number)) for number in (0, 1)]
    return all(source is not None and source.op_type in FORMAT_NODES - {"StoredFormat"} for source in sources)


def _clip_nothing_before(node: ir.Node, name: str) -> None:
    """Inserts a Clip over the full float range before the first input of a node."""
    _insert_before(node, "Clip", name, ("lowest", "highest"))


_ENDS = {"lowest": np.finfo(np.float32).min, "highest": np.finfo(np.float32).max}


def _insert_before(node: ir.Node, op: str, name: str, ends: tuple[str, ...]) -> None:
    """Inserts an operator of the first input of a node and of ends of the float range."""
    assert node.graph is not None
    apart = _apart(node.graph, input_of(node, 0), op, name, ends)
    node.graph.insert_before(node, apart)
    node.replace_input_with(0, apart.outputs[0])


def _insert_max_behind(node: ir.Node) -> None:
    """Inserts a Max that changes no finite number behind the first result of a node."""
    y = node.outputs[0]
    assert node.graph is not None
    apart = _apart(node.graph, y, "Max", str(y.name), ("lowest",))
    ir.convenience.replace_all_uses_with(y, apart.outputs[0], replace_graph_outputs=True)
    apart.replace_input_with(0, y)
    node.graph.insert_after(node, apart)


def _apart(graph: ir.Graph, x: ir.Value, op: str, name: str, ends: tuple[str, ...]) -> ir.Node:
    """Returns an operator of a value and of ends of the float range, which are registered in the graph."""
    bounds = []
    for end in ends:
        value = _ENDS[end]
        bound = ir.Value(name=f"{name}_{end}", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
        bound.const_value = ir.tensor(np.array(value, dtype=np.float32), name=bound.name)
        graph.register_initializer(bound)
        bounds.append(bound)
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
        if not _is_grid(node):
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


def _is_per_tensor(node: ir.Node) -> bool:
    scale = node.inputs[1]
    return scale is not None and scale.const_value is not None and scale.const_value.numpy().size == 1


def _repeat_before_moves(node: ir.Node) -> None:
    at = node
    while _is_per_tensor(node):
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
        attributes = {key: attribute.value for key, attribute in node.attributes.items()}
        attributes.pop("also", None)
        attributes["name"] = f"{attributes['name']}.before_{producer.op_type.lower()}"
        out = ir.Value(name=f"{source.name}_moved", shape=source.shape, type=ir.TensorType(ir.DataType.FLOAT))
        made = ir.convenience.convert_attributes(attributes)
        copy = ir.Node(DOMAIN, "Grid", [source, *node.inputs[1:]], made, outputs=[out])
        graph.insert_before(producer, copy)
        producer.replace_input_with(0, out)
        at = copy


def _repeat_after_moves(node: ir.Node, target: Target) -> None:
    lowest = node.attributes["lowest"].as_int()
    is_signed = -128 <= lowest < 0 and not target.unsigned_activations
    pending = [node.outputs[0]] if _is_per_tensor(node) else []
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
    """Inserts a copy of a grid between a result of a move and its readers that are no grids. Returns its result."""
    graph, users = move.graph, [use for use in value.uses() if not _is_grid(use[0])]
    assert graph is not None
    attributes = {key: attribute.value for key, attribute in node.attributes.items() if key != "also"}
    attributes |= {"name": f"{attributes['name']}.after_{move.op_type.lower()}", "is_within": 1}
    out = ir.Value(name=f"{value.name}_again", shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT))
    made = ir.convenience.convert_attributes(attributes)
    graph.insert_after(move, ir.Node(DOMAIN, "Grid", [value, *node.inputs[1:]], made, outputs=[out]))
    for user, number in users:
        user.replace_input_with(number, out)
    return out


def _take_in_relu(node: ir.Node) -> None:
    value = input_of(node, 0)
    producer = value.producer()
    if producer is None or producer.op_type != "Relu" or producer.domain or not _is_per_tensor(node):
        return
    zero_point = int(constant_of(input_of(node, 2)).reshape(()))
    source = input_of(producer, 0).producer()
    if zero_point == node.attributes["qmin"].as_int() and (source is None or source.op_type not in ONNX_MOVES):
        return  # runtimes fuse this form already
    node.replace_input_with(0, input_of(producer, 0))
    node.attributes["qmin"] = ir.AttrInt64("qmin", zero_point)
    if not value.uses() and not value.is_graph_output() and producer.graph is not None:
        producer.graph.remove(producer, safe=True)
