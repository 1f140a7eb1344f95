"""Files and folders that are written completely or not at all."""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


@contextmanager
def writing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a new folder next to `path` that is moved there on success and deleted on failure.

    Raises FileExistsError if there is something at `path` that is not a folder, or a folder that is not empty.
    """
    goal = Path(path)
    if goal.exists() and (not goal.is_dir() or any(goal.iterdir())):
        what = "a folder that is not empty" if goal.is_dir() else "a file"
        raise FileExistsError(f"{str(goal)!r} is {what}.\nUse a path that does not exist, or remove it first.")
    if not goal.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(goal.parent)!r} to write {goal.name!r} into.\n"
            "Create it first, or use another path."
        )
    unfinished = goal.absolute().parent / unfinished_name(goal.name)
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.replace(goal)  # also over an empty folder
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def size_of(path: str | os.PathLike[str]) -> int:
    """Returns the size of a file, or of all files in a folder, in bytes."""
    place = Path(path)
    files = place.rglob("*") if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file.is_file())
