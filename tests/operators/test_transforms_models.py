"""`torch.func` over whole prepared models: `functional_call`, `grad`, and gradients per example."""

import copy
import functools

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from thoroughness import ALL

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
functional_call, grad, jacrev, jvp, vmap = (
    getattr(torch.func, name) for name in ("functional_call", "grad", "jacrev", "jvp", "vmap")
)
pytestmark = [
    # Quantizers warn in training that they keep no state; one test checks the warning.
    pytest.mark.filterwarnings("ignore:Quantizers that observe under a transform:RuntimeWarning"),
    # torch's forward mode warns about its own code.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

RECIPES = {
    "int8": fq.recipes.int8,
    "int8_dynamic": fq.recipes.int8_dynamic,
    "int4_weight_only": fq.recipes.int4_weight_only,
    "w4a8": fq.recipes.w4a8,
    "lsq": functools.partial(fq.recipes.lsq, 4),
    "fp8": fq.recipes.fp8,
    "mxfp8": fq.recipes.mxfp8,
    "nvfp4": fq.recipes.nvfp4,
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
each_mode = pytest.mark.parametrize("mode", ["train", "eval"])
each_freezing = pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
each_layer = pytest.mark.parametrize("layer", ["linear", "conv"])
# Batched matrix products are summed in another order than single ones.
SUMMED_IN_ANOTHER_ORDER = 1e-6


def make(recipe, layer, mode, frozen):
    torch.manual_seed(0)
    if layer == "linear":
        model, x = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(6, 32)
    else:
        model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)), torch.randn(6, 3, 4, 4)
    if layer == "linear" and recipe == "int4_weight_only":
        config = fq.recipes.int4_weight_only(16)
    else:
        config = RECIPES[recipe]()
    model = fq.calibrate(fq.prepare(model, config, x), [x], progress=False)
    if frozen:
        fq.nn.switch_quantizers(model, frozen=True)
    return model.train(mode == "train"), x, torch.randint(0, 4, (6,))


def state(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return parameters, dict(model.named_buffers())


def loss_of(model):
    return lambda parameters, buffers, x, y: F.cross_entropy(functional_call(model, (parameters, buffers), (x,)), y)


def gradients_by_backward(model, x, y):
    model = copy.deepcopy(model)
    F.cross_entropy(model(x), y).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def assert_unchanged(before, model):
    for name, value in model.state_dict().items():
        assert_same_bits(before[name], value, name)


@each_recipe
@each_mode
@each_freezing
@(each_layer if ALL else pytest.mark.parametrize("layer", ["conv"]))
def test_torch_func_gradients_of_prepared_models_have_the_bits_of_backward(recipe, layer, mode, frozen):
    model, x, y = make(recipe, layer, mode, frozen)
    before = copy.deepcopy(model.state_dict())
    actual = grad(loss_of(model))(*state(model), x, y)
    assert_unchanged(before, model)
    for name, expected in gradients_by_backward(model, x, y).items():
        assert_same_bits(expected, actual[name], name)


@each_recipe
@each_mode
@each_freezing
@(each_layer if ALL else pytest.mark.parametrize("layer", ["linear"]))
def test_per_example_gradients_of_prepared_models_equal_a_loop(recipe, layer, mode, frozen):
    model, x, y = make(recipe, layer, mode, frozen)
    before = copy.deepcopy(model.state_dict())
    one = lambda p, b, x, y: loss_of(model)(p, b, x[None], y[None])  # noqa: E731
    actual = vmap(grad(one), in_dims=(None, None, 0, 0))(*state(model), x, y)
    assert_unchanged(before, model)
    for i in range(len(x)):
        looped = grad(one)(*state(model), x[i], y[i])
        for name, expected in gradients_by_backward(model, x[i : i + 1], y[i : i + 1]).items():
            assert_same_bits(expected, looped[name], name)
            if mode == "train":  # in evaluation sums of integers often tie, and the order of sums decides the rounding
                torch.testing.assert_close(actual[name][i], expected, rtol=0, atol=SUMMED_IN_ANOTHER_ORDER)


@each_recipe
@each_mode
def test_jvp_and_jacrev_of_prepared_models_agree(recipe, mode):
    model, x, _ = make(recipe, "linear", mode, False)
    call = functools.partial(functional_call, model, state(model))
    value, tangent = jvp(lambda x: call((x,)), (x,), (torch.ones_like(x),))
    assert_same_bits(copy.deepcopy(model)(x), value)
    jacobian = jacrev(lambda x: call((x,)))(x)
    summed = torch.einsum("abcd->ab", jacobian)
    torch.testing.assert_close(summed, tangent, rtol=0, atol=1e-5)


@each_recipe
def test_functional_call_of_a_prepared_model_uses_other_parameters(recipe):
    model, x, _ = make(recipe, "linear", "eval", True)
    parameters, buffers = state(model)
    other = {n: p * 0.5 if n.endswith("weight") else p for n, p in parameters.items()}
    expected = copy.deepcopy(model)
    expected.load_state_dict({**expected.state_dict(), **other})
    actual = functional_call(model, (other, buffers), (x,))
    assert_same_bits(expected(x), actual)


@each_mode
def test_an_ensemble_of_prepared_models_under_vmap_equals_a_loop(mode):
    """Stacked scales have a batch axis too."""
    models = [make("int8", "linear", mode, frozen=True)[0] for _ in range(3)]
    x = torch.randn(5, 32)
    with torch.no_grad():
        for k, model in enumerate(models):
            model[0].weight.mul_(1 + k)
            model[0].input_quantizer.scale.mul_(1 + k)
    parameters, buffers = torch.func.stack_module_state(models)
    actual = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    for model, y in zip(models, actual, strict=True):
        torch.testing.assert_close(y, model(x), rtol=0, atol=1e-5)


def test_pact_under_torch_func_has_the_gradients_of_backward():
    pact = fq.nn.PACT(4, alpha=1.5)
    x = torch.linspace(-1, 3, 24).reshape(4, 6)
    loss = lambda p, x: functional_call(pact, p, (x,)).square().sum()  # noqa: E731
    parameters = {"alpha": pact.alpha.detach()}
    actual = vmap(grad(loss), in_dims=(None, 0))(parameters, x)["alpha"]
    for row, expected in zip(x, actual, strict=True):
        pact.alpha.grad = None
        pact(row).square().sum().backward()
        assert_same_bits(pact.alpha.grad, expected)
    _, tangent = jvp(lambda x: functional_call(pact, parameters, (x,)), (x,), (torch.ones_like(x),))
    assert torch.equal(tangent, ((x >= 0) & (x <= 1.5)).float())


# --- warnings and errors ---------------------------------------------------------------------------------


def test_a_quantizer_that_observes_under_a_transform_warns_and_keeps_its_state():
    quantizer = fq.nn.FakeQuantize(fq.presets.uint8())
    with pytest.warns(
        RuntimeWarning, match=r"do not remember what they see.\n.*freeze the ranges: fakequant.nn.switch_quantizers"
    ):
        grad(lambda x: quantizer(x).sum())(torch.randn(6))
    assert quantizer.scale.isnan()


def test_nonfinite_values_under_a_transform_are_not_counted():
    quantizer = fq.nn.FakeQuantize(fq.presets.int8_per_token())
    grad(lambda x: quantizer(x).nan_to_num().sum())(torch.tensor([[1.0, torch.nan]]))
    assert quantizer.nonfinite == 0


REFUSED = {
    "range search": (lambda: fq.nn.FakeQuantize(fq.presets.uint8(), fq.observers.Histogram()), "cannot observe under"),
    "fused operator": (
        lambda: fq.nn.FusedFakeQuantize(fq.QuantSpec(symmetric=False, numerics="torch")),
        "torch's fused operator changes its running range",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_quantizers_that_cannot_run_under_a_transform_raise_with_a_fix(make, message):
    quantizer = make()
    x = torch.randn(3, 6)
    with pytest.raises(
        RuntimeError, match=rf"(?s)FakeQuantize: .*{message}.*fakequant.nn.switch_quantizers\(model, frozen=True"
    ):
        vmap(quantizer)(x)
    quantizer(x)
    quantizer.frozen = True
    assert_same_bits(quantizer(x), vmap(quantizer)(x))


def test_a_learned_quantizer_cannot_be_initialized_under_a_transform():
    quantizer = fq.nn.LearnedFakeQuantize(fq.QuantSpec(bits=4))
    quantizer.observing = True
    with pytest.raises(
        RuntimeError, match=r"cannot be initialized under a transform of torch.func.*\nCall `initialize"
    ):
        grad(lambda x: quantizer(x).sum())(torch.randn(6))
