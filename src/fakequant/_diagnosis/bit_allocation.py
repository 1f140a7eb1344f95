"""Bit widths for all weights together: the cheapest ones within a budget, and the least cost for each size.

One option for every item, at the least total cost within a limit, is a multiple-choice knapsack problem.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fakequant._prepare.bit_widths import weight_bytes
from fakequant._util.packages import require
from fakequant._util.shown import Shown
from fakequant._util.text import table

if TYPE_CHECKING:
    from fakequant._diagnosis.sensitivity_table import LayerSensitivity

# Solutions that exceed the limit by the solver's tolerance are excluded one by one, up to this many.
_RETRIES = 50
# The largest cost that the solver sees. It stops at an absolute gap of 1e-6.
_LARGEST_COST = 1e4
# Budgets that were computed from sizes may be rounded down. So much more is still within them.
_SLACK = Fraction(1, 10**12)
# The number of budgets that are tried, evenly spaced from the narrowest to the widest.
_BUDGETS = 41

Array: TypeAlias = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Knapsack:
    """Items with options. A solution has the number of an option for each item.

    The options of an item are in an order in which the cost never rises.
    """

    costs: Sequence[Sequence[float]]
    sizes: Sequence[Sequence[float]]

    def cost(self, solution: Sequence[int]) -> float:
        """Returns the total cost."""
        return math.fsum(options[k] for options, k in zip(self.costs, solution, strict=True))

    def size(self, solution: Sequence[int]) -> float:
        """Returns the total size. It is exact if all sizes are integers."""
        return _total([options[k] for options, k in zip(self.sizes, solution, strict=True)])

    def smallest(self) -> list[int]:
        """Returns the solution of the least size, and of the least cost among those."""
        pairs = [list(zip(*item, strict=True)) for item in zip(self.sizes, self.costs, strict=True)]
        return [min(range(len(options)), key=options.__getitem__) for options in pairs]

    def solve(self, limit: float, known: Sequence[list[int]] = ()) -> list[int]:
        """Returns a solution of the least cost whose size is at most `limit`, which the smallest must be.

        It costs no more than any of the `known` solutions within the limit.
        """
        last = [len(options) - 1 for options in self.costs]  # no option costs less
        found = [solution for solution in (self.smallest(), *known, last) if self.size(solution) <= limit]
        if last not in found:
            solved = self._solve_exactly(limit)
            found += [] if solved is None else [solved]
        return self.lean(min(found, key=self.cost))

    def lean(self, solution: Sequence[int]) -> list[int]:
        """Returns the solution with the smallest option of each item that costs no more."""
        found = []
        for costs, sizes, k in zip(self.costs, self.sizes, solution, strict=True):
            as_good = [j for j in range(len(costs)) if costs[j] <= costs[k]]
            found.append(min(as_good, key=sizes.__getitem__))
        return found

    def filled(self, solution: Sequence[int], limit: float, order: Sequence[Sequence[float]]) -> list[int]:
        """Returns the solution with later options wherever the limit allows them. They never cost more.

        `order` has a number for every option: items whose option has the lowest number are next.
        """
        found = list(solution)
        while True:
            total = self.size(found)
            ready = [
                item
                for item, (k, sizes) in enumerate(zip(found, self.sizes, strict=True))
                if k + 1 < len(sizes) and total - sizes[k] + sizes[k + 1] <= limit
            ]
            if not ready:
                return found
            item = min(ready, key=lambda item: (order[item][found[item]], -self.costs[item][0], item))
            found[item] += 1

    def _solve_exactly(self, limit: float) -> list[int] | None:
        """Returns a solution of the least cost, or None if rounding kept the solver from finding one."""
        # Costs relative to the cheapest option, sizes to the smallest one. The rest is constant.
        extra = np.concatenate([np.subtract(options, options[-1]) for options in self.costs])
        least = [min(options) for options in self.sizes]
        room = limit - _total(least)
        sizes = np.array([size - low for low, options in zip(least, self.sizes) for size in options], np.float64)
        allowed = sizes <= room
        found = None
        while True:
            solution = self._solved(extra, sizes / (room or 1), allowed, limit)
            if solution is None:
                return found
            found = solution
            # The solver stops at an absolute gap. Options that alone cost more than this solution are in no better
            # one; without them costs have a smaller range, and the gap is smaller.
            total = math.fsum(options[k] - options[-1] for options, k in zip(self.costs, found))
            fewer = allowed & (extra <= total)
            if 2 * extra[fewer].max() >= extra[allowed].max():
                return found
            allowed = fewer

    def _solved(self, extra: Array, sizes: Array, allowed: Array, limit: float) -> list[int] | None:
        """Solves the problem with scaled sizes, whose limit is 1, by integer programming."""
        scipy: Any = require("scipy.optimize", "SciPy", "search")
        starts = np.cumsum([0, *map(len, self.costs)])
        one_each = np.zeros((len(self.costs), len(extra)))
        for item, (start, stop) in enumerate(pairwise(starts)):
            one_each[item, start:stop] = 1
        constraints = [scipy.LinearConstraint(one_each, 1, 1), scipy.LinearConstraint(sizes, ub=1)]
        for _ in range(_RETRIES):
            result = scipy.milp(
                np.where(allowed, extra, 0) * (_LARGEST_COST / (extra[allowed].max() or 1)),
                integrality=np.ones(len(extra)),
                bounds=scipy.Bounds(0, allowed.astype(np.float64)),
                constraints=constraints,
                options={"mip_rel_gap": 0},
            )
            if result.x is None:
                return None
            solution = [int(np.argmax(result.x[start:stop])) for start, stop in pairwise(starts)]
            if self.size(solution) <= limit:
                return solution
            chosen = np.zeros(len(extra))
            chosen[[start + k for start, k in zip(starts, solution)]] = 1
            constraints.append(scipy.LinearConstraint(chosen, ub=len(solution) - 1))
        return None


def _total(sizes: Sequence[float]) -> float:
    """Returns the sum, exactly for integers, and rounded once for floats."""
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else math.fsum(sizes)


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

    def in_bits(self) -> Knapsack:
        """Returns the problem whose sizes are bits of weights."""
        sizes = [[layer.weights * bits for bits in widths] for layer, widths in zip(self.layers, self.widths)]
        return Knapsack(self.costs, sizes)

    def in_bytes(self) -> Knapsack:
        """Returns the problem whose sizes are bytes, of weights and their scales."""
        pairs = zip(self.layers, self.widths)
        return Knapsack(self.costs, [[_bytes(x, bits) for bits in ws] for x, ws in pairs])

    def in_time(self, times: Mapping[Any, Any]) -> Knapsack:
        """Returns the problem whose sizes are the times of layers. Layers that share a weight count together."""
        members = {layer.path: [layer.path] for layer in self.layers}
        for path, first in self.tied.items():
            members[first].append(path)
        pairs = [(members[layer.path], widths) for layer, widths in zip(self.layers, self.widths)]
        return Knapsack(self.costs, [[math.fsum(_time(times, p, w) for p in paths) for w in ws] for paths, ws in pairs])

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


@dataclasses.dataclass(frozen=True)
class ParetoPoint:
    """Widths for all layers, and what they cost."""

    # Bits per weight, on average over all weights whose width was measured.
    bits: float
    # The size of these weights and their scales.
    bytes: int
    # The sum of the layers' costs.
    cost: float
    # The width of each layer's weight, by path.
    widths: dict[str, int]


@dataclasses.dataclass(frozen=True, repr=False)
class Pareto(Shown):
    """The result of `Sensitivity.pareto`. Prints as a table."""

    # Points of the least cost for their size, the smallest first.
    points: list[ParetoPoint]
    # The same width everywhere. Layers that do not have this width have the next wider one.
    uniform: dict[int, ParetoPoint]

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists and numbers."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        used = sorted({bits for point in self.points for bits in point.widths.values()})
        rows = [_pareto_row(point, used, "") for point in self.points]
        rows += [_pareto_row(point, used, f"{bits} bits everywhere") for bits, point in self.uniform.items()]
        header = ["bits", "bytes", "cost", *(f"layers at {bits}" for bits in used), "uniform"]
        return table(header, rows)


def pareto_of(layers: "Sequence[LayerSensitivity]") -> Pareto:
    """Returns the points of the least cost for budgets from the narrowest widths to the widest."""
    found = Widths(layers)
    problem, uniform = found.in_bits(), found.all_uniform()
    in_bytes = found.in_bytes()

    def point(solution: Sequence[int]) -> ParetoPoint:
        bits = problem.size(solution) / max(found.weights, 1)
        return ParetoPoint(
            bits=bits,
            bytes=int(in_bytes.size(solution)),
            cost=problem.cost(solution),
            widths=found.by_path(solution),
        )

    low = problem.size(problem.smallest())
    high = problem.size([len(widths) - 1 for widths in found.widths])
    steps = [low + (high - low) * step // (_BUDGETS - 1) for step in range(_BUDGETS)]
    budgets = sorted({*steps, *(problem.size(solution) for solution in uniform.values())})
    points: list[ParetoPoint] = []
    before: list[list[int]] = list(uniform.values())
    for budget in budgets:
        solution = problem.solve(budget, before)
        before.append(solution)
        if not points or problem.cost(solution) < points[-1].cost:
            points.append(point(solution))
    return Pareto(points, {bits: point(solution) for bits, solution in uniform.items()})


def _pareto_row(point: ParetoPoint, used: list[int], words: str) -> list[object]:
    counts = [sum(bits == width for width in point.widths.values()) for bits in used]
    return [f"{point.bits:.2f}", f"{point.bytes:,}", f"{point.cost:.4g}", *counts, words]
