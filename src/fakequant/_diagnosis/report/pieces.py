"""Parts of the page: table cells and named figures."""

import dataclasses
import math
import re
from collections.abc import Callable

from matplotlib.figure import Figure

from fakequant._diagnosis.report.drawing import own_style, to_png, to_svg


@dataclasses.dataclass(frozen=True)
class Cell:
    """The text of a table cell, and the value it is sorted by."""

    text: str
    value: float | None = None
    bad: bool = False


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A figure on the page. Its PNG has the same name."""

    name: str
    svg: str
    caption: str


class Figures:
    """Draws figures under unique names, and keeps the PNGs until they are written."""

    def __init__(self, on_drawn: Callable[[], object]) -> None:
        self.pngs: dict[str, bytes] = {}
        self._on_drawn = on_drawn

    def draw(self, name: str, title: str, caption: str, make: Callable[..., Figure], *args: object) -> Drawn:
        """Draws the figure that `make(*args)` returns, for the page and as a PNG.

        Args:
            name: The name of the file, changed if necessary to make it valid and unique.
            title: The title of the PNG.
            caption: The caption on the page.
            make: A function that returns a figure.
            *args: The arguments of `make`.
        """
        name = _file_name(name, self.pngs)
        with own_style():
            figure = make(*args)
            svg = to_svg(figure, f"f{len(self.pngs)}", f"{title}. {caption}")
            self.pngs[name] = to_png(figure, title)
        self._on_drawn()
        return Drawn(f"{name}.png", svg, caption)


def _file_name(name: str, taken: dict[str, bytes]) -> str:
    """Returns a unique name that is valid on every file system."""
    safe = re.sub(r"[^A-Za-z0-9.-]+", "_", name)[-100:].lstrip(".") or "figure"
    lower = {other.lower() for other in taken}
    number, found = 1, safe
    while found.lower() in lower:
        number += 1
        found = f"{safe}-{number}"
    return found


def percent(value: float | None, bad: bool = False) -> Cell:
    return Cell("–", None) if value is None else Cell(f"{value:.2%}", value, bad)


def decibel(value: float | None, bad: bool = False) -> Cell:
    """Returns a cell with a signal-to-noise ratio."""
    if value is None or math.isnan(value):
        return Cell("–", None)
    return Cell("exact" if value == math.inf else f"{value:.1f} dB", min(max(value, -1e9), 1e9), bad)


def number(value: float, digits: int = 4, bad: bool = False) -> Cell:
    """Returns a cell with a number."""
    return Cell(f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}", value, bad)
