"""ExecuTorch: runs a program (.pte) with XNNPACK, and says which layers are computed in integers.

The codes of a program cannot be read. They are read from a second program, which is made from the same golden model and
also returns the values of its quantizers. `verify` requires that both programs have the same results.
"""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import Integers
from fakequant._convert.golden.tracked_codes import GridOf, codes_of
from fakequant._executorch.delegation import Delegation, How
from fakequant._executorch.exported_modules import has_transposed_groups
from fakequant._executorch.loaded import Loaded, require_elements
from fakequant._executorch.notes import read_notes
from fakequant._executorch.program import Program, make_program
from fakequant._executorch.quiet import import_runtime
from fakequant._verify.runtimes.interface import Array, Run
from fakequant.nn._records import find_record

_PYBINDINGS = "executorch.extension.pybindings.portable_lib"
# Layers by how they are computed, as `Verification.kernels` says it.
_KERNELS: dict[How, str] = {"int8": "XNNPACK int8", "float": "XNNPACK float", "not delegated": "portable float"}


class ExecuTorch:
    """A program, and a second one that also returns the values of quantizers.

    Programs run on the threads of a pool that ExecuTorch makes once per process, one per core. Programs keep the pool
    they were loaded with, so replacing it (`_unsafe_reset_threadpool`) is safe only before the first one is loaded.

    Args:
        path: The file.
        threads: Ignored. `ExecuTorch.threads` is the number of threads of the pool.
    """

    key, name = "executorch", "ExecuTorch"
    has_tensors = False
    may_misread = False
    exact_setting = ""
    random_operators: Sequence[str] = ()  # ExecuTorch has no such kernels
    missing: Sequence[str] = ()

    def __init__(self, path: str | os.PathLike[str], threads: int = 1) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no file {str(path)!r}.")
        self.path = path
        self.notes = read_notes(path)
        if not self.notes.is_unchanged:
            raise ValueError(
                f"{path} was changed after fakequant.export_executorch wrote it. Running it could end the process.\n"
                "Export the model again."
            )
        self.target: str | None = self.notes.target
        self.parameters: str | None = self.notes.parameters
        self.results: list[str] | None = self.notes.outputs
        self.is_as_written: bool = self.notes.is_unchanged
        self.kernels: dict[str, str] = {}
        self.integers: set[str] = set()
        self.lookups: set[str] = set()
        self.dynamic_paths: set[str] = set()
        self.unwatched: dict[str, str] = {}
        self.rounded: list[str] = []
        self._file = Loaded(Path(path).read_bytes(), path)
        self.threads = thread_count()
        self._golden: nn.Module | None = None
        self._grids: dict[str, Grid] = {}
        # By the shapes of a batch: the program that also returns the values of quantizers, loaded, and their paths.
        self._watched: dict[Any, tuple[Loaded, list[str]]] = {}

    def watch(self, golden: nn.Module) -> None:
        """Takes the golden model, from which programs with watched codes are made."""
        self._golden = golden
        self._grids = {path: module for path, module in golden.named_modules() if isinstance(module, Grid)}
        embeddings = (path for path, module in golden.named_modules() if isinstance(module, nn.Embedding))
        self.lookups = set(embeddings)

    def initializer(self, name: str) -> Array | None:
        """Returns None: the tensors of a program cannot be read."""
        return None

    def read_one_by_one(self) -> bool:
        """Returns False: codes are read together."""
        return False

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

    def find_kernels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes the program again for this batch, because the file does not say how layers are computed."""
        assert self._golden is not None, "watch was called"
        if not self.kernels:
            self._set_kernels(make_program(self._golden, args, kwargs).delegation)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
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

    def run_unwatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array]:
        """Runs only the file on a batch, and returns its results."""
        return [_array(value) for value in self._file(self.inputs(args, kwargs))]

    def run_with_rounding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array] | None:
        """Returns None: XNNPACK does not round the float inputs of layers."""
        return None

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
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

    def _program_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]
    ) -> tuple[Any, list[str]]:
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


def set_thread_count(threads: int) -> None:
    """Replaces ExecuTorch's pool by one with this number of threads. No program may have been loaded before."""
    import_runtime()
    importlib.import_module(_PYBINDINGS)._unsafe_reset_threadpool(threads)


def thread_count() -> int:
    """Returns the number of threads of ExecuTorch's pool."""
    import_runtime()
    return int(importlib.import_module(_PYBINDINGS)._threadpool_get_thread_count())


def _array(value: Tensor) -> Array:
    return value.numpy()
