"""Second derivatives, in which rounding is straight-through again."""

from functools import partial

import pytest

import fakequant as fq
from straight_through import AFFINE, Case, each_spec, inside, make, straight_through, torch

grad, jacfwd, jacrev = torch.func.grad, torch.func.jacfwd, torch.func.jacrev


@pytest.mark.parametrize("gradient", ["clipped", "pass"])
@each_spec
def test_double_backward_equals_the_straight_through_formula(spec, gradient):
    case, c = make(spec), torch.randn(5, 6)
    x = case.x.clone().requires_grad_()
    y = fq.fake_quantize(x, *case[1:], spec, gradient=gradient)
    keep = inside(case, spec) if gradient == "clipped" else torch.ones(5, 6)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * y**2 * keep)
    torch.testing.assert_close(torch.autograd.grad(first, x, c)[0], 6 * y * c * keep)


@each_spec
def test_learned_double_backward_equals_straight_through_autograd(spec):
    case = make(spec, dtype=torch.float64, fraction=True)
    weights = Case(*(torch.randn_like(v) for v in case))

    def twice(function):
        leaves = [v.clone().requires_grad_() for v in case]
        first = torch.autograd.grad(function(*leaves, spec).pow(3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum((g * w).sum() for g, w in zip(first, weights)), leaves)
        return first + second

    for actual, wanted in zip(twice(fq.fake_quantize_learned), twice(straight_through), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


HESSIANS = {
    "reverse over reverse": lambda f: jacrev(jacrev(f)),
    "forward over reverse": torch.func.hessian,
    "reverse over forward": lambda f: jacrev(jacfwd(f)),
    "forward over forward": lambda f: jacfwd(jacfwd(f)),
    "backward over grad": lambda f: partial(torch.autograd.functional.jacobian, grad(f)),
}


@pytest.mark.parametrize("hessian", HESSIANS.values(), ids=HESSIANS)
def test_hessians_by_any_nesting_of_transforms_are_equal(hessian):
    case, spec = make(AFFINE()), AFFINE()
    result = hessian(lambda x: fq.fake_quantize(x, *case[1:], spec).square().sum())(case.x)
    assert torch.equal(result.reshape(30, 30), 2 * torch.diag(inside(case, spec).flatten().float()))


def test_learned_hessians_equal_straight_through_autograd():
    case, spec = make(AFFINE(), dtype=torch.float64, fraction=True), AFFINE()

    def hessian(function):
        loss = lambda *a: function(*a, spec).pow(3).sum()  # noqa: E731
        return jacrev(jacrev(loss, argnums=(0, 1, 2)), argnums=(0, 1, 2))(*case)

    torch.testing.assert_close(hessian(fq.fake_quantize_learned), hessian(straight_through), rtol=1e-5, atol=1e-5)
