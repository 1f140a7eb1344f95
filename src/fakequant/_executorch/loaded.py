"""`Loaded`: a program in the memory of ExecuTorch, which can be run."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fakequant._executorch.quiet import collecting_messages, import_runtime

# How messages name the operator that failed: by its number in a delegate, or by its name.
_NODE = re.compile(r"Failed to create .* node (\d+),? with code")
_OPERATOR = re.compile(r"(aten::\w+)\.\w+")
_ADVICE = "Use a file that fakequant.export_executorch wrote."
_SHAPES = "Use batches with the shapes of the exported example, or export_executorch(..., max_batch=...)."


class RuntimeFailure(ValueError):
    """ExecuTorch cannot load or run a program. `reasons` are the lines that it has written about it."""

    reasons: list[str]

    def caller(self, callers: dict[int | str, list[str]]) -> str:
        """Returns the module that calls the operator that failed, or an empty string if that is not known.

        `callers` has the modules that call an operator, by its number in messages of XNNPACK or by its name.
        """
        for line in self.reasons:
            number, name = _NODE.search(line), _OPERATOR.search(line)
            known = callers.get(int(number[1]) if number else name[1] if name else "", [])
            if known:
                return " or ".join(dict.fromkeys(path or "the model" for path in known))
        return ""


class Loaded:
    """A program that can be run. It keeps the bytes alive that the method reads.

    Args:
        data: The bytes of the program.
        path: The file, for messages.
    """

    def __init__(self, data: bytes, path: str | os.PathLike[str]) -> None:
        runtime = import_runtime()
        self.data, self.path = data, path
        with self._explaining(f"ExecuTorch cannot load {path}", _ADVICE):
            self.program = runtime.Runtime.get().load_program(data)
            self.method = self.program.load_method("forward")

    def __call__(self, inputs: list[Any]) -> list[Tensor]:
        """Runs the program. Constants of the example are inputs too."""
        got = ", ".join(str(tuple(value.shape)) for value in inputs if isinstance(value, Tensor))
        with self._explaining(f"ExecuTorch cannot run {self.path} on a batch of shape {got}", _SHAPES):
            # Results share the memory of the program, which the next run overwrites.
            return [value.clone() for value in self.method.execute(inputs)]

    @contextmanager
    def _explaining(self, problem: str, advice: str) -> Iterator[None]:
        """Turns errors of ExecuTorch into ValueErrors, with the message that it writes to the standard error stream."""
        messages: list[str] = []
        try:
            with collecting_messages() as messages:
                yield
        except (RuntimeError, ValueError) as error:
            reasons = [line.split("] ", 1)[-1] for line in messages if "cpuinfo" not in line]
            reasons = reasons or str(error).strip().splitlines()
            failure = RuntimeFailure(f"{problem}: {reasons[0]}\n{advice}")
            failure.reasons = reasons
            raise failure from error


def require_elements(inputs: Iterable[Tensor], what: str) -> None:
    """Raises ValueError if a tensor is empty: XNNPACK has no kernels for tensors without elements."""
    for x in inputs:
        if x.numel() == 0:
            raise ValueError(
                f"{what} has an empty tensor, of shape {tuple(x.shape)}, and XNNPACK does not compute with empty "
                "tensors.\nUse at least one row, and leave empty batches out."
            )
