"""executorch without its messages, and without what importing it changes in the process."""

import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from fakequant._util.optional_packages import require


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
