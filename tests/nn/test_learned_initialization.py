"""`LearnedFakeQuantize`: the first scale, from LSQ's rule or an observer, and arguments that are refused."""

import itertools
import math

import numpy as np
import pytest

from fakequant import QuantSpec
from fakequant.testing.assertions import assert_same_bits
from learned_cases import (
    GRIDS,
    INT4,
    SHAPE,
    UINT4,
    WHERE,
    X,
    bits,
    blocks,
    by_grid,
    by_where,
    initialized,
    lsq,
    whole_numbers,
)

torch = pytest.importorskip("torch")
observers = pytest.importorskip("fakequant.observers")
quantizers = pytest.importorskip("fakequant.nn")
LearnedFakeQuantize, FakeQuantize = quantizers.LearnedFakeQuantize, quantizers.FakeQuantize

# --- initialization ---------------------------------------------------------------------------------


@by_where
@by_grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_lsq_scale_is_twice_the_mean_magnitude_over_the_root_of_qmax(where, grid, dtype):
    spec = QuantSpec(**where, **grid)
    x = whole_numbers()
    quantizer = LearnedFakeQuantize(spec, shape=SHAPE, init="lsq").initialize(x.to(dtype))
    expected = lsq(blocks(x, spec), spec.qmax)
    assert_same_bits(expected, bits(quantizer.scale), spec)
    assert_same_bits(np.zeros(expected.shape, np.int32), bits(quantizer.zero_point))
    assert_same_bits(expected.reshape(quantizer.step_size.shape), bits(quantizer.step_size))


@by_where
def test_lsq_initialization_skips_and_counts_nonfinite_values(where):
    spec = QuantSpec(bits=4, **where)
    x = whole_numbers()
    x.view(-1)[::17], x.view(-1)[1::23], x.view(-1)[2::29] = math.nan, math.inf, -math.inf
    quantizer = LearnedFakeQuantize(spec, shape=SHAPE, init="lsq", path="blocks.3.act")
    with pytest.warns(RuntimeWarning, match=r"blocks\.3\.act") as told:
        quantizer.initialize(x)
    assert len(told) == 1
    assert quantizer.nonfinite == int((~x.isfinite()).sum())
    assert_same_bits(lsq(blocks(x, spec), spec.qmax), bits(quantizer.scale))


@by_where
def test_lsq_initialization_weights_batches_by_their_size(where):
    spec = QuantSpec(bits=4, **where)
    sizes = (4, 8, 20) if where.get("axis") != 0 else (4, 4, 4)
    batches = [whole_numbers((n, 6, 8), seed=n + i) * 4.0**i for i, n in enumerate(sizes)]
    if spec.axis != -1 or spec.group_size is None:
        joined = torch.cat(batches, dim=1 if spec.axis == 0 else 0)
    if spec.granularity in ("group", "block"):  # they cannot be concatenated along the batch
        batches = [b[:4] for b in batches]
        expected = lsq(np.concatenate([blocks(b, spec) for b in batches], axis=-1), spec.qmax)
    else:
        expected = lsq(blocks(joined, spec), spec.qmax)
    for order in itertools.permutations(batches):
        quantizer = LearnedFakeQuantize(spec, shape=(4, 6, 8), init="lsq")
        quantizer.observing = True
        for x in order:
            assert quantizer(x) is x
        quantizer.observing = False
        assert_same_bits(expected, bits(quantizer.scale))


OBSERVERS = [
    observers.MinMax(),
    observers.MovingAverage(0.3),
    observers.Dynamic(),
    observers.Percentile(90.0),
    observers.Histogram(steps=7),
    observers.MSE(steps=7),
    observers.Entropy(steps=7, bins=64),
    observers.Fixed(-1.0, 2.5),
]


@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("grid", [GRIDS["int4"], GRIDS["int4 affine"], GRIDS["uint4"]], ids=str)
def test_initialization_from_an_observer_matches_the_calibrated_quantizer(observer, grid):
    for where in WHERE.values():
        spec = QuantSpec(**grid, **where)
        learned = LearnedFakeQuantize(spec, shape=SHAPE, init=observer)
        calibrated = FakeQuantize(spec, observer, shape=SHAPE)
        learned.observing, calibrated.quantizing = True, False
        for seed in range(3):
            x = whole_numbers(seed=seed) * (0.37, 1.0, -2.3)[seed]
            learned(x), calibrated(x)
        for expected, actual in zip(calibrated.qparams(), learned.qparams(), strict=True):
            assert_same_bits(bits(expected), bits(actual), spec)


def test_learned_zero_point_starts_from_the_range_and_a_fixed_one_at_zero():
    x = torch.tensor([-1.0, 2.0])
    assert LearnedFakeQuantize(UINT4).initialize(x).zero_point == 5
    assert LearnedFakeQuantize(UINT4, learn_zero_point=False).initialize(x).zero_point == 0


@pytest.mark.parametrize("init", ["lsq", observers.MinMax(), observers.Histogram()], ids=str)
def test_initialization_without_finite_values_is_an_error_with_the_path(init):
    quantizer = LearnedFakeQuantize(INT4, init=init, path="layers.0")
    with pytest.raises(RuntimeError, match=r"layers\.0: `x` has blocks without a finite value"):
        quantizer.initialize(torch.empty(0, 3))
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match=r"layers\.0: `x` has blocks without"):
        quantizer.initialize(torch.tensor([math.nan, math.inf]))
    quantizer.initialize(X)
    assert quantizer.scale > 0


def test_empty_batch_does_not_change_the_initialization():
    quantizer = LearnedFakeQuantize(INT4)
    quantizer.observing = True
    for x in (torch.empty(0), X, torch.empty(3, 0)):
        assert quantizer(x) is x
    quantizer.observing = False
    assert_same_bits(bits(initialized().scale), bits(quantizer.scale))


def test_initialization_with_one_channel_without_finite_values_is_an_error():
    quantizer = LearnedFakeQuantize(QuantSpec(axis=0), shape=(2, 3))
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="without a finite value"):
        quantizer.initialize(torch.tensor([[1.0, 2, 3], [math.nan] * 3]))


@by_where
@pytest.mark.parametrize("init", ["lsq", observers.MinMax()], ids=str)
def test_initialization_from_zeros_gives_the_smallest_scale(where, init):
    quantizer = LearnedFakeQuantize(QuantSpec(**where), shape=SHAPE, init=init, eps=2.0**-12)
    scale = bits(quantizer.initialize(torch.zeros(SHAPE)).scale)
    assert_same_bits(np.full(scale.shape, 2.0**-12, np.float32), scale)


def test_initialization_from_huge_data_gives_a_finite_grid():
    quantizer = LearnedFakeQuantize(QuantSpec(bits=2)).initialize(torch.full((4,), 1e308, dtype=torch.float64))
    assert quantizer(torch.tensor([-math.inf, math.inf])).isfinite().all()


def test_initializing_again_forgets_earlier_data():
    quantizer = initialized(x=X * 100)
    assert_same_bits(bits(initialized().scale), bits(quantizer.initialize(X).scale))


def test_initializing_keeps_the_parameter_objects_and_their_memory():
    quantizer = LearnedFakeQuantize(UINT4)
    before = [(id(p), p.data_ptr()) for p in quantizer.parameters()]
    quantizer.initialize(X)
    assert [(id(p), p.data_ptr()) for p in quantizer.parameters()] == before


def test_refused_initialization_leaves_the_scale_unchanged():
    quantizer = initialized()
    before = bits(quantizer.scale)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError):
        quantizer.initialize(torch.tensor([math.nan]))
    assert_same_bits(before, bits(quantizer.scale))


OTHER_SIZES = {
    "one channel": (dict(axis=0), (4, 6), (1, 6)),
    "more channels": (dict(axis=0), (4, 6), (5, 6)),
    "same number of groups in another layout": (dict(axis=-1, group_size=2), (2, 8), (4, 4)),
}


@pytest.mark.parametrize("init", ["lsq", observers.MinMax()], ids=str)
@pytest.mark.parametrize(("where", "shape", "other"), OTHER_SIZES.values(), ids=OTHER_SIZES)
def test_data_of_another_size_is_refused_with_the_path(where, shape, other, init):
    quantizer = LearnedFakeQuantize(QuantSpec(**where), shape=shape, init=init, path="layers.0")
    with pytest.raises((ValueError, RuntimeError), match=r"layers\.0"):
        quantizer.initialize(torch.ones(other))
    quantizer.initialize(torch.ones(shape))
    with pytest.raises((ValueError, RuntimeError), match=r"layers\.0"):
        quantizer(torch.ones(other))


# --- bad input --------------------------------------------------------------------------------------

BAD = {
    "spec is a string": (dict(spec="int8"), "`spec` must be a QuantSpec"),
    "unknown init": (dict(init="mean"), '`init` must be "lsq" or an observer'),
    "observer class": (dict(init=observers.MinMax), '`init` must be "lsq" or an observer'),
    "zero point of a symmetric grid": (dict(learn_zero_point=True), "symmetric grid is 0 and cannot be learned"),
    "per token": (dict(spec=QuantSpec(axis=-1, group_size=-1)), "cannot be learned"),
    "missing shape": (dict(spec=QuantSpec(axis=0)), "pass `shape`"),
    "unknown number of channels": (dict(spec=QuantSpec(axis=0), shape=(None, 3)), "no fixed shape"),
    "eps 0": (dict(eps=0.0), "`eps` must be finite and greater than 0"),
    "eps NaN": (dict(eps=math.nan), "`eps` must be finite and greater than 0"),
    "eps inf": (dict(eps=math.inf), "`eps` must be finite and greater than 0"),
    "eps 0 in float32": (dict(eps=1e-46), "`eps` must be finite and greater than 0"),
    "grad_factor NaN": (dict(grad_factor=math.nan), "`grad_factor`"),
    "grad_factor inf": (dict(grad_factor=math.inf), "`grad_factor`"),
    "grad_factor of another type": (dict(grad_factor="lsq"), "`grad_factor`"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LearnedFakeQuantize(**{"spec": INT4, **options})


@pytest.mark.parametrize("x", [torch.arange(3), torch.ones(3, dtype=torch.complex64)], ids=["int64", "complex64"])
def test_data_that_is_not_float_is_refused_with_the_path(x):
    quantizer = initialized(path="blocks.3.act")
    for call in (quantizer, quantizer.initialize):
        with pytest.raises(
            (TypeError, NotImplementedError), match=r"blocks\.3\.act.*\n?.*`x` must be a tensor of float32"
        ):
            call(x)
