"""Fixtures for test modules whose `CHECKS` run on two ranks; see two_ranks.py."""

from functools import partial

import pytest


@pytest.fixture(scope="session")
def outcomes_of_all(request, tmp_path_factory):
    """The outcomes of the checks of all collected test modules, by rank and by module."""
    from two_ranks import Checks, outcomes_of

    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    names = [module.__name__ for module in modules if isinstance(getattr(module, "CHECKS", None), Checks)]
    return outcomes_of(sorted(names), tmp_path_factory)


@pytest.fixture(scope="module")
def outcomes(request, outcomes_of_all):
    """The outcomes of the checks of the test module, by rank."""
    return [outcome[request.module.__name__] for outcome in outcomes_of_all]


@pytest.fixture
def ranks(outcomes):
    """A function that returns the results of a check, by rank."""
    from two_ranks import results_of

    return partial(results_of, outcomes)
