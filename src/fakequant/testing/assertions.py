"""Comparisons without a tolerance."""

import numpy as np
from numpy.typing import ArrayLike


def bits(a: ArrayLike) -> np.ndarray:
    """Returns the bits of the array as unsigned integers, after replacing every NaN by the same NaN.

    >>> bits(np.float32([1, -0.0])).tolist() == [0x3F800000, 0x80000000]
    True
    """
    a = np.asarray(a)
    if a.dtype.kind in "iub":
        return a.astype(np.uint8) if a.dtype == bool else a.view(f"u{a.itemsize}")
    # The types of ml_dtypes have kind "V", but np.isnan accepts them.
    one_nan = np.full((), np.nan, a.dtype)
    return np.where(np.isnan(a), one_nan, a).view(f"u{a.itemsize}")


def assert_same_bits(expected: ArrayLike, actual: ArrayLike, *names: object) -> None:
    """Raises AssertionError unless both arrays have the same dtype, shape and bits.

    -0.0 differs from +0.0. NaN equals NaN, whatever its payload. The message starts with `names`.

    >>> assert_same_bits(np.float16([0.0]), np.float16([-0.0]), "y")
    Traceback (most recent call last):
    AssertionError: y: 1 of 1 differ, first at (0,): expected 0.0 (0x0000), got -0.0 (0x8000)
    """
    expected, actual = np.asarray(expected), np.asarray(actual)
    if expected.dtype != actual.dtype:
        raise AssertionError(f"{_join(names)}: expected dtype {expected.dtype}, got {actual.dtype}")
    if expected.shape != actual.shape:
        raise AssertionError(f"{_join(names)}: expected shape {expected.shape}, got {actual.shape}")
    left, right = bits(expected), bits(actual)
    differ = left != right
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        width = 2 + 2 * left.itemsize
        raise AssertionError(
            f"{_join(names)}: {int(differ.sum())} of {differ.size} differ, first at {at}: "
            f"expected {expected[at]} ({int(left[at]):#0{width}x}), "
            f"got {actual[at]} ({int(right[at]):#0{width}x})"
        )


def _join(names: tuple[object, ...]) -> str:
    return ", ".join(map(str, names)) or "arrays"
