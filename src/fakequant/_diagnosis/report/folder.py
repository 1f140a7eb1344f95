"""Fills a folder with files when all of them are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fakequant._util.optional_packages import unfinished_name


@contextmanager
def filling(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder whose files are moved to `folder` on success and deleted on failure.

    The temporary folder is created first, on the same file system, so a folder that cannot be written raises OSError
    before any work is done. Figures of an earlier report in `folder` are deleted, as they may be of another model.
    """
    goal = Path(folder)
    for path in (goal, goal / "figures"):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{str(path)!r} is a file, not a folder.\nUse another folder.")
    there = goal
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(f"{str(there)!r} is a file, not a folder.\nUse another folder.")
    had_report = (goal / "report.html").is_file()
    unfinished = there / unfinished_name(f".{goal.name}")
    try:
        unfinished.mkdir()
    except OSError as error:
        raise OSError(
            error.errno,
            f"{str(goal)!r} cannot be written: {error.strerror}.\nUse a writable folder",
        ) from error
    try:
        yield unfinished
        # Deeper folders first, so that the figures are complete when the page appears.
        files = sorted((f for f in unfinished.rglob("*") if f.is_file()), key=lambda f: (-len(f.parts), f))
        for file in files:
            place = goal / file.relative_to(unfinished)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)
        if had_report:
            new = {file.name for file in files}
            for old in goal.glob("figures/*.png"):
                if old.name not in new:
                    old.unlink()
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
