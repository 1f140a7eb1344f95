"""Fixtures for test modules whose `CHECKS` run on two ranks; see two_ranks.py."""

from functools import partial

import pytest


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """The outcomes of the checks of the test module, by rank."""
    from two_ranks import outcomes_of

    return outcomes_of(request.module.__name__, tmp_path_factory)


@pytest.fixture
def ranks(outcomes):
    """A function that returns the results of a check, by rank."""
    from two_ranks import results_of

    return partial(results_of, outcomes)
