"""Difficult values in tensors of every memory layout, and comparisons with NumPy results."""

import functools
import itertools

import numpy as np
import pytest

import fakequant as fq
from fakequant import reference
from fakequant._backends.blocks import blocks_of
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import aten, to_numpy, to_torch, torch

# Every axis is even, so that groups of two fit in any order of axes.
SHAPE = (4, 6, 2, 8)
BLOCKS = {
    "tensor": {},
    "channel, first": dict(axis=0),
    "channel, middle": dict(axis=1),
    "channel, last": dict(axis=-1),
    "group, last": dict(axis=-1, group_size=2),
    "group, middle": dict(axis=1, group_size=2),
    "token": dict(axis=-1, group_size=-1),
    "token, first": dict(axis=0, group_size=-1),
    "block": dict(axis=-1, group_size=2, group_rows=2),
}
SCALES = (0.1, 1 / 3, 12345.678, 1e-40)


def at_an_offset(t):
    return torch.cat([t.new_zeros(3), t.flatten()])[3:].view(t.shape)


def inferred(t):
    with torch.inference_mode():
        return t.clone()


def channels_last(t):
    return t.contiguous(memory_format=torch.channels_last)


# Dense and in C order, as NumPy functions compute.
IN_C_ORDER = {
    "contiguous": lambda t: t,
    "at an offset": at_an_offset,
    "requires grad": lambda t: t.clone().requires_grad_(t.is_floating_point()),
    "made in inference mode": inferred,
}
DENSE = IN_C_ORDER | {
    "channels last": channels_last,
    "permuted": lambda t: t.permute(3, 1, 0, 2),
    "permuted, at an offset": lambda t: at_an_offset(t).permute(1, 3, 2, 0),
}
LAYOUTS = DENSE | {
    "expanded": lambda t: t[:, :1, :, :1].expand(SHAPE),
    "sliced": lambda t: t[:, ::3, :, 1:5],
    "sliced and permuted": lambda t: t[..., ::2].permute(2, 0, 3, 1),
    "overlapping": lambda t: t.as_strided(SHAPE, (3, 1, 5, 2)),
    "lazily negated": torch._neg_view,
}
# Layouts of gradients, which need not match the layout of x.
DY_LAYOUTS = {
    "contiguous": lambda t: t,
    "channels last": channels_last,
    "axes reversed": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "sliced": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:1, :, :1, :1].expand(t.shape),
    "of a sum": lambda t: t[:1, :1, :1, :1].expand(t.shape),
    "lazily negated": torch._neg_view,
}


def rules(where, **options):
    """Yields every numerics with every dtype."""
    for numerics, dtype in itertools.product(reference.NUMERICS, cases.DTYPES.values()):
        yield fq.QuantSpec(numerics=numerics, **where, **{"symmetric": False, **options}), dtype


def few_rules(where, **options):
    """Returns a few combinations, with every numerics and every dtype at least once."""
    return [r for i, r in enumerate(rules(where, **options)) if i in (0, 3, 5, 10)]


@functools.cache
def hostile(dtype):
    """Ties, edges, subnormal and huge values; one in ten is NaN or infinite."""
    values = np.concatenate([cases.values(s, z, -128, 127, dtype) for s in SCALES for z in (-7, 0, 20)])
    return np.concatenate([values, np.resize(np.array([np.nan, np.inf, -np.inf]).astype(dtype), len(values) // 9)])


def elements(shape, dtype, seed=0):
    return to_torch(np.random.default_rng(seed).choice(hostile(dtype), shape))


def data(layout, dtype, seed=0):
    return LAYOUTS[layout](elements(SHAPE, dtype, seed))


def differentiable(layout, dtype):
    """Returns a leaf tensor in that layout that requires a gradient."""
    x = data(layout, dtype).resolve_neg()
    return (x.clone() if x.is_inference() else x).detach().requires_grad_()


def gradient(x, layout, dtype):
    """Returns a gradient for `x` with signed zeros, infinities and NaN."""
    return DY_LAYOUTS[layout](to_torch(cases.gradients(x.numel(), dtype, seed=3).reshape(x.shape)))


def grid(x, spec):
    """Returns the scale and zero point of every block, as arrays."""
    rng = np.random.default_rng(1)
    parameters = blocks_of(tuple(x.shape), spec).parameters
    allowed = [0] if spec.symmetric else [z for z in (-7, 0, 2, 5) if spec.qmin <= z <= spec.qmax]
    return np.asarray(rng.choice(np.float32(SCALES), parameters)), np.asarray(rng.choice(np.int32(allowed), parameters))


def array(t):
    """Returns the values of a tensor in C order."""
    return to_numpy(t.detach().resolve_neg().contiguous())


def assert_like(expected, actual, x, *names):
    """Asserts the bits of `expected` and the strides of a result computed from `x`."""
    assert_same_bits(expected, array(actual), *names)
    assert actual.stride() == torch.empty_like(x).stride(), names


def assert_same(expected, actual, *names):
    """Asserts equal bits, dtypes, strides and `requires_grad`, for one tensor or several."""
    if isinstance(expected, torch.Tensor):
        expected, actual = (expected,), (actual,)
    for e, a in zip(expected, actual, strict=True):
        assert_same_bits(array(e), array(a), *names)
        assert (a.stride(), a.requires_grad) == (e.stride(), e.requires_grad), names


def torchs(name):
    """Returns torch's function of that name, public or private."""
    for place, known_as in itertools.product((torch, aten), (name, f"_{name}")):
        if hasattr(place, known_as):
            return getattr(place, known_as)
    raise LookupError(name)


def saved_bytes(call, *args, **options):
    """Returns the sizes in bytes of the tensors saved for the backward pass."""
    sizes = []

    def pack(t):
        sizes.append(t.numel() * t.itemsize)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(*args, **options)
    return sizes


@pytest.fixture
def unchanged():
    """Records tensors and fails if the test changes one of them."""
    remembered = []

    def remember(*tensors):
        remembered.extend((t, array(t).copy()) for t in tensors)
        return tensors

    yield remember
    for tensor, before in remembered:
        assert_same_bits(before, array(tensor), "input after the call")


@pytest.fixture(params=["compiled nodes", "Python nodes"])
def each_nodes(request, monkeypatch):
    """Runs a test with compiled autograd nodes and with those written in Python."""
    from fakequant._backends.torch import compiled_nodes

    if request.param == "Python nodes":
        monkeypatch.setattr(compiled_nodes, "compiled", None)
    elif compiled_nodes.compiled is None:
        pytest.skip("no nodes are compiled for this torch")
