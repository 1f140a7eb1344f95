"""Every kind of quantizer, and comparisons of their states."""

import io

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")

torch.manual_seed(0)
X = torch.randn(6, 8)
WIDE = torch.linspace(-9, 9, 48).view(6, 8)
AFFINE, CHANNEL, GROUP = presets.uint4(), presets.int8(), presets.int4(group_size=4)
HISTOGRAM = observers.Histogram(bins=64, steps=8)
LEARNED_AFFINE = fq.QuantSpec(bits=4, symmetric=False, axis=0)
KINDS = {
    "MinMax": lambda **o: fqnn.FakeQuantize(AFFINE, observers.MinMax(), **o),
    "MovingAverage": lambda **o: fqnn.FakeQuantize(CHANNEL, observers.MovingAverage(0.3), shape=(6, 8), **o),
    "Dynamic": lambda **o: fqnn.FakeQuantize(GROUP, observers.Dynamic(), shape=(6, 8), **o),
    "token": lambda **o: fqnn.FakeQuantize(presets.int8_per_token(), **o),
    "Percentile": lambda **o: fqnn.FakeQuantize(CHANNEL, observers.Percentile(90.0, bins=64), shape=(6, 8), **o),
    "Histogram": lambda **o: fqnn.FakeQuantize(AFFINE, HISTOGRAM, **o),
    "MSE": lambda **o: fqnn.FakeQuantize(AFFINE, observers.MSE(steps=8), **o),
    "Entropy": lambda **o: fqnn.FakeQuantize(AFFINE, observers.Entropy(bins=64, steps=8), **o),
    "Fixed": lambda **o: fqnn.FakeQuantize(AFFINE, observers.Fixed(-1.0, 0.5), **o),
    "fused": lambda **o: fqnn.FusedFakeQuantize(fq.QuantSpec(symmetric=False, numerics="torch"), **o),
    "LSQ": lambda **o: fqnn.LearnedFakeQuantize(GROUP, shape=(6, 8), **o),
    "LSQ+": lambda **o: fqnn.LearnedFakeQuantize(LEARNED_AFFINE, shape=(6, 8), **o),
    "LSQ, fixed offset": lambda **o: fqnn.LearnedFakeQuantize(AFFINE, learn_zero_point=False, **o),
    "PACT": lambda **o: fqnn.PACT(4, 1.5, **o),
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def trained(make):
    module = make()
    if isinstance(module, fqnn.LearnedFakeQuantize):
        module.initialize(X)
    module(X)
    module(X * 1.5)
    return module


def snapshot(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def through_a_file(state, **options):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def assert_same_module(expected, actual):
    """Asserts that two quantizers compute and observe the same from now on."""
    assert_same_state(expected.state_dict(), actual.state_dict())
    assert str(expected) == str(actual)
    for training in (False, True, False):
        assert_same_bits(expected.train(training)(WIDE), actual.train(training)(WIDE), "y")
        assert_same_state(expected.state_dict(), actual.state_dict())
