"""Quantizers taken over from torch.ao, as modules or as states, go on with the same bits."""

import numpy as np
import pytest

from fakequant import QuantSpec, reference
from fakequant.nn import PACT, FakeQuantize, FusedFakeQuantize, LearnedFakeQuantize, from_torch_ao
from fakequant.observers import Histogram, MinMax, MovingAverage
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import to_numpy, to_torch, torch

from torch.ao import quantization as tq  # isort: skip
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize  # isort: skip

# torch.ao is deprecated and says so in many ways.
pytestmark = [pytest.mark.usefixtures("torch_on_one_thread"), pytest.mark.filterwarnings("ignore")]

TENSOR, CHANNEL = tq.MovingAverageMinMaxObserver, tq.MovingAveragePerChannelMinMaxObserver
AFFINE, SYMMETRIC = torch.per_tensor_affine, torch.per_tensor_symmetric
CHANNEL_AFFINE, CHANNEL_SYMMETRIC = torch.per_channel_affine, torch.per_channel_symmetric
UINT8, INT8 = (0, 255, torch.quint8), (-128, 127, torch.qint8)
CHANNELS = 5
# A few units in the last place of float32: the only difference between their gradients of a scale and ours.
SUMMED_IN_ANOTHER_ORDER = 1e-5
SHAPES = {None: (8, 5, 6), 0: (CHANNELS, 4, 6), 1: (4, CHANNELS, 12)}


class Case:
    """A module of torch.ao and what it is here."""

    def __init__(self, kind, observer, codes, scheme, spec, ours=None, **options):
        self.make = lambda: kind(
            observer, quant_min=codes[0], quant_max=codes[1], dtype=codes[2], qscheme=scheme, **options
        )
        self.spec = QuantSpec(numerics="torch", **spec)
        self.shape = SHAPES[self.spec.axis]
        self.ours = ours or {}

    def build(self):
        """Ours by hand, before anything was loaded."""
        kind = FusedFakeQuantize if "symmetric" in self.ours else FakeQuantize
        return kind(self.spec, shape=self.shape, **self.ours)


def plain(observer, codes, scheme, spec, ours=None, **options):
    return Case(tq.FakeQuantize, observer, codes, scheme, spec, ours, **options)


def fused(observer, codes, scheme, spec, ours=None, **options):
    symmetric = scheme in (SYMMETRIC, CHANNEL_SYMMETRIC)
    ours = {"symmetric": symmetric, **(ours or {})}
    spec = {**spec, "symmetric": False}  # its zero point may be anywhere
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
    """Ranges that change, values that repeat, ties of the scale 1/8."""
    rng = np.random.default_rng(seed)
    for step in range(count):
        x = rng.standard_normal(shape) * (1, 30, 0.1, 4)[step % 4] + (0, 1)[step % 2]
        yield to_torch(np.where(rng.random(shape) < 0.3, np.rint(16 * x) / 16, x).astype(np.float32))


def hostile(theirs, dtype, axis):
    """Ties at the module's own scales and ends, special values, NaN and infinities."""
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
        assert_same_bits(expected.numpy().reshape(actual.shape) + 0, actual.numpy() + 0, name, *names)


def gradients(x, seed=3):
    return to_torch(cases.gradients(x.numel(), to_numpy(x).dtype, seed=seed).reshape(x.shape))


def switch(theirs, ours, observe, quantize):
    theirs.enable_observer(observe)
    theirs.enable_fake_quant(quantize)
    ours.observing, ours.quantizing = observe, quantize


# --- FakeQuantize and FusedMovingAvgObsFakeQuantize -----------------------------------------------


@by_way
@by_case
def test_observing_and_quantizing_goes_on_with_the_same_bits(case, take_over):
    theirs = case.make()
    first, second, *rest = batches(case.shape, 6)
    theirs(first), theirs(second)
    ours = take_over(case, theirs)
    assert_same_state(theirs, ours, "taken over")
    for step, x in enumerate(rest):
        assert_same_results(theirs, ours, x, gradients(x), step)
        assert_same_state(theirs, ours, step)


@by_way
@by_case
def test_with_observers_off_every_value_has_the_same_bits(case, take_over):
    theirs = case.make()
    for x in batches(case.shape, 2):
        theirs(x)
    theirs.disable_observer()
    ours = take_over(case, theirs)
    assert not ours.observing
    only_float32 = isinstance(theirs, tq.FusedMovingAvgObsFakeQuantize)
    for name, dtype in cases.DTYPES.items():
        if only_float32 and name != "float32":  # torch's operator takes nothing else
            continue
        x = hostile(theirs, dtype, case.spec.axis)
        assert_same_results(theirs, ours, x, gradients(x), name)


@by_case
def test_in_evaluation_it_is_torch_with_its_observers_off(case):
    theirs = case.make()
    for x in batches(case.shape, 2):
        theirs(x)
    ours = from_torch_ao(theirs.eval())
    assert not ours.training
    theirs.disable_observer()
    x = hostile(theirs, np.dtype(np.float32), case.spec.axis)
    assert_same_results(theirs, ours, x, gradients(x))
    assert_same_state(theirs, ours)


@by_case
def test_with_fake_quantization_off_tensors_pass_and_are_observed(case):
    theirs = case.make()
    first, *rest = batches(case.shape, 4)
    theirs(first)
    theirs.disable_fake_quant()
    ours = from_torch_ao(theirs)
    assert not ours.quantizing
    for x in rest:
        assert_same_results(theirs, ours, x, gradients(x))
    theirs.enable_fake_quant()
    ours.quantizing = True
    for x in batches(case.shape, 2, seed=5):
        assert_same_results(theirs, ours, x, gradients(x))
        assert_same_state(theirs, ours)


@by_case
def test_observed_before_it_ever_quantized(case):
    theirs = case.make()
    theirs.disable_fake_quant()
    for x in batches(case.shape, 2):
        theirs(x)
    ours = from_torch_ao(theirs)
    switch(theirs, ours, observe=False, quantize=True)
    for x in batches(case.shape, 2, seed=5):
        assert_same_results(theirs, ours, x, gradients(x))


@by_way
@by_case
def test_every_order_of_switches(case, take_over):
    theirs = case.make()
    steps = batches(case.shape, 9)
    theirs(next(steps))
    ours = take_over(case, theirs)
    for x, (observe, quantize) in zip(
        steps, [(1, 1), (1, 0), (0, 1), (0, 0), (1, 0), (1, 1), (0, 0), (0, 1)], strict=True
    ):
        switch(theirs, ours, bool(observe), bool(quantize))
        assert_same_results(theirs, ours, x, gradients(x), observe, quantize)
    assert_same_state(theirs, ours)


DATA = {
    "positive": lambda x: x.abs() + 0.25,
    "negative": lambda x: -x.abs() - 0.25,
    "tiny": lambda x: x * 1e-9,
    "tiny and positive": lambda x: x.abs() * 1e-7,
    "below eps": lambda x: x * 1e-40,
    "zeros": lambda x: x * 0,
    "huge": lambda x: (x * 1e30).clamp(-1e36, 1e36),
    "constant": lambda x: torch.full_like(x, 0.3),
}


@pytest.mark.parametrize("change", DATA.values(), ids=DATA)
@by_case
def test_ranges_of_one_sign_and_of_extreme_size(case, change):
    theirs = case.make()
    first, *rest = batches(case.shape, 4)
    theirs(change(first))
    ours = from_torch_ao(theirs)
    assert_same_state(theirs, ours)
    for step, x in enumerate(rest):
        x = change(x)
        assert_same_results(theirs, ours, x, gradients(x), step)
        assert_same_state(theirs, ours, step)
    for x in batches(case.shape, 2, seed=5):  # and then of any
        assert_same_results(theirs, ours, x, gradients(x))


@pytest.mark.parametrize("name", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_other_dtypes_are_observed_alike(case, name):
    theirs = case.make()
    first, *rest = batches(case.shape, 4)
    theirs(first)
    ours = from_torch_ao(theirs)
    for x in rest:
        x = to_torch(to_numpy(x).astype(cases.DTYPES[name]))
        assert_same_results(theirs, ours, x, gradients(x))
        assert_same_state(theirs, ours)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in FUSED.items() if c.spec.axis is None])
def test_the_fused_operator_learns_from_what_is_not_finite_as_torchs_does(case, broken):
    theirs = case.make()
    first, second, third = batches(case.shape, 3)
    theirs(first)
    ours = from_torch_ao(theirs)
    second.view(-1)[7] = broken
    for x in (second, third):
        assert_same_results(theirs, ours, x, torch.ones_like(x))
        assert_same_state(theirs, ours)


@pytest.mark.parametrize("broken", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_an_observer_does_not_learn_from_what_is_not_finite(case, broken):
    theirs = case.make()
    first, second = batches(case.shape, 2)
    theirs(first)
    ours = from_torch_ao(theirs)
    spoiled = second.clone()
    place = torch.zeros(case.shape, dtype=torch.bool)
    place.view(-1)[11] = True
    spoiled[place] = broken
    second[place] = second[(0, 0, 1) if case.spec.axis != 1 else (0, 0, 0)]  # which its channel holds anyway
    theirs(second), ours(spoiled)
    assert_same_state(theirs, ours)
    assert ours.nonfinite == 1


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_a_range_that_nan_has_spoiled_is_refused_or_forgotten(case):
    theirs = case.make()
    first, second = batches(case.shape, 2)
    first[:, :, 0] = torch.nan
    theirs(first)
    try:
        ours = from_torch_ao(theirs)
    except (RuntimeError, ValueError):
        return
    assert ours(second).isfinite().all()


@by_case
def test_a_module_that_has_seen_nothing(case):
    theirs = case.make()
    ours = loaded(case, theirs)
    with pytest.raises(RuntimeError, match="has not observed a finite value"):
        ours.eval()(torch.ones(case.shape))
    ours.train()
    for x in batches(case.shape, 3):
        assert_same_results(theirs, ours, x, gradients(x))
        assert_same_state(theirs, ours)


@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in CASES.items() if c.spec.axis is None])
def test_a_module_that_has_seen_nothing_has_no_scale(case):
    ours = from_torch_ao(case.make())
    assert ours.scale.isnan().all()
    with pytest.raises(RuntimeError, match="has not observed"):
        ours.eval()(torch.ones(3))


@by_case
def test_the_module_taken_over_is_left_as_it_is(case):
    theirs = case.make()
    first, second = batches(case.shape, 2)
    theirs(first)
    before = {k: v.clone() for k, v in theirs.state_dict().items()}
    ours = from_torch_ao(theirs)
    ours(second)
    for k, v in theirs.state_dict().items():
        assert_same_bits(before[k].numpy(), v.numpy(), k)


def test_from_torch_ao_finds_spec_and_observer():
    for name, case in CASES.items():
        theirs = case.make()
        theirs(next(batches(case.shape)))
        ours, expected = from_torch_ao(theirs), case.build()
        assert (type(ours), ours.spec, ours.observer) == (type(expected), expected.spec, expected.observer), name
        assert ours.state_dict().keys() == expected.state_dict().keys()


# --- _LearnableFakeQuantize -----------------------------------------------------------------------


def learnable(scheme, codes, shape=None, *, scaling=False, **options):
    """Learning, with a scale from data."""
    observer, channels = (tq.PerChannelMinMaxObserver, CHANNELS) if shape else (tq.MinMaxObserver, -1)
    options |= dict(channel_len=channels) | (dict(ch_axis=shape.index(CHANNELS)) if shape else {})
    theirs = _LearnableFakeQuantize(
        observer, quant_min=codes[0], quant_max=codes[1], dtype=codes[2], qscheme=scheme, use_grad_scaling=scaling,
        **options,
    )  # fmt: skip
    theirs(next(batches(shape or SHAPES[None])))
    return theirs.enable_param_learning()


LEARNED = {
    "uint8": ((AFFINE, UINT8), UNSIGNED),
    "int8 affine": ((AFFINE, INT8), SIGNED),
    "int8 symmetric": ((SYMMETRIC, INT8), {}),
    "int4 symmetric": ((SYMMETRIC, (-8, 7, torch.qint8)), dict(bits=4)),
    "-127 to 127": ((SYMMETRIC, NARROW_8), dict(narrow_range=True)),
    "channel symmetric": ((CHANNEL_SYMMETRIC, INT8, SHAPES[0]), dict(axis=0)),
    "channel affine": ((CHANNEL_AFFINE, INT8, SHAPES[1]), {**SIGNED, "axis": 1}),
    "channel uint4": ((CHANNEL_AFFINE, (0, 15, torch.quint8), SHAPES[0]), {**UNSIGNED, "bits": 4, "axis": 0}),
}
by_learned = pytest.mark.parametrize(("arguments", "spec"), LEARNED.values(), ids=LEARNED)
by_scaling = pytest.mark.parametrize("scaling", [False, True], ids=["", "scaled gradients"])


def learned_by_hand(theirs, spec, shape, scaling):
    factor = None if scaling else 1.0
    ours = LearnedFakeQuantize(QuantSpec(numerics="torch", **spec), shape=shape, grad_factor=factor)
    model, there = torch.nn.Sequential(torch.nn.Linear(2, 2), ours), torch.nn.Sequential(torch.nn.Linear(2, 2), theirs)
    model.load_state_dict(there.state_dict(), strict=True)
    return ours


def learned_run(module, parameters, x, dy):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    wanted = [p for p in parameters if p is not None]
    return [g.detach() for g in (y, *torch.autograd.grad(y, (x, *wanted), dy))]


def assert_learned_alike(theirs, ours, x, dy, *names):
    """Bits of y and dx; sums at least as close to the exact ones as torch's."""
    axis, spec = ours.spec.axis, ours.spec
    scale, zero_point = (p.detach().numpy().copy() for p in (theirs.scale, theirs.zero_point))
    expected = learned_run(theirs, (theirs.scale, theirs.zero_point), x, dy)
    actual = learned_run(ours, (ours.step_size, ours.offset), x, dy)
    for name, e, a in zip(("y", "dx"), expected, actual, strict=False):
        assert_same_bits(to_numpy(e), to_numpy(a), name, *names)
    shape = [1] * x.dim()
    if axis is not None:
        shape[axis] = -1
    factor = 1 / (x.numel() * spec.qmax) ** 0.5 if theirs.use_grad_scaling else 1.0
    _, *terms = reference.learned_backward(
        to_numpy(dy), to_numpy(x), scale.reshape(shape), zero_point.reshape(shape), spec.qmin, spec.qmax, "torch",
        grad_factor=factor, granularity="tensor" if axis is None else "channel",
    )  # fmt: skip
    over = None if axis is None else tuple(i for i in range(x.dim()) if i != axis)
    for name, term, e, a in zip(("dscale", "dzero_point"), terms, expected[2:], actual[2:], strict=False):
        exact = reference.exact_sum(term, over).reshape(-1)
        e, a = (v.double().numpy().reshape(-1) for v in (e, a))
        assert (np.isfinite(exact) == np.isfinite(a)).all(), (name, *names)
        ok = np.isfinite(exact) & np.isfinite(e)
        assert (np.abs(a - exact)[ok] <= np.abs(e - exact)[ok]).all(), (name, *names, exact, e, a)


@by_scaling
@by_learned
@pytest.mark.parametrize("way", ["module", "state"])
def test_learned_parameters_are_trained_alike(arguments, spec, scaling, way):
    theirs = learnable(*arguments, scaling=scaling)
    shape = SHAPES[spec.get("axis")]
    ours = from_torch_ao(theirs) if way == "module" else learned_by_hand(theirs, spec, shape, scaling)
    assert (ours.spec, ours.frozen) == (QuantSpec(numerics="torch", **spec), False)
    for step, x in enumerate(batches(shape, 3, seed=7)):
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(step))
        assert_learned_alike(theirs, ours, x, dy, step)
    x = hostile(theirs, np.dtype(np.float32), spec.get("axis"))
    assert_learned_alike(theirs, ours, x, torch.ones_like(x), "hostile")


@pytest.mark.parametrize("zero_point", [-57.0, -57.5, 2.5, 3.5, -0.5, 126.9, 1e6, -1e6], ids=str)
@by_scaling
def test_a_learned_zero_point_is_rounded_in_torchs_two_ways(zero_point, scaling):
    theirs = learnable(AFFINE, INT8, scaling=scaling)
    theirs.zero_point.data.fill_(zero_point)
    theirs.scale.data.fill_(0.25)
    ours = from_torch_ao(theirs)
    x = torch.arange(-1200, 1200) / 16
    assert_learned_alike(theirs, ours, x, torch.ones_like(x))


@pytest.mark.parametrize("scale", [0.0, -3.0, 1e-20, 1e-7, 1e-5], ids=str)
@pytest.mark.parametrize("options", [{}, dict(eps=2**-12)], ids=["", "observer's eps 2^-12"])
@pytest.mark.parametrize("learning", [True, False], ids=["learning", "not learning"])
def test_a_learned_scale_that_is_too_small(scale, options, learning):
    theirs = learnable(AFFINE, INT8, **options)  # which has an eps of its own, whatever its observer's
    theirs.toggle_qparam_learning(enabled=learning)
    theirs.scale.data.fill_(scale)
    ours = from_torch_ao(theirs)
    x = torch.linspace(-1, 1, 101) * 1e-4
    assert_same_results(theirs, ours, x, torch.ones_like(x))


@by_learned
def test_training_steps_keep_both_close(arguments, spec):
    theirs = learnable(*arguments, scaling=True)
    ours = from_torch_ao(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125) for m in (theirs, ours)]
    for x in batches(SHAPES[spec.get("axis")], 3, seed=7):
        y = [m(x) for m in (theirs, ours)]
        for result, optimizer in zip(y, optimizers, strict=True):
            optimizer.zero_grad()
            result.square().mean().backward()
            optimizer.step()
        assert torch.allclose(theirs.scale, ours.step_size, rtol=SUMMED_IN_ANOTHER_ORDER, atol=0)
        ours.step_size.data.copy_(theirs.scale)
        if ours.offset is not None:
            ours.offset.data.copy_(theirs.zero_point)


@pytest.mark.parametrize("scheme", [SYMMETRIC, CHANNEL_SYMMETRIC], ids=str)
@by_scaling
def test_a_symmetric_module_after_an_optimizer_step(scheme, scaling):
    # The optimizer moves torch's zero point all the same; the next forward pass sets it back to 0.
    shape = SHAPES[0] if scheme == CHANNEL_SYMMETRIC else None
    theirs = learnable(scheme, INT8, shape, scaling=scaling)
    x = next(batches(shape or SHAPES[None], seed=7))
    (theirs(100 * x)).sum().backward()
    torch.optim.SGD(theirs.parameters(), lr=1e-3).step()
    assert theirs.zero_point.any()
    ours = from_torch_ao(theirs)
    assert_same_bits(theirs(x).detach().numpy(), ours(x).detach().numpy())


@pytest.mark.parametrize("zero_point", [-57.0, 0.0, 20.0], ids=str)
def test_learning_switched_off(zero_point):
    theirs = learnable(AFFINE, INT8)
    theirs.zero_point.data.fill_(zero_point)
    theirs.scale.data.fill_(0.25)
    theirs.toggle_qparam_learning(enabled=False)
    ours = from_torch_ao(theirs)
    assert ours.frozen
    x = torch.arange(-1200, 1200) / 16
    assert_same_results(theirs, ours, x, gradients(x))


@by_learned
def test_a_learned_module_with_fake_quantization_off(arguments, spec):
    theirs = learnable(*arguments)
    theirs.toggle_fake_quant(enabled=False)
    ours = from_torch_ao(theirs)
    x = next(batches(SHAPES[spec.get("axis")], seed=7))
    assert_same_results(theirs, ours, x, gradients(x))
    theirs.toggle_fake_quant(enabled=True)
    ours.quantizing = True
    assert_same_bits(theirs(x).detach().numpy(), ours(x).detach().numpy())


@pytest.mark.parametrize("seen", [False, True], ids=["that has seen nothing", "that has seen data"])
def test_a_learned_module_in_its_static_mode_is_followed_or_refused(seen):
    # There the scale is the observer's, new at every forward pass; before the first one it is 1 and means nothing.
    theirs = _LearnableFakeQuantize(tq.MinMaxObserver, -128, 127, dtype=torch.qint8, qscheme=AFFINE)
    first, second = batches(SHAPES[None], 2)
    if seen:
        theirs(first)
    try:
        ours = from_torch_ao(theirs)
        y = ours(second)
    except (RuntimeError, ValueError):
        return
    assert_same_bits(theirs(second).detach().numpy(), y.detach().numpy())


# --- refused --------------------------------------------------------------------------------------


def observed(theirs, shape=(5, 6)):
    theirs(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    return theirs


def odd_codes(low, high, dtype=torch.qint8):
    return lambda: tq.FakeQuantize(TENSOR, low, high, dtype=dtype, qscheme=AFFINE)


REFUSED = {
    "histogram": (tq.fake_quantize.default_histogram_fake_quant, "HistogramObserver"),
    "uint8 symmetric": (lambda: tq.FakeQuantize(TENSOR, 0, 255, dtype=torch.quint8, qscheme=SYMMETRIC), "symmetric"),
    "codes -100 to 100": (odd_codes(-100, 100), "-100 to 100"),
    "codes 0 to 10": (odd_codes(0, 10), "0 to 10"),
    "codes -8 to 0": (odd_codes(-8, 0), "-8 to 0"),
    "codes -1 to 0": (odd_codes(-1, 0), "-1 to 0"),
    "channels not known": (tq.default_per_channel_weight_fake_quant, "how many channels"),
    "channels not known, fused": (tq.default_fused_per_channel_wt_fake_quant, "how many channels"),
    "float zero points": (lambda: observed(tq.fake_quantize.default_embedding_fake_quant()), "float"),
    "fixed": (tq.fake_quantize.default_fixed_qparams_range_0to1_fake_quant, "FixedQParamsObserver"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_over(make, message):
    with pytest.raises(ValueError, match=message):
        from_torch_ao(make())


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 2), tq.MinMaxObserver(), None, "FakeQuantize"], ids=str)
def test_what_is_no_fake_quantize_module(module):
    with pytest.raises(TypeError, match=r"fake-quantize module of torch\.ao"):
        from_torch_ao(module)


def ours_per_channel():
    return FakeQuantize(QuantSpec(axis=0, numerics="torch"), shape=(5, 6))


def ours_affine():
    return FakeQuantize(QuantSpec(symmetric=False, numerics="torch"))


def affine_learnable():
    theirs = learnable(AFFINE, INT8)
    theirs.zero_point.data.fill_(3.9)
    return theirs


STATES = {
    "per tensor for channels": (tq.default_weight_fake_quant, ours_per_channel, "per channel on axis 0"),
    "per channel for a tensor": (
        tq.default_per_channel_weight_fake_quant, lambda: FakeQuantize(QuantSpec(numerics="torch")), "int8, per tensor",
    ),
    "a zero point for a symmetric grid": (
        tq.default_fake_quant, lambda: FakeQuantize(QuantSpec(numerics="torch")), "zero point is not 0",
    ),
    "learned for observed": (affine_learnable, ours_affine, "LearnedFakeQuantize"),
    "observed for learned": (
        tq.default_fake_quant, lambda: LearnedFakeQuantize(QuantSpec(numerics="torch")), "Use FakeQuantize",
    ),
    "for PACT": (tq.default_fake_quant, PACT, "nothing like PACT"),
    "for a histogram": (
        tq.default_fake_quant, lambda: FakeQuantize(QuantSpec(symmetric=False), Histogram()), "Histogram",
    ),
    "fixed": (
        tq.fake_quantize.default_fixed_qparams_range_0to1_fake_quant,
        lambda: FakeQuantize(QuantSpec(signed=False, symmetric=False, numerics="torch")),
        "act: .*torch.ao",
    ),
    "float zero points": (
        tq.fake_quantize.default_embedding_fake_quant,
        lambda: FakeQuantize(QuantSpec(signed=False, symmetric=False, axis=0, numerics="torch"), shape=(5, 6)),
        "act: .*zero point",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "build", "message"), STATES.values(), ids=STATES)
def test_states_that_do_not_fit_are_refused_by_name_and_change_nothing(make, build, message):
    theirs, ours = torch.nn.ModuleDict({"act": observed(make())}), torch.nn.ModuleDict({"act": build()})
    before = {k: v.clone() for k, v in ours.state_dict().items()}
    with pytest.raises(RuntimeError, match=rf"(?s)act: .*{message.removeprefix('act: ')}"):
        ours.load_state_dict(theirs.state_dict())
    for k, v in ours.state_dict().items():
        assert_same_bits(before[k].numpy(), v.numpy(), k)


def test_a_scale_of_another_grid_is_refused():
    theirs = tq.FakeQuantize(TENSOR, quant_min=-8, quant_max=7, dtype=torch.qint8, qscheme=AFFINE)
    theirs(torch.linspace(-1, 1, 9))
    ours = FakeQuantize(QuantSpec(symmetric=False, numerics="torch"))
    with pytest.raises(RuntimeError, match="another range of codes"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.scale.isnan()
    FakeQuantize(QuantSpec(bits=4, symmetric=False, numerics="torch")).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    "options",
    [dict(gradient="pass"), dict(eps=1e-3), dict(observer=MinMax()), dict(shape=(None, 3), axis=1)],
    ids=str,
)
def test_the_fused_operator_is_not_asked_for_what_it_cannot_do(options):
    spec = QuantSpec(symmetric=False, numerics="torch", axis=options.pop("axis", None))
    with pytest.raises(ValueError, match="The fused operator"):
        FusedFakeQuantize(spec, **options)
