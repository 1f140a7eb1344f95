"""One option for every item, at the least total cost within a limit: a multiple-choice knapsack problem."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fakequant._util.optional_packages import require

# Solutions that exceed the limit by the solver's tolerance are excluded one by one, up to this many.
_RETRIES = 50
# The largest cost that the solver sees. It stops at an absolute gap of 1e-6.
_LARGEST_COST = 1e4

Array: TypeAlias = NDArray[Any]


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
        """Returns the solution of the least size, and of the least cost among those."""
        pairs = [list(zip(*item, strict=True)) for item in zip(self.sizes, self.costs, strict=True)]
        return [min(range(len(options)), key=options.__getitem__) for options in pairs]

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
