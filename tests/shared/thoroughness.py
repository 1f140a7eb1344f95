"""How much is tried: samples of long lists in `make test`, everything in `make test-all` (FAKEQUANT_TESTS=all)."""

import itertools
import os

import pytest

ALL = os.environ.get("FAKEQUANT_TESTS") == "all"
only_in_test_all = pytest.mark.skipif(not ALL, reason="slow; `make test-all` runs it")


def sampled(everything, *chosen):
    """Returns a mapping without the entries that only `make test-all` tries."""
    return everything if ALL else {name: everything[name] for name in chosen}


def pairs_of(first, second, third):
    """Returns triples in which any two values of two lists occur together. `make test-all` tries all triples."""
    if ALL:
        return list(itertools.product(first, second, third))
    return [(first[(i + j) % len(first)], b, c) for i, b in enumerate(second) for j, c in enumerate(third)]
