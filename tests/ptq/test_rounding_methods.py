"""`adaround` and `gptq`: which codes they choose, and what they do to a model."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant._paired_models.products import Form
from fakequant.ptq._adaround import _learn_rounding
from fakequant.ptq._gptq import solver_of
from fakequant.ptq._quadratic_error import LayerSums, Moments, RoundingProblem, best_codes, descend
from ptq_models import IMAGES, chain, config, output_error, randn, ready

METHODS = {"adaround": partial(fq.ptq.adaround, iterations=100), "gptq": fq.ptq.gptq}


def problem(x, weight, bits=3, damping=1e-6):
    """Returns the problem of rounding a matrix with the same inputs in both models."""
    x, weight = x.double(), weight[None]
    sums = LayerSums(Form(), weight[0])
    sums.add(None, ((x.t() @ x)[None],) * 3)
    moments = sums.damp(damping).moments()
    scale = (weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.7)).expand_as(weight)
    return RoundingProblem(weight, scale, torch.zeros_like(scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, moments)


def error(given, codes):
    return given.moments.error(given.values(codes))


def test_moments_are_the_squared_error():
    x, reference, w = randn(20, 5), randn(3, 5, seed=2), randn(3, 5, seed=3)
    given = problem(x, reference)
    undamped = Moments(given.weight, x.double().t()[None] @ x.double(), *(given.moments.b, given.moments.c))
    expected = ((w - reference).double() @ x.double().t()).square().sum(1)
    torch.testing.assert_close(given.moments.error(w[None])[0], expected, rtol=1e-5, atol=0)  # damped by 1e-6
    assert undamped.error(reference[None]).max() < 1e-4


@pytest.mark.parametrize("solve", [lambda p: _learn_rounding(p, 300), lambda p: solver_of(p.moments.a, True)(p)])
def test_codes_are_near_the_best_of_all_roundings(solve):
    """With 8 weights, all 256 ways to round up or down can be tried. Four fifths of what can be gained is gained."""
    sums = torch.zeros(4, dtype=torch.float64)
    for seed in range(8):
        given = problem(randn(40, 8, seed=seed) @ randn(8, 8, seed=seed + 10), randn(4, 8, seed=seed + 20))
        down = torch.floor(given.weight / given.scale)
        ways = (down + torch.tensor(way) for way in itertools.product((0.0, 1.0), repeat=8))
        best = torch.stack([error(given, codes.clamp(given.qmin, given.qmax)) for codes in ways]).amin(0)
        chosen = (best_codes(given, solve).codes, solve(given), given.nearest())
        found, alone, nearest = (error(given, codes) for codes in chosen)
        assert (found <= nearest).all()
        sums += torch.stack([best.sum(), found.sum(), alone.sum(), nearest.sum()])
    best, found, alone, nearest = sums.tolist()
    assert nearest > 1.5 * best
    assert found < best + 0.2 * (nearest - best)
    assert alone < best + 0.5 * (nearest - best)  # before single codes are changed


def test_bad_codes_of_a_solver_are_replaced_by_improved_nearest_codes():
    given = problem(randn(40, 8) @ randn(8, 8, seed=2), randn(4, 8, seed=3))
    found = best_codes(given, lambda given: torch.full_like(given.weight, given.qmin)).codes
    assert (error(given, found) <= error(given, descend(given, given.nearest()))).all()


def test_uncorrelated_inputs_leave_nothing_to_compensate():
    """If A is diagonal, the nearest codes are the best ones."""
    given = problem(torch.eye(6) * torch.arange(1.0, 7), randn(4, 6))
    assert torch.equal(solver_of(given.moments.a, True)(given), given.nearest())
    assert torch.equal(_learn_rounding(given, 500), given.nearest())
    assert torch.equal(descend(given, given.nearest()), given.nearest())


@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_is_the_textbook_algorithm(act_order):
    """Column by column, with the inverse of what is left of A computed anew for each."""
    given = problem(randn(300, 150) @ randn(150, 150, seed=2), randn(3, 150, seed=3), damping=0.01)
    a, w = given.moments.a[0].clone(), given.weight[0].double().clone()
    order = a.diagonal().argsort(descending=True) if act_order else torch.arange(150)
    codes = torch.empty_like(w)
    left = order.tolist()
    while left:
        k = left[0]
        inverse = torch.linalg.inv(a[left][:, left])
        scale = given.scale[0, :, k].double()
        codes[:, k] = torch.round(w[:, k] / scale).clamp(given.qmin, given.qmax)
        w[:, left] -= ((w[:, k] - codes[:, k] * scale) / inverse[0, 0])[:, None] * inverse[0]
        left = left[1:]
    same = (solver_of(given.moments.a, act_order)(given)[0] == codes).float().mean()
    assert same > 0.99  # long sums: a code at a tie may differ


@pytest.mark.parametrize("name", METHODS)
def test_methods_lower_the_error_of_the_model(name):
    floats = chain()
    model = ready(copy.deepcopy(floats), IMAGES)
    before = output_error(model, floats, IMAGES)
    changes = METHODS[name](model, IMAGES, progress=False)
    assert changes.changed == ["0", "3", "6"]
    assert all(layer.after > layer.before for layer in changes.layers)
    assert output_error(model, floats, IMAGES) < 0.7 * before
    assert [layer.kind for layer in changes.layers] == ["Conv2d", "Conv2d", "Linear"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("learned", [False, True])
def test_weights_are_on_their_grids_and_stay_there(name, learned):
    model = ready(chain(), IMAGES, config(learned=learned))
    METHODS[name](model, IMAGES, progress=False)
    expected = model(IMAGES[0])
    for index in (0, 3, 6):
        weight, quantizer = model[index].weight, model[index].weight_quantizer
        assert torch.equal(quantizer(weight), weight)
        assert quantizer.frozen is not learned
    fresh = fq.prepare(chain(), config(learned=learned), IMAGES[0])
    fresh.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh.eval()):
        assert torch.equal(other(IMAGES[0]), expected)
    trained = copy.deepcopy(model).train()
    trained(IMAGES[0]).sum().backward()
    assert all(p.grad is not None for p in trained.parameters())


def test_a_rounded_model_is_rounded_again_from_its_float_weights():
    """With the float model as reference, what was written to a weight leaves no trace."""
    torch.manual_seed(0)
    x = randn(64, 32) @ randn(32, 32, seed=2)
    floats = nn.Sequential(nn.Linear(32, 16))
    once, twice = (ready(copy.deepcopy(floats), [x]) for _ in range(2))
    METHODS["adaround"](once, [x], progress=False)
    fq.ptq.gptq(twice, [x], progress=False)
    with torch.no_grad():
        twice[0].weight.zero_()  # a point of the grid, whose scale is frozen
    METHODS["adaround"](twice, [x], reference=floats, progress=False)
    assert torch.equal(once[0].weight, twice[0].weight)


def test_rounded_model_converts_to_the_same_codes():
    model = ready(chain(), IMAGES)
    fq.ptq.adaround(model, IMAGES, iterations=100, progress=False)
    codes = fq.convert(model)[6].weight_codes
    weight, quantizer = model[6].weight, model[6].weight_quantizer
    assert torch.equal(codes.to(torch.int32), (weight / quantizer.scale[:, None]).round().to(torch.int32))


@pytest.mark.parametrize(
    "spec", [fq.presets.int4(group_size=8), fq.QuantSpec(bits=3, axis=0, symmetric=False, signed=False)]
)
@pytest.mark.parametrize("name", METHODS)
def test_groups_and_zero_points(name, spec):
    torch.manual_seed(0)
    x = randn(128, 32) @ randn(32, 32, seed=2)
    used = fq.QuantConfig(default=fq.LayerConfig(weight=spec))
    model = fq.prepare(nn.Sequential(nn.Linear(32, 8)), used, x)
    change = METHODS[name](model, [x], progress=False).layers[0]
    assert change.after > change.before + 1
    assert torch.equal(model[0].weight_quantizer(model[0].weight), model[0].weight)


def test_layers_can_be_chosen():
    model = ready(chain(), IMAGES)
    before = model[3].weight.clone()
    changes = fq.ptq.gptq(model, IMAGES, layers=["0", "6"], progress=False)
    assert changes.changed == ["0", "6"]
    assert torch.equal(model[3].weight, before)
    assert not model[3].weight_quantizer.frozen
    assert changes.layers[1].reason == "not chosen by `layers`"


@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_keeps_one_matrix_and_compensates_with_it(act_order):
    """Both factors are in it: each may be larger than the weight."""
    given = problem(randn(200, 70) @ randn(70, 70, seed=2), randn(5, 70, seed=3))
    a, b, scale = given.moments.a, given.moments.b, given.scale.double()
    solve = solver_of(a, act_order)
    kept = [cell.cell_contents for cell in solve.__closure__ if isinstance(cell.cell_contents, torch.Tensor)]
    assert [t.shape for t in kept if t.numel() > 70] == [(1, 70, 70)]

    order = a[0].diagonal().argsort(descending=True) if act_order else torch.arange(70)
    sorted_a, w = a[0][order][:, order], torch.linalg.solve(a[0], b[0].t()).t()[:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(sorted_a), upper=True)
    codes = torch.empty(5, 70)
    for k, column in enumerate(order.tolist()):
        code = torch.round(w[:, k] / scale[0, :, column]).clamp(given.qmin, given.qmax)
        w = w - ((w[:, k] - code * scale[0, :, column]) / upper[k, k])[:, None] * upper[k]
        codes[:, column] = code
    assert torch.equal(solve(given)[0], codes)
