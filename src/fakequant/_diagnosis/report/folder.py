"""A folder that gets its files when all of them are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fakequant._util.optional_packages import unfinished_name


@contextmanager
def filling(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write files that are to be in `folder`: they get there when it ends well, or not at all.

    That they can be written is found out first, by making a folder on the same file system. Figures of an earlier
    report there go: they may be of another model.
    """
    goal = Path(folder)
    for path in (goal, goal / "figures"):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{str(path)!r} is a file, where a folder is needed.\nUse another folder.")
    there = goal
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(f"{str(there)!r} is a file, where a folder is needed.\nUse another folder.")
    had_report = (goal / "report.html").is_file()
    unfinished = there / unfinished_name(f".{goal.name}")
    try:
        unfinished.mkdir()
    except OSError as error:
        raise OSError(
            error.errno,
            f"{str(goal)!r} cannot be written: {error.strerror}.\nUse a folder that you may write to",
        ) from error
    try:
        yield unfinished
        # Files of deeper folders first: whoever sees the page finds its figures.
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
