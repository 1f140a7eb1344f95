"""Notes in exported files: what a file was made for, and hashes that show later changes."""

import hashlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._convert.golden.quantizer import GoldenQuantizer

if TYPE_CHECKING:
    import onnx

# Notes on the whole file: its target; which argument of the model each input is, and which result each output is, as
# JSON; the names of its tensors, as JSON; hashes of its graph and of the parameters.
TARGET, INPUTS, OUTPUTS = "fakequant.target", "fakequant.inputs", "fakequant.outputs"
TENSORS = "fakequant.tensors"
GRAPH, PARAMETERS = "fakequant.graph", "fakequant.parameters"
# Of a node that outputs codes: the calls of quantizers that they are the result of, one name per line (see
# `call_name`), and the offset that was added to them.
QUANTIZER, OFFSET = "fakequant.quantizer", "fakequant.offset"

_NUMBER = re.compile(r"(.*)#([1-9]\d*)", re.DOTALL)


def call_name(path: str, call: int) -> str:
    """Returns the name of a call: the path of the quantizer, with the number of the call if it is not the first.

    >>> call_name("fc.input_quantizer", 0), call_name("fc.input_quantizer", 1)
    ('fc.input_quantizer', 'fc.input_quantizer#1')
    """
    return f"{path}#{call}" if call else path


def parse_call(name: str) -> tuple[str, int]:
    """Returns the path of a quantizer and the number of the call.

    >>> parse_call("fc.input_quantizer"), parse_call("fc.input_quantizer#1")
    (('fc.input_quantizer', 0), ('fc.input_quantizer', 1))
    """
    match = _NUMBER.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 0)


def nodes_of(graph: "onnx.GraphProto") -> "Iterator[onnx.NodeProto]":
    """Yields the nodes of an ONNX graph in the order in which they run. Those of a body are before its own node."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)
        yield node


def tensors_of(graph: "onnx.GraphProto") -> "Iterator[onnx.TensorProto]":
    """Yields the constants of an ONNX graph and of the bodies of its loops."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from tensors_of(attribute.g)


def array_of(tensor: "onnx.TensorProto", folder: str | os.PathLike[str]) -> "np.ndarray[Any, Any]":
    """Returns the values of a tensor of an ONNX file in a folder. They may be in another file there."""
    import onnx

    if onnx.external_data_helper.uses_external_data(tensor):  # onnx would keep what it reads in the tensor
        read = onnx.TensorProto()
        read.CopyFrom(tensor)
        tensor = read
    return np.asarray(onnx.numpy_helper.to_array(tensor, str(folder)))


def digest_of_graph(model: "onnx.ModelProto", folder: str | os.PathLike[str] = ".") -> str:
    """Returns a hash of everything in an ONNX model that affects results: nodes, tensors, inputs, outputs, opsets.

    It does not depend on whether tensors are in a second file in the folder.
    """
    seen = hashlib.sha256()
    for opset in model.opset_import:
        _add(seen, "opset", opset.domain, str(opset.version))
    _add_graph(seen, model.graph, folder)
    return seen.hexdigest()


def _add_graph(seen: "hashlib._Hash", graph: "onnx.GraphProto", folder: str | os.PathLike[str]) -> None:
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            _add(seen, kind, value.name, value.type.SerializeToString(deterministic=True))
    for tensor in sorted(graph.initializer, key=lambda t: t.name):
        array = array_of(tensor, folder)
        _add(seen, "tensor", tensor.name, str(tensor.data_type), str(array.shape), _bytes_of(array))
    for node in graph.node:
        _add(seen, "node", node.domain, node.op_type, *node.input, "to", *node.output)
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            if attribute.HasField("g"):
                _add(seen, "body", attribute.name)
                _add_graph(seen, attribute.g, folder)
            else:
                _add(seen, attribute.SerializeToString(deterministic=True))
        for note in sorted(node.metadata_props, key=lambda p: p.key):
            _add(seen, "note", note.key, note.value)


def digest_of_parameters(golden: nn.Module) -> str:
    """Returns a hash of the codes, scales, biases and float parameters of a converted model."""
    seen = hashlib.sha256()
    for path, module in golden.named_modules():
        own: dict[str, Tensor | None] = dict(module._parameters)
        if isinstance(module, (IntegerLayer, GoldenQuantizer, nn.modules.batchnorm._NormBase)):
            own.update(module._buffers)
        for name, value in own.items():
            if value is not None and name != "num_batches_tracked":
                array = value.detach().cpu().contiguous().numpy()
                _add(seen, path, name, str(array.dtype), str(array.shape), _bytes_of(array))
    return seen.hexdigest()


def _bytes_of(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Returns the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _add(seen: "hashlib._Hash", *parts: "str | bytes | np.ndarray[Any, Any]") -> None:
    for part in parts:
        data: Any = part.encode() if isinstance(part, str) else part
        seen.update(len(data).to_bytes(8, "little"))
        seen.update(data)
