"""Exact sums in recurrent layers, whose steps share a weight, and in experts, whose rows each have their own."""

import copy
import dataclasses
import pickle

import pytest
from torch.utils.checkpoint import checkpoint

import fakequant as fq
from expert_cases import EXPERTS, INNER, build, routed
from fakequant import _native, recipes
from fakequant._backends.torch.grouped_linear import Groups
from fakequant._backends.torch.integer_grouped_linear import integer_grouped_linear
from fakequant._backends.torch.integer_linear import BiasCodes, IntegerGrid
from fakequant.testing.assertions import assert_same_bits
from integer_sums_cases import PRODUCTS, multiply_by, restored_settings, torch  # noqa: F401

nn = torch.nn

CONFIGS = {"int8": recipes.int8(), "learned": recipes.lsq(4, first_last_bits=None)}


def sequences(width=40):
    return (torch.randn(3, 5, width, generator=torch.Generator().manual_seed(3)) * 2,)


# A model, and what it takes.
MODELS = {
    "LSTM": (lambda: nn.LSTM(40, 24, proj_size=16), sequences),
    "GRU": (lambda: nn.GRU(40, 300), sequences),  # sums that float32 would round
    "RNN": (lambda: nn.RNN(40, 24, bias=False), sequences),
    "experts": (lambda: build({"has_bias": True}), routed),
    "experts with transposed weights": (lambda: build({"is_transposed": True, "has_gate": False}), routed),
}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
each_model = pytest.mark.parametrize("name", MODELS)


def prepared(name, config=CONFIGS["int8"], sums="exact"):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = fq.prepare(make(), dataclasses.replace(config, sums=sums), inputs())
    return fq.calibrate(model, [inputs()], progress=False)


def step(name, model, run=lambda model, *args: model(*args)):
    """Returns the result and the gradients of a step in training, and the result in evaluation."""
    x, *rest = MODELS[name][1]()
    x.requires_grad_()

    def result(y):
        return y[0] if isinstance(y, tuple) else y

    y = result(run(model.train(), x, *rest))
    gradients = torch.autograd.grad((y * torch.linspace(-1, 1, y.shape[-1])).sum(), [x, *model.parameters()])
    return [y.detach(), *gradients, result(model.eval()(x.detach(), *rest)).detach()]


@pytest.mark.parametrize(
    ("name", "config"), [*((name, "int8") for name in MODELS), ("RNN", "learned"), ("experts", "learned")]
)
def test_whatever_runs_gives_the_same_bits(name, config, monkeypatch):
    config = CONFIGS[config]
    expected = step(name, prepared(name, config))
    others = {
        "codes not saved": step(name, prepared(name, dataclasses.replace(config, save_codes=False))),
        "checkpoint": step(
            name, prepared(name, config), lambda model, *args: checkpoint(model, *args, use_reentrant=False)
        ),
        "pickle": step(name, pickle.loads(pickle.dumps(copy.deepcopy(prepared(name, config))))),
    }
    for other, found in others.items():
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b, other)
    for how in PRODUCTS:
        with monkeypatch.context() as patch:
            multiply_by(how, patch)
            torch.set_num_threads(1 + (torch.get_num_threads() == 1))
            found = step(name, prepared(name, config))
            torch.set_float32_matmul_precision("highest")
            _native.select_target(_native.supported_targets()[-1])
        for a, b in ((found[0], expected[0]), (found[-1], expected[-1])):  # gradients are sums of floats
            assert_same_bits(a, b, how)


@each_model
def test_evaluation_has_the_bits_of_the_golden_model(name):
    model = prepared(name).eval()
    x, *rest = MODELS[name][1]()
    for scale in (1, 0.7):
        found, expected = model(x * scale, *rest), fq.convert(model)(x * scale, *rest)
        for a, b in zip(*(y if isinstance(y, tuple) else (y,) for y in (found, expected)), strict=True):
            for one, other in zip(*(part if isinstance(part, tuple) else (part,) for part in (a, b)), strict=True):
                assert_same_bits(one.detach(), other)


@each_model
def test_gradients_and_results_are_nearly_those_of_float_sums(name):
    exact, floats = (step(name, prepared(name, sums=sums)) for sums in ("exact", "float"))
    for a, b in zip(exact, floats, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("how", PRODUCTS)
def test_sums_of_groups_are_exact(how, monkeypatch):
    multiply_by(how, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    inner, outputs, experts = 700, 5, torch.tensor([0, 0, 2, 3, 3, 3])
    groups, numbers = Groups(experts, 5), experts[:, None] * outputs + torch.arange(outputs)
    zeros = torch.randint(0, 256, (6,), generator=generator, dtype=torch.int32)
    x = torch.randint(0, 256, (6, inner), generator=generator) - zeros[:, None]
    weight = torch.randint(-127, 128, (25, inner), generator=generator)
    weight[3], x[1] = 127, 255 - zeros[1]
    x_scale, scale = (torch.rand(n, generator=generator) + 0.01 for n in (6, 25))
    sums = torch.stack([weight[rows].double() @ row.double() for row, rows in zip(x, numbers, strict=True)])
    bias, codes = torch.randn(25), torch.randint(-(2**30), 2**30, (25,)).double()
    grids = IntegerGrid(x_scale[:, None], zeros[:, None], 0, 255), IntegerGrid(scale, None, -127, 127)
    given = x * x_scale[:, None], weight * scale[:, None], bias, groups, *grids
    factor = x_scale[:, None] * scale[numbers]
    assert_same_bits(integer_grouped_linear(*given), sums.float() * factor + bias[numbers])
    expected = (sums * 8 + codes[numbers]).float() * (x_scale[:, None] * (scale[numbers] / 8))
    assert_same_bits(integer_grouped_linear(*given, BiasCodes(codes, 8.0)), expected)


def test_compiled_products_of_experts_give_the_same_bits():
    """Not whole experts: compilers compute the activation function in other operations."""
    product = prepared("experts").eval().down_product
    groups = Groups(torch.tensor([0, 0, 1, 3]), EXPERTS)
    x = torch.randn(4, INNER, generator=torch.Generator().manual_seed(0)).requires_grad_()
    compiled = torch.compile(lambda x: product(x, groups), backend="aot_eager", fullgraph=True)
    results = [(y, *torch.autograd.grad(y.square().sum(), x)) for y in (product(x, groups), compiled(x))]
    for a, b in zip(*results, strict=True):
        assert_same_bits(a.detach(), b.detach())


def test_nan_reaches_the_results_of_its_row_only():
    model = prepared("experts").eval()
    x, *rest = routed()
    expected = model(x, *rest)
    x[1] = torch.nan
    y = model(x, *rest)
    assert y[1].isnan().all()
    others = torch.arange(len(x)) != 1
    assert_same_bits(y[others], expected[others])
