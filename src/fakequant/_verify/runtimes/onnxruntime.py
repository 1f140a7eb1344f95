"""ONNX Runtime: runs an ONNX file on the CPU, and says which kernels it uses."""

import os
import tempfile
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fakequant._util.optional_packages import require
from fakequant._verify.runtimes.interface import Array, Run
from fakequant._verify.runtimes.onnx_file import OnnxFile, layers_of_weights, readers_of, weight_node

if TYPE_CHECKING:
    import onnx

# The kernels of layers that compute with integers. All others compute in float.
INTEGER_KERNELS = (
    "QLinearConv", "QGemm", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger",
    "ConvInteger",
)  # fmt: skip
# The kernels of embeddings, which compute no products. "?" stands for a layer that the runtime computed in advance.
_LOOKUP_KERNELS = ("Gather", "?")
# The kernel that multiplies a float input by codes. Its accuracy level is that of the session: at level 4, the default,
# it rounds its input to 8 bits, in blocks along the last axis. At level 1 it does not.
CODES_KERNEL = "MatMulNBits"
_EXACT_LEVEL = 1


class OnnxRuntime(OnnxFile):
    """An ONNX file in two sessions with all optimizations. One of them also outputs the codes of quantizers.

    Both have accuracy level 1 (see `CODES_KERNEL`). If the default level would compute something else, a third session
    has that. Each session is made when it is first used.

    Args:
        path: The file.
        threads: The number of threads of each session.
    """

    key, name = "onnxruntime", "ONNX Runtime"
    exact_setting = "the session's config entry session.qdq_matmulnbits_accuracy_level to 1"

    def __init__(self, path: str | os.PathLike[str], threads: int = 1) -> None:
        self.ort = require("onnxruntime", "onnxruntime")
        super().__init__(path, threads)
        try:
            optimized = _optimized(self.model, self.ort, threads)
        except Exception as error:  # of classes without a common base
            raise self.cannot_load(error) from error
        nodes = _layer_nodes(self.model, optimized)
        self.kernels = {path: "?" if node is None else node.op_type for path, node in nodes.items()}
        self.integers = {path for path, kernel in self.kernels.items() if kernel in INTEGER_KERNELS}
        self.lookups = {path for path, kernel in self.kernels.items() if kernel in _LOOKUP_KERNELS}
        # The layers, or nodes of none, whose inputs a session with the default accuracy level rounds.
        paths = {node.output[0]: path for path, node in nodes.items() if node is not None}
        self.rounded = [paths.get(node.output[0], node.name) for node in optimized.node if _rounds_input(node)]

    @cached_property
    def session(self) -> Any:
        """The session that also outputs codes."""
        return self._session(self.watching(self.codes), _EXACT_LEVEL)

    @cached_property
    def plain(self) -> Any:
        """The session that runs the file as it is."""
        return self._session(self.model.SerializeToString(), _EXACT_LEVEL)

    @cached_property
    def default(self) -> Any:
        """The session with the default accuracy level. None if that makes no difference."""
        return self._session(self.model.SerializeToString(), None) if self.rounded else None

    def _session(self, written: bytes, level: int | None) -> Any:
        return self.ort.InferenceSession(written, _options(self.ort, self.threads, level), providers=_PROVIDERS)

    def why_float(self, layer: str) -> str | None:
        """Returns why a layer that could run in integers has a float kernel. None if that is not known."""
        if self.operator_of(layer) == "ConvTranspose":
            return "there is no integer kernel for transposed convolutions"
        if self.operator_of(layer) == "Conv" and not self.quantizes_result_of(layer):
            return "its result is not quantized, and there is no integer kernel for such a convolution"
        return None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Runs the file on a batch, with and without codes as outputs."""
        names, feed = self.watched_names(self.codes), self.feed(args, kwargs)
        found = self._run(self.session, [*self.outputs, *names], feed)
        values = dict(zip(names, found[len(self.outputs) :], strict=True))
        return self.collected(found[: len(self.outputs)], self.run_unwatched(args, kwargs), values)

    def run_unwatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array]:
        """Runs only the file as it is on a batch, and returns its results."""
        return self._run(self.plain, self.outputs, self.feed(args, kwargs))

    def run_with_rounding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array] | None:
        """Returns the results at the default accuracy level. None if no layer is computed differently there."""
        return None if self.default is None else self._run(self.default, self.outputs, self.feed(args, kwargs))

    def _run(self, session: Any, names: list[str], feed: dict[str, Array]) -> list[Array]:
        try:
            found: list[Array] = session.run(names, feed)
        except Exception as error:  # of classes without a common base
            raise self.cannot_run(feed, error) from error
        return found


_PROVIDERS = ["CPUExecutionProvider"]


def run_once(path: str | os.PathLike[str], feed: dict[str, Array]) -> list[Array]:
    """Loads a file and runs it on inputs by name. Raises ImportError without ONNX Runtime, and whatever that raises."""
    ort = require("onnxruntime", "onnxruntime")
    session = ort.InferenceSession(str(path), _options(ort, torch.get_num_threads()), providers=_PROVIDERS)
    found: list[Array] = session.run(None, feed)
    return found


def _options(ort: ModuleType, threads: int, level: int | None = _EXACT_LEVEL) -> Any:
    options = ort.SessionOptions()
    if level is not None:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(level))
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # no warnings
    # Threads that wait would slow down other sessions, which are timed in turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
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
    found: dict[str, onnx.NodeProto | None] = {}
    readers = readers_of(graph)
    for weight, layer in layers_of_weights(model):
        node, before = weight_node(readers, weight), found.get(layer)
        # If the parts of a weight have different kernels, one in float is reported.
        if layer not in found or (before is not None and before.op_type in INTEGER_KERNELS):
            found[layer] = node
    return found


def _rounds_input(node: "onnx.NodeProto") -> bool:
    """Returns True if a kernel rounds its float input to 8 bits."""
    levels = [attribute.i for attribute in node.attribute if attribute.name == "accuracy_level"]
    return node.op_type == CODES_KERNEL and levels == [4]
