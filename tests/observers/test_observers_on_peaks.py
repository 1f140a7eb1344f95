"""Searched ranges on data with peaks: a constant background, zeros after a ReLU, long tails."""

import pytest

torch = pytest.importorskip("torch")

from fakequant import QuantSpec, choose_qparams, fake_quantize  # noqa: E402
from fakequant.observers import MSE, Entropy, Histogram  # noqa: E402
from thoroughness import sampled  # noqa: E402


def normal(number=20_000, seed=0):
    return torch.randn(number, generator=torch.Generator().manual_seed(seed))


def uniform(number, seed=1):
    return torch.rand(number, generator=torch.Generator().manual_seed(seed))


def with_peak(value, x):
    return torch.cat([torch.full((8000,), value), x])


DATA = {
    # The center of the lowest bin is outside or inside the range of the data.
    "background, center outside": with_peak(-0.4242, uniform(2000) * 3.24 - 0.4242),
    "background, center inside": with_peak(-0.4249, uniform(2000) * 3.24 - 0.4249),
    "images": torch.cat([torch.zeros(15_000), torch.ones(2000), uniform(5000)]).sub(0.1307).div(0.3081),
    "ReLU with zeros": normal().relu(),
    "ReLU with few zeros": (normal() + 1).relu(),
    "ReLU with most of it zeros": (normal() - 1.28).relu(),
    "ReLU without zeros": normal().abs(),
    "ReLU6": (normal() * 3 + 2).clamp(0, 6),
    "peak at the minimum": with_peak(-2.0, normal().clamp(min=-2)),
    "peak at zero": with_peak(0.0, normal()),
    "peak in the middle": with_peak(1.234, normal()),
    "peak at the maximum": with_peak(2.7, normal().clamp(max=2.7)),
    "bell": normal(),
    "bell and an outlier": torch.cat([normal(), torch.tensor([30.0])]),
    "uniform": uniform(20_000),
    "exponential": -uniform(20_000).log(),
    "long tails": normal() ** 3,
    "long tail after a ReLU": (normal() ** 3).relu(),
    "GELU": torch.nn.functional.gelu(normal() * 2),
}
GRIDS = {
    f"{name}{bits}": QuantSpec(bits=bits, **options)
    for bits in (8, 4)
    for name, options in {"int": {}, "uint": dict(signed=False, symmetric=False)}.items()
}
# Decibels that Entropy may lose against the least squared error. It enforces the limit on bins, so the data
# may exceed it slightly.
MOST_LOST = 3.1

# Every grid with a third of the data; `make test-all` tries all pairs.
PAIRS = {f"{data}-{grid}": (DATA[data], GRIDS[grid]) for data in DATA for grid in GRIDS}
PAIRS = sampled(PAIRS, *[*PAIRS][::3])
by_both = pytest.mark.parametrize(("x", "spec"), PAIRS.values(), ids=PAIRS)


def found(observer, x, spec):
    """Returns the range, the share of clipped values, and the signal-to-noise ratio."""
    state = observer.init(())
    observer.update(state, x, spec)
    lo, hi = observer.range(state, spec)
    y = fake_quantize(x, *choose_qparams(lo, hi, spec), spec)
    noise = (y - x).double().square().sum()
    ratio = 10 * (x.double().square().sum() / noise).log10().item()
    return (lo.item(), hi.item()), ((x < lo) | (x > hi)).double().mean().item(), ratio


@by_both
def test_entropy_clips_no_more_than_the_range_of_least_error_and_loses_little(x, spec):
    (lo, hi), clipped, ratio = found(Entropy(), x, spec)
    inner, least_clipped, best = found(Histogram(), x, spec)
    assert lo <= inner[0] <= inner[1] <= hi
    assert clipped <= least_clipped
    assert ratio >= best - MOST_LOST


@by_both
def test_histogram_search_is_as_good_as_a_search_on_the_data(x, spec):
    *_, on_data = found(MSE(), x, spec)
    *_, on_bins = found(Histogram(), x, spec)
    assert on_bins >= on_data - 0.5


def test_entropy_keeps_a_background_at_the_minimum():
    (lo, hi), clipped, ratio = found(Entropy(), DATA["background, center outside"], GRIDS["uint8"])
    assert lo == torch.tensor(-0.4242).item()
    assert hi > 2.7
    assert clipped < 0.01
    assert ratio > 44


def test_entropy_searches_every_block_separately():
    names = ("background, center outside", "ReLU with zeros", "long tails")
    x = torch.stack([DATA[name][:10_000] for name in names])
    spec = QuantSpec(bits=4, symmetric=False, axis=0)
    state = Entropy().init((3,))
    Entropy().update(state, x, spec)
    together = torch.stack(Entropy().range(state, spec), dim=1)
    for row, ends in zip(x, together, strict=True):
        assert found(Entropy(), row, QuantSpec(bits=4, symmetric=False))[0] == tuple(ends.tolist())
