"""`LearnedFakeQuantize`: the scale stays usable after any optimizer step."""

import math

import numpy as np
import pytest

from fakequant import QuantSpec
from fakequant._backends.checks import EPS
from fakequant.testing.assertions import assert_same_bits
from learned_cases import INT4, UINT4, X, all_usable, bits, by_broken, by_optimizer, initialized, make_step_size
from thoroughness import ALL

torch = pytest.importorskip("torch")
nn = torch.nn
bounded = pytest.importorskip("fakequant.nn._bounded_parameters")
LearnedFakeQuantize = pytest.importorskip("fakequant.nn").LearnedFakeQuantize


@by_optimizer
@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        (QuantSpec(bits=2), 10_000 if ALL else 1_000),
        (QuantSpec(bits=4, symmetric=False, axis=0), 1_000 if ALL else 500),
    ],
    ids=["per tensor", "per channel, zero point too"],
)
def test_scale_is_usable_after_every_optimizer_step_and_forward_pass(spec, steps, optimizer):
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
    assert len(seen) > 5  # the scale moved


def test_scale_pushed_below_zero_recovers():
    quantizer = initialized(grad_factor=1.0)
    make_step_size(quantizer, -50.0)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1)
    quantizer(torch.tensor([1.0])).backward(torch.tensor([-1.0]))  # clipped: dscale = -qmax
    optimizer.step()
    assert quantizer.scale == pytest.approx(0.7, abs=1e-6)  # 0.1 * 7 + eps, in float32


@pytest.mark.parametrize(("sent", "end"), [(1e6, 15), (-1e6, 0)])
def test_offset_beyond_the_range_is_clamped_to_its_end(sent, end):
    quantizer = initialized(UINT4)
    quantizer.offset.data.fill_(sent)
    assert quantizer.zero_point == end
    quantizer(X)
    assert quantizer.offset.tolist() == [end]


@by_broken
@by_optimizer
def test_nonfinite_gradient_leaves_the_scale_unchanged(optimizer, broken):
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


def test_nonfinite_gradient_of_one_channel_leaves_the_other_channels_learning():
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    quantizer = initialized(QuantSpec(bits=4, axis=0), x)
    quantizer(x)
    before = bits(quantizer.scale)
    quantizer.step_size.grad = torch.tensor([math.nan, -1.0])
    torch.optim.SGD(quantizer.parameters(), lr=0.5).step()
    assert_same_bits(np.float32([before[0], before[1] + np.float32(0.5)]), bits(quantizer.scale))


@by_broken
def test_training_continues_after_a_nonfinite_gradient(broken):
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
def test_saved_scale_is_the_scale_in_use(broken):
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
def test_eps_bounds_the_scale_before_and_after_a_forward_pass(eps):
    quantizer = initialized(eps=eps)
    make_step_size(quantizer, -1.0)
    assert_same_bits(np.float32(eps), bits(quantizer.scale))
    quantizer(X)
    assert_same_bits(np.float32(eps), bits(quantizer.scale))
    assert_same_bits(np.float32([eps]), bits(quantizer.step_size))


@pytest.mark.parametrize("spec", [QuantSpec(bits=32), QuantSpec(narrow_range=True), UINT4], ids=str)
def test_largest_scale_still_has_a_finite_grid(spec):
    quantizer = initialized(spec, torch.tensor([-1.0, 1.0]))
    make_step_size(quantizer, 3.4e38)
    assert quantizer(torch.tensor([-math.inf, math.inf, 3.4e38])).isfinite().all()


def test_within_and_keep_within_give_the_same_values():
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


def test_keep_in_graph_is_a_no_op_without_other_processes():
    x = torch.ones(3, requires_grad=True)
    assert bounded.keep_in_graph(x, nn.Parameter(torch.ones(1)), None) is x
