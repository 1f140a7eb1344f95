"""OpenVINO: runs an ONNX file in its CPU plug-in, and says which kernels it uses."""

import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fakequant._model.running import Args, Kwargs
from fakequant._runtimes.onnx_session import OnnxSession, layers_of_weights, readers_of, weight_node
from fakequant._runtimes.openvino.running import import_openvino, outputs
from fakequant._runtimes.openvino.target import RUNTIME
from fakequant._runtimes.session import Array, Run

if TYPE_CHECKING:
    import onnx

# Why the codes of a quantizer are not read.
_ADDED = "its codes are not read, because OpenVINO would compute the addition after it differently"
_CHANGES = "reading its codes changes the results of some batches"
# The kernel of all layers in a loop.
_LOOP = "TensorIterator"
# The kernels that compute layers.
_LAYERS = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "Gather")


class _Kernel(NamedTuple):
    """A kernel of a compiled model: its kind and type, and the names of the operators that were merged into it."""

    kind: str
    dtype: str
    merged: set[str]


class OpenVinoSession(OnnxSession):
    """An ONNX file, compiled twice for the CPU. One of the two models also outputs the codes of quantizers.

    That one is compiled when it is first used.
    """

    key, name = RUNTIME.key, RUNTIME.name
    may_misread = True
    exact_setting = "the property DYNAMIC_QUANTIZATION_GROUP_SIZE of the compiled model to 0"

    def __init__(self, path: str | os.PathLike[str], threads: int = 1) -> None:
        self.core = import_openvino().Core()
        super().__init__(path, threads)
        # Kernels compute with floats of 32 bits, also on CPUs that have shorter ones. They do not round float inputs.
        self.default = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        self.settings = {**self.default, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        self.readable = [name for name in self.codes if not self._is_added(name)]
        for name in self.codes.keys() - set(self.readable):
            self.unwatched |= dict.fromkeys(self.codes[name][0], _ADDED)
        self.plain = self._compiled([])
        self.single: dict[str, Any] = {}
        self.reads_one_by_one = False
        self._find_kernels()

    def _find_kernels(self) -> None:
        """Finds the kernel of each layer."""
        kernels, readers = list(_kernels(self.plain)), readers_of(self.model.graph)
        outside = {name for node in self.model.graph.node for name in node.output}
        for weight, layer in layers_of_weights(self.model):
            node = weight_node(readers, weight)
            kernel = None if node is None else _kernel_of(node, readers, kernels)
            if node is not None and node.op_type == "Gather":
                self.lookups.add(layer)
            if layer in self.kernels and layer not in self.integers:
                continue  # if the parts of a weight have different kernels, one in float is reported
            self.kernels[layer] = "?" if kernel is None else f"{kernel.kind} {kernel.dtype}"
            if node is not None and node.output[0] not in outside:
                self.kernels[layer] = _LOOP
            self.integers.discard(layer)
            if kernel is not None and kernel.dtype == "I8":
                self.integers.add(layer)
            elif node is not None and node.op_type in ("Gemm", "MatMul"):
                self.rounded.append(layer)

    @cached_property
    def rounding(self) -> Any:
        """The model that is compiled with the default settings. None if these make no difference."""
        return self._compiled([], self.default) if self.rounded else None

    @cached_property
    def watched(self) -> Any:
        """The compiled model that also outputs codes."""
        return self._compiled(self.readable)

    def read_one_by_one(self) -> bool:
        """Makes runs read the codes of one quantizer at a time.

        OpenVINO 2026.4 outputs wrong codes in some models that output many, with the right results.
        """
        before, self.reads_one_by_one = self.reads_one_by_one, True
        return not before

    def why_float(self, layer: str) -> str | None:
        """Returns why a layer that could run in integers has a float kernel. None if that is not known."""
        if self.operator_of(layer) == "ConvTranspose":
            return "there is no integer kernel for transposed convolutions"
        if self.kernels[layer] == _LOOP:
            return "it is in a loop, and OpenVINO does not name the kernels in loops"
        weight = self.initializer(f"{layer}.weight_zero_point" if layer else "weight_zero_point")
        if weight is not None and weight.any():
            return "its weight has a zero point, for which there is no integer kernel"
        node = self.node_of(layer)
        if node is not None and _is_strided_pointwise(node):
            return "it has a 1x1 kernel and a stride, and no other layer reads its input"
        if node is not None and node.input[0].endswith("_strided"):  # `onnx_forms` has moved padding and stride out
            return "it has a 1x1 kernel, a stride and padding, which OpenVINO computes in float unless 0 has the code 0"
        return None

    def run(self, args: Args, kwargs: Kwargs) -> Run:
        """Runs the file on a batch, with and without codes as outputs."""
        feed = self.feed(args, kwargs)
        results = self.run_unwatched(args, kwargs)
        watched, values = self._run(self.watched, self.readable, feed)
        if self.reads_one_by_one or not _are_equal(watched, results):
            watched, values = results, self._run_one_by_one(results, feed)
        return self.collected(watched, results, values)

    def run_unwatched(self, args: Args, kwargs: Kwargs) -> list[Array]:
        """Runs only the file as it is on a batch, and returns its results."""
        results, _ = self._run(self.plain, [], self.feed(args, kwargs))
        return results

    def _run_one_by_one(self, results: list[Array], feed: dict[str, Array]) -> dict[str, Array]:
        """Reads the codes of one quantizer at a time, and returns the watched values by name.

        Reading codes can change how OpenVINO merges float operations, and with it their rounding. Codes of a run whose
        results differ from those without watched codes are not used. `results` are the results of the model without
        watched codes.
        """
        values: dict[str, Array] = {}
        for name in self.readable:
            if name not in self.single:
                self.single[name] = self._compiled([name])
            found, seen = self._run(self.single[name], [name], feed)
            if _are_equal(found, results):
                values |= seen
            else:
                self.unwatched |= dict.fromkeys(self.codes[name][0], _CHANGES)
        return values

    def _is_added(self, codes: str) -> bool:
        """Returns True if an addition reads the floats of these codes."""
        nodes = self.model.graph.node
        floats = {n.output[0] for n in nodes if n.op_type == "DequantizeLinear" and n.input[0] == codes}
        return any(node.op_type == "Add" and floats & set(node.input) for node in nodes)

    def _compiled(self, codes: Iterable[str], settings: dict[str, Any] | None = None) -> Any:
        try:
            with self.watching_file(codes) as path:
                return self.core.compile_model(self.core.read_model(path), "CPU", settings or self.settings)
        except Exception as error:  # of classes without a common base
            raise self.cannot_load(error) from error

    def _run(self, model: Any, codes: Iterable[str], feed: dict[str, Array]) -> tuple[list[Array], dict[str, Array]]:
        """Returns the results of a compiled model, and its watched values by name."""
        try:
            found = outputs(model, feed)
        except Exception as error:  # of classes without a common base
            raise self.cannot_run(feed, error) from error
        count = len(self.outputs)
        return found[:count], dict(zip(self.watched_names(codes), found[count:], strict=True))

    def run_with_rounding(self, args: Args, kwargs: Kwargs) -> list[Array] | None:
        """Returns the results with the default settings, at which inputs of weight-only layers are rounded."""
        return None if self.rounding is None else self._run(self.rounding, [], self.feed(args, kwargs))[0]


def _are_equal(some: list[Array], others: list[Array]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(some, others, strict=True))


def _is_strided_pointwise(node: "onnx.NodeProto") -> bool:
    """Returns True if OpenVINO moves the stride of a convolution to a pooling before it."""
    sizes = {attribute.name: list(attribute.ints) for attribute in node.attribute}
    return node.op_type == "Conv" and set(sizes.get("kernel_shape", [])) == {1} and max(sizes.get("strides", [1])) > 1


def _kernels(compiled: Any) -> Iterator[_Kernel]:
    for op in compiled.get_runtime_model().get_ops():
        notes = op.get_rt_info()
        if "layerType" not in notes or "primitiveType" not in notes:
            continue
        names = notes["originalLayersNames"].astype(str) if "originalLayersNames" in notes else ""
        # Operators that OpenVINO has made from an operator of the file have its name and a suffix.
        merged = {name.split("/")[0] for name in names.split(",")}
        yield _Kernel(notes["layerType"].astype(str), notes["primitiveType"].astype(str).rsplit("_")[-1], merged)


def _kernel_of(node: "onnx.NodeProto", readers: "dict[str, onnx.NodeProto]", kernels: list[_Kernel]) -> _Kernel | None:
    found = [kernel for kernel in kernels if kernel.merged & {node.name, *node.output}]
    last = readers.get(node.output[0])
    if last is not None and last.op_type in ("Add", "Mul", "Div"):  # kernels with a bias or a factor have its name
        found += [kernel for kernel in kernels if kernel.merged & {last.name, *last.output}]
    return next((kernel for kernel in found if kernel.kind in _LAYERS), found[0] if found else None)


SESSION = OpenVinoSession
