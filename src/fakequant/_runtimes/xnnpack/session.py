"""ExecuTorch: runs a program (.pte) with XNNPACK, and says which layers are computed in integers.

The codes of a program cannot be read. They are read from a second program, which is made from the same golden model and
also returns the values of its quantizers. `verify` requires that both programs have the same results.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._convert.golden.integer_layer import Integers
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._convert.golden.tracked_codes import GridOf, codes_of
from fakequant._export.executorch.delegation import Delegation, How
from fakequant._export.executorch.exported_modules import has_transposed_groups
from fakequant._export.executorch.notes import FILE, MAGIC, read_notes
from fakequant._export.executorch.program import Program, make_float_program, make_program
from fakequant._export.notes import PARAMETERS, TARGET
from fakequant._export.seal import UNSEALED, sealed
from fakequant._model.running import Args, Kwargs
from fakequant._runtimes.session import Array, Run, Session, starts_with
from fakequant._runtimes.xnnpack.running import Loaded, require_elements, thread_count, times_of_programs
from fakequant._runtimes.xnnpack.target import RUNTIME
from fakequant.nn._records import find_record

# Layers by how they are computed, as `Verification.kernels` says it.
_KERNELS: dict[How, str] = {"int8": "XNNPACK int8", "float": "XNNPACK float", "not delegated": "portable float"}


class ExecuTorchSession(Session):
    """A program, and a second one that also returns the values of quantizers.

    Programs run on the threads of a pool that ExecuTorch makes once per process, one per core. Programs keep the pool
    they were loaded with, so replacing it (`_unsafe_reset_threadpool`) is safe only before the first one is loaded. So
    the argument `threads` is ignored, and the attribute is the number of threads of the pool.
    """

    key, name = RUNTIME.key, RUNTIME.name

    def __init__(self, path: str | os.PathLike[str], threads: int = 1) -> None:
        super().__init__(path, threads)
        self.notes = read_notes(path)
        if not self.notes.is_unchanged:
            raise ValueError(
                f"{path} was changed after fakequant.export_executorch wrote it. Running it could end the process.\n"
                "Export the model again."
            )
        self.target, self.parameters, self.results = self.notes.target, self.notes.parameters, self.notes.outputs
        self.is_as_written = True
        self._file = Loaded(Path(path).read_bytes(), path)
        self.threads = thread_count()
        self._golden: nn.Module | None = None
        self._grids: dict[str, GoldenQuantizer] = {}
        # By the shapes of a batch: the program that also returns the values of quantizers, loaded, and their paths.
        self._watched: dict[Any, tuple[Loaded, list[str]]] = {}

    @classmethod
    def opens(cls, path: str | os.PathLike[str]) -> bool:
        """Returns True for every program."""
        return starts_with(path, MAGIC, offset=4)

    def watch(self, golden: nn.Module) -> None:
        """Takes the golden model, from which programs with watched codes are made."""
        self._golden = golden
        self._grids = {path: module for path, module in golden.named_modules() if isinstance(module, GoldenQuantizer)}
        embeddings = (path for path, module in golden.named_modules() if isinstance(module, nn.Embedding))
        self.lookups = set(embeddings)

    def why_float(self, layer: str) -> str | None:
        """Returns why a layer that could run in integers has a float kernel. None if that is not known."""
        if self.kernels.get(layer) == _KERNELS["float"]:
            golden: Any = self._golden.get_submodule(layer) if self._golden is not None else None
            if golden is not None and has_transposed_groups(golden):
                return "XNNPACK has no integer kernel for a transposed convolution with groups"
            return (
                "XNNPACK computes it in integers only if a single quantizer reads its output, and the scale of that "
                "quantizer is more than 1/256 of the scale of the accumulators"
            )
        return None

    def find_kernels(self, args: Args, kwargs: Kwargs) -> None:
        """Makes the program again for this batch, because the file does not say how layers are computed."""
        assert self._golden is not None, "watch was called"
        if not self.kernels:
            self._set_kernels(make_program(self._golden, args, kwargs).delegation)

    def run(self, args: Args, kwargs: Kwargs) -> Run:
        """Runs the file on a batch, and the program with watched codes."""
        inputs = self.inputs(args, kwargs)
        results = self.run_unwatched(args, kwargs)
        program, paths = self._program_for(args, kwargs, inputs)
        found = program(inputs)
        count = len(found) - len(paths)
        run = Run([_array(value) for value in found[:count]], results, {}, {})
        for path, value in zip(paths, found[count:], strict=True):
            grid = self._grids[path]
            assert grid.scale is not None
            assert grid.zero_point is not None
            codes = codes_of(value, GridOf(grid.scale, grid.zero_point, grid.spec))
            calls = run.codes.setdefault(path, {})
            calls[len(calls)] = codes.numpy().astype(np.int32)
        return run

    def run_unwatched(self, args: Args, kwargs: Kwargs) -> list[Array]:
        """Runs only the file on a batch, and returns its results."""
        return [_array(value) for value in self._file(self.inputs(args, kwargs))]

    def inputs(self, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """Returns the tensors of a batch in the order of the program's inputs."""
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        kwargs = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        if kwargs and not args and set(kwargs) == set(self.notes.inputs):
            tensors = [kwargs[name] for name in self.notes.inputs]
        if len(tensors) != len(self.notes.inputs):
            raise ValueError(
                f"The file has the inputs {', '.join(self.notes.inputs)}; the batch has {len(tensors)} tensors."
            )
        require_elements(tensors, "The batch")
        return [tensor.contiguous() for tensor in tensors]

    def write_float(self, model: nn.Module, args: Args, kwargs: Kwargs, folder: Path) -> Path:
        """Writes a program of a float model, for batches of the example's shape."""
        notes = {TARGET: "float", PARAMETERS: "", FILE: UNSEALED}
        (folder / "float.pte").write_bytes(sealed(make_float_program(model, args, kwargs, notes)))
        return folder / "float.pte"

    def times_with(
        self, other: Path, args: Args, kwargs: Kwargs, *, threads: int, seconds: float, **_: Any
    ) -> tuple[list[float], list[float]]:
        """Times both programs in a new process, because the pool of this one may have another number of threads."""
        programs = {"this": Path(self.path), "other": other}
        times = times_of_programs(programs, self.inputs(args, kwargs), threads, seconds)
        return times["this"], times["other"]

    def _program_for(self, args: Args, kwargs: Kwargs, inputs: list[Tensor]) -> tuple[Any, list[str]]:
        """Returns a program that takes this batch and returns the values of quantizers, and the paths of these."""
        key = tuple((tuple(value.shape), value.dtype) for value in inputs)
        if key not in self._watched:
            assert self._golden is not None, "watch was called"
            made: Program = make_program(self._golden, args, kwargs, watched=True)
            self._watched[key] = Loaded(made.data, self.path), made.watched
            self._set_kernels(made.delegation)
        return self._watched[key]

    def _set_kernels(self, delegation: Delegation) -> None:
        """Sets the kernels of layers with codes. If a layer has several, one in float is reported."""
        assert self._golden is not None
        layers = [(path, find_record(module)) for path, module in self._golden.named_modules()]
        coded = {path for path, record in layers if isinstance(record, Integers) and record.weight_spec is not None}
        for layer in sorted(delegation.layers, key=lambda layer: layer.how != "int8"):
            if layer.path in coded:
                self.kernels[layer.path] = _KERNELS[layer.how]
        self.integers = {path for path, kernel in self.kernels.items() if kernel == _KERNELS["int8"]}


def _array(value: Tensor) -> Array:
    return value.numpy()


SESSION = ExecuTorchSession
