"""Runs an exported model in ONNX Runtime and reads its codes and kernels."""

import json
import os
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fakequant._onnx.fingerprint import digest_of_graph
from fakequant._onnx.metadata_keys import GRAPH, INPUTS, OFFSET, PARAMETERS, QUANTIZER, TARGET
from fakequant._util.optional_packages import require

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[Any]  # of any dtype that ONNX has

# The kernels of layers that compute with integers. All others compute in float.
INTEGER_KERNELS = (
    "QLinearConv", "QGemm", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger",
    "ConvInteger",
)  # fmt: skip
# The kernels of embeddings, which compute no products. "?" stands for a layer that the runtime computed in advance.
LOOKUP_KERNELS = ("Gather", "?")
# The kernel that multiplies a float input by codes. Its accuracy level is that of the session: at level 4, the default,
# it rounds its input to 8 bits, in blocks along the last axis. At level 1 it does not.
CODES_KERNEL = "MatMulNBits"
_EXACT_LEVEL = 1


class Run(NamedTuple):
    """What a file computed from one batch."""

    # The results of the session that also outputs codes, and of the other one. Outputting codes prevents some
    # optimizations of the runtime.
    watched: list[Array]
    results: list[Array]
    # Codes by the path of the quantizer, with one entry per call.
    codes: dict[str, list[Array]]
    # The scales and zero points that were computed at run time, likewise.
    qparams: dict[str, list[tuple[Array, Array]]]


class Runtime:
    """An exported file in two sessions with all optimizations. One of them also outputs the codes of quantizers.

    Both have accuracy level 1 (see `CODES_KERNEL`). If the default level would compute something else, a third session
    has that.

    Args:
        path: The file.
        threads: The number of threads of each session.
    """

    model: "onnx.ModelProto"

    def __init__(self, path: str | os.PathLike[str], threads: int = 1) -> None:
        onnx, ort = require("onnx", "onnx"), require("onnxruntime", "onnxruntime")
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no file {str(path)!r}.")
        try:
            self.model = onnx.load(path)
        except Exception as error:
            raise ValueError(
                f"{path} is not an ONNX model: {error}\nUse a file that fakequant.export_onnx wrote."
            ) from error
        # By the name of a value that holds codes: the paths of its quantizers and the offset of the codes.
        self.codes: dict[str, tuple[list[str], int]] = {}
        # By the same name: the names of the scale and the zero point, if they are computed at run time.
        self.dynamic: dict[str, tuple[str, str]] = {}
        for node in self.model.graph.node:
            notes = {p.key: p.value for p in node.metadata_props}
            if QUANTIZER in notes:
                self.codes[node.output[0]] = (notes[QUANTIZER].split("\n"), _offset(notes, path))
                if node.op_type == "DynamicQuantizeLinear":
                    self.dynamic[node.output[0]] = node.output[1], node.output[2]
        try:
            optimized = _optimized(self.model, ort, threads)
        except Exception as error:  # of classes without a common base
            raise ValueError(
                f"ONNX Runtime cannot load {path}: {error}\nUse a file that fakequant.export_onnx wrote."
            ) from error
        nodes = _layer_nodes(self.model, optimized)
        self.kernels = {path: "?" if node is None else node.op_type for path, node in nodes.items()}
        # The layers, or nodes of none, whose inputs a session with the default accuracy level rounds.
        paths = {node.output[0]: path for path, node in nodes.items() if node is not None}
        self.rounded = [paths.get(node.output[0], node.name) for node in optimized.node if _rounds_input(node)]
        watched = onnx.ModelProto()
        watched.CopyFrom(self.model)
        there = {output.name for output in watched.graph.output}
        for name in (*self.codes, *(name for names in self.dynamic.values() for name in names)):
            if name not in there:
                watched.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
        self.session = ort.InferenceSession(watched.SerializeToString(), _options(ort, threads), providers=_PROVIDERS)
        written = self.model.SerializeToString()
        self.unwatched = ort.InferenceSession(written, _options(ort, threads), providers=_PROVIDERS)
        self.default = None
        if self.rounded:
            self.default = ort.InferenceSession(written, _options(ort, threads, level=None), providers=_PROVIDERS)
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.model.graph.output]

    def initializer(self, name: str) -> Array | None:
        """Returns the value of a tensor in the file. None if there is no such tensor."""
        onnx = require("onnx", "onnx")
        for tensor in self.model.graph.initializer:
            if tensor.name == name:
                return np.asarray(onnx.numpy_helper.to_array(tensor))
        return None

    @property
    def target(self) -> str | None:
        """The target for which the file was exported. None if the file does not say."""
        return self._noted(TARGET)

    @property
    def parameters(self) -> str | None:
        """The hash of the exported parameters. None in files of older versions."""
        return self._noted(PARAMETERS)

    @property
    def is_as_written(self) -> bool:
        """Whether the file is unchanged since `export_onnx` wrote it. False for files of older versions."""
        return self._noted(GRAPH) == digest_of_graph(self.model)

    def quantizes_result_of(self, layer: str) -> bool:
        """Returns True if all that reads the result of a layer in the file quantizes it, also after a ReLU."""
        node = _layer_node(self.model.graph, f"{layer}." if layer else "")
        while node is not None:
            users = [other for other in self.model.graph.node if node.output[0] in other.input]
            if users and all(user.op_type == "QuantizeLinear" for user in users):
                return True
            node = users[0] if len(users) == 1 and users[0].op_type in ("Relu", "Clip") else None
        return False

    def _arguments(self) -> list[str]:
        """Returns the names of the model's arguments, in the order of the file's inputs."""
        noted = self._noted(INPUTS)
        names = None if noted is None else json.loads(noted)
        return names if isinstance(names, list) and len(names) == len(self.inputs) else self.inputs

    def _noted(self, key: str) -> str | None:
        return next((p.value for p in self.model.metadata_props if p.key == key), None)

    @property
    def dynamic_paths(self) -> set[str]:
        """The paths of the quantizers whose scales are computed at run time."""
        return {path for name in self.dynamic for path in self.codes[name][0]}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Runs the file on a batch, with and without codes as outputs."""
        feed = self._feed(args, kwargs)
        names = [*self.codes, *(name for names in self.dynamic.values() for name in names)]
        try:
            found = self.session.run([*self.outputs, *names], feed)
            results = self.unwatched.run(self.outputs, feed)
        except Exception as error:  # of classes without a common base
            raise ValueError(self._cannot_run(feed, error)) from error
        values = dict(zip(names, found[len(self.outputs) :], strict=True))
        run = Run(found[: len(self.outputs)], results, {}, {})
        for name, (paths, offset) in self.codes.items():
            for path in paths:
                run.codes.setdefault(path, []).append(values[name].astype(np.int32) - offset)
                if name in self.dynamic:
                    scale, zero_point = self.dynamic[name]
                    run.qparams.setdefault(path, []).append((values[scale], values[zero_point]))
        return run

    def run_at_default_level(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array] | None:
        """Returns the results at the default accuracy level. None if no layer is computed differently there."""
        return None if self.default is None else self.default.run(self.outputs, self._feed(args, kwargs))

    def _feed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Array]:
        """Returns the inputs of the file by name."""
        arguments = dict(zip(self.inputs, self._arguments(), strict=True))
        feed = {name: np.asarray(kwargs[key]) for name, key in arguments.items() if key in kwargs}
        others = [name for name, key in arguments.items() if key not in kwargs]
        if len(others) != len(args) or len(feed) != len(kwargs):
            got = ", ".join([f"{len(args)} by position", *kwargs])
            raise ValueError(f"The file has the inputs {', '.join(self.inputs)}; the batch has {got}.")
        return feed | {name: np.asarray(value) for name, value in zip(others, args, strict=True)}

    def _cannot_run(self, feed: dict[str, Array], error: Exception) -> str:
        takes = ", ".join(f"{value.name} of shape {value.shape}" for value in self.session.get_inputs())
        got = ", ".join(f"{name} of shape {list(value.shape)}" for name, value in feed.items())
        reason = str(error).strip().split("\n")[0]
        return (
            f"ONNX Runtime cannot run the file on this batch: {reason}\nThe file takes {takes}; the batch has {got}.\n"
            "Use batches with the shapes of the exported example; only the batch size may differ."
        )


def _offset(notes: dict[str, str], path: str | os.PathLike[str]) -> int:
    try:
        return int(notes[OFFSET])
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged: the metadata of a quantizer has no {OFFSET!r}.\n"
            "Use a file that fakequant.export_onnx wrote."
        ) from error


_PROVIDERS = ["CPUExecutionProvider"]


def _options(ort: ModuleType, threads: int, level: int | None = _EXACT_LEVEL) -> Any:
    options = ort.SessionOptions()
    if level is not None:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(level))
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # no warnings
    return options


def _optimized(model: "onnx.ModelProto", ort: ModuleType, threads: int) -> "onnx.GraphProto":
    """Returns the graph that a session with the default accuracy level runs, after all optimizations."""
    with tempfile.TemporaryDirectory() as folder:
        options = _options(ort, threads, level=None)
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        ort.InferenceSession(model.SerializeToString(), options, providers=_PROVIDERS)
        graph: onnx.GraphProto = require("onnx", "onnx").load(options.optimized_model_filepath).graph
        return graph


def _layer_nodes(model: "onnx.ModelProto", graph: "onnx.GraphProto") -> "dict[str, onnx.NodeProto | None]":
    """Returns the node of an optimized graph that computes each layer of a file, by the path of the layer."""
    matches = [_WEIGHT.fullmatch(t.name) for t in model.graph.initializer]
    readers = _readers(graph)
    found: dict[str, onnx.NodeProto | None] = {}
    for match in matches:
        if match is None:
            continue
        node, layer = _weight_node(readers, match["weight"]), match["layer"] or ""
        before = found.get(layer)
        # If the parts of a weight have different kernels, one in float is reported.
        if layer not in found or (before is not None and before.op_type in INTEGER_KERNELS):
            found[layer] = node
    return found


def _rounds_input(node: "onnx.NodeProto") -> bool:
    """Returns True if a kernel rounds its float input to 8 bits."""
    levels = [attribute.i for attribute in node.attribute if attribute.name == "accuracy_level"]
    return node.op_type == CODES_KERNEL and levels == [4]


# The codes of a weight, or of a part of it.
_WEIGHT = re.compile(r"(?P<weight>((?P<layer>.*)\.)?weight(\[\d+\])?)_codes")


def _layer_node(graph: "onnx.GraphProto", layer: str) -> "onnx.NodeProto | None":
    """Returns the node that computes with the weight of a layer, given its path and a dot. None if there is none."""
    return _weight_node(_readers(graph), f"{layer}weight")


def _readers(graph: "onnx.GraphProto") -> "dict[str, onnx.NodeProto]":
    """Returns a node that reads each value, by the name of the value."""
    return {name: node for node in graph.node for name in node.input}


def _weight_node(readers: "dict[str, onnx.NodeProto]", weight: str) -> "onnx.NodeProto | None":
    """Returns the node that computes with a weight, or None if there is none."""
    # The codes may have been packed under another name. The scale keeps its name, unless both are transposed.
    names = (f"{weight}_codes", f"{weight}_scale", f"{weight}_codes_T")
    node = next((readers[name] for name in names if name in readers), None)
    while node is not None and node.op_type in ("DequantizeLinear", "Transpose", "Reshape", "Slice", "Cast"):
        node = readers.get(node.output[0])
    return node
