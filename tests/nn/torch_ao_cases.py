"""Quantizers of torch.ao, their fakequant counterparts, and data and comparisons for both."""

import numpy as np
import pytest

from fakequant import QuantSpec
from fakequant.nn import FakeQuantize, FusedFakeQuantize, from_torch_ao
from fakequant.observers import MinMax, MovingAverage
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import to_numpy, to_torch, torch

from torch.ao import quantization as tq  # isort: skip
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize  # isort: skip

TENSOR, CHANNEL = tq.MovingAverageMinMaxObserver, tq.MovingAveragePerChannelMinMaxObserver
AFFINE, SYMMETRIC = torch.per_tensor_affine, torch.per_tensor_symmetric
CHANNEL_AFFINE, CHANNEL_SYMMETRIC = torch.per_channel_affine, torch.per_channel_symmetric
UINT8, INT8 = (0, 255, torch.quint8), (-128, 127, torch.qint8)
CHANNELS = 5
SHAPES = {None: (8, 5, 6), 0: (CHANNELS, 4, 6), 1: (4, CHANNELS, 12)}


class Case:
    """A module of torch.ao and the matching quantizer of fakequant."""

    def __init__(self, kind, observer, codes, scheme, spec, ours=None, **options):
        self.make = lambda: kind(
            observer, quant_min=codes[0], quant_max=codes[1], dtype=codes[2], qscheme=scheme, **options
        )
        self.spec = QuantSpec(numerics="torch", **spec)
        self.shape = SHAPES[self.spec.axis]
        self.ours = ours or {}

    def build(self):
        """Returns a new fakequant quantizer, without loaded state."""
        kind = FusedFakeQuantize if "symmetric" in self.ours else FakeQuantize
        return kind(self.spec, shape=self.shape, **self.ours)


def plain(observer, codes, scheme, spec, ours=None, **options):
    return Case(tq.FakeQuantize, observer, codes, scheme, spec, ours, **options)


def fused(observer, codes, scheme, spec, ours=None, **options):
    symmetric = scheme in (SYMMETRIC, CHANNEL_SYMMETRIC)
    ours = {"symmetric": symmetric, **(ours or {})}
    spec = {**spec, "symmetric": False}  # the fused operator may choose any zero point
    return Case(tq.FusedMovingAvgObsFakeQuantize, observer, codes, scheme, spec, ours, **options)


UNSIGNED, SIGNED = dict(signed=False, symmetric=False), dict(symmetric=False)
NARROW_8 = (-127, 127, torch.qint8)
PLAIN = {
    "uint8": plain(TENSOR, UINT8, AFFINE, UNSIGNED),
    "0 to 127": plain(TENSOR, UINT8, AFFINE, {**UNSIGNED, "bits": 7}, reduce_range=True),
    "-64 to 63": plain(TENSOR, INT8, SYMMETRIC, dict(bits=7), reduce_range=True),
    "int8 affine": plain(TENSOR, INT8, AFFINE, SIGNED),
    "int8 symmetric": plain(TENSOR, INT8, SYMMETRIC, {}),
    "-127 to 127": plain(TENSOR, NARROW_8, SYMMETRIC, dict(narrow_range=True), dict(eps=2**-12), eps=2**-12),
    "int4 affine": plain(TENSOR, (-8, 7, torch.qint8), AFFINE, dict(bits=4, symmetric=False)),
    "one bit": plain(TENSOR, (0, 1, torch.quint8), AFFINE, {**UNSIGNED, "bits": 1}),
    "min-max": plain(tq.MinMaxObserver, UINT8, AFFINE, UNSIGNED, dict(observer=MinMax())),
    "dynamic": plain(
        TENSOR, UINT8, AFFINE, UNSIGNED, dict(observer=MovingAverage(1.0)), averaging_constant=1, is_dynamic=True
    ),
    "quick": plain(TENSOR, UINT8, AFFINE, UNSIGNED, dict(observer=MovingAverage(0.3)), averaging_constant=0.3),
    "channel symmetric": plain(
        CHANNEL, INT8, CHANNEL_SYMMETRIC, dict(axis=0), dict(observer=MovingAverage()), ch_axis=0
    ),
    "channel affine": plain(CHANNEL, UINT8, CHANNEL_AFFINE, {**UNSIGNED, "axis": 1}, ch_axis=1),
    "channel -127 to 127": plain(
        tq.PerChannelMinMaxObserver, NARROW_8, CHANNEL_SYMMETRIC, dict(narrow_range=True, axis=0),
        dict(eps=2**-12, observer=MinMax()), ch_axis=0, eps=2**-12,
    ),
}  # fmt: skip
FUSED = {
    "fused uint8": fused(TENSOR, UINT8, AFFINE, UNSIGNED),
    "fused 0 to 127": fused(TENSOR, UINT8, AFFINE, {**UNSIGNED, "bits": 7}, reduce_range=True),
    "fused uint8 symmetric": fused(TENSOR, UINT8, SYMMETRIC, UNSIGNED),
    "fused int8 symmetric": fused(TENSOR, INT8, SYMMETRIC, SIGNED),
    "fused -127 to 127": fused(TENSOR, NARROW_8, SYMMETRIC, {**SIGNED, "narrow_range": True}, eps=2**-12),
    "fused quick": fused(TENSOR, INT8, AFFINE, SIGNED, dict(observer=MovingAverage(0.3)), averaging_constant=0.3),
    "fused channel symmetric": fused(CHANNEL, INT8, CHANNEL_SYMMETRIC, {**SIGNED, "axis": 0}, ch_axis=0),
    "fused channel affine": fused(CHANNEL, UINT8, CHANNEL_AFFINE, {**UNSIGNED, "axis": 0}, ch_axis=0),
}
CASES = PLAIN | FUSED
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def loaded(case, theirs):
    ours = case.build()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours


def loaded_in_a_model(case, theirs):
    parts = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)
    there = torch.nn.ModuleDict({"a": parts[0], "b": torch.nn.Sequential(parts[1], theirs)})
    ours = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Sequential(parts[1], case.build())})
    found = ours.load_state_dict(there.state_dict(), strict=True)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert torch.equal(ours["a"].weight, parts[0].weight)
    return ours["b"][1]


WAYS = {"module": lambda case, theirs: from_torch_ao(theirs), "state": loaded, "in a model": loaded_in_a_model}
by_way = pytest.mark.parametrize("take_over", WAYS.values(), ids=WAYS)


def batches(shape, count=4, seed=0):
    """Yields batches of changing ranges with repeated values and ties of the scale 1/8."""
    rng = np.random.default_rng(seed)
    for step in range(count):
        x = rng.standard_normal(shape) * (1, 30, 0.1, 4)[step % 4] + (0, 1)[step % 2]
        yield to_torch(np.where(rng.random(shape) < 0.3, np.rint(16 * x) / 16, x).astype(np.float32))


def hostile(theirs, dtype, axis):
    """Returns ties and ends of the module's grid, special values, NaN and infinities."""
    rng = np.random.default_rng(1)
    scales, zeros = (t.detach().double().reshape(-1).tolist() for t in (theirs.scale, theirs.zero_point))
    low, high = int(theirs.quant_min), int(theirs.quant_max)
    rows = [rng.permutation(cases.values(s, round(z), low, high, dtype)) for s, z in zip(scales, zeros, strict=True)]
    if axis is None:
        return to_torch(rows[0])
    x = np.stack([r[: min(map(len, rows))] for r in rows])
    x = x[:, : x.shape[1] // 4 * 4].reshape(len(rows), 4, -1)
    return to_torch(x if axis == 0 else np.swapaxes(x, 0, 1))


def run(module, x, dy):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


def assert_same_results(theirs, ours, x, dy, *names):
    for name, expected, actual in zip(("y", "dx"), run(theirs, x, dy), run(ours, x, dy), strict=True):
        assert_same_bits(to_numpy(expected), to_numpy(actual), name, *names)


def assert_same_state(theirs, ours, *names):
    observer = theirs.activation_post_process
    pairs = {
        "scale": (theirs.scale, ours.scale),
        "zero_point": (theirs.zero_point, ours.zero_point),
        "running_min": (observer.min_val, ours.running_min),
        "running_max": (observer.max_val, ours.running_max),
    }
    for name, (expected, actual) in pairs.items():
        assert_same_bits(expected.reshape(actual.shape) + 0, actual + 0, name, *names)


def gradients(x, seed=3):
    return to_torch(cases.gradients(x.numel(), to_numpy(x).dtype, seed=seed).reshape(x.shape))


def switch(theirs, ours, observe, quantize):
    theirs.enable_observer(observe)
    theirs.enable_fake_quant(quantize)
    ours.observing, ours.quantizing = observe, quantize


def learnable(scheme, codes, shape=None, *, scaling=False, **options):
    """Returns a learnable module of torch.ao that takes its scale from data and then learns it."""
    observer, channels = (tq.PerChannelMinMaxObserver, CHANNELS) if shape else (tq.MinMaxObserver, -1)
    options |= dict(channel_len=channels) | (dict(ch_axis=shape.index(CHANNELS)) if shape else {})
    theirs = _LearnableFakeQuantize(
        observer, quant_min=codes[0], quant_max=codes[1], dtype=codes[2], qscheme=scheme, use_grad_scaling=scaling,
        **options,
    )  # fmt: skip
    theirs(next(batches(shape or SHAPES[None])))
    return theirs.enable_param_learning()
