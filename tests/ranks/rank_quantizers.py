"""Batches for two ranks, quantizers for them, and comparisons with one process."""

from datetime import timedelta

import pytest

from fakequant import QuantSpec, observers, presets
from fakequant.testing.assertions import assert_same_bits
from straight_through import torch
from two_ranks import PATIENCE, dist

fqnn = pytest.importorskip("fakequant.nn")

NAN, INF = float("nan"), float("inf")


def batches(dtype=torch.float32):
    """Returns batches of seven rows and six channels: four rows for rank 0, three for rank 1."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(7, 6, generator=generator) * factor for factor in (1.0, 3.0, 0.01, 1.1)]
    made[1][:4], made[1][4:] = made[1][:4].abs(), -made[1][4:].abs()  # one sign per rank
    halves = (torch.arange(42.0) - 20.5).reshape(7, 6)  # ties at scale 1
    zeros = torch.zeros(7, 6)
    zeros[4:] = -0.0
    return [x.to(dtype) for x in (made[0], made[1], zeros, halves, made[2], made[3])]


OBSERVERS = {
    "MinMax": observers.MinMax(),
    "MovingAverage": observers.MovingAverage(0.3),
    "Dynamic": observers.Dynamic(),
    "Percentile": observers.Percentile(90.0, bins=64),
    "Histogram": observers.Histogram(bins=64, steps=8),
    "MSE": observers.MSE(8),
    "Entropy": observers.Entropy(bins=64, steps=8),
    "Fixed": observers.Fixed(-0.5, 2.0),
}
SPECS = {
    "tensor": presets.uint8(),
    "tensor, symmetric": QuantSpec(bits=4),
    "channel": QuantSpec(symmetric=False, axis=1),
    "channel, symmetric": QuantSpec(bits=3, narrow_range=True, axis=-1),
    "half_away": QuantSpec(symmetric=False, numerics="half_away"),
    "torch": QuantSpec(symmetric=False, numerics="torch"),
}
SHAPE = (None, 6)


def state_of(quantizer):
    """Returns copies of all buffers, such as ranges, scale, zero point and histograms."""
    return {name: value.detach().clone() for name, value in quantizer.named_buffers()}


def steps(quantizer, parts):
    """Returns y, dx and the quantizer's state after every forward and backward pass."""
    seen = []
    for x in parts:
        x = x.clone().requires_grad_()
        y = quantizer(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        seen.append({"y": y.detach(), "dx": dx, **state_of(quantizer)})
    return seen


def observe(seat, observer, spec, data=None, **options):
    quantizer = fqnn.FakeQuantize(spec, observer, shape=SHAPE, **options)
    return steps(quantizer, [seat.part(x) for x in (data or batches())])


def new_group(ranks):
    return dist.new_group(ranks, timeout=timedelta(seconds=PATIENCE)) if dist.is_initialized() else None


def learned(spec, **options):
    return fqnn.LearnedFakeQuantize(spec, shape=SHAPE, **options)


def compiled(module):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager")


OF_THE_BATCH = ("x", "y", "dx")  # rows of one rank; everything else is equal on all ranks


def assert_joined(whole, parts, *where):
    """Asserts that joined rows and each rank's state equal those of one process."""
    for name, expected in whole.items():
        found = [part[name] for part in parts]
        if name in OF_THE_BATCH:
            assert_same_bits(expected, torch.cat(found), *where, name)
        else:
            for rank, value in enumerate(found):
                assert_same_bits(expected, value, *where, f"rank {rank}", name)


def assert_all_joined(whole, parts):
    for number, (expected, *found) in enumerate(zip(whole, *parts, strict=True)):
        assert_joined(expected, found, f"step {number}")
