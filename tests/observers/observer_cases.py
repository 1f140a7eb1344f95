"""Observers, specs and data that the tests of observers share."""

import math
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fakequant import QuantSpec  # noqa: E402
from fakequant._backends.blocks import blocks_of  # noqa: E402
from fakequant.observers import MSE, Dynamic, Entropy, Fixed, Histogram, MinMax, MovingAverage, Percentile  # noqa: E402
from fakequant.observers._ranks import ALONE  # noqa: E402
from fakequant.testing.assertions import assert_same_bits  # noqa: E402

INT8 = QuantSpec()
UINT8 = QuantSpec(signed=False, symmetric=False)
INT4 = QuantSpec(bits=4)
UINT4 = QuantSpec(bits=4, signed=False, symmetric=False)
LARGEST = np.finfo(np.float32).max.item()
RUNNING = {"MinMax": MinMax(), "MovingAverage": MovingAverage(0.3), "Dynamic": Dynamic()}
BINNED = {
    "Percentile": Percentile(99.0, bins=256),
    "Histogram": Histogram(steps=10, bins=256),
    "Entropy": Entropy(steps=10, bins=256),
}
SEARCHES = {"Histogram": BINNED["Histogram"], "Entropy": BINNED["Entropy"], "MSE": MSE(steps=10)}
OBSERVING = {**RUNNING, **BINNED, "MSE": MSE(steps=10)}
STATEFUL = {name: o for name, o in OBSERVING.items() if name != "Dynamic"}
ALL = {**OBSERVING, "Fixed": Fixed(-0.5, 2.0)}


def by(table, name="observer"):
    return pytest.mark.parametrize(name, table.values(), ids=table)


def as_tensors(*batches, dtype=torch.float32):
    return [torch.tensor(b, dtype=dtype) if not isinstance(b, torch.Tensor) else b for b in batches]


def state_after(observer, *batches, spec=INT8, ranks=ALONE):
    """Returns the state after the batches."""
    batches = as_tensors(*batches)
    state = observer.init(blocks_of(tuple(batches[0].shape), spec).parameters)
    for x in batches:
        observer.update(state, x, spec, ranks)
    return state


def range_of(observer, *batches, spec=INT8):
    """Returns the range after the batches, as arrays."""
    return tuple(end.numpy() for end in observer.range(state_after(observer, *batches, spec=spec), spec))


def assert_same_range(expected, actual, *names):
    for end, e, a in zip(("lo", "hi"), expected, actual, strict=True):
        assert_same_bits(np.asarray(e, np.float32), a, end, *names)


def bell(*shape, seed=0, dtype=torch.float32):
    """Returns normal values with a few outliers, all representable in every dtype."""
    x = np.random.default_rng(seed).standard_normal(shape)
    x[abs(x) > 2] *= 3
    return torch.from_numpy(x).to(torch.bfloat16).to(torch.float16).to(dtype)


def counted(values, bins):
    """Returns the exponent and counts of a histogram, computed with exact arithmetic."""
    finite = [Fraction(float(np.float32(v))) for v in values if np.isfinite(v)]
    largest = max(map(abs, finite), default=0)
    exponent = next(e for e in range(-126, 129) if largest < bins // 2 * Fraction(2) ** e)
    counts = np.zeros(bins, np.int64)
    for value, given in zip(finite, (v for v in values if np.isfinite(v)), strict=True):
        distance = math.floor(abs(value) / Fraction(2) ** exponent)
        counts[bins // 2 - 1 - distance if given < 0 else bins // 2 + distance] += 1
    return exponent, counts
