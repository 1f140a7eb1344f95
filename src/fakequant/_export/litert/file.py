"""Writes a graph as a .tflite file, and reads what `verify` needs from one.

The file has notes in its metadata: what it was made for, which tensors have the codes of which quantizers, and its
seal.
"""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from fakequant._export.litert.graph import AnyLength, Array, Graph, Operator, Tensor
from fakequant._export.notes import INPUTS, OUTPUTS, PARAMETERS, TARGET
from fakequant._export.seal import SEAL, UNSEALED, is_unchanged, sealed
from fakequant._util.packages import require

# What follows the first four bytes of every file.
MAGIC = b"TFL3"
# The metadata entry with the notes, as JSON.
NOTES = "fakequant"
_NEEDED = {TARGET, INPUTS, OUTPUTS, PARAMETERS, "kernels", "codes", "seal"}
# Buffers start at multiples of this number of bytes, so that kernels can read them where they are.
_ALIGNMENT = 16
# The version of an operator, where it is not 1: that which first had the form that is written here.
_VERSIONS = {
    "ADD": 2, "SUB": 2, "MUL": 2, "CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 5, "TRANSPOSE_CONV": 3,
    "DEQUANTIZE": 2, "CONCATENATION": 2, "MEAN": 2, "TRANSPOSE": 2, "PAD": 2, "MAX_POOL_2D": 2,
    "AVERAGE_POOL_2D": 2, "STRIDED_SLICE": 2, "SLICE": 2, "GATHER": 2, "BATCH_MATMUL": 2, "MAXIMUM": 2, "MINIMUM": 2,
    "RESIZE_NEAREST_NEIGHBOR": 3, "RESIZE_BILINEAR": 3, "BROADCAST_TO": 3, "SOFTMAX": 2, "LOGISTIC": 2, "TANH": 2,
}  # fmt: skip
_TYPES = {
    "float32": "FLOAT32", "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "bool": "BOOL",
    "uint8": "UINT8", "int4": "INT4",
}  # fmt: skip


def schema() -> Any:
    """Returns the module with the schema. Raises ImportError if LiteRT is not installed."""
    return require("ai_edge_litert.schema_py_generated", "ai-edge-litert", "litert")


def write(graph: Graph, notes: dict[str, Any]) -> bytes:
    """Returns the bytes of a file."""
    return sealed(pack(_Writer(graph, notes).model))


def pack(model: Any) -> bytes:
    """Returns the bytes of a model of the schema."""
    builder = require("flatbuffers", "flatbuffers", "litert").Builder(1 << 20)
    builder.Finish(model.Pack(builder), MAGIC)
    return bytes(builder.Output())


class _Writer:
    """Makes a model of the schema from a graph."""

    def __init__(self, graph: Graph, notes: dict[str, Any]) -> None:
        self.schema, self.graph = schema(), graph
        self.buffers: list[Any] = [self.schema.BufferT()]  # the first one must be empty
        self.buffer_of: dict[bytes, int] = {}  # by the digest of what is in it
        self.codes: list[Any] = []
        self.code_of: dict[tuple[str, int], int] = {}
        tensors = graph.tensors()
        self.index = {id(tensor): number for number, tensor in enumerate(tensors)}
        names = _unique_names(tensors, graph)
        subgraph = self.schema.SubGraphT()
        subgraph.name = "main"
        subgraph.tensors = [self.tensor(tensor, name) for tensor, name in zip(tensors, names, strict=True)]
        subgraph.inputs = self.indices([tensor for _, tensor in graph.inputs])
        subgraph.outputs = self.indices([tensor for _, tensor in graph.outputs])
        subgraph.operators = [self.operator(operator) for operator in graph.operators]
        model = self.schema.ModelT()
        model.version, model.description = 3, "fakequant"
        model.subgraphs = [subgraph]
        model.operatorCodes = self.codes
        model.signatureDefs = [self.signature()]
        # How often axes have the length of the batch, and 0 where the length is fixed.
        batch = next((one for _, x in graph.inputs for one in x.shape if isinstance(one, AnyLength)), 1)
        codes = {
            name: [
                names[self.index[id(found)]],
                list(order),
                [one // batch if isinstance(one, AnyLength) else 0 for one in found.shape],
            ]
            for name, (found, order) in graph.codes.items()
        }
        note = json.dumps({**notes, "codes": codes, "seal": UNSEALED}).encode()
        metadata = self.schema.MetadataT()
        metadata.name, metadata.buffer = NOTES, self.buffer(np.frombuffer(note, np.uint8))
        model.metadata = [metadata]
        model.buffers = self.buffers
        self.model = model

    def indices(self, tensors: list[Tensor | None]) -> Any:
        return np.array([-1 if one is None else self.index[id(one)] for one in tensors], np.int32)

    def tensor(self, tensor: Tensor, name: str) -> Any:
        made = self.schema.TensorT()
        made.name, made.type = name, getattr(self.schema.TensorType, _TYPES[tensor.dtype])
        # The length of an example would make files of one model differ.
        made.shape = np.array([1 if isinstance(one, AnyLength) else one for one in tensor.shape], np.int32)
        if -1 in tensor.signature and tensor.data is None:
            made.shapeSignature = np.array(tensor.signature, np.int32)
        made.hasRank = True
        made.buffer = 0 if tensor.data is None else self.buffer(_bytes_of(tensor))
        if tensor.scale is not None:
            made.quantization = self.schema.QuantizationParametersT()
            made.quantization.scale = np.asarray(tensor.scale, np.float32).reshape(-1)
            made.quantization.zeroPoint = np.full(made.quantization.scale.size, tensor.zero_point, np.int64)
            made.quantization.quantizedDimension = tensor.axis
        return made

    def buffer(self, data: Array) -> int:
        """Returns the number of the buffer with these bytes. Time steps of a recurrent layer share their weights."""
        digest = hashlib.sha256(data.tobytes()).digest()
        if digest in self.buffer_of:
            return self.buffer_of[digest]
        self.buffer_of[digest] = len(self.buffers)
        made = self.schema.BufferT()
        made.data = data
        made.Pack = lambda builder: _pack_buffer(self.schema, builder, data)
        self.buffers.append(made)
        return len(self.buffers) - 1

    def operator(self, operator: Operator) -> Any:
        made = self.schema.OperatorT()
        key = (operator.code, _version(operator))
        if key not in self.code_of:
            self.code_of[key] = len(self.codes)
            code = self.schema.OperatorCodeT()
            code.builtinCode = getattr(self.schema.BuiltinOperator, operator.code)
            code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), key[1]
            self.codes.append(code)
        made.opcodeIndex = self.code_of[key]
        made.inputs, made.outputs = self.indices(operator.inputs), self.indices(list(operator.outputs))
        if operator.options is not None:
            name, values = operator.options
            made.builtinOptionsType = getattr(self.schema.BuiltinOptions, f"{name}Options")
            made.builtinOptions = getattr(self.schema, f"{name}OptionsT")()
            for field, value in values.items():
                assert hasattr(made.builtinOptions, field), (name, field)
                setattr(made.builtinOptions, field, value)
        return made

    def signature(self) -> Any:
        made = self.schema.SignatureDefT()
        made.signatureKey, made.subgraphIndex = "serving_default", 0
        for field, named in (("inputs", self.graph.inputs), ("outputs", self.graph.outputs)):
            entries = []
            for name, tensor in named:
                entry = self.schema.TensorMapT()
                entry.name, entry.tensorIndex = name, self.index[id(tensor)]
                entries.append(entry)
            setattr(made, field, entries)
        return made


def _version(operator: Operator) -> int:
    if any(tensor is not None and tensor.dtype == "int4" for tensor in operator.inputs):
        return {"FULLY_CONNECTED": 10}.get(operator.code, 1)
    return _VERSIONS.get(operator.code, 1)


def _pack_buffer(schema: Any, builder: Any, data: Array) -> Any:
    builder.StartVector(1, data.size, _ALIGNMENT)
    builder.head = builder.head - data.size
    builder.Bytes[builder.head : builder.head + data.size] = data.tobytes()
    vector = builder.EndVector()
    schema.BufferStart(builder)
    schema.BufferAddData(builder, vector)
    return schema.BufferEnd(builder)


def _bytes_of(tensor: Tensor) -> Array:
    assert tensor.data is not None
    if tensor.dtype == "int4":
        codes = tensor.data.reshape(-1, 2).astype(np.uint8) & 15
        return codes[:, 0] | codes[:, 1] << 4
    return np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)


def _unique_names(tensors: list[Tensor], graph: Graph) -> list[str]:
    """Returns a name for each tensor. Codes have the name of the call of the quantizer."""
    given = {id(tensor): name for name, (tensor, _) in reversed(graph.codes.items())}
    given |= {id(tensor): name for name, tensor in graph.inputs}
    seen: dict[str, int] = {}
    names = []
    for number, tensor in enumerate(tensors):
        name = given.get(id(tensor)) or tensor.name or f"tensor_{number}"
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}~{seen[name]}")
    return names


# --- reading


class LitertFile:
    """A file that `export_litert` wrote, with its notes.

    Raises ValueError if it is damaged, or something else wrote it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.data = data = Path(path).read_bytes()
        if data[4:8] != MAGIC:
            kind = "is empty" if not data else "is not a .tflite file"
            raise ValueError(f"{str(path)!r} {kind}.\nUse a file that fakequant.export_litert wrote.")
        if not SEAL.search(data):
            raise ValueError(
                f"{str(path)!r} was not written by fakequant.export_litert, or it is damaged: its notes are missing.\n"
                "Use fakequant.export_litert to write it."
            )
        if not is_unchanged(data):
            raise ValueError(
                f"{path} was changed after fakequant.export_litert wrote it. Running it could end the process.\n"
                "Export the model again."
            )
        try:
            self.model = schema().ModelT.InitFromPackedBuf(data)
            self.notes: dict[str, Any] = self._read_notes()
            self.graph = self.model.subgraphs[0]
            self.names = [tensor.name.decode() for tensor in self.graph.tensors]
            inputs = [self.graph.tensors[number] for number in self.graph.inputs]
        except (struct.error, LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r} is damaged, or fakequant.export_litert did not write it.\n"
                "Use fakequant.export_litert to write it again."
            ) from error
        # The shapes of its inputs, with -1 for any length.
        self.shapes = [
            tuple(map(int, one.shape if one.shapeSignature is None else one.shapeSignature)) for one in inputs
        ]
        self.has_any_length = any(-1 in shape for shape in self.shapes)

    def _read_notes(self) -> dict[str, Any]:
        for entry in self.model.metadata or []:
            if entry.name == NOTES.encode():
                notes: dict[str, Any] = json.loads(bytes(self.model.buffers[entry.buffer].data))
                if notes.keys() >= _NEEDED:
                    return notes
        raise LookupError(NOTES)

    def watching(self, names: list[str]) -> bytes:
        """Returns a file that also outputs some tensors, behind its own outputs."""
        model = schema().ModelT.InitFromPackedBuf(self.data)
        graph = model.subgraphs[0]
        own = list(graph.outputs)
        graph.outputs = np.array(own + [self.names.index(name) for name in names], np.int32)
        model.signatureDefs = []
        return pack(model)
