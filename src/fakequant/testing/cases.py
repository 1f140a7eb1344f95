"""Inputs on which implementations of fake quantization disagree.

Random numbers almost never hit a tie, a clip boundary or a special value. These functions produce them. All results
are deterministic.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

# ml_dtypes does not annotate it.
_finfo: Callable[[DTypeLike], Any] = ml_dtypes.finfo

# Their reciprocals round up, down or are exact. EXTREME_SCALES are near the ends of the float32 range.
SCALES = (1.0, 0.5, 0.1, 0.02, 1 / 3, 1 / 255, 0.7, 3.0517578e-05, 1.1920929e-07, 12345.678, 1e30)
EXTREME_SCALES = (1e-38, 1.1754942e-38, 1e-40, 3e-39, 1e-45, 2e38, 3.4028235e38)
# Invalid scales, which torch accepts nevertheless.
BROKEN_SCALES = (0.0, -0.0, -0.1, -1.0, -1e-45, np.inf, -np.inf, np.nan, 1e39, 1e-46)

INT8, UINT8, INT4, NARROW_INT8 = (-128, 127), (0, 255), (-8, 7), (-127, 127)


def ranges(max_bits: int = 32) -> list[tuple[int, int]]:
    """Returns signed, unsigned and narrow `(qmin, qmax)` of 1 to `max_bits` bits, and ranges with one code."""
    out = [(0, 0), (-1, -1), (5, 5)]
    for bits in range(1, max_bits + 1):
        half = 2 ** (bits - 1)
        out += [(-half, half - 1), (0, 2 * half - 1)]
        if bits > 1:
            out.append((1 - half, half - 1))
    return out


INT64_RANGES = (
    (-(2**63), 2**63 - 1),
    (-(2**63), 0),
    (0, 2**63 - 1),
    (-(2**53) - 1, 2**53 + 1),
    (2**62, 2**62 + 1),
    (-(2**31), 2**32),
)


def neighbours(x: ArrayLike, ulps: int) -> np.ndarray:
    """Returns the values that are `ulps` representable values above `x`, or below for a negative number.

    >>> neighbours(np.float32([0.0, 1.0]), -1)
    array([-1.4012985e-45,  9.9999994e-01], dtype=float32)
    """
    x = np.asarray(x)
    integer = np.dtype(f"i{x.itemsize}")
    lowest = np.iinfo(integer).min
    order = np.ascontiguousarray(x).view(integer)
    order = np.where(order < 0, lowest - order, order) + integer.type(ulps)
    moved: np.ndarray = np.where(order < 0, lowest - order, order)
    return moved.astype(integer).view(x.dtype)


def special_values(dtype: DTypeLike) -> np.ndarray:
    """Returns signed zeros, subnormals, inf, NaN, and the limits of float, int32 and int64 with their neighbours."""
    info = _finfo(dtype)
    positive = [0.0, 0.5, 1.0, 1.5, 2.5, float(info.smallest_subnormal), float(info.tiny)]
    positive += [float(info.tiny) / 2, float(info.max), np.inf]
    positive += [2.0**k for k in (22, 23, 24, 31, 32, 52, 53, 62, 63, 64) if 2.0**k < info.max]
    values = np.array(positive + [-v for v in positive] + [np.nan]).astype(dtype)
    finite = values[np.isfinite(values)]
    near = [neighbours(finite, step) for step in (-1, 1)]
    return np.concatenate([values, *near])


def ties(scale: float, zero_point: int, qmin: int, qmax: int, dtype: DTypeLike, count: int = 64) -> np.ndarray:
    """Returns ties `(k + 1/2) * scale` and grid values `k * scale` with their neighbours, on both sides of the range.

    Args:
        scale: The scale of the grid.
        zero_point: The zero point of the grid.
        qmin: The lowest code.
        qmax: The highest code.
        dtype: The float dtype of the result.
        count: How many steps to sample from a range with more codes.

    >>> ties(0.1, 0, 0, 1, np.float32)[:4]
    array([-0.35, -0.25, -0.15, -0.05], dtype=float32)
    """
    low, high = float(int(qmin) - int(zero_point)), float(int(qmax) - int(zero_point))
    if high - low <= count:
        steps = np.arange(low - 4, high + 4)
    else:
        ends = [k + np.arange(-4.0, 4.0) for k in (low, -1, 0, high)]
        steps = np.concatenate([*ends, np.rint(np.linspace(low, high, count))])
    with np.errstate(all="ignore"):
        exact = [(steps + 0.5) * scale, steps * scale]
        x = np.concatenate(exact).astype(dtype)
    x = x[np.isfinite(x)]
    return np.concatenate([x] + [neighbours(x, step) for step in (-2, -1, 1, 2)])


def values(scale: float, zero_point: int, qmin: int, qmax: int, dtype: DTypeLike, seed: int = 0) -> np.ndarray:
    """Returns ties, special values and random values over three times the range, as one array.

    Args:
        scale: The scale of the grid.
        zero_point: The zero point of the grid.
        qmin: The lowest code.
        qmax: The highest code.
        dtype: The float dtype of the result.
        seed: The seed of the random values.
    """
    rng = np.random.default_rng(seed)
    scale32 = float(np.float32(scale)) if abs(scale) < 3e38 else 1.0
    middle = (int(qmin) + int(qmax)) / 2 - int(zero_point)
    spread = 1.5 * (int(qmax) - int(qmin) + 2)
    with np.errstate(all="ignore"):
        random = ((middle + spread * rng.uniform(-1, 1, 64)) * scale32).astype(dtype)
        wild = np.exp(rng.uniform(-100, 100, 32)) * rng.choice([-1, 1], 32)
        return np.concatenate(
            [ties(scale32, zero_point, qmin, qmax, dtype), special_values(dtype), random, wild.astype(dtype)]
        )


def gradients(size: int | tuple[int, ...], dtype: DTypeLike, seed: int = 0) -> np.ndarray:
    """Returns normally distributed gradients, a quarter of them replaced by signed zeros, inf, NaN and the like."""
    rng = np.random.default_rng(seed)
    dy = rng.standard_normal(size).astype(dtype)
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-6, -3.0]).astype(dtype)
    places = rng.random(size) < 0.25
    dy[places] = rng.choice(specials, int(places.sum()))
    return dy
