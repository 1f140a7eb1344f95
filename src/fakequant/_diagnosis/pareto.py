"""`Pareto`: the least cost for each size of a model's weights."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fakequant._diagnosis.mixed_precision import Widths
from fakequant._util.text_table import table

if TYPE_CHECKING:
    from fakequant._diagnosis.sensitivity_table import LayerSensitivity

# The number of budgets that are tried, evenly spaced from the narrowest to the widest.
_BUDGETS = 41


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


@dataclasses.dataclass(frozen=True)
class Pareto:
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
        rows = [_row(point, used, "") for point in self.points]
        rows += [_row(point, used, f"{bits} bits everywhere") for bits, point in self.uniform.items()]
        header = ["bits", "bytes", "cost", *(f"layers at {bits}" for bits in used), "uniform"]
        return table(header, rows)


def pareto_of(layers: "Sequence[LayerSensitivity]") -> Pareto:
    """Returns the points of the least cost for budgets from the narrowest widths to the widest."""
    found = Widths(layers)
    problem, uniform = found.in_bits(), found.all_uniform()
    in_bytes = found.in_bytes()

    def point(solution: Sequence[int]) -> ParetoPoint:
        bits = problem.size(solution) / max(found.weights, 1)
        return ParetoPoint(bits, int(in_bytes.size(solution)), problem.cost(solution), found.by_path(solution))

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


def _row(point: ParetoPoint, used: list[int], words: str) -> list[object]:
    counts = [sum(bits == width for width in point.widths.values()) for bits in used]
    return [f"{point.bits:.2f}", f"{point.bytes:,}", f"{point.cost:.4g}", *counts, words]
