"""What is seen while the demo works: one line for every stage, and a bar until it is there.

All of it goes to stderr: stdout is for results, which a machine may read.
"""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fakequant._train.running import Bar


class Stage:
    """A piece of work with a bar, which is there on a terminal only."""

    def __init__(self, name: str, total: int, show: bool) -> None:
        self._bar: Any = Bar(
            total=total,
            disable=None if show else True,  # None: on a terminal only, where carriage returns mean something
            leave=False,
            ncols=min(94, shutil.get_terminal_size().columns - 1),
            bar_format="  {desc:<24} {bar} {percentage:3.0f} % {elapsed}",
        )
        self._name = name
        # What came out, for the line.
        self.result = ""

    def doing(self, what: str) -> None:
        """What is being done now."""
        self._bar.set_description_str(f"{self._name}: {what}", refresh=True)

    def step(self, number: int = 1) -> None:
        """A part of the total is done."""
        self._bar.update(number)

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, a step after each."""
        for item in items:
            yield item
            self.step()

    def close(self) -> bool:
        """Takes the bar away; returns whether it could be seen, so that others may have theirs in its place."""
        shown = not self._bar.disable
        self._bar.close()
        return shown


class Progress:
    """Prints a heading, and a line when a stage is done; nothing at all if `show` is False.

    >>> progress = Progress(show=False)
    >>> with progress.stage("train", total=2) as stage:
    ...     stage.step(2)
    >>> list(progress.seconds)
    ['train']
    """

    def __init__(self, show: bool) -> None:
        self.show = show
        # Of every stage.
        self.seconds: dict[str, float] = {}

    def heading(self, text: str) -> None:
        if self.show:
            print(f"{text}\n", file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Stage]:
        """A stage with so many steps."""
        start = time.perf_counter()
        stage = Stage(name, total, self.show)
        try:
            yield stage
        finally:
            stage.close()
        self.seconds[name] = time.perf_counter() - start
        if self.show:
            print(f"  {name:<12}{stage.result:<72}{self.seconds[name]:6.1f} s", file=sys.stderr, flush=True)

    def end(self) -> None:
        """A blank line before what follows."""
        if self.show:
            print(file=sys.stderr, flush=True)
