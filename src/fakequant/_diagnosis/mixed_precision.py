"""Widths for all weights together: which widths cost least within a budget."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any

from fakequant._diagnosis.allocation import Problem
from fakequant._prepare.weight_widths import weight_bytes

if TYPE_CHECKING:
    from fakequant._diagnosis.sensitivity_table import LayerSensitivity

# Budgets that were computed from sizes may be rounded down. So much more is still within them.
_SLACK = Fraction(1, 10**12)


class Widths:
    """The layers whose widths are chosen, with the costs of each width.

    Measured costs are noisy. A width costs at most as much as every narrower one: more bits never cost more.
    """

    def __init__(self, layers: "Sequence[LayerSensitivity]") -> None:
        self.layers = [layer for layer in layers if layer.costs is not None and layer.tied_to is None]
        self.tied = {layer.path: layer.tied_to for layer in layers if layer.tied_to is not None}
        self.widths = [sorted(layer.costs or ()) for layer in self.layers]
        self.costs = [_falling([(layer.costs or {})[w] for w in ws]) for layer, ws in zip(self.layers, self.widths)]
        self.weights = sum(layer.weights for layer in self.layers)

    def in_bits(self) -> Problem:
        """Returns the problem whose sizes are bits of weights."""
        sizes = [[layer.weights * bits for bits in widths] for layer, widths in zip(self.layers, self.widths)]
        return Problem(self.costs, sizes)

    def in_bytes(self) -> Problem:
        """Returns the problem whose sizes are bytes, of weights and their scales."""
        pairs = zip(self.layers, self.widths)
        return Problem(self.costs, [[_bytes(x, bits) for bits in ws] for x, ws in pairs])

    def in_time(self, times: Mapping[Any, Any]) -> Problem:
        """Returns the problem whose sizes are the times of layers. Layers that share a weight count together."""
        members = {layer.path: [layer.path] for layer in self.layers}
        for path, first in self.tied.items():
            members[first].append(path)
        pairs = [(members[layer.path], widths) for layer, widths in zip(self.layers, self.widths)]
        return Problem(self.costs, [[math.fsum(_time(times, p, w) for p in paths) for w in ws] for paths, ws in pairs])

    def uniform(self, bits: int) -> list[int]:
        """Returns the solution with the same width everywhere, or the next wider one that a layer has."""
        return [next((k for k, w in enumerate(ws) if w >= bits), len(ws) - 1) for ws in self.widths]

    def all_uniform(self) -> dict[int, list[int]]:
        """Returns the solutions with the same width everywhere, by width."""
        return {bits: self.uniform(bits) for bits in sorted({bits for widths in self.widths for bits in widths})}

    def by_path(self, solution: Sequence[int]) -> dict[str, int]:
        """Returns the width of every layer. Layers that share a weight have the same."""
        found = {x.path: ws[k] for x, ws, k in zip(self.layers, self.widths, solution, strict=True)}
        return {**found, **{path: found[first] for path, first in self.tied.items()}}


def within_budget(
    layers: "Sequence[LayerSensitivity]",
    bits: object,
    bytes: object,
    latency: object,
    times: Mapping[Any, Any] | None,
) -> dict[str, int]:
    """Returns the widths of the least total cost within one budget, by path. The two other budgets are None."""
    found = Widths(layers)
    if bits is not None:
        problem, words = found.in_bits(), "bits per weight on average"
        limit: Any = math.floor(_budget("bits", bits, words) * found.weights * (1 + _SLACK))
        least: Any = problem.size(problem.smallest()) / max(found.weights, 1)
    elif bytes is not None:
        problem, words = found.in_bytes(), "bytes for weights and scales"
        limit = math.floor(_budget("bytes", bytes, words))
        least = problem.size(problem.smallest())
    else:
        assert times is not None
        problem, words = found.in_time(times), "for the times of all layers together"
        limit = float(_budget("latency", latency, words) * (1 + _SLACK))
        least = problem.size(problem.smallest())
    if problem.size(problem.smallest()) > limit:
        given = next(value for value in (bits, bytes, latency) if value is not None)
        raise ValueError(
            f"The budget is too small: {given} {words}, but the narrowest widths need {least:,.6g}.\n"
            "Use a larger budget or narrower `candidates`. Layers that have `first_last_bits` keep at least those; "
            "first_last_bits=None in the config lets them be as narrow as others."
        )
    solution = problem.solve(limit, list(found.all_uniform().values()))
    return found.by_path(problem.filled(solution, limit, found.widths))


def _bytes(layer: "LayerSensitivity", bits: int) -> int:
    spec = None if layer.config is None else layer.config.weight
    return weight_bytes(layer.weights, bits, layer.scales, "float32" if spec is None else spec.scale_format)


def _falling(costs: list[float]) -> list[float]:
    """Returns the least of the costs up to each one.

    >>> _falling([0.5, 0.1, 0.2])
    [0.5, 0.1, 0.1]
    """
    return [min(costs[: k + 1]) for k in range(len(costs))]


def _budget(name: str, value: object, words: str) -> Fraction:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"`{name}` must be a number above 0, {words}, got {value!r}.")
    return Fraction(float(value)) if not isinstance(value, int) else Fraction(value)


def _time(times: Mapping[Any, Any], path: str, bits: int) -> float:
    row = times.get(path)
    value = row.get(bits) if isinstance(row, Mapping) else times.get((path, bits))
    if value is None:
        raise ValueError(
            f"`times` has no time of {path or 'the model'} at {bits} bits.\n"
            "Use {path: {bits: time}} or {(path, bits): time} with all layers and widths of the table."
        )
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) < math.inf:
        raise ValueError(
            f"`times` must have numbers from 0 on, got {value!r} for {path or 'the model'} at {bits} bits."
        )
    return float(value)
