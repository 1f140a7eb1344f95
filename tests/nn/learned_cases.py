"""Specs, data and helpers that the tests of learned quantizers share."""

import math

import numpy as np
import pytest

from fakequant import QuantSpec

torch = pytest.importorskip("torch")
LearnedFakeQuantize = pytest.importorskip("fakequant.nn").LearnedFakeQuantize

INT4 = QuantSpec(bits=4)
UINT4 = QuantSpec(bits=4, signed=False, symmetric=False)
SHAPE = (4, 6, 8)
WHERE = {
    "tensor": {},
    "channel, first": dict(axis=0),
    "channel, last": dict(axis=-1),
    "group, last": dict(axis=-1, group_size=4),
    "group, middle": dict(axis=1, group_size=3),
    "block": dict(axis=-1, group_size=4, group_rows=3),
}
GRIDS = {
    "int4": dict(bits=4),
    "int4 narrow": dict(bits=4, narrow_range=True),
    "int4 affine": dict(bits=4, symmetric=False),
    "uint4": dict(bits=4, signed=False, symmetric=False),
    "int2": dict(bits=2),
    "uint1": dict(bits=1, signed=False, symmetric=False),
    "int8 affine": dict(symmetric=False),
}
BROKEN = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
X = torch.tensor([-1.0, 0.5, 3.0])
by_where = pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
by_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
by_broken = pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)


def initialized(spec=INT4, x=X, **options):
    return LearnedFakeQuantize(spec, shape=x.shape, **options).initialize(x)


def whole_numbers(shape=SHAPE, seed=0):
    """Returns integers as floats, whose sums are exact in any order."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-99, 100, shape).astype(np.float32))


def blocks(x, spec):
    """Moves the elements that share a scale to the last axis. The other axes are those of the scales."""
    x = x.numpy()
    if spec.axis is None:
        return x.reshape(-1)
    axis = spec.axis % x.ndim
    if spec.group_size is None:
        return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    if spec.group_rows is not None:
        *outer, rows, columns = x.shape
        cut = x.reshape(*outer, rows // spec.group_rows, spec.group_rows, columns // spec.group_size, spec.group_size)
        return cut.swapaxes(-2, -3).reshape(*cut.shape[:-3], cut.shape[-2], -1)
    cut = x.reshape(*x.shape[:axis], -1, spec.group_size, *x.shape[axis + 1 :])
    return np.moveaxis(cut, axis + 1, -1)


def lsq(values, qmax):
    """Returns LSQ's scale of the finite values along the last axis, rounded once."""
    finite = np.isfinite(values)
    total = np.where(finite, np.abs(values.astype(np.float64)), 0).sum(-1)
    return np.asarray(2 * (total / finite.sum(-1)) / math.sqrt(qmax)).astype(np.float32)


def make_step_size(quantizer, value):
    """Overwrites the step size, as an optimizer may between two forward passes."""
    with torch.no_grad():
        quantizer.step_size.copy_(torch.as_tensor(value))


def bits(t):
    return t.detach().clone().numpy()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e2, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e2, weight_decay=0.1, fused=True),
}
by_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def all_usable(scale):
    return all(0 < s < math.inf for s in scale.flatten().tolist())
