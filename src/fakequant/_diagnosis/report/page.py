"""The data that the template shows: rows of text, numbers to sort by, figures."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from fakequant._diagnosis.compare import Comparison
from fakequant._diagnosis.health import History
from fakequant._diagnosis.report.advice import LOW_SQNR, Judged
from fakequant._diagnosis.report.drawing import Drawn, Figures
from fakequant._diagnosis.report.figures import (
    HISTORY_LABELS,
    ROWS,
    draw_comparison,
    draw_history,
    draw_levels,
    draw_pareto,
    draw_ranges,
    draw_sensitivity,
    draw_values,
    layers_to_draw,
)
from fakequant._diagnosis.report.tensor_counts import TensorCounts
from fakequant._diagnosis.sensitivity_table import Sensitivity
from fakequant._prepare.summary import Summary
from fakequant._util.text import counted
from fakequant._verify.verdict import Verification

# Variables of the template: text, cells, figures, and lists and dicts of them.
Entry: TypeAlias = dict[str, Any]
# Title, value, explanation, whether it is bad.
Tile = tuple[str, str, str, bool]


@dataclasses.dataclass(frozen=True)
class Cell:
    """The text of a table cell, and the value it is sorted by."""

    text: str
    value: float | None = None
    bad: bool = False


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


def tensor_entry(figures: Figures, judged: Judged) -> Entry:
    """Returns the figures, numbers and findings of one tensor."""
    counts, path = judged.counts, judged.path
    what = "a weight" if counts.kind == "weight" else "activations"
    scaled = "" if counts.one_grid else " Every value is divided by its scale, so that one histogram shows all of them."
    values = figures.draw(
        f"{path}-values",
        f"{path}: values",
        f"Values of {what} on the grid.{scaled}{_lines(counts)} Look for values outside the shaded range, which are "
        "clipped, and for a range that is much wider than most values need.",
        draw_values,
        counts,
    )
    mean = "" if counts.levels <= 64 else " Bars are means over neighbouring codes."
    levels = figures.draw(
        f"{path}-codes",
        f"{path}: codes",
        f"How often each code occurs.{mean} Look for codes that never occur, and for bars at the ends, which contain "
        "the clipped values.",
        draw_levels,
        counts,
    )
    return {
        "path": path,
        "anchor": anchor(path),
        "kind": counts.kind,
        "spec": str(counts.spec),
        "shape": " × ".join(map(str, counts.shape)) or "one number",
        "total": f"{counts.total:,}",
        "sqnr": decibel(counts.sqnr).text,
        "clipped": percent(counts.clipped).text,
        "used": f"{counts.used:,} of {len(counts.codes):,}",
        "findings": judged.findings,
        "figures": [values, levels],
    }


def _lines(counts: TensorCounts) -> str:
    if counts.spec.float_format is None:
        return ""
    if counts.levels <= 32:
        return " Lines are the values of the format."
    return " Lines are powers of two: there the steps of the format double."


def quantizer_row(judged: Judged, has_figure: bool) -> Entry:
    """Returns the table row of one quantizer."""
    health, counts = judged.health, judged.counts
    marks = {finding.mark for finding in judged.findings}
    used: Cell = Cell("–", None)
    if counts.total:
        used = Cell(f"{counts.used:,} / {len(counts.codes):,}", counts.used / len(counts.codes), "few codes" in marks)
    return {
        "path": health.path,
        "anchor": anchor(health.path) if has_figure else None,
        "spec": str(counts.spec),
        "marks": [finding.mark for finding in judged.findings],
        "cells": [
            percent(health.clipped, "clips" in marks),
            used,
            decibel(counts.sqnr),
            percent(health.scale_drift, "drifts" in marks),
            percent(health.oscillating, "oscillates" in marks),
            number(health.nonfinite, bad="not finite" in marks),
        ],
    }


def grouped(judged: Sequence[Judged]) -> list[Entry]:
    """Groups findings by advice, so that each advice is shown once."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for one in judged:
        for finding in one.findings:
            where = {"path": one.path, "why": finding.why}
            groups.setdefault((finding.mark, finding.what_to_do), []).append(where)
    return [{"mark": mark, "what_to_do": help, "where": where} for (mark, help), where in groups.items()]


def anchor(path: str) -> str:
    """Returns the id of a tensor on the page."""
    return "tensor-" + re.sub(r"[^A-Za-z0-9_.-]", "_", path)


def comparison_entry(figures: Figures, found: Comparison) -> Entry:
    """Returns the figure and the rows of the comparison with the float model."""
    drawn, worst, bad = layers_to_draw(found), found.worst, low_layer(found)
    figure = figures.draw(
        "layers-sqnr",
        "SQNR of every layer's output",
        "Signal-to-noise ratio of each layer's output with respect to the float model. Look for a filled dot far to "
        "the left: that layer adds the noise itself. A hollow dot far from its filled dot shows noise from earlier "
        "layers.",
        draw_comparison,
        drawn,
        bad,
    )
    rows = [
        {
            "path": layer.path,
            "kind": layer.kind,
            "bad": layer.path == bad,
            "cells": [
                decibel(layer.weight_sqnr),
                decibel(layer.bias_sqnr),
                decibel(layer.isolated.sqnr, layer.path == bad),
                decibel(layer.accumulated.sqnr),
                *(_or_dash(errors.max_steps) for errors in (layer.isolated, layer.accumulated)),
                *(percent(errors.clipped) for errors in (layer.isolated, layer.accumulated)),
            ],
        }
        for layer in found.layers
    ]
    left_out = len(found.layers) - len(drawn)
    return {"rows": rows, "worst": worst, "is_bad": bad is not None, "figure": figure, "left_out": left_out}


def low_layer(found: Comparison) -> str | None:
    """Returns the layer with the lowest SQNR in isolation, or None if that is not below `LOW_SQNR`."""
    sqnr = found.worst_layer.isolated.sqnr
    return found.worst if sqnr is not None and not sqnr >= LOW_SQNR else None


def _or_dash(value: float | None) -> Cell:
    return Cell("–", None) if value is None else number(float(value), 3)


def sensitivity_entry(figures: Figures, found: Sensitivity) -> Entry:
    """Returns the figure and the rows of the sensitivity analysis."""
    figure = figures.draw(
        "sensitivity",
        "Sensitivity of layers",
        "The effect of each layer on the score. Look for the few longest bars: those layers are worth more bits. "
        "Layers without a bar need fewer.",
        draw_sensitivity,
        found.layers[:ROWS],
    )
    widths = sorted({bits for layer in found.layers for bits in layer.costs or ()})
    rows = [
        {
            "path": layer.path,
            "kind": layer.kind,
            "cells": [number(layer.weights), number(layer.bits), _signed(layer.cost), _signed(layer.gain)]
            + [_width_cost(layer.costs, bits) for bits in widths],
        }
        for layer in found.layers
    ]
    return {
        "rows": rows,
        "columns": ["Weights", "Bits", "Cost", "Gain", *(f"{bits}-bit weight" for bits in widths)],
        "measure": found.measure,
        "error": f"{-found.quantized_score:.4g}",
        "pareto": _pareto_figure(figures, found) if found.has_widths else None,
        "figure": figure,
        "left_out": max(0, len(found.layers) - ROWS),
        "float_score": f"{found.float_score:.4g}",
        "quantized_score": f"{found.quantized_score:.4g}",
    }


def _pareto_figure(figures: Figures, found: Sensitivity) -> Drawn:
    return figures.draw(
        "pareto",
        "Cost of widths",
        "The least sum of costs for each average width of the weights, and the cost of the same width everywhere. The "
        "further the squares are above the line, the more is gained by a width for each layer.",
        draw_pareto,
        found.pareto(),
    )


def _width_cost(costs: dict[int, float] | None, bits: int) -> Cell:
    return Cell("–", None) if costs is None or bits not in costs else _signed(costs[bits])


def _signed(value: float) -> Cell:
    return Cell(f"{value:+.4g}".replace("-", "−") if value else "0", value)


def history_entry(figures: Figures, history: History) -> Entry:
    captions = {
        "clipped": "Share of values outside the range. Look for a line that rises: its range no longer fits.",
        "scale_drift": "The largest change of a scale since the last check. It should go to 0 before training ends.",
        "levels_used": "Share of codes that occur. Look for a line that falls: the range has become too wide.",
        "oscillating": "Share of weights whose code changed and changed back. Look for lines that are high at the end.",
    }
    drawn = [
        figures.draw(
            f"history-{name}", f"{label.capitalize()} over training", captions[name], draw_history, history, name
        )
        for name, label in HISTORY_LABELS.items()
        if any(history.series(path, name)[1] for path in history.paths)
    ]
    if any(len(history.series(path, "min")[1]) > 1 for path in history.paths):
        caption = "The smallest and the largest value of each grid. Look for ranges that still move at the end."
        drawn.append(figures.draw("history-ranges", "Ranges over training", caption, draw_ranges, history))
    return {"figures": drawn, "checks": len(history.steps)}


def verification_entry(found: Verification) -> Entry:
    """Returns the rows and the verdict of the comparison with a runtime."""
    rows = [
        {
            "path": t.path,
            "cells": [
                number(t.codes),
                Cell(_differ(t.prepared_differ, t.prepared_steps), t.prepared_differ, not t.is_equal_but_for_ties),
                Cell(_differ(t.runtime_differ, t.runtime_steps), t.runtime_differ, not t.is_equal_but_for_ties),
            ],
            "why": t.why,
        }
        for t in found.tensors
    ]
    return {
        "ok": found.ok,
        "target": found.target,
        "verdict": [f"{line[:1].upper()}{line[1:].rstrip('.')}." for line in found.verdict().splitlines()],
        "rows": rows,
        "kernels": [(path, kernel, found.floats.get(path, "")) for path, kernel in found.kernels.items()]
        + [(path, "–", why) for path, why in found.floats.items() if path not in found.kernels],
        "skipped": list(found.skipped.items()),
    }


def _differ(count: int, steps: int) -> str:
    return "equal" if count == 0 else f"{count:,} differ, by {steps}"


def overview(
    summary: Summary,
    judged: Sequence[Judged],
    comparison: Comparison | None,
    sensitivity: Sensitivity | None,
    verification: Verification | None,
) -> list[Tile]:
    """Returns the tiles at the top of the page."""
    bad = sum(bool(j.findings) for j in judged)
    ratio = summary.bytes_after / max(summary.bytes_before, 1)
    tiles: list[Tile] = [
        *_share_tiles(summary, verification),
        _layers_tile(summary),
        (
            "Size of parameters",
            _bytes(summary.bytes_after),
            f"{ratio:.0%} of {_bytes(summary.bytes_before)} in float",
            False,
        ),
        (
            "Quantizers to look at",
            f"{bad} of {len(judged)}",
            "see the findings below" if bad else "all are healthy",
            bad > 0,
        ),
    ]
    if comparison is not None:
        worst = comparison.worst_layer
        where = f"at {worst.path or 'the model'}"
        is_low = low_layer(comparison) is not None
        tiles.append(("Lowest SQNR of a layer", decibel(worst.isolated.sqnr).text, where, is_low))
    if sensitivity is not None and sensitivity.measure == "score":
        words = f"from fakequant.sensitivity, before training. In float: {sensitivity.float_score:.4g}"
        tiles.append(("Score after calibration", f"{sensitivity.quantized_score:.4g}", words, False))
    if verification is not None:
        verdict = "same codes" if verification.ok else "differs"
        tiles.append(("Runtime", verdict, f"target {verification.target}", not verification.ok))
    return tiles


def _share_tiles(summary: Summary, verification: Verification | None) -> list[Tile]:
    """Returns tiles with the shares that are quantized and, if the runtime is known, that run in integers."""
    tiles = [_share_tile("Quantized", summary.quantized_multiplications, summary.quantized_parameters, summary, "")]
    if verification is not None and verification.parameters:
        floats = len(verification.floats)
        words = f". {floats} of {counted(verification.layers, 'layer')} run in float" if floats else ""
        amounts = verification.integer_multiplications, verification.integer_parameters
        tiles.append(_share_tile("In integers in the runtime", *amounts, summary, words, floats > 0))
    return tiles


def _share_tile(
    title: str, multiplications: int, parameters: int, summary: Summary, words: str, is_bad: bool = False
) -> Tile:
    of_parameters = f"{parameters / max(summary.parameters, 1):.1%}"
    if not summary.multiplications:
        return (title, of_parameters, f"of {summary.parameters:,} parameters{words}", is_bad)
    share = f"{multiplications / summary.multiplications:.1%}"
    of = f"of {summary.multiplications:,} multiplications, {of_parameters} of {summary.parameters:,} parameters"
    return (title, share, f"{of}{words}", is_bad)


def _layers_tile(summary: Summary) -> Tile:
    """Returns the tile that counts layers with quantized weights, and modules that only quantize their result."""
    with_weights = sum(layer.weight != "-" for layer in summary.layers)
    others = len(summary.layers) - with_weights
    words = f"with their weights. In float: {counted(len(summary.floats), 'module')}"
    if others:
        words = f"with their weights. Results only: {others}. In float: {counted(len(summary.floats), 'module')}"
    return ("Layers quantized", str(with_weights), words, False)


def _bytes(count: int) -> str:
    """Formats a number of bytes with a decimal unit.

    >>> _bytes(512), _bytes(23738 * 4), _bytes(44_000_000)
    ('512 B', '95.0 kB', '44.0 MB')
    """
    size, unit = float(count), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, bigger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
