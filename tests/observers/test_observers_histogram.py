"""Histograms count exactly, and percentiles are those of the sorted values."""

import math
from fractions import Fraction

import numpy as np
import pytest

from observer_cases import LARGEST, assert_same_range, bell, by, counted, range_of, state_after

torch = pytest.importorskip("torch")

from fakequant import QuantSpec  # noqa: E402
from fakequant.observers import Percentile  # noqa: E402
from fakequant.testing.assertions import assert_same_bits, assert_same_state  # noqa: E402

INF, NAN = math.inf, math.nan

# --- histogram --------------------------------------------------------------------------------------

EDGES = [k * 2.0**-5 for k in range(-40, 41)]  # exactly on edges of bins if the exponent allows
DATA = {
    "random": bell(200).tolist(),
    "on the edges": EDGES,
    "beside the edges": [float(np.nextafter(np.float32(v), np.float32(s))) for v in EDGES for s in (-INF, INF)],
    "powers of two": [s * 2.0**p for p in range(-10, 11) for s in (1, -1)],
    "zeros": [0.0, -0.0, -0.0, 1.0],
    "tiny": [1e-45, -1e-45, 1e-38, -1e-40, 0.0],
    "huge": [LARGEST, -LARGEST, 1e38, -1.0],
    "every magnitude": [s * 10.0**p for p in range(-44, 39, 3) for s in (1, -1)],
    "not finite": [NAN, 1.0, INF, -3.0, -INF, NAN],
    "nothing": [NAN],
}


@by(DATA, "values")
@pytest.mark.parametrize("bins", [4, 64, 4096])
def test_histogram_counts_match_exact_arithmetic(values, bins):
    exponent, counts = counted(values, bins)
    state = state_after(Percentile(bins=bins), values)
    assert int(state["exponent"]) == exponent
    assert_same_bits(counts, state["counts"])


@by(DATA, "values")
@pytest.mark.parametrize("bins", [4, 1024])
def test_histogram_counts_do_not_depend_on_order_or_batches(bins, values):
    observer = Percentile(bins=bins)
    joined = state_after(observer, values)
    shuffled = np.random.default_rng(0).permutation(values).tolist()
    by_size = sorted(values, key=lambda v: (math.isnan(v), abs(v)))
    for name, order in {"shuffled": shuffled, "rising": by_size, "falling": by_size[::-1]}.items():
        size = max(1, len(order) // 20)
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        assert_same_state(joined, state_after(observer, *batches), name)


def test_histogram_counts_per_channel_do_not_depend_on_order_or_batches():
    spec = QuantSpec(axis=0)
    x = bell(3, 60) * torch.tensor([[1.0], [1e20], [1e-20]])
    joined = state_after(Percentile(bins=64), x, spec=spec)
    assert_same_state(joined, state_after(Percentile(bins=64), *x.flip(1).split(7, dim=1), spec=spec))
    for row, exponent, counts in zip(x.tolist(), joined["exponent"], joined["counts"], strict=True):
        expected = counted(row, 64)
        assert int(exponent) == expected[0]
        assert_same_bits(expected[1], counts)


# --- percentile -------------------------------------------------------------------------------------


def percentile_range(values, percent):
    """Returns the outermost values outside the tails of n * (100 - percent) / 100, by exact arithmetic."""
    ordered = sorted(values)
    cut = math.floor(len(ordered) * (100 - Fraction(str(percent))) / 100)
    return ordered[cut], ordered[len(ordered) - 1 - cut]


def assert_within_a_bin(values, percent, bins):
    lo, hi = percentile_range(values, percent)
    found = range_of(Percentile(percent, bins=bins), values)
    widest = 4 / bins * max(map(abs, values))
    assert lo - widest <= found[0] <= lo, percent
    assert hi <= found[1] <= hi + widest, percent
    assert min(values) <= found[0] <= found[1] <= max(values)


SORTED = {
    "both sides": bell(999).tolist(),
    "positive": bell(999).abs().add(0.5).tolist(),
    "negative": bell(999).abs().add(0.5).neg().tolist(),
    "with outliers": [*bell(997).tolist(), 1000.0, -300.0],
    "many the same": [0.5] * 500 + [-0.25] * 499,
    "one": [3.0],
    "two": [-1.0, 3.0],
    "three": [-1.0, 0.5, 3.0],
}


@by(SORTED, "values")
@pytest.mark.parametrize("percent", [50.0001, 75.0, 90.0, 99.0, 99.9, 99.99, 100.0])
@pytest.mark.parametrize("bins", [64, 4096])
def test_percentile_matches_sorted_values_within_a_bin(values, percent, bins):
    assert_within_a_bin([float(np.float32(v)) for v in values], percent, bins)


@pytest.mark.parametrize("percent", [*map(float, range(51, 101)), 99.5, 99.75, 62.5])
@pytest.mark.parametrize("count", [100, 200, 400])
def test_percentile_leaves_out_a_tail_of_whole_percents_exactly(percent, count):
    """Whole percents of round counts are where a rounded product falls on the wrong side."""
    assert_within_a_bin([float(v) for v in range(1, count + 1)], percent, 4096)


@pytest.mark.parametrize(("percent", "count"), [(99.9, 1000), (99.9, 2000), (99.99, 10000), (99.7, 1000), (50.1, 1000)])
def test_percentile_leaves_out_a_tail_of_fractional_percents_exactly(percent, count):
    """99.9 is not a binary number, but one in a thousand is a whole count."""
    assert_within_a_bin([float(v) for v in range(1, count + 1)], percent, 1 << 17)


def test_percentile_100_is_the_range_of_the_data():
    x = bell(1000)
    assert_same_range((x.min().item(), x.max().item()), range_of(Percentile(100.0, bins=4), x))
