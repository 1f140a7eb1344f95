"""A gradient that nothing else refers to is overwritten by the backward pass of fake quantization; others are not."""

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
compiled_nodes = pytest.importorskip("fakequant._backends.torch.compiled_nodes")

SPEC = fq.QuantSpec(bits=4)


def quantized(x):
    return fq.fake_quantize(x, torch.tensor(0.1), 0, SPEC)


def data(*shape):
    return torch.linspace(-2, 2, torch.Size(shape).numel()).reshape(shape)


def test_gradients_that_are_kept_are_not_changed():
    x = data(6, 8).requires_grad_()
    given = torch.ones(6, 8)
    quantized(x).backward(given)
    assert_same_bits(given, torch.ones(6, 8))
    seen = []
    middle = x * 1.0
    middle.retain_grad()
    y = quantized(middle)
    y.retain_grad()
    y.register_hook(seen.append)
    z = y * 2.0
    z.sum().backward()
    for kept in (y.grad, *seen):
        assert_same_bits(kept, torch.full((6, 8), 2.0))
    assert (middle.grad == 0).any()


def test_gradients_shared_by_several_functions_are_not_changed():
    a, b, c = (data(6, 8).requires_grad_() for _ in range(3))
    # The gradient of an addition is the same tensor for both operands.
    (quantized(a) + b + quantized(c)).backward(torch.ones(6, 8))
    assert_same_bits(b.grad, torch.ones(6, 8))
    for x in (a, c):
        assert ((x.grad == 0) | (x.grad == 1)).all()
        assert (x.grad == 0).any()
    views = [one.requires_grad_() for one in (data(6, 8), data(6, 8))]
    joined = torch.cat([quantized(views[0]), views[1]])
    (joined * 1.0).sum().backward()
    assert_same_bits(views[1].grad, torch.ones(6, 8))


def test_second_derivatives_do_not_overwrite():
    x = data(6, 8).requires_grad_()
    (first,) = torch.autograd.grad((quantized(x) ** 2).sum(), x, create_graph=True)
    before = first.detach().clone()
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_same_bits(first.detach(), before)
    assert set(second.tolist()[0]) <= {0.0, 2.0}


def test_second_use_of_a_graph_returns_the_same():
    x = data(6, 8).requires_grad_()
    y = quantized(x) * 2.0
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert_same_bits(first, second)


@pytest.mark.skipif(compiled_nodes.compiled is None, reason="Python nodes always write to new memory")
def test_memory_of_the_last_gradient_is_used_again():
    x = data(64, 64).requires_grad_()
    z = quantized(x) * 2.0
    with torch.profiler.profile(profile_memory=True) as profile:
        z.sum().backward()
    (node,) = (event for event in profile.events() if event.name == "FakeQuantizeBackward")
    assert node.cpu_memory_usage == 0
