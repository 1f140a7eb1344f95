"""Packages that only some need, and the files that are written with them."""

import importlib
import os
import secrets
import stat
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
    try:
        unfinished = begun(goal.parent, goal.name)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{str(goal)!r} cannot be written: {error.strerror}.\nUse a path in a folder that you may write to",
        ) from error
    mode = unfinished.stat().st_mode
    try:
        yield unfinished
        unfinished.chmod(stat.S_IMODE(mode))  # what wrote it may have put another file in its place
        unfinished.replace(goal)
    finally:
        unfinished.unlink(missing_ok=True)


def begun(folder: Path, name: str) -> Path:
    """A new, empty file in a folder, for what will be called `name`.

    Its own name cannot be guessed, and it is nothing that was there before: no file of another thread or process, no
    link to another place. It has the permissions that `open` gives.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    while True:
        path = folder / unfinished_name(name)
        try:
            os.close(os.open(path, flags, 0o666))
        except FileExistsError:
            continue
        return path


def unfinished_name(name: str) -> str:
    """A name that nothing else has, for what will be called `name`."""
    return f"{name[:80]}.{secrets.token_hex(8)}.unfinished"
