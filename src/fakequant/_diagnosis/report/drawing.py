"""Renders Matplotlib figures as PNGs, and as SVGs that use the colours of their page."""

import dataclasses
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# The colours of PNGs and light pages. All differ, because an SVG replaces each by the CSS variable named below.
INK, MUTED, GRID, BAND = "#1f2933", "#5b6672", "#dce1e7", "#e8f0f8"
ACCENT, WARN, THIRD, PAPER = "#2a6cb2", "#c0430d", "#7b4fc4", "#fefefe"
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    BAND: "--band",
    ACCENT: "--accent",
    WARN: "--warn",
    THIRD: "--third",
    PAPER: "--paper",
}
_STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "text.color": INK,
    "text.parse_math": False,  # module paths are not formulas
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "ytick.minor.size": 0.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": "auto",
    "svg.fonttype": "none",
    "svg.hashsalt": "fakequant",
    "path.simplify": False,
}
# In inches: readable on a phone, and narrow enough for two figures side by side on a screen.
WIDTH = 4.7


@contextmanager
def own_style() -> Iterator[None]:
    """Makes figures independent of the user's Matplotlib settings."""
    with matplotlib.style.context(["default", _STYLE]):
        yield


def new_figure(height: float, left: float = 0.62, top: float = 0.12) -> tuple[Figure, Axes]:
    """Returns a figure with one plot. All lengths are in inches."""
    bottom = 0.5
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((left / WIDTH, bottom / height, 1 - (left + 0.12) / WIDTH, 1 - (bottom + top) / height))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    return figure, axes


def to_svg(figure: Figure, prefix: str, label: str) -> str:
    """Returns the figure as SVG markup for a page.

    Colours become CSS variables, and text stays text in the page's font. The markup contains no date and no URL. All
    ids have the prefix, to be unique on the page. The label is for screen readers.
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.patch.set_visible(False)
    FigureCanvasSVG(figure).print_svg(file, metadata=nothing)
    figure.patch.set_visible(True)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for color, name in _VARIABLES.items():
        text = text.replace(color, f"var({name})")
    # Keep the size of the text, and drop its font family to use the font of the page.
    text = re.sub(r"font: ([^;\"]*?)([\d.]+px)[^;\"]*", r"font-size: \2", text)
    viewbox = re.search(r'viewBox="[^"]*"', text)
    assert viewbox is not None
    start = f'<svg {viewbox[0]} role="img" aria-label="{_escaped(label)}">'
    return re.sub(r"<svg[^>]*>", lambda _: start, text, count=1).strip()


def to_png(figure: Figure, title: str) -> bytes:
    """Returns the figure as a PNG, with a title because there is no page around it."""
    figure.set_size_inches(figure.get_figwidth(), figure.get_figheight() + 0.3)
    high = figure.get_figheight()
    for axes in figure.axes:
        box = axes.get_position()
        axes.set_position((box.x0, box.y0 * (high - 0.3) / high, box.width, box.height * (high - 0.3) / high))
    figure.text(
        0.12 / WIDTH, 1 - 0.1 / high, shortened(title, 56), va="top", ha="left", size=9.5, weight="bold", color=INK
    )
    file = io.BytesIO()
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(160)
    canvas.print_png(file, metadata={"Software": None})
    return file.getvalue()


def shortened(path: str, length: int = 30) -> str:
    """Returns the last `length` characters of a path, which tell more than the first ones.

    >>> shortened("encoder.layers.11.attention.out_proj", 20)
    '…1.attention.out_proj'
    """
    return path if len(path) <= length else "…" + path[-length:]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


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
        """Draws the figure that `make(*args)` returns, for the page with a caption, and as a PNG with a title.

        The name of the file is changed if necessary to make it valid and unique.
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
