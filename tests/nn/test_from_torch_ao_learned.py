"""Learned quantizers of torch.ao keep their bits and gradients when they are taken over."""

import numpy as np
import pytest

from fakequant import QuantSpec, reference
from fakequant.nn import LearnedFakeQuantize, from_torch_ao
from fakequant.testing.assertions import assert_same_bits
from torch_ao_cases import (
    AFFINE,
    CHANNEL_AFFINE,
    CHANNEL_SYMMETRIC,
    INT8,
    NARROW_8,
    SHAPES,
    SIGNED,
    SYMMETRIC,
    UINT8,
    UNSIGNED,
    _LearnableFakeQuantize,
    assert_same_results,
    batches,
    gradients,
    hostile,
    learnable,
    tq,
)
from torch_bridge import to_numpy, torch

# torch.ao is deprecated and warns in many ways.
pytestmark = [pytest.mark.usefixtures("torch_on_one_thread"), pytest.mark.filterwarnings("ignore")]

# A few units in the last place of float32: the only difference between torch's gradients of a scale and ours.
SUMMED_IN_ANOTHER_ORDER = 1e-5

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
by_scaling = pytest.mark.parametrize("scaling", [False, True], ids=["unscaled gradients", "scaled gradients"])


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
    """Asserts equal bits of y and dx, and gradient sums at least as exact as torch's."""
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
def test_a_learned_module_has_torchs_bits_and_at_least_as_exact_gradient_sums(arguments, spec, scaling, way):
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
def test_a_learned_zero_point_is_rounded_as_torch_does_forward_and_backward(zero_point, scaling):
    theirs = learnable(AFFINE, INT8, scaling=scaling)
    theirs.zero_point.data.fill_(zero_point)
    theirs.scale.data.fill_(0.25)
    ours = from_torch_ao(theirs)
    x = torch.arange(-1200, 1200) / 16
    assert_learned_alike(theirs, ours, x, torch.ones_like(x))


@pytest.mark.parametrize("scale", [0.0, -3.0, 1e-20, 1e-7, 1e-5], ids=str)
@pytest.mark.parametrize("options", [{}, dict(eps=2**-12)], ids=["default eps", "observer's eps 2^-12"])
@pytest.mark.parametrize("learning", [True, False], ids=["learning", "not learning"])
def test_a_learned_scale_that_is_too_small_is_clamped_as_torch_does(scale, options, learning):
    theirs = learnable(AFFINE, INT8, **options)  # has its own eps, independent of its observer's
    theirs.toggle_qparam_learning(enabled=learning)
    theirs.scale.data.fill_(scale)
    ours = from_torch_ao(theirs)
    x = torch.linspace(-1, 1, 101) * 1e-4
    assert_same_results(theirs, ours, x, torch.ones_like(x))


@by_learned
def test_training_steps_keep_learned_scales_close_to_torchs(arguments, spec):
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
def test_a_symmetric_learned_module_resets_its_zero_point_as_torch_does(scheme, scaling):
    # The optimizer moves torch's zero point, and the next forward pass sets it back to 0.
    shape = SHAPES[0] if scheme == CHANNEL_SYMMETRIC else None
    theirs = learnable(scheme, INT8, shape, scaling=scaling)
    x = next(batches(shape or SHAPES[None], seed=7))
    (theirs(100 * x)).sum().backward()
    torch.optim.SGD(theirs.parameters(), lr=1e-3).step()
    assert theirs.zero_point.any()
    ours = from_torch_ao(theirs)
    assert_same_bits(theirs(x), ours(x))


@pytest.mark.parametrize("zero_point", [-57.0, 0.0, 20.0], ids=str)
def test_a_module_taken_over_with_learning_off_is_frozen(zero_point):
    theirs = learnable(AFFINE, INT8)
    theirs.zero_point.data.fill_(zero_point)
    theirs.scale.data.fill_(0.25)
    theirs.toggle_qparam_learning(enabled=False)
    ours = from_torch_ao(theirs)
    assert ours.frozen
    x = torch.arange(-1200, 1200) / 16
    assert_same_results(theirs, ours, x, gradients(x))


@by_learned
def test_a_learned_module_taken_over_with_fake_quantization_off_passes_tensors(arguments, spec):
    theirs = learnable(*arguments)
    theirs.toggle_fake_quant(enabled=False)
    ours = from_torch_ao(theirs)
    x = next(batches(SHAPES[spec.get("axis")], seed=7))
    assert_same_results(theirs, ours, x, gradients(x))
    theirs.toggle_fake_quant(enabled=True)
    ours.quantizing = True
    assert_same_bits(theirs(x), ours(x))


@pytest.mark.parametrize("seen", [False, True], ids=["without data", "with data"])
def test_a_learned_module_in_static_mode_has_torchs_bits_or_is_refused(seen):
    # In static mode every forward pass takes the observer's scale; before the first one it is a meaningless 1.
    theirs = _LearnableFakeQuantize(tq.MinMaxObserver, -128, 127, dtype=torch.qint8, qscheme=AFFINE)
    first, second = batches(SHAPES[None], 2)
    if seen:
        theirs(first)
    try:
        ours = from_torch_ao(theirs)
        y = ours(second)
    except (RuntimeError, ValueError):
        return
    assert_same_bits(theirs(second), y)
