"""Packages that only some need, and the files that are written with them."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def require(module: str, package: str, extra: str = "onnx") -> Any:
    """The module, or an error that says how to get it.

    >>> require("json", "json").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'This needs {package}, which is not installed.\nUse: pip install "fakequant[{extra}]"'
        ) from error


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write a file that is to be at `path`: it gets there when it is complete, or not at all.

    That it can be written is found out first, by beginning it.
    """
    goal = Path(path)
    if goal.is_dir():
        raise IsADirectoryError(f"{str(goal)!r} is a folder, not a file to write.\nUse a path with a file's name.")
    if not goal.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(goal.parent)!r} to write {goal.name!r} into.\nMake it first, or use another path."
        )
    if goal.exists() and not goal.is_file():
        raise OSError(f"{str(goal)!r} is neither a file nor a name for one.\nUse another path.")
    # Not the name that another process uses for the same goal.
    unfinished = goal.with_name(f"{goal.name}.{os.getpid()}.unfinished")
    try:
        unfinished.touch()
    except OSError as error:
        raise OSError(
            error.errno,
            f"{str(goal)!r} cannot be written: {error.strerror}.\nUse a path in a folder that you may write to",
        ) from error
    try:
        yield unfinished
        unfinished.replace(goal)
    finally:
        unfinished.unlink(missing_ok=True)
