"""Rewrites a graph into forms that OpenVINO computes exactly, without changing any code.

`Max` stands for a Max that changes no finite number, and `Clip` for one that clips nothing; see
`fakequant._export.onnx.graph_forms`.

- A Clip is inserted between a product with two axes and a Reshape. OpenVINO would otherwise multiply by the
  scales of the channels behind the Reshape, along the wrong axis.
- A Max is inserted before an AveragePool that counts its padding, unless 0 has the code 0. OpenVINO would
  otherwise pad with the code 0 in any case.
- The same Max is inserted behind a convolution without a bias whose result is read more than once, not only by
  quantizers. OpenVINO 2026.4 would otherwise lose the scale of the result for some of the readers.
- The same Max is inserted behind a ReduceMax, a ReduceMin and a Sub. OpenVINO 2026.4 would otherwise merge them with a
  quantizer behind them, and compute other codes.
- The same Max is inserted before a normalization. OpenVINO would otherwise normalize the sums of a layer before it
  multiplies them by their scale, and add the normalization's epsilon to another variance.
- A Max of a value with itself is inserted between a product and a batch norm. OpenVINO would otherwise multiply the
  last axis of the product by the factors of the norm, which belong to axis 1, and refuse the file. It merges the other
  Max into the product, but nothing that reads the product twice.
- A convolution with a 1x1 kernel, a stride and padding becomes a Pad, a Slice with the stride as its step, and a
  convolution without either. OpenVINO would otherwise ignore the padding.
- Each convolution in groups has its own copy of a weight that several read. OpenVINO multiplies the weight by a factor
  that follows one of them, and all others would be multiplied too.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fakequant._export.onnx.graph_forms import (
    clip_nothing_before,
    insert_before,
    insert_max_behind,
    is_grid,
    is_per_tensor,
    producer_behind_moves,
)
from fakequant._export.onnx.lowering import constant_of, copy_of, input_of, register
from fakequant._runtimes.target import Target

# Operators that OpenVINO merges into a product before them.
_MERGED = {"Add", "Sub", "Mul", "Div", "Relu", "PRelu", "LeakyRelu", "Elu", "Gelu", "Sigmoid", "Tanh", "Clip"}
_NORMS = {"LayerNormalization", "GroupNormalization", "InstanceNormalization"}


def rewrite(model: ir.Model, target: Target) -> None:
    """Applies all rewrites, after those of `graph_forms`."""
    for node in list(model.graph):
        if node.op_type == "Reshape" and not node.domain:
            _keep_scales(node)
        elif node.op_type == "AveragePool" and not node.domain:
            _keep_zeros(node)
        elif node.op_type == "Conv" and not node.domain:
            _keep_scale(node)
            _pad_and_stride_before(node)
        elif node.op_type in ("ReduceMax", "ReduceMin", "Sub") and node.outputs[0].dtype == ir.DataType.FLOAT:
            insert_max_behind(node)
        elif node.op_type in _NORMS and not node.domain:
            insert_before(node, "Max", str(node.outputs[0].name), ("lowest",))
        elif node.op_type == "BatchNormalization" and not node.domain:
            _keep_axis(node)
        elif node.op_type == "Stored":
            _keep_weights(node)


def _keep_scales(node: ir.Node) -> None:
    """Stops OpenVINO from moving the scales of a product behind a Reshape of it."""
    x = input_of(node, 0)
    source = x.producer()
    if source is not None and source.op_type == "Relu" and not source.domain:
        source = input_of(source, 0).producer()
    is_product = source is not None and not source.domain and source.op_type in ("Gemm", "MatMul")
    if is_product and x.shape is not None and len(x.shape) == 2:
        clip_nothing_before(node, str(node.outputs[0].name))


def _keep_axis(node: ir.Node) -> None:
    """Stops OpenVINO from merging a batch norm into a product before it."""
    source = producer_behind_moves(input_of(node, 0), _MERGED)
    if source is None or source.domain or source.op_type not in ("Gemm", "MatMul"):
        return
    assert node.graph is not None
    x, y = input_of(node, 0), node.outputs[0]
    apart = ir.Value(name=f"{y.name}_apart", shape=x.shape, type=x.type)
    node.graph.insert_before(node, ir.Node("", "Max", [x, x], outputs=[apart], name=f"{y.name}_apart/Max"))
    node.replace_input_with(0, apart)


def _keep_zeros(node: ir.Node) -> None:
    """Stops OpenVINO from computing an average pool with codes, if it pads and then counts the wrong numbers."""
    counts = node.attributes.get("count_include_pad")
    pads = node.attributes.get("pads")
    is_padded = pads is not None and any(pads.as_ints())
    if is_padded and counts is not None and counts.as_int() and not _has_code_0_for_0(input_of(node, 0)):
        insert_before(node, "Max", str(node.outputs[0].name), ("lowest",))


def _keep_scale(node: ir.Node) -> None:
    """Stops OpenVINO from multiplying the sums of a convolution by their scale once for each reader."""
    y = node.outputs[0]
    is_read_as_float = y.is_graph_output() or any(not is_grid(reader) for reader, _ in y.uses())
    if is_read_as_float and len(y.uses()) + y.is_graph_output() > 1 and not _has_bias(node):
        insert_max_behind(node)


def _pad_and_stride_before(node: ir.Node) -> None:
    """Moves the padding and the stride of a convolution with a 1x1 kernel to a Pad and a Slice before it."""
    kernel, strides, pads = (node.attributes.get(name) for name in ("kernel_shape", "strides", "pads"))
    if kernel is None or strides is None or pads is None or node.graph is None:
        return
    if set(kernel.as_ints()) != {1} or max(strides.as_ints()) == 1 or not any(pads.as_ints()):
        return
    axes = len(kernel.as_ints())
    x, y, graph = input_of(node, 0), node.outputs[0], node.graph
    assert x.shape is not None
    assert y.shape is not None

    def constant(name: str, value: Sequence[int]) -> ir.Value:
        return register(graph, f"{y.name}_{name}", value, ir.DataType.INT64)

    before, behind = pads.as_ints()[:axes], pads.as_ints()[axes:]
    padded = ir.Value(name=f"{y.name}_padded", type=x.type)
    taken = ir.Value(name=f"{y.name}_strided", type=x.type, shape=ir.Shape([*x.shape[:2], *y.shape[2:]]))
    pad = ir.Node("", "Pad", [x, constant("pads", [0, 0, *before, 0, 0, *behind])], outputs=[padded])
    ends = constant("ends", [np.iinfo(np.int64).max] * axes)
    slice_inputs = [padded, constant("starts", [0] * axes), ends, constant("axes", range(2, 2 + axes))]
    strided = ir.Node("", "Slice", [*slice_inputs, constant("steps", strides.as_ints())], outputs=[taken])
    graph.insert_before(node, [pad, strided])
    node.replace_input_with(0, taken)
    node.attributes["strides"] = ir.AttrInt64s("strides", [1] * axes)
    node.attributes["pads"] = ir.AttrInt64s("pads", [0] * (2 * axes))


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
        weight, name = node.outputs[0], node.attributes["name"].as_string()
        out = ir.Value(name=f"{weight.name}_{count}", shape=weight.shape, type=weight.type)
        assert node.graph is not None
        node.graph.insert_after(node, copy_of(node, node.inputs, out, name=f"{name}[{count}]"))
        user.replace_input_with(number, out)


def _has_code_0_for_0(value: ir.Value) -> bool:
    """Returns True if the file stores a tensor in codes whose zero point is 0."""
    node = producer_behind_moves(value)
    if node is not None and node.op_type == "Concat" and not node.domain:
        return all(_has_code_0_for_0(input_of(node, number)) for number in range(len(node.inputs)))
    if node is None or not is_grid(node) or not is_per_tensor(node):
        return False
    return int(constant_of(input_of(node, 2)).reshape(())) == node.attributes["lowest"].as_int()
