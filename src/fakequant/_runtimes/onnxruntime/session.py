"""ONNX Runtime: runs an ONNX file on the CPU, and says which kernels it uses."""

import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakequant._export.notes import nodes_of
from fakequant._model.running import Args, Kwargs
from fakequant._runtimes.onnx_session import OnnxSession, layers_of_weights, load, readers_of, weight_node
from fakequant._runtimes.onnxruntime.running import EXACT_LEVEL, PROVIDERS, options
from fakequant._runtimes.onnxruntime.target import RUNTIME
from fakequant._runtimes.session import Array, Run
from fakequant._util.packages import require

if TYPE_CHECKING:
    import onnx

# The kernels of layers that compute with integers. All others compute in float.
INTEGER_KERNELS = (
    "QLinearConv", "QGemm", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger",
    "ConvInteger",
)  # fmt: skip
# The kernels of embeddings, which compute no products. "?" stands for a layer that the runtime computed in advance.
_LOOKUP_KERNELS = ("Gather", "?")
# The kernel that multiplies a float input by codes, at the accuracy level of the session.
CODES_KERNEL = "MatMulNBits"


class OnnxRuntimeSession(OnnxSession):
    """An ONNX file in two sessions with all optimizations. One of them also outputs the codes of quantizers.

    Both have accuracy level 1 (see `running.py`). If the default level would compute something else, a third session
    has that. Each session is made when it is first used.
    """

    key, name = RUNTIME.key, RUNTIME.name
    exact_setting = "the session's config entry session.qdq_matmulnbits_accuracy_level to 1"

    def __init__(self, path: str | os.PathLike[str], threads: int = 1) -> None:
        self.ort = require("onnxruntime", "onnxruntime")
        super().__init__(path, threads)
        try:
            optimized = self._optimized()
        except Exception as error:  # of classes without a common base
            raise self.cannot_load(error) from error
        nodes = _layer_nodes(self.model, optimized)
        self.kernels = {path: "?" if node is None else node.op_type for path, node in nodes.items()}
        self.integers = {path for path, kernel in self.kernels.items() if kernel in INTEGER_KERNELS}
        self.lookups = {path for path, kernel in self.kernels.items() if kernel in _LOOKUP_KERNELS}
        tables = {node.output[0] for node in nodes_of(optimized) if node.op_type == "DequantizeLinear"}
        self.whole_tables = {path for path in self.lookups if _reads(nodes[path], tables)}
        # The layers, or nodes of none, whose inputs a session with the default accuracy level rounds.
        paths = {node.output[0]: path for path, node in nodes.items() if node is not None}
        self.rounded = [paths.get(node.output[0], node.name) for node in nodes_of(optimized) if _rounds_input(node)]

    @cached_property
    def session(self) -> Any:
        """The session that also outputs codes. If there are none, it is the plain one."""
        if not self.codes:
            return self.plain
        return self._session(self.watching(self.codes), EXACT_LEVEL)

    @cached_property
    def plain(self) -> Any:
        """The session that runs the file as it is."""
        return self._session(self.model.SerializeToString(), EXACT_LEVEL)

    @cached_property
    def default(self) -> Any:
        """The session with the default accuracy level. None if that makes no difference."""
        return self._session(self.model.SerializeToString(), None) if self.rounded else None

    def _session(self, written: bytes, level: int | None) -> Any:
        settings = options(self.ort, self.threads, level, self.folder)
        return self.ort.InferenceSession(written, settings, providers=PROVIDERS)

    def _optimized(self) -> "onnx.GraphProto":
        """Returns the graph that a session with the default accuracy level runs, after all optimizations."""
        with tempfile.TemporaryDirectory() as folder:
            settings = options(self.ort, self.threads, None, self.folder)
            settings.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
            if self.has_external_data:  # they would not fit into one file
                settings.add_session_config_entry(
                    "session.optimized_model_external_initializers_file_name", "optimized.data"
                )
            self.ort.InferenceSession(self.model.SerializeToString(), settings, providers=PROVIDERS)
            graph: onnx.GraphProto = load(settings.optimized_model_filepath).graph
            return graph

    def why_float(self, layer: str) -> str | None:
        """Returns why a layer that could run in integers has a float kernel. None if that is not known."""
        if self.operator_of(layer) == "ConvTranspose":
            return "there is no integer kernel for transposed convolutions"
        if self.operator_of(layer) == "Conv" and not self.quantizes_result_of(layer):
            return "its result is not quantized, and there is no integer kernel for such a convolution"
        return None

    def run(self, args: Args, kwargs: Kwargs) -> Run:
        """Runs the file on a batch, with and without codes as outputs."""
        names, feed = self.watched_names(self.codes), self.feed(args, kwargs)
        found = self._run(self.session, [*self.outputs, *names], feed)
        values = dict(zip(names, found[len(self.outputs) :], strict=True))
        return self.collected(found[: len(self.outputs)], self.run_unwatched(args, kwargs), values)

    def run_unwatched(self, args: Args, kwargs: Kwargs) -> list[Array]:
        """Runs only the file as it is on a batch, and returns its results."""
        return self._run(self.plain, self.outputs, self.feed(args, kwargs))

    def run_with_rounding(self, args: Args, kwargs: Kwargs) -> list[Array] | None:
        """Returns the results at the default accuracy level. None if no layer is computed differently there."""
        return None if self.default is None else self._run(self.default, self.outputs, self.feed(args, kwargs))

    def _run(self, session: Any, names: list[str], feed: dict[str, Array]) -> list[Array]:
        try:
            found: list[Array] = session.run(names, feed)
        except Exception as error:  # of classes without a common base
            raise self.cannot_run(feed, error) from error
        return found


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


def _reads(node: "onnx.NodeProto | None", values: set[str]) -> bool:
    return node is not None and node.input[0] in values


def _rounds_input(node: "onnx.NodeProto") -> bool:
    """Returns True if a kernel rounds its float input to 8 bits."""
    levels = [attribute.i for attribute in node.attribute if attribute.name == "accuracy_level"]
    return node.op_type == CODES_KERNEL and levels == [4]


SESSION = OnnxRuntimeSession
