"""`LearnedFakeQuantize`, `PACT` and `param_groups`: initialization, gradients, and scales no optimizer can break."""

import contextlib
import copy
import io
import itertools
import math
import pickle

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec, reference
from fakequant.qparams import EPS
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
nn = torch.nn
observers = pytest.importorskip("fakequant.observers")
bounded = pytest.importorskip("fakequant.nn._bounded_parameters")
quantizers = pytest.importorskip("fakequant.nn")
LearnedFakeQuantize, FakeQuantize, PACT = quantizers.LearnedFakeQuantize, quantizers.FakeQuantize, quantizers.PACT
param_groups = quantizers.param_groups

INT4 = QuantSpec(bits=4)
UINT4 = QuantSpec(bits=4, signed=False, symmetric=False)
SHAPE = (4, 6, 8)
WHERE = {
    "tensor": {},
    "channel, first": dict(axis=0),
    "channel, last": dict(axis=-1),
    "group, last": dict(axis=-1, group_size=4),
    "group, middle": dict(axis=1, group_size=3),
}
GRIDS = {
    "int4": dict(bits=4),
    "int4 narrow": dict(bits=4, narrow_range=True),
    "int4 affine": dict(bits=4, symmetric=False),
    "uint4": dict(bits=4, signed=False, symmetric=False),
    "int2": dict(bits=2),
    "uint1": dict(bits=1, signed=False, symmetric=False),
    "int8 affine": dict(symmetric=False),
}
BROKEN = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
X = torch.tensor([-1.0, 0.5, 3.0])

by_where = pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
by_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
by_broken = pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)


def initialized(spec=INT4, x=X, **options):
    return LearnedFakeQuantize(spec, shape=x.shape, **options).initialize(x)


def whole_numbers(shape=SHAPE, seed=0):
    """Sums of these are exact, in any order."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-99, 100, shape).astype(np.float32))


def blocks(x, spec):
    """The elements that share a scale, in the last axis; the other axes are those of the scales."""
    x = x.numpy()
    if spec.axis is None:
        return x.reshape(-1)
    axis = spec.axis % x.ndim
    if spec.group_size is None:
        return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    cut = x.reshape(*x.shape[:axis], -1, spec.group_size, *x.shape[axis + 1 :])
    return np.moveaxis(cut, axis + 1, -1)


def lsq(values, qmax):
    """LSQ's rule on what is finite in the last axis, rounded once."""
    finite = np.isfinite(values)
    total = np.where(finite, np.abs(values.astype(np.float64)), 0).sum(-1)
    return np.asarray(2 * (total / finite.sum(-1)) / math.sqrt(qmax)).astype(np.float32)


def make_step_size(quantizer, value):
    """What an optimizer may do between two forward passes."""
    with torch.no_grad():
        quantizer.step_size.copy_(torch.as_tensor(value))


def bits(t):
    return t.detach().clone().numpy()


# --- initialization -------------------------------------------------------------------------------


@by_where
@by_grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_scale_is_twice_the_mean_magnitude_over_the_root_of_qmax(where, grid, dtype):
    spec = QuantSpec(**where, **grid)
    x = whole_numbers()
    quantizer = LearnedFakeQuantize(spec, shape=SHAPE, init="lsq").initialize(x.to(dtype))
    expected = lsq(blocks(x, spec), spec.qmax)
    assert_same_bits(expected, bits(quantizer.scale), spec)
    assert_same_bits(np.zeros(expected.shape, np.int32), bits(quantizer.zero_point))
    assert_same_bits(expected.reshape(quantizer.step_size.shape), bits(quantizer.step_size))


@by_where
def test_what_is_not_finite_is_left_out_of_the_mean_and_counted(where):
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
def test_batches_while_observing_count_by_their_elements(where):
    spec = QuantSpec(bits=4, **where)
    sizes = (4, 8, 20) if where.get("axis") != 0 else (4, 4, 4)
    batches = [whole_numbers((n, 6, 8), seed=n + i) * 4.0**i for i, n in enumerate(sizes)]
    if spec.axis != -1 or spec.group_size is None:
        joined = torch.cat(batches, dim=1 if spec.axis == 0 else 0)
    if spec.granularity == "group":  # there groups are not joined along the batch
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
def test_from_an_observer_it_is_what_the_calibrated_quantizer_has(observer, grid):
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


def test_a_learned_zero_point_starts_from_the_range_and_a_fixed_one_at_zero():
    x = torch.tensor([-1.0, 2.0])
    assert LearnedFakeQuantize(UINT4).initialize(x).zero_point == 5
    assert LearnedFakeQuantize(UINT4, learn_zero_point=False).initialize(x).zero_point == 0


@pytest.mark.parametrize("init", ["lsq", observers.MinMax(), observers.Histogram()], ids=str)
def test_nothing_to_learn_from_is_an_error_that_names_the_path(init):
    quantizer = LearnedFakeQuantize(INT4, init=init, path="layers.0")
    with pytest.raises(RuntimeError, match=r"layers\.0: `x` has blocks without a finite value"):
        quantizer.initialize(torch.empty(0, 3))
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match=r"layers\.0: `x` has blocks without"):
        quantizer.initialize(torch.tensor([math.nan, math.inf]))
    quantizer.initialize(X)
    assert quantizer.scale > 0


def test_an_empty_batch_changes_nothing():
    quantizer = LearnedFakeQuantize(INT4)
    quantizer.observing = True
    for x in (torch.empty(0), X, torch.empty(3, 0)):
        assert quantizer(x) is x
    quantizer.observing = False
    assert_same_bits(bits(initialized().scale), bits(quantizer.scale))


def test_one_channel_without_finite_values_is_an_error():
    quantizer = LearnedFakeQuantize(QuantSpec(axis=0), shape=(2, 3))
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="without a finite value"):
        quantizer.initialize(torch.tensor([[1.0, 2, 3], [math.nan] * 3]))


@by_where
@pytest.mark.parametrize("init", ["lsq", observers.MinMax()], ids=str)
def test_zeros_give_the_smallest_scale(where, init):
    quantizer = LearnedFakeQuantize(QuantSpec(**where), shape=SHAPE, init=init, eps=2.0**-12)
    scale = bits(quantizer.initialize(torch.zeros(SHAPE)).scale)
    assert_same_bits(np.full(scale.shape, 2.0**-12, np.float32), scale)


def test_the_largest_data_gives_a_finite_grid():
    quantizer = LearnedFakeQuantize(QuantSpec(bits=2)).initialize(torch.full((4,), 1e308, dtype=torch.float64))
    assert quantizer(torch.tensor([-math.inf, math.inf])).isfinite().all()


def test_initializing_again_forgets_what_was_seen():
    quantizer = initialized(x=X * 100)
    assert_same_bits(bits(initialized().scale), bits(quantizer.initialize(X).scale))


def test_initializing_keeps_the_parameters_that_an_optimizer_may_have():
    quantizer = LearnedFakeQuantize(UINT4)
    before = [(id(p), p.data_ptr()) for p in quantizer.parameters()]
    quantizer.initialize(X)
    assert [(id(p), p.data_ptr()) for p in quantizer.parameters()] == before


def test_a_refused_initialization_leaves_the_scale_as_it_was():
    quantizer = initialized()
    before = bits(quantizer.scale)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError):
        quantizer.initialize(torch.tensor([math.nan]))
    assert_same_bits(before, bits(quantizer.scale))


OTHER_SIZES = {
    "one channel": (dict(axis=0), (4, 6), (1, 6)),
    "more channels": (dict(axis=0), (4, 6), (5, 6)),
    "as many groups elsewhere": (dict(axis=-1, group_size=2), (2, 8), (4, 4)),
}


@pytest.mark.parametrize("init", ["lsq", observers.MinMax()], ids=str)
@pytest.mark.parametrize(("where", "shape", "other"), OTHER_SIZES.values(), ids=OTHER_SIZES)
def test_data_of_another_size_is_refused_by_the_path(where, shape, other, init):
    quantizer = LearnedFakeQuantize(QuantSpec(**where), shape=shape, init=init, path="layers.0")
    with pytest.raises((ValueError, RuntimeError), match=r"layers\.0"):
        quantizer.initialize(torch.ones(other))
    quantizer.initialize(torch.ones(shape))
    with pytest.raises((ValueError, RuntimeError), match=r"layers\.0"):
        quantizer(torch.ones(other))


# --- gradients ------------------------------------------------------------------------------------


def exact(x, scale, zero_point, dy, spec, factor):
    """The formulas of the class in float64, summed exactly."""
    x, dy, s, z = (np.asarray(v, np.float64) for v in (x, dy, scale, zero_point))
    code = np.rint(x / s) + z
    inside = (code >= spec.qmin) & (code <= spec.qmax)
    bound = np.clip(code, spec.qmin, spec.qmax)
    dscale = dy * np.where(inside, (code - z) - x / s, bound - z) * factor
    dzero_point = np.where(inside, 0, -dy * s) * factor
    return np.where(inside, dy, 0), dscale.sum(-1), dzero_point.sum(-1)


@by_grid
@by_where
def test_the_gradients_are_the_formulas(grid, where):
    # Every number here, product and sum is a float32: there is nothing to round.
    spec = QuantSpec(**grid, **where)
    x = torch.from_numpy(np.random.default_rng(1).integers(-800, 800, SHAPE) / 32).float().requires_grad_()
    dy = torch.from_numpy(np.random.default_rng(2).integers(-8, 9, SHAPE) / 4).float()
    quantizer = LearnedFakeQuantize(spec, shape=SHAPE, grad_factor=0.25).initialize(x)
    scale = 0.5 ** np.random.default_rng(3).integers(0, 3, quantizer.scale.shape)
    offset = np.random.default_rng(4).integers(max(spec.qmin, -3), min(spec.qmax, 3) + 1, quantizer.scale.shape)
    make_step_size(quantizer, scale.reshape(quantizer.step_size.shape))
    if quantizer.offset is not None:
        quantizer.offset.data.copy_(torch.as_tensor(offset.reshape(quantizer.step_size.shape)))
    else:
        offset = 0 * offset

    quantizer(x).backward(dy)

    dx, dscale, dzero_point = exact(
        blocks(x.detach(), spec), scale[..., None], offset[..., None], blocks(dy, spec), spec, 0.25
    )
    assert_same_bits(dx.astype(np.float32), blocks(x.grad, spec), "dx")
    assert_same_bits(dscale.astype(np.float32), bits(quantizer.step_size.grad).reshape(dscale.shape), "dscale")
    if quantizer.offset is not None:
        got = bits(quantizer.offset.grad).reshape(dscale.shape)
        assert_same_bits((dzero_point + 0.0).astype(np.float32), got, "dzero_point")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numerics", reference.NUMERICS)
@by_where
def test_the_gradients_are_those_of_the_function(where, numerics, dtype):
    for grid, factor in itertools.product((GRIDS["int4"], GRIDS["int8 affine"], GRIDS["uint4"]), (None, 0.3)):
        spec = QuantSpec(**grid, **where, numerics=numerics)
        generator = torch.Generator().manual_seed(5)
        x, dy = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
        init = "lsq" if spec.symmetric else observers.MinMax()  # a search for the best would take most of the time
        quantizer = LearnedFakeQuantize(spec, shape=SHAPE, grad_factor=factor, init=init).initialize(x / 2)
        x.view(-1)[::17] = torch.tensor([math.nan, math.inf, -math.inf]).repeat(9)[:12].to(dtype)
        if quantizer.offset is not None:
            quantizer.offset.data += 0.3
        offset = 0 if quantizer.offset is None else bits(quantizer.offset).reshape(quantizer.scale.shape)
        grad_factor = 1 / math.sqrt(x.numel() * spec.qmax) if factor is None else factor
        expected = fq.fake_quantize_learned_backward(
            dy, x, quantizer.scale, torch.as_tensor(offset), spec, grad_factor=grad_factor
        )
        leaf = x.clone().requires_grad_()

        y = quantizer(leaf)
        y.backward(dy)

        plain = fq.fake_quantize(x, quantizer.scale, quantizer.zero_point, spec)
        assert torch.equal(y.detach().nan_to_num(9e9), plain.nan_to_num(9e9))
        assert y.dtype == dtype
        assert torch.equal(leaf.grad, expected.dx)
        assert_same_bits(
            bits(expected.dscale.float()).reshape(-1), bits(quantizer.step_size.grad).reshape(-1), "dscale"
        )
        if quantizer.offset is not None:
            assert_same_bits(
                bits(expected.dzero_point.float()).reshape(-1), bits(quantizer.offset.grad).reshape(-1), "dz"
            )


@pytest.mark.parametrize("grid", [GRIDS["int2"], GRIDS["uint1"]], ids=str)
def test_the_default_factor_is_one_over_the_root_of_elements_times_qmax(grid):
    quantizer = LearnedFakeQuantize(QuantSpec(**grid), init="lsq").initialize(torch.full((4,), 0.5))
    assert quantizer.scale == 1
    for elements, factor in ((64, 1 / 8), (4, 1 / 2), (1, 1.0)):  # qmax is 1
        quantizer.step_size.grad = None
        quantizer(torch.full((elements,), 9.0)).sum().backward()
        assert quantizer.step_size.grad.tolist() == [elements * factor]


def test_the_default_factor_counts_the_whole_tensor_not_a_channel():
    quantizer = initialized(QuantSpec(bits=2, axis=0), torch.full((4, 16), 0.5))
    quantizer(torch.full((4, 16), 9.0)).sum().backward()
    assert quantizer.step_size.grad.tolist() == [16 / 8] * 4


def test_a_symmetric_grid_has_no_offset():
    quantizer = initialized()
    assert quantizer.offset is None
    assert [name for name, _ in quantizer.named_parameters()] == ["step_size"]
    assert "offset" not in quantizer.state_dict()
    assert quantizer.zero_point.dtype == torch.int32
    assert quantizer.zero_point == 0


def test_a_zero_point_that_is_not_learned_stays():
    quantizer = LearnedFakeQuantize(UINT4, init=observers.MinMax(), learn_zero_point=False)
    quantizer.initialize(torch.tensor([-1.0, 2.0]))
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1)
    assert len(optimizer.param_groups[0]["params"]) == 1
    for _ in range(3):
        quantizer(torch.tensor([-9.0, 9.0, 0.3])).sum().backward()
        optimizer.step()
    assert quantizer.offset.grad is None
    assert quantizer.zero_point == 5
    assert quantizer(torch.tensor([-1e9])) == -5 * quantizer.scale


@by_broken
def test_a_value_that_is_not_finite_teaches_nothing(broken):
    for spec in (INT4, UINT4):
        grads = []
        for x in (torch.tensor([0.3, 9.0, -2.0]), torch.tensor([0.3, 9.0, broken, -2.0])):
            quantizer = initialized(spec, torch.tensor([-1.0, 2.0]), grad_factor=1.0)
            x.requires_grad_()
            y = quantizer(x)
            y.sum().backward()
            grads.append([bits(p.grad) for p in quantizer.parameters()])
        assert x.grad[2] == 0
        end = y[2].item()
        assert math.isnan(end) if math.isnan(broken) else math.copysign(1, end) == math.copysign(1, broken)
        for expected, actual in zip(*grads, strict=True):
            assert_same_bits(expected, actual)


def test_an_empty_tensor_has_zero_gradients():
    quantizer = initialized(UINT4, torch.tensor([-1.0, 2.0]))
    y = quantizer(torch.empty(0, 3, requires_grad=True))
    assert y.shape == (0, 3)
    y.sum().backward()
    assert [p.grad.tolist() for p in quantizer.parameters()] == [[0.0], [0.0]]


# --- more than one pass ---------------------------------------------------------------------------


def test_two_forward_passes_before_one_backward():
    separate, together = initialized(UINT4), initialized(UINT4)
    a, b = torch.tensor([9.0, 0.3, -4.0]), torch.tensor([-1.0, 7.0])
    for x in (a, b):  # accumulated
        separate(x).sum().backward()
    first, second = together(a), together(b)
    (first.sum() + second.sum()).backward()
    for e, g in zip(separate.parameters(), together.parameters(), strict=True):
        assert_same_bits(bits(e.grad), bits(g.grad))


def test_a_graph_from_before_an_optimizer_step_is_refused_not_computed_with_other_scales():
    quantizer = initialized()
    y = quantizer(torch.tensor([9.0, 0.3], requires_grad=True))
    quantizer.step_size.grad = torch.tensor([1.0])
    torch.optim.SGD(quantizer.parameters(), lr=1e2).step()
    quantizer(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives():
    # dscale = sum of dy * (bound - z), dzero_point = -sum of dy * scale: each is linear in the other.
    quantizer = LearnedFakeQuantize(UINT4, grad_factor=0.5).initialize(torch.tensor([-1.0, 2.0]))
    quantizer.step_size.data.fill_(0.25), quantizer.offset.data.fill_(5.0)
    x = torch.tensor([9.0, 9.0, -9.0, 0.3], requires_grad=True)
    dy = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    dx, dscale, doffset = torch.autograd.grad(
        quantizer(x), (x, quantizer.step_size, quantizer.offset), dy, create_graph=True
    )
    assert dx.tolist() == [0, 0, 0, 8]
    assert dscale.item() == pytest.approx(0.5 * (3 * 10 + 4 * -5 + 8 * (1 - 0.3 / 0.25)), rel=1e-6)  # float32
    for value, wanted in ((dscale, quantizer.offset), (doffset, quantizer.step_size)):
        (second,) = torch.autograd.grad(value, wanted, retain_graph=True)
        assert second.tolist() == [-0.5 * 7]
    (by_dy,) = torch.autograd.grad(doffset, dy, retain_graph=True)
    assert by_dy.tolist() == [-0.125, -0.125, -0.125, 0]


def test_gradients_of_a_functional_call():
    quantizer = initialized()
    x = torch.tensor([9.0, 0.3, -4.0])
    quantizer(x).sum().backward()
    parameters, buffers = (
        {k: v.detach().clone() for k, v in named} for named in (quantizer.named_parameters(), quantizer.named_buffers())
    )
    found = torch.func.grad(lambda p: torch.func.functional_call(quantizer, (p, buffers), x).sum())(parameters)
    assert_same_bits(bits(quantizer.step_size.grad), bits(found["step_size"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_step_size_of_another_dtype_is_not_taken_for_float32_memory(dtype):
    quantizer = initialized()  # a sharded model may hand its layers parameters in the dtype of the computation
    memory = torch.full((8,), -3.0, dtype=dtype)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        torch.func.functional_call(quantizer, {"step_size": memory[:1]}, X)
    assert memory[1:].tolist() == [-3.0] * 7
    assert memory[0].item() in (-3.0, torch.tensor(EPS, dtype=dtype).item())


# --- whatever the optimizer does ------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e2, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e2, weight_decay=0.1, fused=True),
}
by_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def all_usable(scale):
    return all(0 < s < math.inf for s in scale.flatten().tolist())


@by_optimizer
@pytest.mark.parametrize(
    ("spec", "steps"),
    [(QuantSpec(bits=2), 10_000), (QuantSpec(bits=4, symmetric=False, axis=0), 1_000)],
    ids=["per tensor", "per channel, zero point too"],
)
def test_the_scale_is_usable_after_every_step_and_every_forward_pass(spec, steps, optimizer):
    generator = torch.Generator().manual_seed(6)
    batches = [torch.randn(3, 4, generator=generator) * 10.0**k for k in (-3, 0, 3, 20)]
    gradients = [torch.randn(3, 4, generator=generator) * 10.0**k for k in (0, -2, 3)]
    quantizer = initialized(spec, batches[1], grad_factor=1.0)
    optimizer = optimizer(quantizer.parameters())
    seen = set()
    for step in range(steps):
        y = quantizer(batches[step % 4])
        assert all_usable(quantizer.scale), step
        y.backward(gradients[step % 3])
        optimizer.step()
        optimizer.zero_grad()
        scale = quantizer.scale
        assert all_usable(scale), step
        seen.add(scale.flatten()[0].item())
        if step % 100 == 0:
            assert y.isfinite().all(), step
            assert spec.qmin <= quantizer.zero_point.min() <= quantizer.zero_point.max() <= spec.qmax
    assert len(seen) > 5  # it did move


def test_a_scale_that_was_sent_too_low_comes_back():
    quantizer = initialized(grad_factor=1.0)
    make_step_size(quantizer, -50.0)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1)
    quantizer(torch.tensor([1.0])).backward(torch.tensor([-1.0]))  # clipped: dscale = -qmax
    optimizer.step()
    assert quantizer.scale == pytest.approx(0.7, abs=1e-6)  # 0.1 * 7 + eps, in float32


@pytest.mark.parametrize(("sent", "end"), [(1e6, 15), (-1e6, 0)])
def test_an_offset_beyond_the_range_is_brought_back_to_its_end(sent, end):
    quantizer = initialized(UINT4)
    quantizer.offset.data.fill_(sent)
    assert quantizer.zero_point == end
    quantizer(X)
    assert quantizer.offset.tolist() == [end]


@by_broken
@by_optimizer
def test_a_broken_gradient_leaves_the_scale_as_it_was(optimizer, broken):
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    quantizer = initialized(QuantSpec(bits=4, symmetric=False, axis=0), x)
    quantizer(x)
    before = bits(quantizer.scale), bits(quantizer.zero_point)
    for p in quantizer.parameters():
        p.grad = torch.tensor([broken, broken])
    optimizer(quantizer.parameters()).step()
    assert not quantizer.step_size.isfinite().any()
    for when in ("after the step", "after a forward pass"):
        assert_same_bits(before[0], bits(quantizer.scale), when)
        assert_same_bits(before[1], bits(quantizer.zero_point), when)
        quantizer(x)
    assert quantizer.step_size.isfinite().all()


def test_one_broken_channel_does_not_hold_back_the_others():
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    quantizer = initialized(QuantSpec(bits=4, axis=0), x)
    quantizer(x)
    before = bits(quantizer.scale)
    quantizer.step_size.grad = torch.tensor([math.nan, -1.0])
    torch.optim.SGD(quantizer.parameters(), lr=0.5).step()
    assert_same_bits(np.float32([before[0], before[1] + np.float32(0.5)]), bits(quantizer.scale))


@by_broken
def test_training_goes_on_after_a_broken_step(broken):
    quantizer = initialized(grad_factor=1.0)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1)
    before = bits(quantizer.scale)
    quantizer.step_size.grad = torch.tensor([broken])
    optimizer.step()
    optimizer.zero_grad()
    quantizer(torch.tensor([100.0])).backward(torch.tensor([-1.0]))
    optimizer.step()
    assert quantizer.scale == pytest.approx(before + 0.7, rel=1e-6)  # one float32 addition


@pytest.mark.parametrize("broken", [math.nan, math.inf, -5.0, 0.0], ids=str)
def test_the_scale_in_use_is_the_scale_that_is_saved(broken):
    quantizer = initialized()
    quantizer(X)
    make_step_size(quantizer, broken)
    used = bits(quantizer.scale)
    loaded = LearnedFakeQuantize(INT4)
    loaded.load_state_dict(quantizer.state_dict())
    assert_same_bits(used, bits(loaded.scale))
    make_step_size(loaded, math.nan)
    assert_same_bits(used, bits(loaded.scale), "after one more broken step")
    assert all_usable(loaded.scale)


@pytest.mark.parametrize("eps", [EPS, 1e-8, 0.1, 3e-30], ids=str)
def test_the_smallest_scale_is_the_same_before_and_after_a_forward_pass(eps):
    quantizer = initialized(eps=eps)
    make_step_size(quantizer, -1.0)
    assert_same_bits(np.float32(eps), bits(quantizer.scale))
    quantizer(X)
    assert_same_bits(np.float32(eps), bits(quantizer.scale))
    assert_same_bits(np.float32([eps]), bits(quantizer.step_size))


@pytest.mark.parametrize("spec", [QuantSpec(bits=32), QuantSpec(narrow_range=True), UINT4], ids=str)
def test_the_largest_scale_still_has_a_finite_grid(spec):
    quantizer = initialized(spec, torch.tensor([-1.0, 1.0]))
    make_step_size(quantizer, 3.4e38)
    assert quantizer(torch.tensor([-math.inf, math.inf, 3.4e38])).isfinite().all()


def test_both_ways_of_keeping_a_value_give_the_same():
    before = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    values = [-3.0, 0.5, math.nan, math.inf, -math.inf, 9.0]
    expected = np.float32([0.1, 0.5, 3.0, 4.0, 5.0, 8.0])
    assert_same_bits(expected, bits(bounded.within(torch.tensor(values), torch.tensor(before), 0.1, 8.0)))
    for value in (torch.tensor(values), torch.tensor(values).repeat_interleave(2)[::2]):
        value.requires_grad_()
        last = torch.tensor(before)
        kept = bounded.keep_within(value, last, 0.1, 8.0)
        assert_same_bits(expected, bits(kept))
        assert_same_bits(expected, bits(last))
        kept.sum().backward()
        assert value.grad.tolist() == [1.0] * 6


def test_without_other_processes_nothing_is_added_to_the_graph():
    x = torch.ones(3, requires_grad=True)
    assert bounded.keep_in_graph(x, nn.Parameter(torch.ones(1)), None) is x


# --- frozen ---------------------------------------------------------------------------------------


@by_optimizer
def test_a_frozen_scale_does_not_move(optimizer):
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    quantizer = initialized(QuantSpec(bits=4, symmetric=False, axis=0), x)
    optimizer = optimizer(quantizer.parameters())
    for _ in range(2):  # so that momentum goes on by itself
        quantizer(x).backward(torch.full_like(x, 1e-4))
        optimizer.step()
    quantizer.frozen = True
    scale, zero_point, y = bits(quantizer.scale), bits(quantizer.zero_point), bits(quantizer(x))
    for broken in (0.1, math.nan, math.inf, -7.0):
        for p in quantizer.parameters():
            p.grad = torch.full_like(p, broken)
        optimizer.step()
        for mode in (False, True):
            quantizer.train(mode)
            assert_same_bits(scale, bits(quantizer.scale), broken)
            assert_same_bits(zero_point, bits(quantizer.zero_point), broken)
            assert_same_bits(y, bits(quantizer(x)), broken)


def test_a_frozen_quantizer_passes_gradients_and_learns_nothing():
    quantizer = initialized()
    quantizer.frozen = True
    x = torch.tensor([0.3, 100.0], requires_grad=True)
    quantizer(x).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0]
    assert quantizer.step_size.grad is None


@pytest.mark.parametrize("moved", [77.0, -3.0, math.nan], ids=str)
def test_a_state_saved_while_frozen_has_the_frozen_scale(moved):
    quantizer = initialized()
    quantizer.frozen = True
    scale = bits(quantizer.scale)
    make_step_size(quantizer, moved)
    loaded = LearnedFakeQuantize(INT4)
    loaded.load_state_dict(quantizer.state_dict())
    assert loaded.frozen
    assert_same_bits(scale, bits(loaded.scale))
    loaded.frozen = False
    assert_same_bits(scale, bits(loaded.scale))


@pytest.mark.parametrize("moved", [77.0, -3.0, math.nan], ids=str)
def test_unfreezing_goes_on_from_the_frozen_scale(moved):
    quantizer = initialized()
    quantizer.frozen = True
    scale = bits(quantizer.scale)
    make_step_size(quantizer, moved)
    quantizer.frozen = False
    assert_same_bits(scale.reshape(1), bits(quantizer.step_size))
    quantizer(X)
    assert_same_bits(scale, bits(quantizer.scale))
    make_step_size(quantizer, 0.75)
    assert quantizer.scale == 0.75


def test_freezing_keeps_the_scale_of_the_moment_not_that_of_the_last_forward_pass():
    quantizer = initialized()
    quantizer(X)
    make_step_size(quantizer, 0.75)
    quantizer.frozen = True
    assert quantizer.scale == 0.75


def test_a_scale_is_not_overwritten_by_observing():
    quantizer = initialized()
    quantizer.path = "layers.0"
    with pytest.raises(RuntimeError, match=r"layers\.0 has a scale, which observing would overwrite"):
        quantizer.observing = True
    fq.nn.switch_quantizers(quantizer, observing=True)  # of a whole model: not for this one
    assert not quantizer.observing
    quantizer.reset_parameters()
    fq.nn.switch_quantizers(quantizer, observing=True)
    assert quantizer.observing


@pytest.mark.parametrize("moved", [77.0, math.nan], ids=str)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "not frozen"])
@pytest.mark.parametrize("make", [initialized, PACT], ids=["LearnedFakeQuantize", "PACT"])
def test_loading_a_model_without_quantizers_leaves_them_as_they_are(make, frozen, moved):
    model = nn.Sequential(nn.Linear(3, 3), make())
    model[1](X)
    model[1].frozen = frozen
    with torch.no_grad():
        for p in model[1].parameters():
            p.fill_(moved)
    before = bits(model[1].scale)
    model.load_state_dict({f"0.{k}": v for k, v in nn.Linear(3, 3).state_dict().items()}, strict=False)
    assert_same_bits(before, bits(model[1].scale))


# --- switches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", reference.NUMERICS)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_quantizing_without_a_scale_is_an_error_that_names_the_path(numerics, frozen):
    for where in WHERE.values():
        quantizer = LearnedFakeQuantize(QuantSpec(numerics=numerics, **where), shape=SHAPE, path="blocks.3.act")
        quantizer.frozen = frozen
        with pytest.raises(RuntimeError, match=r"LearnedFakeQuantize at blocks\.3\.act has no scale yet"):
            quantizer(torch.ones(SHAPE))
        with pytest.raises(RuntimeError, match=r"blocks\.3\.act has no scale yet"):
            quantizer.qparams()
        assert quantizer.scale.isnan().all()


def test_not_quantizing_passes_the_tensor_itself():
    quantizer = LearnedFakeQuantize(INT4)
    quantizer.quantizing = False
    assert quantizer(X) is X


def test_observing_then_quantizing_by_a_switch_of_the_whole_model():
    model = nn.Sequential(LearnedFakeQuantize(INT4), LearnedFakeQuantize(UINT4, init="lsq"))
    quantizers.switch_quantizers(model, observing=True)
    assert model(X) is X
    quantizers.switch_quantizers(model, observing=False)
    assert_same_bits(bits(initialized().scale), bits(model[0].scale))
    assert_same_bits(lsq(X.numpy(), 15), bits(model[1].scale))


def test_in_evaluation_nothing_is_observed():
    quantizer = LearnedFakeQuantize(INT4)
    quantizer.observing = True
    quantizer(X)
    scale = bits(quantizer.scale)
    y = bits(quantizer.eval()(X * 9))
    quantizer.observing = False
    assert_same_bits(y, bits(quantizer(X * 9)), "quantized, not only passed")
    assert_same_bits(scale, bits(quantizer.scale))


@pytest.mark.parametrize("switch", ["observing", "quantizing", "frozen"])
def test_switches_are_saved(switch):
    quantizer = LearnedFakeQuantize(INT4) if switch == "observing" else initialized()
    loaded = LearnedFakeQuantize(INT4)
    setattr(quantizer, switch, not getattr(quantizer, switch))
    loaded.load_state_dict(quantizer.state_dict())
    assert getattr(loaded, switch) == getattr(quantizer, switch)
    with pytest.raises(TypeError, match=f"`{switch}` is a switch"):
        setattr(loaded, switch, 1)


# --- state ----------------------------------------------------------------------------------------


def saved(quantizer):
    file = io.BytesIO()
    torch.save(quantizer.state_dict(), file)
    file.seek(0)
    shape = None if quantizer.spec.axis is None else SHAPE
    other = LearnedFakeQuantize(quantizer.spec, shape=shape, init=quantizer.init)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


COPIES = {
    "state_dict": saved,
    "deepcopy": copy.deepcopy,
    "pickle": lambda quantizer: pickle.loads(pickle.dumps(quantizer)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@by_where
def test_a_copy_goes_on_like_the_original(where, copied):
    x, dy = whole_numbers() / 8, whole_numbers(seed=1) / 8
    quantizer = initialized(QuantSpec(bits=4, symmetric=False, **where), x)
    other = copied(quantizer)
    results = []
    for module in (quantizer, other):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(3):
            y = module(x)
            y.backward(dy)
            optimizer.step()
        results.append([bits(t) for t in (y, module.scale, module.zero_point, *module.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert_same_bits(expected, actual)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("init", ["lsq", observers.Histogram(steps=5)], ids=["lsq", "Histogram"])
def test_a_copy_made_while_observing_has_what_was_seen(copied, init):
    quantizer = LearnedFakeQuantize(INT4, init=init)
    quantizer.observing = True
    quantizer(X)
    other = copied(quantizer)
    other.observing = quantizer.observing = False
    assert_same_bits(bits(quantizer.scale), bits(other.scale))
    assert all_usable(other.scale)


def test_a_copy_is_independent():
    quantizer = initialized()
    other = copy.deepcopy(quantizer)
    quantizer.step_size.grad = torch.tensor([math.nan])
    make_step_size(other, 0.25)
    other(X)
    torch.optim.SGD(quantizer.parameters(), lr=1.0).step()
    assert_same_bits(bits(initialized().scale), bits(quantizer.scale))


@by_where
def test_the_state_has_the_same_names_and_shapes_before_and_after(where):
    spec = QuantSpec(symmetric=False, **where)
    fresh = LearnedFakeQuantize(spec, shape=SHAPE)
    before = {k: (v.shape, v.dtype) for k, v in fresh.state_dict().items()}
    fresh.initialize(whole_numbers())
    assert {k: (v.shape, v.dtype) for k, v in fresh.state_dict().items()} == before
    assert set(before) == {"step_size", "offset", "grid", "switches"}


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.float16),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("make", [lambda: initialized(UINT4), lambda: PACT(4, 1.7)], ids=["learned", "PACT"])
def test_parameters_and_scales_stay_float32(make, cast):
    expected, model = make(), cast(nn.Sequential(nn.Linear(3, 3), make()))
    quantizer = model[1]
    for p in (*quantizer.parameters(), *(b for b in quantizer.buffers() if b.is_floating_point())):
        assert p.dtype == torch.float32
    assert_same_bits(bits(expected.scale), bits(quantizer.scale))
    data = X.to(model[0].weight.dtype)
    y = quantizer(data)
    assert y.dtype == data.dtype
    assert torch.equal(y, expected(data))
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in quantizer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing_but_the_data(dtype):
    model = nn.Sequential(nn.Linear(3, 3), initialized(UINT4))
    with torch.autocast("cpu", dtype=dtype):
        hidden = model[0](X[None])
        y = model(X[None])
    assert (hidden.dtype, y.dtype) == (dtype, dtype)
    assert torch.equal(y, model[1](hidden))
    y.float().sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_state_of_another_granularity_names_both_specs():
    per_tensor, per_channel = initialized(), LearnedFakeQuantize(QuantSpec(bits=4, axis=0), shape=(3, 2))
    with pytest.raises(RuntimeError, match=r"int4, per tensor\).*int4, per channel on axis 0"):
        per_channel.load_state_dict(per_tensor.state_dict())
    with pytest.raises(RuntimeError, match=r"act: .*int4, per channel on axis 0\).*int4, per tensor"):
        nn.ModuleDict({"act": per_tensor}).load_state_dict(nn.ModuleDict({"act": per_channel}).state_dict())


def test_a_state_of_another_number_of_channels_names_the_spec():
    four, three = (LearnedFakeQuantize(QuantSpec(axis=0), shape=(n, 2)) for n in (4, 3))
    with pytest.raises(RuntimeError, match=r"`step_size` has shape \(4,\).*\n?.*int8, per channel on axis 0"):
        three.load_state_dict(four.state_dict())


def test_a_refused_state_changes_nothing():
    other = initialized(QuantSpec(bits=8)).state_dict()
    observing = LearnedFakeQuantize(INT4)
    observing.observing = True
    observing(X)
    frozen = initialized()
    frozen.frozen = True
    make_step_size(frozen, 77.0)
    for quantizer in (observing, frozen):
        with pytest.raises(RuntimeError, match="spec"):
            quantizer.load_state_dict(other)
        assert_same_bits(bits(initialized().scale), bits(quantizer.qparams().scale))


# --- PACT -----------------------------------------------------------------------------------------


def pact_values(alpha):
    a = np.float32(alpha)
    edges = [a, np.nextafter(a, np.float32(9)), np.nextafter(a, np.float32(0)), 0, -0.0, 1e-45, -1e-45, np.nan]
    ties = (np.arange(-2, 34) + 0.5) * a / 15
    return np.concatenate([np.float32([*edges, np.inf, -np.inf, 3e38]), ties.astype(np.float32)])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("alpha", [3.0, 0.1, 1.7, 1e30])
def test_pact_clips_at_alpha_and_quantizes(width, alpha):
    x = pact_values(alpha)
    qmax = 2**width - 1
    scale = np.float32(alpha) / np.float32(qmax)
    clipped = np.clip(x, np.float32(0), np.float32(alpha))
    expected, _ = reference.fake_quantize(clipped, scale, 0, 0, qmax, "onnx")
    quantizer = PACT(width, alpha)
    assert_same_bits(expected, bits(quantizer(torch.from_numpy(x))))
    assert_same_bits(scale, bits(quantizer.qparams().scale))
    assert quantizer.qparams().zero_point == 0


@pytest.mark.parametrize("alpha", [3.0, 0.1, 1.7])
def test_the_gradients_of_pact(alpha):
    values = pact_values(alpha)
    x = torch.from_numpy(values).requires_grad_()
    dy = torch.arange(1.0, len(values) + 1)  # a sum of whole numbers is exact
    quantizer = PACT(4, alpha)
    quantizer(x).backward(dy)
    inside = (values >= 0) & (values <= np.float32(alpha))
    assert_same_bits(np.where(inside, dy.numpy(), np.float32(0)), bits(x.grad))
    assert quantizer.alpha.grad.tolist() == [dy.numpy()[values > np.float32(alpha)].sum()]


@pytest.mark.parametrize(("dtype", "dy"), [(torch.float16, 32.0), (torch.bfloat16, 1.0)], ids=["float16", "bfloat16"])
def test_the_gradient_of_alpha_is_a_float32_sum_whatever_the_data(dtype, dy):
    quantizer = PACT(8, alpha=1.0)
    x = torch.full((4097,), 2.0, dtype=dtype)
    quantizer(x).backward(torch.full_like(x, dy))
    assert quantizer.alpha.grad.tolist() == [4097 * dy]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_pact_in_other_dtypes_is_rounded_once(dtype):
    x = torch.linspace(-1, 3, 401).to(dtype)
    quantizer = PACT(4, alpha=1.7)
    wide = x.double() if dtype == torch.float64 else x.float()
    expected = fq.fake_quantize(wide.clamp(min=0), quantizer.scale, 0, quantizer.spec).to(dtype)
    assert torch.equal(quantizer(x), expected)


@by_optimizer
def test_alpha_is_usable_whatever_the_optimizer_does(optimizer):
    quantizer = PACT(4, alpha=1.0)
    optimizer = optimizer(quantizer.parameters())
    x = torch.tensor([0.5, 2.0, 1e30])
    for step in range(1_000):
        y = quantizer(x)
        y.backward(torch.full_like(x, (1.0, -1.0, 1e30, math.nan, 0.0)[step % 5 if step < 500 else step % 3]))
        optimizer.step()
        optimizer.zero_grad()
        assert all_usable(quantizer.scale), step
        assert y.isfinite().all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -5.0], ids=str)
def test_the_alpha_in_use_is_the_alpha_that_is_saved(broken):
    quantizer, loaded = PACT(4, alpha=1.5), PACT(4)
    quantizer(X)
    quantizer.alpha.data.fill_(broken)
    used = bits(quantizer.scale)
    assert 0 < used < math.inf
    loaded.load_state_dict(quantizer.state_dict())
    assert_same_bits(used, bits(loaded.scale))
    loaded.alpha.data.fill_(math.nan)
    assert_same_bits(used, bits(loaded.scale), "after one more broken step")


def test_a_frozen_alpha_does_not_move():
    quantizer = PACT(4, alpha=1.5)
    quantizer.frozen = True
    before = bits(quantizer.scale), bits(quantizer(X))
    for moved in (3.0, -1.0, math.nan):
        quantizer.alpha.data.fill_(moved)
        assert_same_bits(before[0], bits(quantizer.scale))
        assert_same_bits(before[1], bits(quantizer(X)))
    quantizer.frozen = False
    assert_same_bits(before[0], bits(quantizer.scale))
    assert quantizer.alpha == 1.5


def test_pact_that_does_not_quantize_is_a_relu():
    quantizer = PACT(4, alpha=1.0)
    quantizer.quantizing = False
    assert quantizer(X).tolist() == [0.0, 0.5, 3.0]


@pytest.mark.parametrize(
    "options",
    [
        dict(alpha=0.0),
        dict(alpha=-1.0),
        dict(alpha=math.nan),
        dict(alpha=math.inf),
        dict(bits=0),
        dict(bits=32),
        dict(eps=0.0, alpha=1.0),
        dict(eps=-1.0, alpha=-0.5),
        dict(eps=1e-46, alpha=1.0),
    ],
    ids=str,
)
def test_pact_refuses(options):
    with pytest.raises(ValueError, match="must be"):
        PACT(**options)


# --- param_groups ---------------------------------------------------------------------------------


def model_with_everything():
    shared = LearnedFakeQuantize(INT4)
    return nn.ModuleDict(
        {
            "linear": nn.Linear(3, 3),
            "act": LearnedFakeQuantize(UINT4),
            "nested": nn.Sequential(shared, nn.Linear(3, 3, bias=False), shared),
            "fixed": LearnedFakeQuantize(UINT4, learn_zero_point=False),
            "pact": PACT(4),
            "calibrated": FakeQuantize(INT4),
        }
    )


def names(model, group):
    by_id = {id(p): name for name, p in model.named_parameters()}
    return sorted(by_id[id(p)] for p in group["params"])


def test_scales_have_a_group_of_their_own():
    model = model_with_everything()
    others, scales = param_groups(model)
    assert names(model, scales) == ["act.offset", "act.step_size", "fixed.step_size", "nested.0.step_size"]
    assert names(model, others) == ["linear.bias", "linear.weight", "nested.1.weight", "pact.alpha"]
    assert set(others) == {"params"}
    assert scales["weight_decay"] == 0


def test_options_are_those_of_the_scales():
    groups = param_groups(model_with_everything(), lr=0.5, betas=(0.5, 0.9))
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    assert [(g["lr"], g["weight_decay"], g["betas"][0]) for g in optimizer.param_groups] == [
        (0.1, 0.3, 0.9),
        (0.5, 0.0, 0.5),
    ]


def test_modules_that_share_a_parameter_give_it_once():
    a, b = LearnedFakeQuantize(INT4), LearnedFakeQuantize(INT4)
    b.step_size = a.step_size
    (group,) = param_groups(nn.Sequential(a, b))
    assert [id(p) for p in group["params"]] == [id(a.step_size)]


def test_a_group_without_parameters_is_left_out():
    assert [len(g["params"]) for g in param_groups(nn.Linear(2, 2))] == [2]
    assert param_groups(nn.ReLU()) == []
    (group,) = param_groups(initialized())
    assert group["weight_decay"] == 0


def test_weight_decay_does_not_reach_the_scales():
    model = nn.Sequential(nn.Linear(3, 3), initialized(UINT4))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.1, weight_decay=0.5)
    before = [bits(p) for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = [bits(p) for p in model.parameters()]
    assert [np.array_equal(b, a) for b, a in zip(before, after, strict=True)] == [False, False, True, True]


# --- bad input ------------------------------------------------------------------------------------

BAD = {
    "no spec": (dict(spec="int8"), "`spec` must be a QuantSpec"),
    "init": (dict(init="mean"), '`init` must be "lsq" or an observer'),
    "an observer's class": (dict(init=observers.MinMax), '`init` must be "lsq" or an observer'),
    "zero point of a symmetric grid": (dict(learn_zero_point=True), "there is none to learn"),
    "per token": (dict(spec=QuantSpec(axis=-1, group_size=-1)), "cannot be learned"),
    "no shape": (dict(spec=QuantSpec(axis=0)), "pass `shape`"),
    "shape that varies": (dict(spec=QuantSpec(axis=0), shape=(None, 3)), "no fixed shape"),
    "eps 0": (dict(eps=0.0), "`eps` must be finite and greater than 0"),
    "eps NaN": (dict(eps=math.nan), "`eps` must be finite and greater than 0"),
    "eps inf": (dict(eps=math.inf), "`eps` must be finite and greater than 0"),
    "eps 0 in float32": (dict(eps=1e-46), "`eps` must be finite and greater than 0"),
    "grad_factor NaN": (dict(grad_factor=math.nan), "`grad_factor`"),
    "grad_factor inf": (dict(grad_factor=math.inf), "`grad_factor`"),
    "grad_factor of another type": (dict(grad_factor="lsq"), "`grad_factor`"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LearnedFakeQuantize(**{"spec": INT4, **options})


@pytest.mark.parametrize("x", [torch.arange(3), torch.ones(3, dtype=torch.complex64)], ids=["int64", "complex64"])
def test_data_that_is_not_of_a_float_dtype(x):
    quantizer = initialized(path="blocks.3.act")
    for call in (quantizer, quantizer.initialize):
        with pytest.raises(
            (TypeError, NotImplementedError), match=r"blocks\.3\.act.*\n?.*`x` must be a tensor of float32"
        ):
            call(x)
