"""MinMax and MovingAverage observers have the ranges and qparams of torch.ao's, bit for bit."""

import itertools

import numpy as np
import pytest

from fakequant import QuantSpec, choose_qparams
from fakequant._backends.checks import EPS
from fakequant.observers import MinMax, MovingAverage
from fakequant.testing.assertions import assert_same_bits
from thoroughness import sampled
from torch_bridge import to_numpy, torch

from torch.ao.quantization import observer as ao  # isort: skip

# torch.ao is deprecated and warns in many ways.
pytestmark = [pytest.mark.usefixtures("torch_on_one_thread"), pytest.mark.filterwarnings("ignore")]

# The options of a spec, torch.ao's dtype for it, and the range if it is not that of the dtype.
GRIDS = {
    "quint8 affine": (dict(signed=False, symmetric=False), "quint8", {}),
    "qint8 affine": (dict(symmetric=False), "qint8", {}),
    "qint8 symmetric": ({}, "qint8", {}),
    "qint8 symmetric narrow": (dict(narrow_range=True), "qint8", dict(quant_min=-127, quant_max=127)),
    "qint8 affine narrow": (dict(narrow_range=True, symmetric=False), "qint8", dict(quant_min=-127, quant_max=127)),
    "4 bits unsigned affine": (dict(bits=4, signed=False, symmetric=False), "quint8", dict(quant_min=0, quant_max=15)),
    "4 bits affine": (dict(bits=4, symmetric=False), "qint8", dict(quant_min=-8, quant_max=7)),
    "4 bits symmetric": (dict(bits=4), "qint8", dict(quant_min=-8, quant_max=7)),
    "4 bits symmetric narrow": (dict(bits=4, narrow_range=True), "qint8", dict(quant_min=-7, quant_max=7)),
    "7 bits unsigned affine": (dict(bits=7, signed=False, symmetric=False), "quint8", dict(quant_min=0, quant_max=127)),
    "2 bits symmetric": (dict(bits=2), "qint8", dict(quant_min=-2, quant_max=1)),
    "1 bit unsigned affine": (dict(bits=1, signed=False, symmetric=False), "quint8", dict(quant_min=0, quant_max=1)),
    "int16 symmetric": (dict(bits=16), "int16", {}),
    "int16 affine": (dict(bits=16, symmetric=False), "int16", {}),
    "uint16 affine": (dict(bits=16, signed=False, symmetric=False), "uint16", {}),
    "qint32 symmetric": (dict(bits=32), "qint32", {}),
}
by_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
by_few_grids = pytest.mark.parametrize("grid", [GRIDS[n] for n in list(GRIDS)[:5]], ids=list(GRIDS)[:5])
CONSTANTS = (0.01, 0.1, 1 / 3, 0.5, 0.9999999, 1.0, 1e-8)
KINDS = {"min-max": None, **{f"average {c:.8g}": c for c in CONSTANTS}}
KINDS = sampled(KINDS, "min-max", "average 0.01", "average 0.9999999", "average 1e-08")
by_kind = pytest.mark.parametrize("constant", KINDS.values(), ids=KINDS)


def pair(grid, constant, channel=None, eps=EPS):
    """Returns our observer, its spec, and torch.ao's observer."""
    options, dtype, limits = grid
    spec = QuantSpec(axis=channel, **options)
    where = "per_tensor" if channel is None else "per_channel"
    theirs = dict(
        dtype=getattr(torch, dtype),
        qscheme=getattr(torch, f"{where}_{'symmetric' if spec.symmetric else 'affine'}"),
        eps=eps,
        **limits,
    )
    if channel is not None:
        theirs["ch_axis"] = channel
    if constant is None:
        kind = ao.MinMaxObserver if channel is None else ao.PerChannelMinMaxObserver
        return MinMax(), spec, kind(**theirs)
    kind = ao.MovingAverageMinMaxObserver if channel is None else ao.MovingAveragePerChannelMinMaxObserver
    return MovingAverage(constant), spec, kind(averaging_constant=constant, **theirs)


def compare(grid, constant, batches, *, channel=None, eps=EPS, ranges=True, name=""):
    """Asserts that both observers have equal ranges and qparams after every batch."""
    case = (name, constant, channel)
    ours, spec, theirs = pair(grid, constant, channel, eps)
    assert (theirs.quant_min, theirs.quant_max) == (spec.qmin, spec.qmax)
    state = None
    for step, x in enumerate(batches):
        if state is None:
            state = ours.init(() if channel is None else (x.shape[channel],))
        ours.update(state, x, spec)
        theirs(x)
        lo, hi = ours.range(state, spec)
        if ranges:
            assert_same_bits(to_numpy(theirs.min_val), to_numpy(lo), "lo", step, *case)
            assert_same_bits(to_numpy(theirs.max_val), to_numpy(hi), "hi", step, *case)
        scale, zero_point = theirs.calculate_qparams()
        found = choose_qparams(lo, hi, spec, eps=eps)
        assert_same_bits(to_numpy(scale.reshape(lo.shape)), to_numpy(found.scale), "scale", step, *case)
        zero_point = zero_point.reshape(lo.shape).int()
        assert_same_bits(to_numpy(zero_point), to_numpy(found.zero_point), "zero point", step, *case)


def random_batches(count=8, shape=(6, 5, 4), low=-6, high=6):
    """Yields two-sided and one-sided batches whose ranges change by orders of magnitude."""
    rng = np.random.default_rng(11)
    for step in range(count):
        x = rng.standard_normal(shape) * 10.0 ** rng.uniform(low, high)
        yield torch.from_numpy((abs(x) if step % 4 == 2 else -abs(x) if step % 4 == 3 else x).astype(np.float32))


@by_grid
@by_kind
def test_per_tensor_observers_have_torch_aos_bits_after_every_batch(constant, grid):
    compare(grid, constant, random_batches())


@by_grid
@by_kind
def test_per_channel_observers_have_torch_aos_bits_after_every_batch(constant, grid):
    for channel in range(3):
        compare(grid, constant, random_batches(), channel=channel)


SHAPES_OF_DATA = {
    "zeros": [[0, 0], [0, 0]],
    "zeros, then a range, then zeros": [[0, 0], [-1, 2], [0, 0]],
    "a positive constant": [[0.3, 0.3], [0.3, 0.3]],
    "a negative constant": [[-0.3, -0.3], [-0.3, -0.3]],
    "changing constants": [[0.3, 0.3], [-7, -7], [0.1, 0.1]],
    "positive": [[0.1, 5], [0.2, 6.1], [1e-3, 2]],
    "negative": [[-0.1, -5], [-0.2, -6.1], [-1e-3, -2]],
    "positive, then negative": [[1, 3], [-3, -1]],
    "one value": [[2.5]],
    "subnormal": [[1e-45, -1e-45], [3e-45, -7e-45], [1e-39, -1e-38]],
    "subnormal, positive": [[1e-45, 1e-44], [1e-39, 1e-40]],
    "subnormal beside huge": [[1e-45, 1e38], [-1e38, 1e-45]],
    "huge": [[3e38, 1e38], [2e38, 3.4028235e38]],
    "huge, both sides": [[-1.6e38, 1.7e38], [-1.7e38, 1.6e38]],
    "huge, negative": [[-3e38, -1e38], [-3.4028235e38, -2e38]],
    "just at eps": [[-1.1920929e-07 * 127.5, 1.1920929e-07 * 127.5], [0, 1.1920929e-07 * 255]],
    "just below eps": [[-1.5e-05, 1.5e-05], [0, 3.0398368e-05]],
    "ties of the zero point": [[-0.5, 254.5], [-1.5, 253.5], [-2.5, 252.5]],
    "ties of the zero point, small steps": [[-0.125, 63.625], [-0.375, 63.375]],
}


def float32(values):
    return torch.tensor(values, dtype=torch.float32)


FEW_CONSTANTS = (None, 0.01, 1 / 3, 1.0)


@by_grid
def test_per_tensor_observers_have_torch_aos_bits_on_edge_cases(grid):
    for (name, data), constant in itertools.product(SHAPES_OF_DATA.items(), FEW_CONSTANTS):
        compare(grid, constant, [float32(x) for x in data], name=name)


@by_grid
def test_per_channel_observers_have_torch_aos_bits_on_edge_cases(grid):
    """The channels are the data, its negative, and ordinary values."""
    for (name, data), constant in itertools.product(SHAPES_OF_DATA.items(), FEW_CONSTANTS):
        batches = [torch.stack([float32(x), 0.0 - float32(x), torch.linspace(-1, 3, len(x))]) for x in data]
        compare(grid, constant, batches, channel=0, name=name)


@by_few_grids
@pytest.mark.parametrize("eps", [EPS, 2.0**-12, 1e-10, 1e-38, 1.0, 1e30], ids=str)
def test_observers_have_torch_aos_bits_with_other_values_of_eps(eps, grid):
    for constant, channel in itertools.product((None, 0.1), (None, 1)):
        compare(grid, constant, random_batches(low=-12, high=4), channel=channel, eps=eps)
        compare(grid, constant, [torch.zeros(2, 3), torch.full((2, 3), 1e-30)], channel=channel, eps=eps)


@by_few_grids
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_observers_have_torch_aos_bits_on_other_dtypes(dtype, grid):
    """torch.ao converts to float32 first, which gives the same ranges."""
    low, high = (-3, 3) if dtype == "float16" else (-12, 12)
    for constant, channel in itertools.product((None, 1 / 3), (None, 0, 2)):
        batches = [x.double() * 1.1 for x in random_batches(low=low, high=high)]
        compare(grid, constant, [x.to(getattr(torch, dtype)) for x in batches], channel=channel)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every other": lambda x: torch.repeat_interleave(x, 2, -1)[..., ::2],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@by_few_grids
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_observers_have_torch_aos_bits_in_every_layout(layout, grid):
    for constant, channel in itertools.product((None, 0.01), (None, 0, 1, 3)):
        compare(grid, constant, [layout(x) for x in random_batches(3, (2, 3, 4, 5))], channel=channel)


@by_few_grids
def test_observers_ignore_empty_batches_as_torch_ao_does(grid):
    for constant in (None, 0.5):
        compare(grid, constant, [torch.tensor([-1.0, 2.0]), torch.empty(0), torch.tensor([-3.0, 1.0])])


@by_few_grids
def test_observers_have_torch_aos_qparams_on_negative_zeros(grid):
    """Ranges are not compared: ours end in positive zeros, and torch's sign of a zero is arbitrary."""
    for constant, channel in itertools.product((None, 0.3), (None, 0)):
        batches = [torch.tensor([[-0.0, 0.0, -0.0]]), torch.tensor([[-0.0, 5.0, 0.0]]), torch.tensor([[-5.0, -0.0, 0]])]
        compare(grid, constant, batches, channel=channel, ranges=False)


@by_few_grids
def test_observers_have_torch_aos_bits_on_many_channels_of_every_magnitude(grid):
    """The channels do not fill a whole number of vector registers."""
    rng = np.random.default_rng(5)
    size = 10.0 ** rng.uniform(-44, 38, (1003, 1))
    batches = [torch.from_numpy((rng.uniform(-1, 1, (1003, 3)) * size).astype(np.float32)) + 0.0 for _ in range(4)]
    for constant in (None, 0.01):
        compare(grid, constant, batches, channel=0)


def test_observers_have_torch_aos_bits_on_a_large_tensor():
    """The tensor spans several tiles of our kernel and several chunks of torch's."""
    x = torch.from_numpy(np.random.default_rng(2).standard_normal(200_003).astype(np.float32))
    compare(GRIDS["quint8 affine"], 0.01, [x, x * 1.7, -x])
    compare(GRIDS["qint8 symmetric"], None, [x[:200_000].reshape(8, -1), x[3:].reshape(8, -1) * 3], channel=0)
