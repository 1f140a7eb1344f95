"""Learned scales on the grids of float formats, and observers that look for them."""

import copy
import math
import pickle

import pytest

import fakequant as fq
from fakequant import QuantSpec, observers
from fakequant.formats import FLOAT_FORMATS

torch = pytest.importorskip("torch")

by_format = pytest.mark.parametrize("name", FLOAT_FORMATS)
# Sums of some thousand products in float64, rounded once to float32, against the same sums in another order.
SUM = 1e-6


def edges(name):
    """Values in units of the scale: points of the grid, ties between them, and values around both ends."""
    grid = torch.from_numpy(FLOAT_FORMATS[name].grid())
    ties = (grid[1:] + grid[:-1]) / 2
    largest = FLOAT_FORMATS[name].largest
    around = torch.tensor([0.999, 1.0, 1.03, 1.04, 1.1, 2.0, 1e6]) * largest
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    return torch.cat([grid, ties, around, -around, special, torch.randn(500) * largest / 3])


def nearest(t, name):
    """Returns the values without and with the bound of the format, by distances to all points of a wider grid."""
    made = FLOAT_FORMATS[name]
    grid = torch.from_numpy(made.grid()).double()
    # Above the largest value, the grid goes on in the same steps, and in steps twice as wide after a power of two.
    step = made.largest - float(grid[-2])
    power = 2.0 ** (math.floor(math.log2(made.largest)) + 1)
    beyond = [made.largest + step * k for k in range(1, 20) if made.largest + step * k <= power]
    beyond += [power + 2 * step * k for k in range(1, 1 + round(power / (2 * step)))]
    beyond = torch.tensor(beyond, dtype=torch.float64)
    wide = torch.cat([-beyond.flip(0), grid, beyond])
    t = t.double().clamp(-2 * made.largest, 2 * made.largest)
    right = torch.searchsorted(wide, t).clamp(1, len(wide) - 1)
    low, high = wide[right - 1], wide[right]
    down, up = t - low, high - t
    middle = len(wide) // 2
    even = (right - middle) % 2 == 0  # zero is even, and codes alternate
    r = torch.where((up < down) | ((up == down) & even), high, low)
    return r, r.clamp(-made.largest, made.largest)


@by_format
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-20])
def test_gradients_are_those_of_the_formula(name, scale):
    torch.manual_seed(0)
    spec = QuantSpec(format=name)
    x = (edges(name) * scale).requires_grad_()
    dy = torch.randn(x.shape)
    quantizer = fq.nn.LearnedFakeQuantize(spec)
    with torch.no_grad():
        quantizer.step_size.fill_(scale)
    quantizer.run_deferred()
    y = quantizer(x)
    y.backward(dy)

    t = x.detach() / torch.tensor(scale)
    r, q = nearest(t, name)
    finite = t.isfinite()
    inside = finite & (r == q)
    assert torch.equal(y.detach()[finite], (q.float() * torch.tensor(scale))[finite])
    assert torch.equal(x.grad, torch.where(inside, dy, 0))
    steps = torch.where(inside, q - t.double(), torch.sign(t.double()) * spec.largest)
    expected = (dy.double() * torch.where(finite, steps, 0)).sum() / math.sqrt(x.numel() * spec.largest)
    size = (dy.double() * torch.where(finite, steps, 0)).abs().sum() / math.sqrt(x.numel() * spec.largest)
    assert abs(float(quantizer.step_size.grad) - float(expected)) <= SUM * float(size)


@by_format
def test_a_learned_scale_trains_and_travels(name):
    torch.manual_seed(0)
    x = torch.randn(6, 512)
    quantizer = fq.nn.LearnedFakeQuantize(QuantSpec(format=name, axis=0), shape=(6, None)).initialize(x * 0.1)
    before = float((quantizer(x) - x).detach().square().mean())
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.02 * float(quantizer.scale.max()))
    for _ in range(60):
        optimizer.zero_grad()
        (quantizer(x) - x).square().mean().backward()
        optimizer.step()
    after = float((quantizer(x) - x).detach().square().mean())
    assert after < before
    loaded = fq.nn.LearnedFakeQuantize(quantizer.spec, shape=(6, None))
    loaded.load_state_dict(quantizer.state_dict())
    for other in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)), loaded):
        assert torch.equal(other(x), quantizer(x))


@by_format
def test_a_learned_scale_stays_where_all_values_are_finite(name):
    quantizer = fq.nn.LearnedFakeQuantize(QuantSpec(format=name)).initialize(torch.randn(64))
    with torch.no_grad():
        quantizer.step_size.fill_(3e38)
    y = quantizer(torch.tensor([3e38, -3e38, math.inf, 1.0]))
    assert bool(y.isfinite().all())
    with torch.no_grad():
        quantizer.step_size.fill_(-1.0)
    assert float(quantizer.scale) > 0


@by_format
def test_lsq_starts_from_the_mean_magnitude_and_the_largest_value(name):
    x = torch.randn(1000)
    quantizer = fq.nn.LearnedFakeQuantize(QuantSpec(format=name), init="lsq").initialize(x)
    expected = 2 * x.abs().double().mean() / math.sqrt(FLOAT_FORMATS[name].largest)
    assert float(quantizer.scale) == pytest.approx(float(expected), rel=1e-6)


def test_scales_that_follow_blocks_cannot_be_learned():
    with pytest.raises(ValueError, match="cannot be learned"):
        fq.nn.LearnedFakeQuantize(fq.presets.mxfp8(), shape=(4, 32))


# --- observers ------------------------------------------------------------------------------------


@by_format
@pytest.mark.parametrize("observer", [observers.MinMax(), observers.MovingAverage(1.0), observers.Dynamic()], ids=str)
def test_the_largest_magnitude_becomes_the_largest_value(name, observer):
    quantizer = fq.nn.FakeQuantize(QuantSpec(format=name), observer)
    quantizer(torch.tensor([-3.0, 0.5, 1.0]))
    assert float(quantizer.scale) == float(torch.tensor(3.0) / FLOAT_FORMATS[name].largest)


def least_error(x, spec):
    """The least squared error over ranges from 1 to 100 percent of the largest magnitude."""
    top = float(x.abs().max())
    scales = [torch.tensor(top * k / 100 / spec.largest) for k in range(1, 101)]
    return min(float((fq.fake_quantize(x, s, 0, spec) - x).double().square().sum()) for s in scales)


def error(quantizer, x):
    quantizer.train()
    quantizer(x)
    return float((quantizer.eval()(x) - x).double().square().sum())


@by_format
@pytest.mark.parametrize("kind", ["normal", "with outliers", "one-sided"])
def test_searches_find_the_least_squared_error(name, kind):
    torch.manual_seed(0)
    x = torch.randn(20000)
    if kind == "with outliers":
        x[:5] *= 30
    if kind == "one-sided":
        x = x.abs()
    spec = QuantSpec(format=name)
    best = least_error(x, spec)
    assert error(fq.nn.FakeQuantize(spec, observers.MSE()), x) == pytest.approx(best, rel=1e-4)
    # Bins are narrower than the steps of the grid, except near zero: there the error is small.
    assert error(fq.nn.FakeQuantize(spec, observers.Histogram()), x) <= 1.05 * best
    # At most twice the error of Histogram() on the bins.
    assert error(fq.nn.FakeQuantize(spec, observers.Entropy()), x) <= 2.1 * best


def test_percentile_on_a_float_grid_clips_outliers():
    x = torch.cat([torch.linspace(-1, 1, 10000), torch.tensor([100.0])])
    quantizer = fq.nn.FakeQuantize(fq.presets.fp8_e4m3(), observers.Percentile(99.9))
    quantizer(x)
    assert float(quantizer.qparams().scale) * 448 == pytest.approx(1.0, abs=0.05)
