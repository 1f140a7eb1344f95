"""`nn.FakeQuantize`: gradients, tangents, vmap, and inference mode."""

import copy
from contextlib import nullcontext

import pytest

from fake_quantize_cases import (
    AFFINE,
    BATCHES,
    DY,
    WIDE,
    assert_unchanged,
    each_gradient,
    each_observer,
    each_running,
    each_way,
    leaf,
    run,
    state_of,
    ways_of,
    without_compiled_nodes,
)
from fakequant.testing.assertions import assert_same_bits, assert_same_state

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")
forward_ad = pytest.importorskip("torch.autograd.forward_ad")


@each_way
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("gradient", "requires_grad", "kept"), [("clipped", True, 6), ("pass", True, 0), ("clipped", False, 0)]
)
def test_backward_keeps_one_bit_per_element_or_nothing(gradient, requires_grad, kept, training, way):
    module = fqnn.FakeQuantize(AFFINE, gradient=gradient)
    module(BATCHES[0])
    saved, x = [], BATCHES[1].flatten()[:43].clone().requires_grad_(requires_grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t), way():
        y = module.train(training)(x)
    assert sum(saved) == kept
    assert y.requires_grad == requires_grad


@each_way
@each_gradient
def test_two_forward_passes_before_one_backward_give_the_gradients_of_each(gradient, way):
    module = fqnn.FakeQuantize(AFFINE, observers.MovingAverage(0.3), gradient=gradient)
    twin = fqnn.FakeQuantize(AFFINE, observers.MovingAverage(0.3), gradient=gradient)
    expected = [run(twin, x, dy) for x, dy in zip(BATCHES, (DY, -DY, 2 * DY), strict=True)]
    xs = [leaf(x) for x in BATCHES]
    with way():
        ys = [module(x) for x in xs]
        grads = torch.autograd.grad(ys, xs, (DY, -DY, 2 * DY))
    for (y, dx), actual_y, actual_dx in zip(expected, ys, grads, strict=True):
        assert_same_bits(y, actual_y, "y")
        assert_same_bits(dx, actual_dx, "dx")
    assert_same_state(twin, module)


@each_way
@each_gradient
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradient_can_be_taken_twice_and_differentiated(training, gradient, way):
    module = fqnn.FakeQuantize(AFFINE, gradient=gradient)
    module(BATCHES[1])
    x, dy = leaf(BATCHES[2]), leaf(DY)
    with way():
        y = module.train(training)(x)
        first = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
        again = torch.autograd.grad(y, x, dy, create_graph=True)[0]
        (second,) = torch.autograd.grad(again, dy, torch.full((6, 8), 3.0))
    assert_same_bits(first, again, "dx")
    assert_same_bits(
        torch.where(first == 0, 0.0, 3.0) if gradient == "clipped" else torch.full((6, 8), 3.0), second, "d2"
    )
    assert (first == 0).any() == (gradient == "clipped")


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@each_gradient
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("way", [nullcontext, without_compiled_nodes], ids=["nodes", "Python"])
def test_forward_mode_tangent_matches_the_gradient(training, gradient, way):
    module, twin = (fqnn.FakeQuantize(AFFINE, gradient=gradient) for _ in range(2))
    for m in (module, twin):
        m(BATCHES[1])
        m.train(training)
    expected = run(twin, BATCHES[2])
    with way(), forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(BATCHES[2], DY)))
    assert_same_bits(expected[0], y, "y")
    assert_same_bits(expected[1], tangent, "tangent")
    assert_same_state(twin, module)


def test_vmap_uses_a_range_per_example_and_stores_nothing():
    module = fqnn.FakeQuantize(AFFINE)
    module(BATCHES[0])
    before = state_of(module)
    expected = torch.stack([copy.deepcopy(module)(x) for x in WIDE])
    with pytest.warns(RuntimeWarning, match="do not remember what they see.\nCall `calibrate` first"):
        assert_same_bits(expected, torch.func.vmap(module)(WIDE), "y")
    assert_unchanged(before, module)
    assert_same_bits(module.eval()(WIDE), torch.func.vmap(module)(WIDE), "y")
    assert_unchanged(before, module)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@each_observer
def test_no_grad_and_inference_mode_compute_the_same_values(observer, mode):
    for way in ways_of(observer):
        assert_same_without_graph(observer, mode, way)


def assert_same_without_graph(observer, mode, way):
    module, twin = (fqnn.FakeQuantize(AFFINE, observer) for _ in range(2))
    for training, x in zip((True, True, False), BATCHES, strict=True):
        expected = twin.train(training)(x)
        with mode(), way():
            y = module.train(training)(leaf(x))
        assert not y.requires_grad
        assert_same_bits(expected, y.clone(), "y")
    assert_same_state(twin, module)
    run(module.train(), BATCHES[0])


@each_running
def test_quantizer_made_in_inference_mode_works_outside_it(observer):
    with torch.inference_mode():
        module = fqnn.FakeQuantize(AFFINE, observer)
    twin = fqnn.FakeQuantize(AFFINE, observer)
    for x in BATCHES:
        assert_same_bits(twin(x), module(x), "y")
    assert_same_state(twin, module)
