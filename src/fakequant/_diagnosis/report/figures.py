"""The figures of a quantized tensor, and of a whole model: its layers, costs of widths, health over training."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fakequant._diagnosis.bit_allocation import Pareto
from fakequant._diagnosis.compare import Comparison, LayerComparison
from fakequant._diagnosis.health import History
from fakequant._diagnosis.report.drawing import (
    ACCENT,
    BAND,
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
from fakequant._diagnosis.report.tensor_counts import TensorCounts
from fakequant._diagnosis.sensitivity_table import LayerSensitivity

# The maximum number of bars. More levels are drawn as this many bins.
DRAWN = 64
# A bar below this share of the highest one is hardly visible.
_TOO_LOW = 0.05
_HEIGHT = 2.4
# The maximum number of values whose places on the grid are marked, and of powers of two.
_LINES, _POWERS = 32, 5
# The maximum number of quantizers whose ranges over training are drawn.
_RANGES = 12
# The maximum numbers of rows in a figure, and of lines with a name.
ROWS = 40
_NAMED = 3
# In inches: the height of a row, the width of a letter, the height of the legend.
_ROW, _LETTER, _LEGEND = 0.235, 0.066, 0.36
# What a `History` has of each quantizer, by the name of the field.
HISTORY_LABELS = {
    "clipped": "clipped values",
    "scale_drift": "change of scales",
    "levels_used": "codes in use",
    "oscillating": "oscillating weights",
}


def draw_values(counts: TensorCounts) -> Figure:
    """Draws the histogram of values. The range of the grid is shaded, and clipped values have another colour."""
    figure, axes = new_figure(_HEIGHT)
    edges, heights = counts.edges.numpy(), counts.bins.numpy().astype(float)
    n = counts.inside
    low, high = _occupied(heights, n)
    if counts.one_grid is not None:
        scale, zero_point = counts.one_grid
        edges = (edges - zero_point) * scale
    axes.axvspan(edges[n], edges[2 * n], color=BAND, linewidth=0, zorder=0)
    lines = _grid_lines(counts)
    if counts.one_grid is not None:
        lines = (lines - counts.one_grid[1]) * counts.one_grid[0]
    axes.vlines(lines, 0, 0.86, transform=axes.get_xaxis_transform(), color=MUTED, alpha=0.45, linewidth=0.7, zorder=1)
    shares = heights / max(counts.total, 1)
    use_log = _use_log(shares)
    floor = _set_scale(axes, shares, use_log)
    for start, end, color in ((low, n, WARN), (n, 2 * n, ACCENT), (2 * n, high, WARN)):
        if start < end:
            axes.stairs(shares[start:end], edges[start : end + 1], baseline=floor, fill=True, color=color, linewidth=0)
    axes.set_xlim(edges[low], edges[high])
    _write_tails(axes, counts)
    axes.set_xlabel(_position_label(counts))
    axes.set_ylabel("share of values per bin" + (", log" if use_log else ""))
    return figure


def draw_levels(counts: TensorCounts) -> Figure:
    """Draws how often each code occurs. With many levels, bars are means over neighbouring codes."""
    figure, axes = new_figure(_HEIGHT)
    levels = counts.levels
    shares = counts.codes.numpy().astype(float) / max(counts.total, 1)
    # Values of a float format stand side by side, at equal distances, with 0 in the middle.
    first = float(counts.spec.qmin if counts.spec.float_format is None else -(levels // 2))
    width = levels / len(shares)
    per_level = levels <= DRAWN
    cuts = np.linspace(0, len(shares), min(len(shares), DRAWN) + 1).round().astype(int)
    starts, widths = first + cuts[:-1] * width, np.diff(cuts) * width
    heights = np.add.reduceat(shares, cuts[:-1]) / widths
    use_log = _use_log(heights)
    floor = _set_scale(axes, heights, use_log)
    gap = 0.14 if per_level else 0.06
    left = starts - 0.5 + widths * gap / 2
    right = left + widths * (1 - gap)
    _bars(axes, left, right, np.full(len(heights), floor), heights, ACCENT)
    # The clipped values, as the top parts of the first and last bar.
    clipped = np.zeros(len(heights))
    clipped[0] += counts.below / widths[0]
    clipped[-1] += counts.above / widths[-1]
    _bars(axes, left, right, np.maximum(heights - clipped / max(counts.total, 1), floor), heights, WARN)
    margin = 0.02 * levels + 0.5
    axes.set_xlim(first - margin, first + levels - 1 + margin)
    _label_codes(axes, counts)
    axes.set_ylabel(("share of values" if per_level else "mean share per code") + (", log" if use_log else ""))
    known = "" if levels == len(shares) else " bins of codes"
    axes.text(1, 0.985, f"{counts.used:,} of {len(shares):,}{known or ' codes'} occur", **_at_top(axes, "right", INK))
    return figure


def _grid_lines(counts: TensorCounts) -> np.ndarray:
    """Returns the positions of all values of a grid with few of them.

    With more, a float format has lines at powers of two, where its steps double, and an integer grid has none.
    """
    form = counts.spec.float_format
    if form is None:
        return np.arange(counts.spec.qmin, counts.spec.qmax + 1.0) if counts.levels <= _LINES else np.zeros(0)
    if counts.levels <= _LINES:
        return form.grid().astype(float)
    highest = int(np.log2(form.largest))
    lowest = max(highest - _POWERS, 1 - form.bias)  # closer ones cannot be told apart
    powers = 2.0 ** np.arange(lowest, highest + 1)
    return np.concatenate([-powers[::-1], powers])


def _label_codes(axes: Axes, counts: TensorCounts) -> None:
    """Labels the axis of codes: with codes, or with the values of a float format."""
    form = counts.spec.float_format
    if form is None:
        axes.xaxis.set_major_locator(MaxNLocator(9 if counts.levels < 10000 else 5, integer=True))
        axes.set_xlabel("code")
        return
    grid, middle = form.grid(), counts.levels // 2
    if counts.levels <= _LINES:
        places = np.arange(-middle, middle + 1)
    else:  # every second, fourth, ... power of two
        powers = np.flatnonzero(np.frexp(grid[middle + 1 :])[0] == 0.5) + 1
        powers = powers[:: -max(1, len(powers) // 4)][::-1]
        powers = powers[powers > 0.08 * counts.levels]  # labels next to 0 would cover its label
        places = np.concatenate([-powers[::-1], [0], powers])
    axes.set_xticks(places, [_short(float(grid[place + middle])) for place in places])
    axes.set_xlabel("value / scale, one bar per value of the format")


def _short(value: float) -> str:
    """Formats a value of a float format.

    >>> _short(-1.5), _short(448.0), _short(2.0**-9)
    ('-1.5', '448', '2^-9')
    """
    if value and abs(value) < 0.1 and np.frexp(abs(value))[0] == 0.5:
        return f"{'-' if value < 0 else ''}2^{int(np.log2(abs(value)))}"
    return f"{value + 0.0:g}"  # + 0.0: no negative zero


def _bars(axes: Axes, left: np.ndarray, right: np.ndarray, bottom: np.ndarray, top: np.ndarray, color: str) -> None:
    """Draws all bars as one path, which is many times faster than one path each."""
    some = top > bottom
    corners = [(left, bottom), (left, top), (right, top), (right, bottom), (left, bottom)]
    points = np.stack([np.stack([x[some], y[some]], axis=-1) for x, y in corners], axis=1)
    moves = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    if len(points):
        axes.add_patch(PathPatch(Path(points.reshape(-1, 2), moves * len(points)), color=color, linewidth=0))


def _occupied(heights: np.ndarray, n: int) -> tuple[int, int]:
    """Returns the first and last bin to show: the range with a margin, and all bins that are not empty."""
    some = np.flatnonzero(heights)
    around = max(1, n // 16)
    low = min(n, int(some[0]) if len(some) else n)
    high = max(2 * n, int(some[-1]) + 1 if len(some) else 2 * n)
    return max(0, low - around), min(3 * n, high + around)


def _use_log(shares: np.ndarray) -> bool:
    """Returns True if the median bar would be hardly visible on a linear scale."""
    some = np.sort(shares[shares > 0])
    return bool(len(some)) and float(some[len(some) // 2]) < _TOO_LOW * float(some[-1])


def _set_scale(axes: Axes, shares: np.ndarray, use_log: bool) -> float:
    """Sets the y axis, with room for a line of text, and returns the bottom of the bars."""
    some = shares[shares > 0]
    top = float(some.max()) if len(some) else 1.0
    if not use_log:
        axes.set_ylim(0, 1.22 * top)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
        return 0.0
    floor = float(some.min()) / 2
    axes.set_yscale("log")
    axes.set_ylim(floor, top * (top / floor) ** 0.22)
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    return floor


def _write_tails(axes: Axes, counts: TensorCounts) -> None:
    for share, further, at, side, word in (
        (counts.below, counts.under, 0.015, "left", "below"),
        (counts.above, counts.over, 1.0, "right", "above"),
    ):
        if not share:
            continue
        part = share / counts.total
        text = f"{_percent(part) if part >= 1e-4 else 'under 0.01%'} clipped {word}"
        if further:
            text += f"\n{_percent(further / counts.total)} further out"
        axes.text(at, 0.985, text, **_at_top(axes, side, WARN))
    if not counts.below and not counts.above:
        axes.text(1, 0.985, "nothing is clipped", **_at_top(axes, "right", MUTED))


def _at_top(axes: Axes, side: str, color: str) -> dict[str, Any]:
    return {"transform": axes.transAxes, "va": "top", "ha": side, "color": color, "size": 8.5, "linespacing": 1.3}


def _position_label(counts: TensorCounts) -> str:
    if counts.one_grid is not None:
        return "value; shaded: the range of the grid"
    each = {"channel": "channel", "group": "group", "token": "token"}.get(counts.spec.granularity, "batch")
    return f"value / scale of its {each}; shaded: the range"


def _percent(share: float) -> str:
    """Formats a share as a percentage with two significant digits.

    >>> _percent(0.25), _percent(0.0123), _percent(0.000012), _percent(0)
    ('25%', '1.2%', '1.2e-3%', '0%')
    """
    percent = 100 * share
    if percent == 0:
        return "0%"
    if percent < 1e-2:
        digits, power = f"{percent:.1e}".split("e")
        return f"{float(digits):g}e{int(power)}%"
    return f"{float(f'{percent:.2g}'):g}%"


def layers_to_draw(found: Comparison) -> list[LayerComparison]:
    """Returns the layers with the lowest SQNR, at most `ROWS`, in the order of the model."""
    worst = sorted((layer for layer in found.layers if layer.isolated.sqnr is not None), key=_sqnr)[:ROWS]
    return [layer for layer in found.layers if layer in worst]


def _sqnr(layer: LayerComparison) -> float:
    value = layer.isolated.sqnr
    return -math.inf if value is None or math.isnan(value) else value


def draw_comparison(layers: Sequence[LayerComparison], bad: str | None) -> Figure:
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


def draw_sensitivity(layers: Sequence[LayerSensitivity]) -> Figure:
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


def draw_pareto(found: Pareto) -> Figure:
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
    axes.set_ylabel(HISTORY_LABELS[name])
    if worst:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="upper right", borderaxespad=0.0, handlelength=1.4)
    return figure


def draw_ranges(history: History) -> Figure:
    """Draws the grid of each quantizer over training, from its smallest to its largest value, in a plot of its own.

    Of many quantizers, it draws those whose ends have moved most, relative to the first range.
    """
    ends = {path: (history.series(path, "min"), history.series(path, "max")) for path in history.paths}
    ends = {path: found for path, found in ends.items() if len(found[0][1]) > 1}

    def moved(path: str) -> float:
        (_, low), (_, high) = ends[path]
        return (max(map(abs, (low[-1] - low[0], high[-1] - high[0])))) / ((high[0] - low[0]) or 1.0)

    shown = sorted(sorted(ends, key=moved, reverse=True)[:_RANGES], key=history.paths.index)
    rows = max(1, math.ceil(len(shown) / 2))
    figure = Figure((WIDTH, 1.25 * rows + 0.3), facecolor=PAPER, layout="constrained")
    for number, path in enumerate(shown):
        axes = figure.add_subplot(rows, 2, number + 1)
        (steps, low), (_, high) = ends[path]
        axes.fill_between(steps, low, high, color=ACCENT, alpha=0.18, linewidth=0)
        for values in (low, high):
            axes.plot(steps, values, color=ACCENT, linewidth=1.2)
        axes.set_title(shortened(path), fontsize=7.0, color=INK, loc="left")
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.tick_params(labelsize=7.0, colors=MUTED)
        axes.spines[["top", "right"]].set_visible(False)
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
