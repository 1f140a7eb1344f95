"""One option for every item, at the least total cost within a limit: a multiple-choice knapsack problem."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fakequant._util.optional_packages import require

# Solutions that exceed the limit by the solver's tolerance are excluded one by one, up to this many.
_RETRIES = 50


@dataclasses.dataclass(frozen=True)
class Problem:
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
        """Returns the solution of the least size."""
        return [min(range(len(options)), key=options.__getitem__) for options in self.sizes]

    def solve(self, limit: float, known: Sequence[list[int]] = ()) -> list[int]:
        """Returns a solution of the least cost whose size is at most `limit`, which the smallest must be.

        Args:
            limit: The largest size.
            known: Other solutions. The result costs no more than those of them that are within the limit.
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

        Args:
            solution: The solution.
            limit: The largest size.
            order: A number for every option. Items whose option has the lowest number are next.
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
        scipy: Any = require("scipy.optimize", "SciPy", "search")
        counts = [len(options) for options in self.costs]
        starts = np.cumsum([0, *counts])
        # Relative to the smallest option and to the room that is left, so that tolerances are relative too.
        least = [min(options) for options in self.sizes]
        room = limit - _total(least)
        sizes = np.array([size - low for low, options in zip(least, self.sizes) for size in options], np.float64)
        costs = np.array([cost - options[-1] for options in self.costs for cost in options])
        one_each = np.zeros((len(counts), starts[-1]))
        for item, count in enumerate(counts):
            one_each[item, starts[item] : starts[item] + count] = 1
        constraints = [scipy.LinearConstraint(one_each, 1, 1), scipy.LinearConstraint(sizes / max(room, 1e-300), ub=1)]
        # An option that does not fit even alone is never chosen.
        upper = (sizes <= room).astype(np.float64)
        for _ in range(_RETRIES):
            result = scipy.milp(
                # The solver stops at an absolute gap of 1e-6.
                1e4 * costs / max(costs.max(), 1e-300),
                integrality=np.ones(starts[-1]),
                bounds=scipy.Bounds(0, upper),
                constraints=constraints,
                options={"mip_rel_gap": 0},
            )
            if result.x is None:
                return None
            solution = [int(np.argmax(result.x[a:b])) for a, b in pairwise(starts)]
            if self.size(solution) <= limit:
                return solution
            chosen = np.zeros(starts[-1])
            chosen[[start + k for start, k in zip(starts, solution)]] = 1
            constraints.append(scipy.LinearConstraint(chosen, ub=len(counts) - 1))
        return None


def _total(sizes: Sequence[float]) -> float:
    """Returns the sum, exactly for integers, and rounded once for floats."""
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else math.fsum(sizes)
