"""Example data in every granularity, and the expected derivatives written in torch operations."""

from functools import partial
from typing import Any, NamedTuple

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
block_shape = pytest.importorskip("fakequant._backends.torch.tensor_checks").block_shape

AFFINE = partial(fq.QuantSpec, bits=4, symmetric=False)
SPECS = {
    "tensor": AFFINE(),
    "channel": AFFINE(axis=0),
    "last channel": AFFINE(axis=-1, numerics="torch"),
    "group": AFFINE(axis=-1, group_size=3, numerics="half_away"),
    "token": AFFINE(axis=-1, group_size=-1),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
# 30 elements end inside a byte of a packed mask, 24 do not.
each_shape = pytest.mark.parametrize("shape", [(5, 6), (4, 6)], ids=str)


class Case(NamedTuple):
    x: Any
    scale: Any
    zero_point: Any

    def at(self, i):
        return Case(*(v[i] for v in self))


def make(spec, shape=(5, 6), batch=(), dtype=torch.float32, fraction=False):
    torch.manual_seed(1)
    blocks = fq.min_max(torch.zeros(shape), spec).min.shape
    zero_point = torch.randint(-3, 4, (*batch, *blocks), dtype=torch.int32)
    return Case(
        2 * torch.randn(*batch, *shape, dtype=dtype),
        torch.rand((*batch, *blocks), dtype=dtype) * 0.2 + 0.1,
        zero_point + torch.tensor(0.3, dtype=dtype) if fraction else zero_point,
    )


def spread(parameter, x, spec):
    """Expands one value per block to one per element."""
    parameter = parameter.reshape(block_shape(tuple(x.shape), spec) or [1] * x.dim())
    for axis, length in enumerate(x.shape):
        parameter = parameter.repeat_interleave(length // parameter.shape[axis], axis)
    return parameter


def straight_through(x, scale, zero_point, spec):
    """Learned fake quantization in torch operations, with derivative 1 for rounding and 0 for clipping."""
    s, z = spread(scale, x, spec), spread(zero_point, x, spec)
    z = z + (z.round().clamp(spec.qmin, spec.qmax) - z).detach()
    v = x / s
    code = v + (v.round() - v).detach() + z
    q = torch.where(code < spec.qmin, spec.qmin, torch.where(code > spec.qmax, spec.qmax, code))
    return (q - z) * s


def inside(case, spec):
    code = torch.round(case.x / spread(case.scale, case.x, spec)) + spread(case.zero_point, case.x, spec)
    return (code >= spec.qmin) & (code <= spec.qmax)
