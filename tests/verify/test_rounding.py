"""Tolerances for rounding, found per element by repeating a computation with rounding errors."""

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional
rounding = pytest.importorskip("fakequant._verify.rounding_bounds")

UNIT = 2.0**-24


def tolerance(compute, number=0):
    return rounding.Rounding(compute, compute()).tolerance(number)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_tolerance_of_a_sum_is_relative_to_its_terms_not_to_its_result():
    """The terms cancel, so the result is far smaller than they are."""
    x = torch.cat([randn(64, 500), -randn(64, 500)], 1) * 1000
    y = torch.ones(1000, 1)
    found = tolerance(lambda: [x @ y])
    magnitude = x.double().abs().sum(1, keepdim=True)
    assert bool((found >= 32 * UNIT * magnitude).all())
    assert bool((found <= 128 * UNIT * magnitude).all())


EXACT = {
    "masked": lambda x: x.masked_fill(x > 0, -1e9),
    "-inf": lambda x: x.masked_fill(x > 0, -torch.inf),
    "selected": lambda x: torch.where(x > 0, x, 2.0)[:, 1:].flip(1),
    "largest": lambda x: torch.relu(x).amax(1),
    "moved": lambda x: torch.cat([x.t(), x.t()]).contiguous().view(-1),
    "in place": lambda x: F.relu(x.clone(), inplace=True).clamp_(max=1).t_().unsqueeze_(0).masked_fill_(x > 0.5, 7.0),
}


@pytest.mark.parametrize("function", EXACT.values(), ids=EXACT)
def test_operations_that_only_move_or_select_have_no_tolerance(function):
    x = randn(8, 8)
    found = rounding.Rounding(lambda: [function(x)], [function(x)])
    assert not found.changes[0].any()


def test_masked_elements_do_not_change_the_tolerance_of_others():
    """Each element has a tolerance independent of its neighbours."""
    x, weight = randn(16, 32), randn(32, 4)
    mask = torch.tensor([False, True, False, True])

    def compute(fill):
        return [(x @ weight).masked_fill(mask, fill)]

    plain = tolerance(lambda: [x @ weight])
    for fill in (-torch.inf, torch.finfo(torch.float32).min, -1e9):
        found = tolerance(lambda fill=fill: compute(fill))
        assert bool((found[:, ~mask] <= 2 * plain[:, ~mask]).all()), fill


OTHERS = {
    "GELU": (lambda x: F.gelu(x), lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))),
    "SiLU": (lambda x: F.silu(x), lambda x: x / (1 + torch.exp(-x))),
    "sum in place": (lambda x: x.clone().sub_(x.flip(0)).mul_(3), lambda x: (3 * x.double() - 3 * x.flip(0)).float()),
    "sum with out": (
        lambda x: torch.mm(x, x.t(), out=torch.empty(64, 64)),
        lambda x: sum(x[:, k, None] * x.t()[k] for k in range(64)),
    ),
    "softmax": (
        lambda x: torch.softmax(x, 1),
        lambda x: torch.exp(x - x.amax(1, True)) / torch.exp(x - x.amax(1, True)).sum(1, True),
    ),
    "layer norm": (
        lambda x: F.layer_norm(x, (64,)),
        lambda x: (x - x.mean(1, True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt(),
    ),
    "product": (lambda x: x @ x.t(), lambda x: sum(x[:, k, None] * x.t()[k] for k in range(64))),
    "mean": (lambda x: x.mean(1), lambda x: x.flip(1).double().sum(1).float() / 64),
}


@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("seed", range(3))
def test_another_formula_for_the_same_function_is_within_the_tolerance(one, other, seed):
    x = randn(64, 64, seed=seed) * 3
    found = tolerance(lambda: [one(x)])
    assert bool(((one(x) - other(x)).abs().double() <= found).all())


@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS)
def test_a_change_of_a_thousandth_exceeds_the_tolerance(one, other):
    x = randn(64, 64) * 3
    found = tolerance(lambda: [one(x)])
    y = one(x)
    large = y.abs() > y.abs().mean() / 2
    assert bool((((y * 1.001 - y).abs().double() > found)[large]).all())


def test_integers_that_rounding_could_change_are_marked_unsteady():
    x = torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    found = rounding.Rounding(lambda: [(x * 1.1).argmax(1)], [(x * 1.1).argmax(1)])
    assert found.unsteady[0].tolist() == [True, False]


def test_the_tolerance_is_reproducible():
    x = randn(32, 32)
    first, second = (tolerance(lambda: [torch.tanh(x @ x)]) for _ in range(2))
    assert torch.equal(first, second)
