"""Loads and runs programs with ExecuTorch, without its messages and what importing it changes in the process.

python -m fakequant._runtimes.xnnpack.running FOLDER     times programs, see `times_of_programs`
"""

import importlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fakequant._util.packages import require
from fakequant.testing.timing import Contender, all_times

# How messages name the operator that failed: by its number in a delegate, or by its name.
_NODE = re.compile(r"Failed to create .* node (\d+),? with code")
_OPERATOR = re.compile(r"(aten::\w+)\.\w+")
_PYBINDINGS = "executorch.extension.pybindings.portable_lib"
_TASK, _INPUTS, _TIMES = "task.json", "inputs.pt", "times.json"
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

    Messages name the file `path`.
    """

    def __init__(self, data: bytes, path: str | os.PathLike[str]) -> None:
        runtime = import_runtime()
        self.data, self.path = data, path
        with self._explaining(f"ExecuTorch cannot load {path}", _ADVICE):
            self.program = runtime.Runtime.get().load_program(data)
            self.method = self.program.load_method("forward")

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Runs the program."""
        got = ", ".join(str(tuple(value.shape)) for value in inputs)
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


def set_thread_count(threads: int) -> None:
    """Replaces ExecuTorch's pool by one with this number of threads. No program may have been loaded before."""
    import_runtime()
    importlib.import_module(_PYBINDINGS)._unsafe_reset_threadpool(threads)


def thread_count() -> int:
    """Returns the number of threads of ExecuTorch's pool."""
    import_runtime()
    return int(importlib.import_module(_PYBINDINGS)._threadpool_get_thread_count())


@contextmanager
def quiet() -> Iterator[None]:
    """Hides warnings, log messages and printed graphs, and restores the settings of `logging` and `warnings`.

    Errors are raised as usual.
    """
    root = logging.getLogger()
    handlers, disabled, level = list(root.handlers), root.manager.disable, root.level
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)


@contextmanager
def collecting_messages() -> Iterator[list[str]]:
    """Collects what ExecuTorch's compiled code writes to the standard error stream, and yields the list of lines.

    Some of it is written to the stream of the process, and some to Python's, which notebooks and test runners replace.
    The list is filled at the end, also if there was an error.
    """
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file, redirect_stderr(io.StringIO()) as printed:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += (printed.getvalue() + file.read().decode(errors="replace")).splitlines()


def import_runtime() -> Any:
    """Returns the module that runs programs. Raises ImportError if executorch is not installed."""
    import_executorch()
    with quiet():
        return require("executorch.runtime", "executorch", "executorch")


def import_executorch() -> None:
    """Imports what exports need. Raises ImportError with the command that installs it if it is missing.

    Importing executorch would add a handler to the root logger, change the filters of warnings, and set the folder of
    torch's compiler cache in the environment. This is undone.
    """
    environment = dict(os.environ)
    with quiet():
        for module in ("exir", "backends.xnnpack.partition.xnnpack_partitioner"):
            require(f"executorch.{module}", "executorch", "executorch")
    for name in set(os.environ) - set(environment):
        del os.environ[name]


def times_of_programs(
    programs: dict[str, Path], inputs: list[Tensor], threads: int, seconds: float
) -> dict[str, list[float]]:
    """Returns the times of programs of ExecuTorch that take turns, in seconds per call, by name.

    They run in a process of their own, whose thread pool has the chosen number of threads. Its folder has `task.json`,
    `inputs.pt` and, when it has ended, `times.json`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {name: str(path.absolute()) for name, path in programs.items()}
        (folder / _TASK).write_text(json.dumps({"programs": files, "threads": threads, "seconds": seconds}))
        torch.save(inputs, folder / _INPUTS)
        command = [sys.executable, "-m", "fakequant._runtimes.xnnpack.running", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
            raise RuntimeError(f"The process that times programs of ExecuTorch failed: {lines[-1]}")
        times: dict[str, list[float]] = json.loads((folder / _TIMES).read_text())
        return times


def _measure(folder: Path) -> None:
    """Times programs in the new process."""
    task = json.loads((folder / _TASK).read_text())
    inputs = torch.load(folder / _INPUTS, weights_only=True)
    torch.set_num_threads(1)
    set_thread_count(task["threads"])
    if thread_count() != task["threads"]:
        raise RuntimeError(f"ExecuTorch uses {thread_count()} threads instead of {task['threads']}.")
    loaded = {name: Loaded(Path(path).read_bytes(), path) for name, path in task["programs"].items()}
    contenders: dict[str, Contender] = {
        name: partial(program.method.execute, inputs) for name, program in loaded.items()
    }
    (folder / _TIMES).write_text(json.dumps(all_times(contenders, seconds=task["seconds"])))


if __name__ == "__main__":
    _measure(Path(sys.argv[1]))
