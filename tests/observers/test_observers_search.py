"""Histogram, MSE and Entropy find the range that an exhaustive search finds."""

import dataclasses
import math

import numpy as np
import pytest

from observer_cases import INT4, INT8, SEARCHES, UINT4, UINT8, assert_same_range, bell, by, counted, range_of

torch = pytest.importorskip("torch")

from fakequant import QuantSpec  # noqa: E402
from fakequant.observers import MSE, Entropy, Histogram  # noqa: E402


def grid_of(lo, hi, spec):
    """Returns scale and zero point, computed in float32."""
    lo, hi = min(np.float32(lo), np.float32(0)), max(np.float32(hi), np.float32(0))
    levels = np.float32(spec.qmax - spec.qmin)
    eps = np.finfo(np.float32).eps
    if spec.symmetric:
        return max(max(-lo, hi) / (levels / np.float32(2)), eps), 0
    scale = max((hi - lo) / levels, eps)
    return scale, int(np.clip(spec.qmin - np.rint(lo / scale), spec.qmin, spec.qmax))


def codes_of(x, lo, hi, spec):
    scale, zero = grid_of(lo, hi, spec)
    return np.clip(np.rint(x / scale) + np.float32(zero), spec.qmin, spec.qmax), scale, zero


def rounded(x, lo, hi, spec):
    codes, scale, zero = codes_of(x, lo, hi, spec)
    return ((codes - np.float32(zero)) * scale).astype(np.float32)


def candidates(lo, hi, steps):
    """Returns the ranges with both ends cut at the same magnitude, from the largest down."""
    top = max(-lo, hi)
    cuts = [top * (np.float32(i) / np.float32(steps)) for i in range(steps, 0, -1)]
    return [(max(lo, -cut), min(hi, cut)) for cut in cuts]


def brute_force(error, lo, hi, steps, *, each_end):
    fractions = [np.float32(i) / np.float32(steps) for i in range(steps, 0, -1)]
    lo, hi = min(candidates(lo, hi, steps), key=lambda ends: error(*ends))
    if each_end:
        lo, hi = min(((lo * f, hi) for f in fractions), key=lambda ends: error(*ends))
        lo, hi = min(((lo, hi * f) for f in fractions), key=lambda ends: error(*ends))
    return lo, hi


def histogram_of(x, bins):
    """Returns counts, centers and width of the bins."""
    exponent, counts = counted(x.tolist(), bins)
    width = 2.0**exponent
    return counts, ((np.arange(-bins // 2, bins // 2) + 0.5) * width).astype(np.float32), width


SEARCHED = {
    "bell": bell(700).numpy(),
    "long tail": (bell(700, seed=4).numpy() ** 3).astype(np.float32),
    "lopsided": np.concatenate([bell(500).numpy(), np.float32([9, 11, 14])]),
    "from zero": np.abs(bell(700, seed=5).numpy()) * np.float32(3) - np.float32(1e-3),
    "few levels": np.random.default_rng(1).choice(np.float32([-3, -1, -0.5, 0, 0.5, 1, 2, 8]), 300),
}
by_searched = by(SEARCHED, "x")
GRIDS = INT4, QuantSpec(bits=4, narrow_range=True), UINT4, QuantSpec(bits=2), INT8, UINT8
by_grid = by({str(spec): spec for spec in GRIDS}, "spec")


@by_searched
@by_grid
@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_histogram_finds_the_range_of_least_error_over_its_bins(x, spec, norm):
    counts, centers, _ = histogram_of(x, 256)

    def error(lo, hi):
        distance = np.abs(rounded(centers, lo, hi, spec) - centers).astype(np.float64)
        return math.fsum(counts * distance**norm)

    expected = brute_force(error, x.min(), x.max(), 20, each_end=not spec.symmetric)
    halves = [torch.from_numpy(part.copy()) for part in np.array_split(x, 2)]
    assert_same_range(expected, range_of(Histogram(norm, 20, bins=256), *halves, spec=spec))


@by_searched
@by_grid
def test_mse_finds_the_range_of_least_squared_error_on_the_latest_tensor(x, spec):
    def error(lo, hi):
        return math.fsum((rounded(x, lo, hi, spec) - x).astype(np.float64) ** 2)

    expected = brute_force(error, x.min(), x.max(), 20, each_end=not spec.symmetric)
    latest = torch.from_numpy(x)
    assert_same_range(expected, range_of(MSE(20), latest[:100] * 50, latest, spec=spec))


def divergence(counts, centers, lo, hi, spec):
    """Returns the KL divergence of the clipped histogram from the one with evenly filled bins per code."""
    half = (centers[1] - centers[0]) / 2
    below, above = centers + half < lo, centers - half > hi
    inside = np.flatnonzero(~below & ~above)
    clipped = counts[inside].astype(np.float64)
    clipped[0] += counts[below].sum()
    clipped[-1] += counts[above].sum()
    codes = codes_of(centers[inside], lo, hi, spec)[0]
    spread = np.zeros(len(inside))
    for code in np.unique(codes):
        used = (codes == code) & (counts[inside] > 0)
        if used.any():
            spread[used] = counts[inside][used].sum() / used.sum()
    p, q = clipped / clipped.sum(), np.maximum(spread / max(spread.sum(), 1), 1e-12)
    return math.fsum(p[p > 0] * np.log(p[p > 0] / q[p > 0]))


# Among candidates of equal divergence, the order of summing up to 1024 terms decides.
SUMMED_IN_ANOTHER_ORDER = 1e-12


@by({k: v for k, v in SEARCHED.items() if k != "few levels"}, "x")
@by({str(s): s for s in (INT4, UINT4, QuantSpec(bits=2), QuantSpec(bits=6))}, "spec")
@pytest.mark.parametrize("bins", [256, 1024])
def test_entropy_finds_the_range_of_least_divergence(x, spec, bins):
    counts, centers, width = histogram_of(x, bins)

    def error(ends):
        return math.fsum(counts * (rounded(centers, *ends, spec) - centers).astype(np.float64) ** 2)

    inner = tuple(range_of(Histogram(bins=bins), torch.from_numpy(x), spec=spec))
    tried = [(min(lo, inner[0]), max(hi, inner[1])) for lo, hi in candidates(x.min(), x.max(), 40)]
    tried = [tried[0], *((lo, hi) for lo, hi in tried[1:] if not (hi - lo) < spec.levels * width)]
    tried = [ends for ends in tried if error(ends) <= 2 * error(inner)]
    found = tuple(range_of(Entropy(40, bins=bins), torch.from_numpy(x), spec=spec))
    if not tried:
        assert found == inner
        return
    assert found in tried
    least = min(divergence(counts, centers, *ends, spec) for ends in tried)
    assert divergence(counts, centers, *found, spec) <= least + SUMMED_IN_ANOTHER_ORDER


@pytest.mark.parametrize("bits", [8, 12, 16, 32])
def test_entropy_takes_the_range_of_the_data_with_more_levels_than_bins(bits):
    x = torch.cat([bell(500), torch.tensor([40.0])])
    expected = (x.min().item(), x.max().item())
    assert_same_range(expected, range_of(Entropy(bins=256), x, spec=QuantSpec(bits=bits)))


def test_search_prefers_the_widest_range_among_equal_errors():
    """Below the smallest scale, every candidate has the same grid."""
    x = [-1e-9, 5e-10, 1e-9]
    for observer in (Histogram(), MSE()):
        for spec in (INT8, UINT8):
            assert_same_range((np.float32(-1e-9), np.float32(1e-9)), range_of(observer, x, spec=spec))


@pytest.mark.parametrize("numerics", ["torch", "onnx", "half_away"])
def test_search_works_with_every_numerics(numerics):
    for observer in SEARCHES.values():
        for where in ({}, dict(axis=0)):
            spec = QuantSpec(bits=4, symmetric=False, numerics=numerics, **where)
            lo, hi = range_of(observer, bell(3, 100), spec=spec)
            assert (lo < 0).all()
            assert (hi > 0).all()


@by(SEARCHES)
def test_search_with_one_step_takes_the_range_of_the_data(observer):
    x = bell(200)
    one = dataclasses.replace(observer, steps=1)
    for spec in (INT4, UINT4):
        assert_same_range((x.min().item(), x.max().item()), range_of(one, x, spec=spec))
