"""The default initialization takes, per scale, LSQ's rule or a search, whichever has the smaller squared error."""

import copy
import math

import pytest

import fakequant as fq
from fakequant import QuantSpec
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
observers = pytest.importorskip("fakequant.observers")
LearnedFakeQuantize = pytest.importorskip("fakequant.nn").LearnedFakeQuantize

SHAPE = (12, 40)
WHERE = {"tensor": {}, "channel": dict(axis=0), "group": dict(axis=-1, group_size=8)}
by_where = pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
by_bits = pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])


def data(seed=0):
    """Returns rows of different distributions: normal, long-tailed, two values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPE, generator=generator)
    x[::3] = x[::3] ** 3
    x[1::3] = x[1::3].sign()
    return x


def start(spec, x, init=None, **options):
    return LearnedFakeQuantize(spec, shape=x.shape, init=init, **options).initialize(x)


def errors(x, quantizer):
    """Returns the squared error per scale."""
    distance = (fq.fake_quantize(x, quantizer.scale, quantizer.zero_point, quantizer.spec) - x).double().square()
    if quantizer.spec.axis is None:
        return distance.sum()
    return distance.sum(1) if quantizer.spec.axis == 0 else distance.reshape(len(x), -1, 8).sum(-1)


def searched(spec):
    return observers.Histogram() if spec.axis is None else observers.MSE()


@by_bits
@by_where
def test_default_initialization_takes_the_scale_of_smaller_error_per_block(where, bits):
    spec, x = QuantSpec(bits=bits, **where), data()
    quantizer, lsq, search = start(spec, x), start(spec, x, "lsq"), start(spec, x, searched(spec))
    assert_same_bits(torch.where(errors(x, search) < errors(x, lsq), search.scale, lsq.scale), quantizer.scale)


def test_default_initialization_takes_some_scales_from_lsq_and_some_from_the_search():
    x = data()
    for bits in (2, 3, 4):
        spec = QuantSpec(bits=bits, axis=-1, group_size=8)
        by_rule = start(spec, x).scale == start(spec, x, "lsq").scale
        assert by_rule.any()
        assert not by_rule.all()


@pytest.mark.parametrize("bits", [6, 8])
def test_default_initialization_with_many_bits_has_the_error_of_the_search(bits):
    x = torch.randn(64, 288, generator=torch.Generator().manual_seed(0))
    spec = QuantSpec(bits=bits, axis=0)
    default, lsq = (errors(x, start(spec, x, init)).sum() for init in (None, "lsq"))
    assert lsq > 8 * default
    assert default <= errors(x, start(spec, x, observers.MSE())).sum()


def test_default_initialization_over_batches_uses_all_of_them():
    batches = [data(seed) * 3.0**seed for seed in range(3)]
    quantizer = LearnedFakeQuantize(QuantSpec(bits=4))
    quantizer.observing = True
    for x in batches:
        assert quantizer(x) is x
    quantizer.observing = False
    assert_same_bits(start(QuantSpec(bits=4), torch.cat(batches)).scale, quantizer.scale)


@by_where
def test_batches_without_finite_values_do_not_change_the_initialization(where):
    spec, x = QuantSpec(bits=4, **where), data()
    quantizer = LearnedFakeQuantize(spec, shape=SHAPE)
    quantizer.observing = True
    quantizer(x)
    expected = copy.deepcopy(quantizer)
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        quantizer(torch.full(SHAPE, math.nan))
    if not where:
        quantizer(torch.empty(0, 40))
    for each in (quantizer, expected):
        each.observing = False
    assert_same_bits(expected.scale, quantizer.scale)


def test_default_initialization_ignores_nonfinite_values():
    x = data()
    dirty = torch.cat([x, torch.tensor([math.nan, math.inf, -math.inf, math.nan]).repeat(12, 1)], dim=1)
    for where in ({}, dict(axis=0)):
        with pytest.warns(RuntimeWarning, match="48 values"):
            quantizer = start(QuantSpec(bits=4, **where), dirty)
        assert_same_bits(start(QuantSpec(bits=4, **where), x).scale, quantizer.scale)


def test_channel_without_finite_values_has_no_scale_until_it_sees_some():
    spec, x = QuantSpec(bits=4, axis=0), data()
    quantizer = LearnedFakeQuantize(spec, shape=SHAPE)
    quantizer.observing = True
    missing = x.clone()
    missing[5] = math.nan
    with pytest.warns(RuntimeWarning, match="40 values"):
        quantizer(missing)
    assert quantizer.scale.isnan().nonzero().tolist() == [[5]]
    quantizer.observing = False
    assert not quantizer.is_initialized
    quantizer.observing = True
    quantizer(x)
    quantizer.observing = False
    assert quantizer.is_initialized


def test_affine_grid_starts_from_the_search_or_with_a_fixed_zero_point_from_lsq():
    x = data().abs()
    uint4 = QuantSpec(bits=4, signed=False, symmetric=False)
    assert_same_bits(start(uint4, x, observers.Histogram()).scale, start(uint4, x).scale)
    fixed = dict(learn_zero_point=False)
    assert_same_bits(start(uint4, x, "lsq", **fixed).scale, start(uint4, x, **fixed).scale)


@pytest.mark.parametrize("init", ["LSQ", "", 0, "mse", observers.MSE], ids=repr)
def test_unknown_init_is_refused(init):
    with pytest.raises(ValueError, match='`init` must be "lsq" or an observer'):
        LearnedFakeQuantize(QuantSpec(bits=4), init=init)


@pytest.mark.parametrize("value", [1e-30, 1e30, 3e38])
def test_initialization_from_tiny_and_huge_data_gives_finite_scales(value):
    for where in ({}, dict(axis=0)):
        quantizer = start(QuantSpec(bits=4, **where), data().clamp(-1, 1) * value)
        assert quantizer.scale.isfinite().all()
        assert (quantizer.scale > 0).all()


@by_where
def test_compiled_observing_gives_the_scale_of_eager_observing(where):
    spec, x = QuantSpec(bits=4, **where), data()
    quantizers = [LearnedFakeQuantize(spec, shape=SHAPE) for _ in range(2)]
    for quantizer, run in zip(quantizers, (quantizers[0], torch.compile(quantizers[1], backend="eager")), strict=True):
        quantizer.observing = True
        for factor in (1.0, 2.0):
            run(x * factor)
        quantizer.observing = False
    assert_same_bits(quantizers[0].scale, quantizers[1].scale)
