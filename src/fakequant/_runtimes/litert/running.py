"""Loads and runs .tflite files with LiteRT, without its messages."""

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fakequant._util.packages import require

Array = npt.NDArray[Any]
# What LiteRT calls the kernels of each target.
RESOLVERS = {
    "litert": "AUTO",
    "litert-builtin": "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
    "litert-reference": "BUILTIN_REF",
}
_ADVICE = "Use a file that fakequant.export_litert wrote."
# Where LiteRT has joined two messages without a space.
_JOINED = re.compile(r"(?<=\S)(?=(?:Node number|Attempting to|failed to delegate|gather index) )")


class RuntimeFailure(ValueError):
    """LiteRT cannot load or run a file. `reason` is what it has written about it."""

    reason: str


class Loaded:
    """A file that can be run.

    Args:
        data: The bytes of the file.
        name: What messages call it.
        threads: The number of threads.
        resolver: The kernels: one of `RESOLVERS`.
    """

    def __init__(self, data: bytes, name: object, threads: int = 1, resolver: str = "AUTO") -> None:
        module = import_runtime()
        self.name = name
        with _explaining(f"LiteRT cannot load {name}", _ADVICE):
            self.interpreter = module.Interpreter(
                model_content=data,
                num_threads=threads,
                experimental_op_resolver_type=getattr(module.OpResolverType, resolver),
            )
            self.interpreter.allocate_tensors()
        self.inputs = [entry["index"] for entry in self.interpreter.get_input_details()]
        self.outputs = [entry["index"] for entry in self.interpreter.get_output_details()]
        self._shapes = [tuple(entry["shape"]) for entry in self.interpreter.get_input_details()]

    def __call__(self, inputs: Iterable[Array]) -> list[Array]:
        """Runs the file."""
        arrays = list(inputs)
        shapes = [array.shape for array in arrays]
        problem = f"LiteRT cannot run {self.name} on a batch of shape {', '.join(map(str, shapes))}"
        if shapes != self._shapes:
            advice = "Use batches with the shapes of the exported example, or export_litert(..., dynamic_batch=True)."
            with _explaining(problem, advice):
                for index, shape in zip(self.inputs, shapes, strict=True):
                    self.interpreter.resize_tensor_input(index, shape, strict=True)
                self.interpreter.allocate_tensors()
                self._shapes = shapes
        with _explaining(problem, "Use batches like the exported example, with indices that are in range."):
            for index, array in zip(self.inputs, arrays, strict=True):
                self.interpreter.set_tensor(index, array)
            self.interpreter.invoke()
            return [self.interpreter.get_tensor(index) for index in self.outputs]

    def invoke(self) -> None:
        """Runs the file again on the inputs of the last run."""
        self.interpreter.invoke()


def arrays_of(tensors: Iterable[Tensor]) -> list[Array]:
    """Returns inputs as LiteRT takes them."""
    return [np.ascontiguousarray(tensor.detach().cpu().numpy()) for tensor in tensors]


@contextmanager
def _explaining(problem: str, advice: str) -> Iterator[None]:
    """Turns errors of LiteRT into ValueErrors, and hides its messages."""
    try:
        with _quiet():
            yield
    except (RuntimeError, ValueError) as error:
        reason = next(iter(_JOINED.sub(" ", str(error)).strip().splitlines()), type(error).__name__)
        failure = RuntimeFailure(f"{problem}: {reason}\n{advice}")
        failure.reason = reason
        raise failure from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what LiteRT's compiled code writes to the standard error stream."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def import_runtime() -> Any:
    """Returns the module that runs files. Raises ImportError if LiteRT is not installed."""
    return require("ai_edge_litert.interpreter", "ai-edge-litert", "litert")
