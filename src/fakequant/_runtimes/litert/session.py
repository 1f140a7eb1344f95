"""LiteRT: runs a .tflite file with the kernels of its target, and says which layers are computed in integers.

XNNPACK does not store the tensors between its operators, so codes are read from a copy of the file that also outputs
them. `verify` requires that both have the same results.
"""

import inspect
import os
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._convert.golden.integer_layer import Integers
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._export.litert.file import MAGIC, LitertFile, write
from fakequant._export.litert.program import KERNELS, file_of, make_float_graph, make_graph
from fakequant._export.notes import INPUTS, OUTPUTS, PARAMETERS, TARGET, parse_call
from fakequant._model.running import Args, Kwargs
from fakequant._runtimes.litert.running import RESOLVERS, Loaded, arrays_of
from fakequant._runtimes.litert.target import RUNTIME
from fakequant._runtimes.session import Array, Run, Session, starts_with
from fakequant.nn._records import find_record

# Layers by how they are computed, as `Verification.kernels` says it.
_KERNELS = {"int8": "LiteRT int8", "int16": "LiteRT int16", "dynamic": "LiteRT int8, dynamic", "float": "LiteRT float"}


class LitertSession(Session):
    """A file, and a copy that also outputs the codes of quantizers."""

    key, name = RUNTIME.key, RUNTIME.name

    def __init__(self, path: str | os.PathLike[str], threads: int = 1) -> None:
        super().__init__(path, threads)
        self._file = LitertFile(path)
        notes = self._file.notes
        self.target, self.parameters, self.results = notes[TARGET], notes[PARAMETERS], notes[OUTPUTS]
        if self.target not in RESOLVERS:
            known = ", ".join(RESOLVERS)
            raise ValueError(
                f"{path} was written for the target {self.target!r}, which is none of {known}.\nExport the model again."
            )
        self._resolver = RESOLVERS[self.target]
        self.is_as_written = True
        # The name of the tensor, the order of its axes, and how often each has the length of the batch or 0, by the
        # name of a quantizer's call.
        self._codes: dict[str, tuple[str, list[int], list[int]]] = notes["codes"]
        self._watching = list(dict.fromkeys(name for name, _, _ in self._codes.values()))
        self._plain: Loaded | None = None
        self._watched: Loaded | None = None
        self._golden: nn.Module | None = None
        self._grids: dict[str, GoldenQuantizer] = {}

    @classmethod
    def opens(cls, path: str | os.PathLike[str]) -> bool:
        """Returns True for every .tflite file."""
        return starts_with(path, MAGIC, offset=4)

    def watch(self, golden: nn.Module) -> None:
        """Takes the golden model, which has the layers and the grids."""
        self._golden = golden
        self._grids = {path: module for path, module in golden.named_modules() if isinstance(module, GoldenQuantizer)}
        self.lookups = {path for path, module in golden.named_modules() if isinstance(module, nn.Embedding)}
        how = self._file.notes[KERNELS]
        for path, module in golden.named_modules():
            record = find_record(module)
            if isinstance(record, Integers) and record.weight_spec is not None and how.get(path) in _KERNELS:
                self.kernels[path] = _KERNELS[how[path]]
        self.integers = {path for path in self.kernels if how[path] != "float"}

    def _require_same(self, golden: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Raises ValueError if the golden model is not exported to this file, byte by byte.

        Wrong files are not loaded: LiteRT does not check what it reads, and could end the process.
        """
        results = self._file.notes[OUTPUTS]
        order = [name for name in inspect.signature(golden.forward).parameters if name in kwargs]
        kwargs = {name: kwargs[name] for name in [*order, *(kwargs.keys() - set(order))]}
        graph = make_graph(golden, args, kwargs, results, has_any_batch=self._file.has_any_length)
        if file_of(golden, graph, results) != self._file.data:
            given = inspect.signature(golden.forward).bind_partial(*args, **kwargs).arguments
            constants = [
                f"{name}={value!r}"
                for name, value in given.items()
                if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
            ]
            values = f" with {', '.join(constants)}" if constants else ""
            raise ValueError(
                f"{self.path} is not the file that fakequant.export_litert writes for this model{values}: it was "
                "exported with other arguments that are no tensors, it was changed, or another version wrote it.\n"
                "Use the arguments of the export, or export the model again."
            )

    def run(self, args: Args, kwargs: Kwargs) -> Run:
        """Runs the file on a batch, with and without codes as outputs."""
        inputs, results = self._inputs(args, kwargs), self.run_unwatched(args, kwargs)
        if self._watched is None:
            self._watched = Loaded(self._file.watching(self._watching), self.path, self.threads, self._resolver)
        found = self._watched(inputs)
        run = Run(found[: len(results)], results, {}, {})
        arrays = dict(zip(self._watching, found[len(results) :], strict=True))
        batch = next((x.shape[0] for x, shape in zip(inputs, self._file.shapes, strict=True) if -1 in shape), 1)
        for name, (tensor, order, batches) in self._codes.items():
            path, number = parse_call(name)
            grid = self._grids.get(path)
            shift = 128 if grid is not None and grid.spec.bits <= 8 and grid.spec.qmax > 127 else 0
            codes = np.asarray(arrays[tensor].astype(np.int32) + shift)
            # Rows that are the same for the whole batch are computed once.
            lengths = [times * batch if times and size == 1 else size for times, size in zip(batches, codes.shape)]
            codes = np.broadcast_to(codes, lengths).transpose([order.index(axis) for axis in range(len(order))])
            # The model's code may view them in another shape.
            run.codes.setdefault(path, {})[number] = np.array(codes, order="C")
        return run

    def run_unwatched(self, args: Args, kwargs: Kwargs) -> list[Array]:
        """Runs only the file as it is on a batch, and returns its results."""
        inputs = self._inputs(args, kwargs)
        if self._plain is None:
            if self._golden is not None:
                self._require_same(self._golden, args, kwargs)
            self._plain = Loaded(self._file.data, self.path, self.threads, self._resolver)
        return self._plain(inputs)

    def _inputs(self, args: Args, kwargs: Kwargs) -> list[Array]:
        """Returns the tensors of a batch in the order of the file's inputs."""
        names = self._file.notes[INPUTS]
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        given = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        if given and not args and set(given) == set(names):
            tensors = [given[name] for name in names]
        if len(tensors) != len(names):
            raise ValueError(f"The file has the inputs {', '.join(names)}; the batch has {len(tensors)} tensors.")
        for name, tensor, shape in zip(names, tensors, self._file.shapes, strict=True):
            fits = len(shape) == tensor.dim() and all(a in (-1, b) for a, b in zip(shape, tensor.shape, strict=True))
            if not fits or not tensor.numel():
                lengths = ", ".join("any" if length == -1 else str(length) for length in shape)
                raise ValueError(
                    f"{self.path} takes {name} of shape ({lengths}), got one of shape {tuple(tensor.shape)}.\n"
                    "Use batches with the shapes of the exported example, or export_litert(..., dynamic_batch=True)."
                )
        return arrays_of(tensors)

    def write_float(self, model: nn.Module, args: Args, kwargs: Kwargs, folder: Path) -> Path:
        """Writes a float model to a file, for batches of the example's shape."""
        from fakequant._model import leaves

        names = leaves.names(model(*args, **kwargs))
        graph = make_float_graph(model, args, kwargs, names)
        notes = {TARGET: self.target, INPUTS: [name for name, _ in graph.inputs], OUTPUTS: names, PARAMETERS: ""}
        (folder / "float.tflite").write_bytes(write(graph, {**notes, KERNELS: {}}))
        return folder / "float.tflite"


SESSION = LitertSession
