"""Imports of optional packages, and files that are written completely or not at all."""

import importlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def require(module: str, package: str, extra: str = "onnx") -> Any:
    """Imports and returns a module. Raises ImportError with the command that installs it if it is missing.

    Args:
        module: The name of the module.
        package: The name of the package that contains it, for the message.
        extra: The extra of fakequant that installs the package.

    >>> require("json", "json").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'This needs {package}, which is not installed.\nUse: pip install "fakequant[{extra}]"'
        ) from error


def require_suffix(path: str | os.PathLike[str], other: str, writer: str) -> None:
    """Raises ValueError if a path has the suffix of files of another format, which `writer` writes."""
    if Path(path).suffix.lower() == other:
        raise ValueError(
            f"`path` is {str(path)!r}, and {other} files have another format.\n"
            f"Use {writer}, or a path with another suffix."
        )


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path that is moved to `path` on success and deleted on failure.

    The temporary file is created first, so a path that cannot be written raises OSError before any work is done.
    """
    goal = Path(path)
    if goal.is_dir():
        raise IsADirectoryError(f"{str(goal)!r} is a folder, not a file.\nUse a path that ends in a file name.")
    if not goal.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(goal.parent)!r} to write {goal.name!r} into.\n"
            "Create it first, or use another path."
        )
    if goal.exists() and not goal.is_file():
        raise OSError(f"{str(goal)!r} exists and is not a regular file.\nUse another path.")
    try:
        unfinished = begun(goal.parent, goal.name)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{str(goal)!r} cannot be written: {error.strerror}.\nUse a path in a writable folder",
        ) from error
    mode = unfinished.stat().st_mode
    try:
        yield unfinished
        unfinished.chmod(stat.S_IMODE(mode))  # the writer may have replaced the file
        unfinished.replace(goal)
    finally:
        unfinished.unlink(missing_ok=True)


def begun(folder: Path, name: str) -> Path:
    """Creates an empty file in a folder, for a file that will be called `name`, and returns its path.

    Its name is random. It is always a new file, never one of another thread or process and never a link. It has the
    permissions that `open` gives.
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
    """Returns a unique temporary name for a file that will be called `name`."""
    return f"{name[:80]}.{secrets.token_hex(8)}.unfinished"
