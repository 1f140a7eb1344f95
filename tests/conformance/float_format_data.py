"""Float formats and values at which implementations of them differ."""

import functools

import ml_dtypes
import numpy as np
import pytest

from fakequant.formats import FLOAT_FORMATS
from fakequant.testing.cases import neighbours

ML_DTYPES = {
    "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2fnuz": "float8_e5m2fnuz",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
}
by_format = pytest.mark.parametrize("format", FLOAT_FORMATS)


def dtype_of(format):
    """Returns the dtype of ml_dtypes for a format."""
    return np.dtype(getattr(ml_dtypes, ML_DTYPES[format]))


@functools.cache
def magnitudes(format):
    """Returns the magnitudes of a format in the order of their codes, from ml_dtypes, and one more that does not fit.

    The last one continues the grid: it is as far from the largest value as the one before.
    """
    values = np.arange(1 << (FLOAT_FORMATS[format].bits - 1), dtype=np.uint8).view(dtype_of(format)).astype(np.float64)
    values = values[np.isfinite(values)]
    return np.append(values, 2 * values[-1] - values[-2])


@functools.cache
def hard_values(format):
    """Returns every grid point, every tie, the first values that do not fit, and all their float32 neighbours."""
    grid = magnitudes(format)
    positive = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, grid[-1] * np.array([1.5, 2, 4, 1e6])])
    points = np.concatenate([positive, -positive]).astype(np.float32)
    return frozen(np.concatenate([points, neighbours(points, -1), neighbours(points, 1)]))


@functools.cache
def bfloat16_values():
    """Returns all 65536 values of bfloat16, as float32."""
    return frozen(np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32))


@functools.cache
def random_values(count=500_000):
    """Returns `count` random bit patterns and as many normally distributed numbers of all magnitudes, float32."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    normal = rng.standard_normal(count) * np.exp2(rng.uniform(-20, 20, count))
    return frozen(np.concatenate([patterns, normal.astype(np.float32)]))


@functools.cache
def all_values(format):
    """Returns the values above together: more than a million."""
    return frozen(np.concatenate([hard_values(format), bfloat16_values(), random_values()]))


def next_to_ties_of_block_scales(largest):
    """Returns magnitudes up to `largest` whose scales in NVFP4 are next to a tie, so that every rounding counts."""
    grid = FLOAT_FORMATS["e4m3fn"].grid().astype(np.float64)
    middle = (grid[1:] + grid[:-1])[grid[1:] > 2**-6] / 2
    absmax = (middle * 6 * (largest / 2688)).astype(np.float32)
    near = [neighbours(absmax, ulps) for ulps in (-2, -1, 0, 1, 2)]
    return np.concatenate([np.float32([largest]), *near])


def nearest(t, format):
    """Returns the magnitudes nearest to `|t|`, ties to even codes, and whether they fit: found on the grid of values.

    Neighbours have codes that follow each other, and the midpoints of values are exact in float64.
    """
    grid = magnitudes(format)
    middle = (grid[1:] + grid[:-1]) / 2
    size = np.minimum(np.abs(np.asarray(t, np.float64)), grid[-1])
    below, above = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
    index = np.where(below % 2 == 0, below, above)  # they differ at ties only
    fits = index < len(grid) - 1
    return grid[np.minimum(index, len(grid) - 2)], fits


def frozen(array):
    """Returns the array, made read-only because tests share it."""
    array.flags.writeable = False
    return array
