"""`Knapsack`: the least cost within a limit, compared with all solutions."""

import itertools
import random
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy")

from fakequant._diagnosis.bit_allocation import Knapsack


def falling(rng, count):
    return sorted((rng.random() * 10 ** rng.randint(-6, 0) for _ in range(count)), reverse=True)


def instance(seed, items=6, scale=1, is_integer=True):
    rng = random.Random(seed)
    counts = [rng.randint(1, 4) for _ in range(items)]
    costs = [falling(rng, count) for count in counts]
    sizes = [[rng.randint(1, 50) * scale if is_integer else rng.random() for _ in range(c)] for c in counts]
    return Knapsack(costs, [sorted(options) for options in sizes])


def solutions(problem):
    return list(itertools.product(*(range(len(options)) for options in problem.costs)))


@pytest.mark.parametrize("scale", [1, 10**9 + 7])
@pytest.mark.parametrize("is_integer", [True, False])
def test_solve_finds_the_least_cost_of_all_solutions_within_the_limit(scale, is_integer):
    for seed in range(12):
        problem = instance(seed, scale=scale, is_integer=is_integer)
        everything = solutions(problem)
        low, high = (f(problem.size(s) for s in everything) for f in (min, max))
        for share in (0, 0.1, 0.35, 0.7, 1):
            limit = low + share * (high - low)
            found = problem.solve(limit)
            assert problem.size(found) <= limit
            best = min(problem.cost(s) for s in everything if problem.size(s) <= limit)
            assert best <= problem.cost(found) <= best * (1 + 1e-9)  # the gap at which the solver stops


def test_solve_meets_a_limit_that_is_exactly_the_size_of_a_solution_and_not_one_less():
    for seed in range(6):
        problem = instance(seed, scale=10**9 + 7)
        best = min(solutions(problem), key=lambda s: (problem.cost(s), problem.size(s)))
        limit = problem.size(best)
        assert problem.solve(limit) == list(best)
        if limit - 1 >= problem.size(problem.smallest()):
            assert problem.size(problem.solve(limit - 1)) <= limit - 1


def test_solve_is_exact_for_costs_of_very_different_size():
    # One option is bad beyond all others. What matters within the limit is ten orders of magnitude smaller.
    rng = random.Random(0)
    costs = [[1e4, 1e-7, 0.0], *([x, x / 3, 0.0] for x in (1e-6 * rng.random() for _ in range(5)))]
    problem = Knapsack(costs, [[10, 20, 40] for _ in costs])
    for limit in (100, 130, 160, 190):
        best = min((s for s in solutions(problem) if problem.size(s) <= limit), key=problem.cost)
        assert problem.cost(problem.solve(limit)) == problem.cost(best)


def test_solve_costs_no_more_than_known_solutions_even_if_the_solver_fails(monkeypatch):
    problem = instance(3)
    monkeypatch.setattr(Knapsack, "_solve_exactly", lambda self, limit: None)
    for known in solutions(problem)[::7]:
        assert problem.cost(problem.solve(problem.size(known), [list(known)])) <= problem.cost(known)


def test_solve_uses_the_smallest_of_options_that_cost_the_same():
    problem = Knapsack([[1.0, 1.0, 1.0], [2.0, 0.5, 0.5]], [[2, 4, 8], [2, 4, 8]])
    assert problem.solve(16) == [0, 1]
    assert problem.solve(12) == [0, 1]


def test_what_is_left_of_the_limit_goes_to_the_lowest_options():
    equal = Knapsack([[0.0] * 3 for _ in range(4)], [[2, 4, 8] for _ in range(4)])
    order = [[2, 4, 8] for _ in range(4)]
    assert equal.filled(equal.solve(16), 16, order) == [1, 1, 1, 1]
    assert equal.filled(equal.solve(19), 19, order) == [1, 1, 1, 1]
    assert equal.filled(equal.solve(20), 20, order) == [2, 1, 1, 1]
    assert equal.filled(equal.solve(32), 32, order) == [2, 2, 2, 2]
    # Among equal widths, the item that costs most at its first option is next.
    costs = Knapsack([[1.0, 1.0], [3.0, 3.0]], [[2, 4], [2, 4]])
    assert costs.filled([0, 0], 6, [[2, 4], [2, 4]]) == [0, 1]


def test_a_missing_scipy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    problem = Knapsack([[1.0, 0.0], [1.0, 0.0]], [[2, 4], [2, 4]])
    with pytest.raises(ImportError, match=r'SciPy(.|\n)*pip install "fakequant\[search\]"'):
        problem.solve(6)
