"""The progress of the demo: a bar for the running stage, and one line for every finished stage.

Everything goes to stderr, because stdout is for results that a machine may read.
"""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from fakequant._train.running import Bar

_Item = TypeVar("_Item")


class Stage:
    """A stage of the demo, with a progress bar if stderr is a terminal."""

    def __init__(self, name: str, total: int, show: bool) -> None:
        self._bar = Bar(
            total=total,
            disable=None if show else True,  # None disables it unless stderr is a terminal
            leave=False,
            ncols=min(94, shutil.get_terminal_size().columns - 1),
            bar_format="  {desc:<24} {bar} {percentage:3.0f} % {elapsed}",
        )
        self._name = name
        # The result to print in the line of the stage.
        self.result = ""

    def doing(self, what: str) -> None:
        """Shows what is being done now."""
        self._bar.set_description_str(f"{self._name}: {what}", refresh=True)

    def step(self, number: int = 1) -> None:
        """Advances the bar."""
        self._bar.update(number)

    def each(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yields the items and advances the bar after each."""
        for item in items:
            yield item
            self.step()

    def close(self) -> bool:
        """Removes the bar. Returns True if it was visible, so that other bars may replace it."""
        shown = not self._bar.disable
        self._bar.close()
        return shown


class Progress:
    """Prints a heading and a line for every finished stage, or nothing if `show` is False.

    >>> progress = Progress(show=False)
    >>> with progress.stage("train", total=2) as stage:
    ...     stage.step(2)
    >>> list(progress.seconds)
    ['train']
    """

    def __init__(self, show: bool) -> None:
        self.show = show
        # The duration of every stage.
        self.seconds: dict[str, float] = {}

    def heading(self, text: str) -> None:
        if self.show:
            print(f"{text}\n", file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Stage]:
        """Times a stage with `total` steps and prints its line."""
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
        """Prints a blank line."""
        if self.show:
            print(file=sys.stderr, flush=True)
