"""Reads the weights of any ONNX file, whoever wrote it: floats, and codes with the scales that dequantize them."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fakequant._export.notes import nodes_of, tensors_of
from fakequant._util.packages import require

if TYPE_CHECKING:
    import onnx


class FileWeight(NamedTuple):
    """A constant of a file with at least two axes, as floats."""

    name: str
    values: np.ndarray
    # The type of its codes, such as "int8", or "float32".
    kind: str


def file_weights(path: str | os.PathLike[str]) -> Iterator[FileWeight]:
    """Yields the weights of an ONNX file. Raises ValueError if it is not one."""
    onnx = require("onnx", "onnx")
    try:
        model = onnx.load(path)
    except Exception as error:
        raise ValueError(f"{path} is not an ONNX model: {error}") from error
    constants = {tensor.name: tensor for tensor in tensors_of(model.graph)}
    nodes = list(nodes_of(model.graph))
    for node in nodes:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            constants[node.output[0]] = node.attribute[0].t
    coded = set()
    for node in nodes:
        if node.op_type == "DequantizeLinear" and all(name in constants for name in node.input if name):
            coded.update(node.input)
            if len(constants[node.input[0]].dims) >= 2:
                yield _dequantized(node, constants)
        if node.op_type in ("MatMulInteger", "ConvInteger") and node.input[1] in constants:
            scale = _scale_of_products(node, nodes, constants)
            if scale is not None:
                coded.update((node.input[1], scale))
                yield _of_integer_product(node, scale, constants)
    for name, tensor in constants.items():
        if (
            name not in coded
            and tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
            and len(tensor.dims) >= 2
        ):
            yield FileWeight(name, onnx.numpy_helper.to_array(tensor).astype(np.float32), "float")


def _dequantized(node: "onnx.NodeProto", constants: "dict[str, onnx.TensorProto]") -> FileWeight:
    """Returns the values of codes: (code - zero point) * scale, per tensor, axis or block."""
    onnx = require("onnx", "onnx")
    codes, scale, *rest = (onnx.numpy_helper.to_array(constants[name]) for name in node.input if name)
    options = {attribute.name: attribute.i for attribute in node.attribute}
    axis = options.get("axis", 1)
    levels = codes.astype(np.float32)
    shape = levels.shape

    def spread(value: np.ndarray) -> np.ndarray:
        if value.ndim == 0 or value.size == 1:
            return value.reshape(())
        if value.ndim == 1:
            return value.reshape([-1 if a == axis % levels.ndim else 1 for a in range(levels.ndim)])
        return np.repeat(value, options.get("block_size", 1), axis)[tuple(slice(n) for n in shape)]

    zero_point = rest[0].astype(np.float32) if rest else np.float32(0)
    values = (levels - spread(np.asarray(zero_point))) * spread(scale.astype(np.float32))
    kind = onnx.TensorProto.DataType.Name(constants[node.input[0]].data_type).lower()
    return FileWeight(node.input[0], values, kind)


def _scale_of_products(
    node: "onnx.NodeProto", nodes: "list[onnx.NodeProto]", constants: "dict[str, onnx.TensorProto]"
) -> str | None:
    """Returns the scale of the weight of an integer product, as onnxruntime.quantization writes it: the product is cast
    and multiplied by the scale of the input times that of the weight."""
    makers = {name: other for other in nodes for name in other.output}
    reached = {node.output[0]}
    for other in nodes:  # which are in the order in which they run
        if other.op_type == "Cast" and other.input[0] in reached:
            reached.update(other.output)
        if other.op_type == "Mul" and reached.intersection(other.input):
            factors = [makers[name] for name in other.input if name not in reached and name in makers]
            return next((name for factor in factors for name in factor.input if name in constants), None)
    return None


def _of_integer_product(node: "onnx.NodeProto", scale: str, constants: "dict[str, onnx.TensorProto]") -> FileWeight:
    """Returns the weight of an integer product. Scales per output are on its last axis, or the first of a
    convolution."""
    onnx = require("onnx", "onnx")
    zero_point = [node.input[3]] if len(node.input) > 3 and node.input[3] in constants else []
    axis = 0 if node.op_type == "ConvInteger" else len(constants[node.input[1]].dims) - 1
    return _dequantized(
        onnx.helper.make_node("DequantizeLinear", [node.input[1], scale, *zero_point], ["w"], axis=axis), constants
    )
