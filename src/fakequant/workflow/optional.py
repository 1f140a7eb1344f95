"""Packages that only some need, and the files that are written with them."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def require(module: str, package: str, extra: str = "export") -> Any:
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
    """Where to write a file that is to be at `path`: it gets there when it is complete, or not at all."""
    goal = Path(path)
    if not goal.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(goal.parent)!r} to write {goal.name!r} into.")
    if goal.is_dir():
        raise IsADirectoryError(f"{str(goal)!r} is a folder, not a file to write.")
    unfinished = goal.with_name(f"{goal.name}.unfinished")
    try:
        yield unfinished
        unfinished.replace(goal)
    finally:
        unfinished.unlink(missing_ok=True)
