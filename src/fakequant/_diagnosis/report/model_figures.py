"""The figures of a whole model: layers compared, their sensitivity, costs of widths, health over training."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from fakequant._diagnosis.history import History
from fakequant._diagnosis.report.drawing import (
    ACCENT,
    GRID,
    INK,
    MUTED,
    PAPER,
    THIRD,
    WARN,
    WIDTH,
    new_figure,
    shortened,
)

if TYPE_CHECKING:
    from fakequant._diagnosis.compare import Comparison, LayerComparison
    from fakequant._diagnosis.pareto import Pareto
    from fakequant._diagnosis.sensitivity_table import LayerSensitivity

# The maximum numbers of rows in a figure, and of lines with a name.
ROWS = 40
_NAMED = 3
# In inches: the height of a row, the width of a letter, the height of the legend.
_ROW, _LETTER, _LEGEND = 0.235, 0.066, 0.36
_LABELS = {
    "clipped": "clipped values",
    "levels_used": "codes in use",
    "scale_drift": "change of scale",
    "oscillating": "oscillating weights",
}


def layers_to_draw(found: "Comparison") -> "list[LayerComparison]":
    """Returns the layers with the lowest SQNR, at most `ROWS`, in the order of the model."""
    worst = sorted((layer for layer in found.layers if layer.isolated.sqnr is not None), key=_sqnr)[:ROWS]
    return [layer for layer in found.layers if layer in worst]


def _sqnr(layer: "LayerComparison") -> float:
    value = layer.isolated.sqnr
    return -math.inf if value is None or math.isnan(value) else value


def draw_comparison(layers: "Sequence[LayerComparison]", bad: str | None) -> Figure:
    """Draws the SQNR of each layer, alone and inside the quantized model. The layer `bad` is highlighted."""
    figure, axes = _rows([layer.path for layer in layers])
    known = [e.sqnr for layer in layers for e in (layer.isolated, layer.accumulated) if e.sqnr is not None]
    finite = [value for value in known if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([10.0, *finite])
    for row, layer in enumerate(layers):
        color = WARN if layer.path == bad else ACCENT
        # Infinite values are drawn at the edge. Unknown values and NaN are not drawn.
        both = (math.nan if e.sqnr is None else e.sqnr for e in (layer.accumulated, layer.isolated))
        ends = [value if math.isnan(value) else min(max(value, low), high) for value in both]
        axes.plot(ends, [row, row], color=MUTED, linewidth=0.9, zorder=2)
        axes.plot(ends[:1], [row], "o", markersize=5.5, color=PAPER, markeredgecolor=color, markeredgewidth=1.3)
        axes.plot(ends[1:], [row], "o", markersize=5.5, color=color)
        if layer.path == bad:
            axes.get_yticklabels()[row].set_color(WARN)
            axes.get_yticklabels()[row].set_fontweight("bold")
    axes.plot([], [], "o", markersize=5.5, color=ACCENT, label="this layer alone quantized")
    axes.plot([], [], "o", markersize=5.5, color=PAPER, markeredgecolor=ACCENT, label="inside the quantized model")
    _legend(figure, axes)
    margin = 0.04 * (high - low)
    axes.set_xlim(low - margin, high + margin)
    axes.set_xlabel("SQNR in dB; further right is better")
    return figure


def draw_sensitivity(layers: "Sequence[LayerSensitivity]") -> Figure:
    """Draws two bars per layer: the cost of quantizing only it, and the gain of leaving only it in float."""
    figure, axes = _rows([layer.path for layer in layers], row=0.31)
    rows = range(len(layers))
    axes.barh(
        [r - 0.18 for r in rows], [s.cost for s in layers], 0.32, color=ACCENT, label="cost of quantizing it alone"
    )
    axes.barh(
        [r + 0.18 for r in rows], [s.gain for s in layers], 0.32, color=THIRD, label="gain of leaving it in float"
    )
    axes.axvline(0, color=MUTED, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.margins(x=0.04)
    _legend(figure, axes)
    axes.set_xlabel("change of the score")
    return figure


def draw_pareto(found: "Pareto") -> Figure:
    """Draws the least cost over the average number of bits, and the costs of uniform widths."""
    figure, axes = new_figure(2.9, left=0.72, top=_LEGEND)
    bits, costs = ([getattr(point, name) for point in found.points] for name in ("bits", "cost"))
    axes.plot(bits, costs, color=ACCENT, linewidth=1.4, drawstyle="steps-post", zorder=2)
    axes.plot(bits, costs, "o", color=ACCENT, markersize=3.6, zorder=3, label="a width for each layer")
    uniform = list(found.uniform.items())
    x, y = [point.bits for _, point in uniform], [point.cost for _, point in uniform]
    axes.plot(x, y, "s", color=PAPER, markersize=6, markeredgecolor=WARN, markeredgewidth=1.4, zorder=4,
              label="the same width everywhere")  # fmt: skip
    for width, point in uniform:
        axes.annotate(f"{width} bits", (point.bits, point.cost), (6, 5), textcoords="offset points", size=8.0)
    if min((*costs, *y)) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # not as a formula
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(x=0.09, y=0.12)
    _legend(figure, axes)
    axes.set_xlabel("bits per weight on average")
    axes.set_ylabel("sum of the layers' costs")
    return figure


def draw_history(history: History, name: str) -> Figure:
    """Draws one line per quantizer. Those with the worst last values have a colour and a name."""
    figure, axes = new_figure(2.6, top=0.14)
    lines = {path: history.series(path, name) for path in history.paths}
    lines = {path: line for path, line in lines.items() if line[1]}
    sign = 1 if name == "levels_used" else -1  # few used codes are bad, all other values are bad if high
    worst = [p for p in sorted(lines, key=lambda p: sign * lines[p][1][-1]) if sign > 0 or max(lines[p][1]) > 0][
        :_NAMED
    ]
    for path, (steps, values) in lines.items():
        if path not in worst:
            axes.plot(steps, values, color=MUTED, alpha=0.4, linewidth=1.0, zorder=2)
    for path, color, marker in reversed(list(zip(worst, (WARN, ACCENT, THIRD), "os^"))):
        style: dict[str, Any] = {"marker": marker, "markersize": 3.2} if len(lines[path][0]) <= 30 else {}
        axes.plot(*lines[path], color=color, linewidth=1.6, zorder=3, label=shortened(path, 34), **style)
    top = max((max(values) for _, values in lines.values()), default=0.0)
    # Leave room for the names above the lines.
    axes.set_ylim(0, (1.0 if name == "levels_used" else top or 0.01) * (1.12 + 0.16 * len(worst)))
    axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]) if name == "levels_used" else MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{float(f'{100 * value:.3g}'):g}%"))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("training step")
    axes.set_ylabel(_LABELS[name])
    if worst:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="upper right", borderaxespad=0.0, handlelength=1.4)
    return figure


def _rows(paths: Sequence[str], row: float = _ROW) -> tuple[Figure, Axes]:
    """Returns a figure with one row per path, from top to bottom."""
    names = [shortened(path or "(the model)") for path in paths]
    left = 0.2 + _LETTER * max(map(len, names), default=0)
    figure, axes = new_figure(0.95 + row * len(names), left=left, top=_LEGEND)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    """Places the legend above the plot, at the left edge of the figure."""
    box, high = axes.get_position(), figure.get_figheight()
    axes.legend(
        loc="lower left",
        bbox_to_anchor=((0.12 / WIDTH - box.x0) / box.width, 1 + 0.06 / (box.height * high)),
        ncols=2,
        borderaxespad=0.0,
        borderpad=0.0,
        handletextpad=0.5,
        columnspacing=1.4,
        handlelength=1.0,
    )
