"""`OnnxSession`: the part of a session that all runtimes of ONNX files share.

It reads what `export_onnx` wrote: the metadata of a file, its tensors, and which values hold codes.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from fakequant._export.notes import (
    GRAPH,
    INPUTS,
    OFFSET,
    OUTPUTS,
    PARAMETERS,
    QUANTIZER,
    TARGET,
    TENSORS,
    array_of,
    digest_of_graph,
    nodes_of,
    parse_call,
    tensors_of,
)
from fakequant._export.onnx.export_onnx import TORCHS_LOWEST, quiet_exporter, torch_export
from fakequant._export.onnx.exported_modules import tensors_in_file
from fakequant._export.onnx.graph_forms import IN_BYTES, PACKED, PAIRS
from fakequant._model.running import Args, Kwargs
from fakequant._runtimes import TARGETS
from fakequant._runtimes.session import Array, Run, Session, starts_with
from fakequant._util.files import begun, size_of
from fakequant._util.packages import require

if TYPE_CHECKING:
    import onnx

# The first byte of every ONNX file: the tag of its first field, the version of the format.
_FIRST_BYTE = b"\x08"
# FLOAT4E2M1 and FLOAT8E8M0, as numbers in a file.
_NEW_TYPES = {23, 24}
_OLDER_TYPES = (
    "The file has FP4 codes or E8M0 scales, for which runtimes may have no kernels.\nExport the model with opset=21 or "
    "22, which stores the same values as FP8 codes and float32 scales, and verify that file."
)
_ADVICE = "Use a file that fakequant.export_onnx wrote."


class OnnxSession(Session):
    """An ONNX file. Sessions of runtimes are derived from it."""

    model: "onnx.ModelProto"

    def __init__(self, path: str | os.PathLike[str], threads: int = 1) -> None:
        super().__init__(path, threads)
        self.model = load(path)
        # Where tensors are that are not in the file itself.
        self.folder = Path(path).resolve().parent
        self.has_external_data = any(tensor.external_data for tensor in tensors_of(self.model.graph))
        # By the name of a value that holds codes: the paths of its quantizers and the offset of the codes.
        self.codes: dict[str, tuple[list[str], int]] = {}
        # By the same name: the number of the call of each of these quantizers.
        self.calls: dict[str, list[int]] = {}
        # By the same name: the names of the scale and the zero point, if they are computed at run time.
        self.dynamic: dict[str, tuple[str, str]] = {}
        # By the same names, and those of their scales and zero points, if they are inside a loop: the number of the
        # Scan among the nodes of the graph, and the name there. Outside of it they have an axis of steps.
        self.steps: dict[str, tuple[int, str]] = {}
        for scan, node in _in_scans(self.model.graph):
            notes = {p.key: p.value for p in node.metadata_props}
            if QUANTIZER in notes:
                calls = [parse_call(line) for line in notes[QUANTIZER].split("\n")]
                outputs = list(node.output)
                if scan is not None:
                    outputs = [f"{name}_of_steps" for name in node.output]
                    self.steps |= {name: (scan, inside) for name, inside in zip(outputs, node.output, strict=True)}
                self.codes[outputs[0]] = ([quantizer for quantizer, _ in calls], _offset(notes, path))
                self.calls[outputs[0]] = [number for _, number in calls]
                if node.op_type == "DynamicQuantizeLinear":
                    self.dynamic[outputs[0]] = outputs[1], outputs[2]
        self.dynamic_paths = {path for name in self.dynamic for path in self.codes[name][0]}
        self.constants = {tensor.name: tensor for tensor in tensors_of(self.model.graph)}
        self.inputs = [value.name for value in self.model.graph.input if value.name not in self.constants]
        self.outputs = [value.name for value in self.model.graph.output]
        noted = json.loads(_noted(self.model, OUTPUTS) or "null")
        self.results = None
        if isinstance(noted, dict):
            self.results = [noted.get(name, f"{name}, which it does not name") for name in self.outputs]
        self.target, self.parameters = _noted(self.model, TARGET), _noted(self.model, PARAMETERS)
        self.missing = sorted(set(json.loads(_noted(self.model, TENSORS) or "[]")) - set(self.constants))
        try:
            digest = digest_of_graph(self.model, self.folder)
        except Exception as error:  # of classes without a common base
            raise ValueError(
                f"{path} has tensors that cannot be read: {error}\n"
                "A second file must be where it was written: next to the first one, and no link."
            ) from error
        self.is_as_written = _noted(self.model, GRAPH) == digest
        self.random_operators = sorted({node.op_type for node in nodes_of(self.model.graph) if _draws(node)})

    @classmethod
    def opens(cls, path: str | os.PathLike[str]) -> bool:
        """Returns True for an ONNX file whose target is for this runtime. A file may name no target."""
        if not starts_with(path, _FIRST_BYTE):
            return False
        target = TARGETS.get(_noted(load(path), TARGET) or "", TARGETS["generic"])
        return target.runtime.key == cls.key

    def size(self) -> int:
        """Returns the size of the file and of the files with its large tensors, in bytes."""
        entries = [entry for tensor in self.model.graph.initializer for entry in tensor.external_data]
        return super().size() + sum(
            size_of(self.folder / name) for name in {e.value for e in entries if e.key == "location"}
        )

    def tensors(self, golden: nn.Module) -> Iterator[tuple[str, Array, Tensor]]:
        """Yields the tensors that the golden model and the file both have."""
        for name, here in tensors_in_file(golden):
            there = self._gathered(name, here)
            there = self.initializer(name) if there is None else there
            # A tensor is absent if it is not used, or was merged with an equal one.
            if there is not None:
                yield name, there, here

    def initializer(self, name: str) -> Array | None:
        """Returns the value of a tensor in the file. None if there is no such tensor."""
        found = self.constants.get(name)
        return None if found is None else array_of(found, self.folder)

    def _gathered(self, name: str, here: Tensor) -> Array | None:
        """Returns a tensor of an embedding with 4-bit codes. None if the file does not store it in bytes.

        Codes are unpacked as the file does it, with its own table.
        """
        packed, pairs = self.initializer(f"{name}{PACKED}"), self.initializer(f"{name}{PAIRS}")
        if packed is None or pairs is None:
            return self.initializer(f"{name}{IN_BYTES}")
        codes: Array = pairs[packed].reshape(len(packed), -1)
        return codes[:, : here.shape[-1]]

    def operator_of(self, layer: str) -> str | None:
        """Returns the operator that computes a layer. None if no operator reads the codes of its weight."""
        node = self.node_of(layer)
        return None if node is None else str(node.op_type)

    def node_of(self, layer: str) -> "onnx.NodeProto | None":
        """Returns the node that computes with the weight of a layer. None if there is none."""
        return weight_node(readers_of(self.model.graph), f"{layer}.weight" if layer else "weight")

    def quantizes_result_of(self, layer: str) -> bool:
        """Returns True if all that reads the result of a layer in the file quantizes it, also after a ReLU."""
        node = self.node_of(layer)
        while node is not None:
            users = [other for other in self.model.graph.node if node.output[0] in other.input]
            if users and all(user.op_type == "QuantizeLinear" for user in users):
                return True
            node = users[0] if len(users) == 1 and users[0].op_type in ("Relu", "Clip") else None
        return False

    def watched_names(self, codes: Iterable[str]) -> list[str]:
        """Returns the names of values to watch: codes, and their scales and zero points if those are computed."""
        codes = list(codes)
        return [*codes, *(name for one in codes for name in self.dynamic.get(one, ()))]

    def watching(self, codes: Iterable[str]) -> bytes:
        """Returns the file with codes as additional outputs."""
        onnx = require("onnx", "onnx")
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for name in self.watched_names(codes):
            if name in self.steps:
                number, inside = self.steps[name]
                _add_scan_output(model.graph.node[number], inside, name)
            if name not in self.outputs:
                model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
        written: bytes = model.SerializeToString()
        return written

    @contextmanager
    def watching_file(self, codes: Iterable[str]) -> Iterator[Path]:
        """Yields the path of a temporary file with codes as additional outputs, next to a second file if any."""
        if not self.has_external_data:
            with TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                path.write_bytes(self.watching(codes))
                yield path
            return
        path = begun(self.folder, "watching.onnx")
        try:
            path.write_bytes(self.watching(codes))
            yield path
        finally:
            path.unlink()

    def collected(self, watched: Sequence[Array], results: Sequence[Array], values: dict[str, Array]) -> Run:
        """Returns a run. `values` has the watched values by name."""
        run = Run(list(watched), list(results), {}, {})
        for name, (paths, offset) in self.codes.items():
            if name not in values:
                continue
            # Inside a loop each step is a call, after those of the sequences before.
            is_steps = name in self.steps
            found, *qparams = (values[one] if is_steps else values[one][None] for one in self.watched_names([name]))
            for path, call in zip(paths, self.calls[name], strict=True):
                codes = run.codes.setdefault(path, {})
                first = len(codes) if is_steps else call
                codes.update(enumerate(_as_codes(found, offset), first))
                if qparams:
                    run.qparams.setdefault(path, {}).update(enumerate(zip(*qparams, strict=True), first))
        return run

    @property
    def opset(self) -> int:
        """The version of the ONNX operators in the file."""
        return next((int(one.version) for one in self.model.opset_import if one.domain == ""), 0)

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Returns the axes that may have any length, with their names, by the name of the model's argument."""
        shapes = {value.name: _shape(value) for value in self.model.graph.input}
        arguments = zip(self.inputs, self._arguments(), strict=True)
        return {
            key: {axis: size for axis, size in enumerate(shapes[name]) if isinstance(size, str)}
            for name, key in arguments
        }

    def write_float(self, model: nn.Module, args: Args, kwargs: Kwargs, folder: Path) -> Path:
        """Writes a float model with the opset and the dynamic axes of this file, if torch can export them."""
        ir = require("onnx_ir", "onnxscript")
        opset = max(self.opset, TORCHS_LOWEST)
        axes = self.dynamic_axes()
        by_position = tuple(of for name, of in axes.items() if name not in kwargs)
        shapes: Any = by_position if not kwargs else axes if not args else None
        with quiet_exporter():
            try:
                program = torch_export(model, args, kwargs, opset, shapes)
            except Exception:
                if shapes is None:
                    raise
                program = torch_export(model, args, kwargs, opset, None)
        ir.save(program, folder / "float.onnx", external_data="float.data" if self.has_external_data else None)
        return folder / "float.onnx"

    def feed(self, args: Args, kwargs: Kwargs) -> dict[str, Array]:
        """Returns the inputs of the file by name."""
        arguments = dict(zip(self.inputs, self._arguments(), strict=True))
        # Other arguments are constants of the file.
        args = tuple(value for value in args if isinstance(value, (Tensor, np.ndarray)))
        kwargs = {name: value for name, value in kwargs.items() if isinstance(value, (Tensor, np.ndarray))}
        feed = {name: np.asarray(kwargs[key]) for name, key in arguments.items() if key in kwargs}
        others = [name for name, key in arguments.items() if key not in kwargs]
        if len(others) != len(args) or len(feed) != len(kwargs):
            got = ", ".join([f"{len(args)} by position", *kwargs])
            raise ValueError(f"The file has the inputs {', '.join(self.inputs)}; the batch has {got}.")
        return feed | {name: np.asarray(value) for name, value in zip(others, args, strict=True)}

    def cannot_load(self, error: Exception) -> ValueError:
        """Returns the error to raise if the runtime refuses the file."""
        types = {tensor.data_type for tensor in tensors_of(self.model.graph)}
        advice = _OLDER_TYPES if types & _NEW_TYPES else _ADVICE
        return ValueError(f"{self.name} cannot load {self.path}: {error}\n{advice}")

    def cannot_run(self, feed: dict[str, Array], error: Exception) -> ValueError:
        """Returns the error to raise if the runtime refuses a batch."""
        shapes = {value.name: _shape(value) for value in self.model.graph.input}
        takes = ", ".join(f"{name} of shape {shapes[name]}" for name in self.inputs)
        got = ", ".join(f"{name} of shape {list(value.shape)}" for name, value in feed.items())
        reason = str(error).strip().split("\n")[0]
        return ValueError(
            f"{self.name} cannot run the file on this batch: {reason}\nThe file takes {takes}; the batch has {got}.\n"
            "Use batches with the shapes of the exported example; only the batch size may differ."
        )

    def _arguments(self) -> list[str]:
        """Returns the names of the model's arguments, in the order of the file's inputs."""
        noted = _noted(self.model, INPUTS)
        names = None if noted is None else json.loads(noted)
        return names if isinstance(names, list) and len(names) == len(self.inputs) else self.inputs


def load(path: str | os.PathLike[str]) -> "onnx.ModelProto":
    """Reads an ONNX file, without tensors that are in a second one."""
    try:
        model: onnx.ModelProto = require("onnx", "onnx").load(path, load_external_data=False)
    except Exception as error:
        raise ValueError(f"{path} is not an ONNX model: {error}\n{_ADVICE}") from error
    return model


def _in_scans(graph: "onnx.GraphProto") -> "Iterator[tuple[int | None, onnx.NodeProto]]":
    """Yields the nodes of a graph with the number of the Scan in whose body they are, or None."""
    for number, node in enumerate(graph.node):
        if node.op_type == "Scan":
            yield from ((number, inside) for attribute in node.attribute for inside in attribute.g.node)
        yield None, node


def _add_scan_output(node: "onnx.NodeProto", inside: str, name: str) -> None:
    """Adds an output to a Scan: a value of its body, for all steps in the order in which they run."""
    onnx = require("onnx", "onnx")
    for attribute in node.attribute:
        if attribute.name == "body":
            attribute.g.output.append(onnx.helper.make_empty_tensor_value_info(inside))
        elif attribute.name == "scan_output_directions":
            attribute.ints.append(0)
    node.output.append(name)


def _noted(model: "onnx.ModelProto", key: str) -> str | None:
    return next((p.value for p in model.metadata_props if p.key == key), None)


def _as_codes(value: Array, offset: int) -> Array:
    """Returns codes without their offset. Those of float formats are read as values."""
    return value if value.dtype == np.float32 else value.astype(np.int32) - offset


# Operators that draw random numbers. Dropout does only in training mode.
_RANDOM = {
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
}  # fmt: skip


def _draws(node: "onnx.NodeProto") -> bool:
    return node.op_type in _RANDOM or (node.op_type == "Dropout" and len(node.input) > 2)


def _offset(notes: dict[str, str], path: str | os.PathLike[str]) -> int:
    try:
        return int(notes[OFFSET])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged: the metadata of a quantizer has no {OFFSET!r}.\n{_ADVICE}") from error


def _shape(value: "onnx.ValueInfoProto") -> list[int | str]:
    sizes = value.type.tensor_type.shape.dim
    return [size.dim_param or size.dim_value for size in sizes]


# The codes of a weight, or of a part of it.
_WEIGHT = re.compile(r"(?P<weight>((?P<layer>.*)\.)?weight(\[\d+\])?)_codes(_packed)?")


def layers_of_weights(model: "onnx.ModelProto") -> Iterator[tuple[str, str]]:
    """Yields the name of each weight, or part of a weight, that a file stores as codes, and the path of its layer."""
    for tensor in tensors_of(model.graph):
        match = _WEIGHT.fullmatch(tensor.name)
        if match is not None:
            yield match["weight"], match["layer"] or ""


def readers_of(graph: "onnx.GraphProto") -> "dict[str, onnx.NodeProto]":
    """Returns a node that reads each value, by the name of the value."""
    return {name: node for node in nodes_of(graph) for name in node.input}


def weight_node(readers: "dict[str, onnx.NodeProto]", weight: str) -> "onnx.NodeProto | None":
    """Returns the node that computes with a weight, or None if there is none. See `readers_of`."""
    # The codes may have been packed under another name. The scale keeps its name, unless both are transposed.
    names = (f"{weight}_codes", f"{weight}_codes{PACKED}", f"{weight}_scale", f"{weight}_codes_T")
    node = next((readers[name] for name in names if name in readers), None)
    while node is not None and node.op_type in ("DequantizeLinear", "Transpose", "Reshape", "Slice", "Cast"):
        node = readers.get(node.output[0])
    return node
