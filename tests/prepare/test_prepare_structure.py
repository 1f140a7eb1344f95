"""`prepare` keeps modules, parameters, hooks and modes, and quantizes the operands of additions."""

import dataclasses
import pickle

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits
from prepare_cases import Mixed, each_recipe, off, quantized_weight, randint, randn

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
tensors = pytest.importorskip("fakequant._backends.torch.tensor_functions")

# --- operands of additions --------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    pass


class Meets(nn.Module):
    def __init__(self, linear=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.relu, self.head = linear(4, 4), linear(4, 4), nn.ReLU(), linear(4, 2)

    def forward(self, x):
        return self.head(self.relu(self.a(x)) + self.b(x))


@pytest.mark.parametrize("linear", [nn.Linear, OwnLinear], ids=["Linear", "a subclass"])
def test_operands_of_an_addition_are_quantized_by_their_producers(linear):
    x = randn(3, 4)
    model = fq.prepare(Meets(linear), dataclasses.replace(recipes.int8(), sums="float"), x)
    assert model.b.output_quantizer is not None
    assert model.relu.output_quantizer.spec == presets.uint8()
    assert model.a.output_quantizer is None
    assert model.head.output_quantizer is None
    fq.calibrate(model, [x], progress=False)
    fqnn.switch_quantizers(model, frozen=True)  # evaluation would also round biases
    a, b = (tensors.fake_quantize(x, *m.input_quantizer.qparams(), presets.uint8()) for m in (model.a, model.b))
    left = torch.relu(F.linear(a, quantized_weight(model.a, 0), model.a.bias))
    right = F.linear(b, quantized_weight(model.b, 0), model.b.bias)
    left = tensors.fake_quantize(left, *model.relu.output_quantizer.qparams(), presets.uint8())
    right = tensors.fake_quantize(right, *model.b.output_quantizer.qparams(), presets.uint8())
    y = tensors.fake_quantize(left + right, *model.head.input_quantizer.qparams(), presets.uint8())
    assert_same_bits(F.linear(y, quantized_weight(model.head, 0), model.head.bias), model(x))


def test_skipped_module_does_not_quantize_its_output():
    model = fq.prepare(Meets(), recipes.int8().skip("relu").skip("b"), randn(3, 4))
    assert not hasattr(model.relu, "output_quantizer")
    assert not model.relu._forward_hooks
    assert type(model.b) is nn.Linear


class AddsIndices(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten, self.table = nn.Flatten(), nn.Embedding(9, 4)

    def forward(self, x):
        return self.table(self.flatten(x) + 1)


def test_integer_operands_of_an_addition_pass_unchanged():
    model = fq.prepare(AddsIndices(), recipes.int8(), randint(8, 2, 3, 2))
    assert model(randint(8, 2, 3, 2)).shape == (2, 6, 4)


class HasEffects(nn.Module):
    """A forward pass with side effects."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.fc(x) + torch.rand(4)


def test_prepare_leaves_buffers_and_random_numbers_as_they_were():
    model = HasEffects()
    rng = torch.get_rng_state()
    fq.prepare(model, recipes.int8(), randn(3, 4))
    assert_same_bits(rng, torch.get_rng_state(), "random numbers")
    assert float(model.seen) == 0


# --- what prepare keeps -----------------------------------------------------------------------------


def before_and_after(config):
    model = Mixed()
    before = (
        dict(model.named_modules()),
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers()),
    )
    fq.prepare(model, config, randint(9, 3, 6))
    return model, before


@each_recipe
def test_prepare_keeps_names_identity_and_order_of_modules_and_tensors(config):
    model, (modules, parameters, buffers) = before_and_after(config)
    for name, module in modules.items():
        assert model.get_submodule(name) is module
    now = {n: p for n, p in model.named_parameters(remove_duplicate=False) if "quantizer" not in n}
    assert list(now) == list(parameters)
    assert all(now[name] is value for name, value in parameters.items())
    assert all(model.get_buffer(name) is value for name, value in buffers.items())
    assert model.head.weight is model.table.weight
    assert [n for n, _ in model.named_modules() if "quantizer" not in n] == list(modules)


@each_recipe
def test_prepared_layers_are_subclass_instances_until_unprepare(config):
    floats = Mixed()
    model = fq.prepare(Mixed(), config, randint(9, 3, 6))
    kinds = {name: type(module) for name, module in floats.named_modules()}
    for name, kind in kinds.items():
        assert isinstance(model.get_submodule(name), kind), name
    changed = [name for name, kind in kinds.items() if type(model.get_submodule(name)) is not kind]
    assert {"conv", "up", "head", "attention"} <= set(changed)
    assert type(model.norm) is nn.BatchNorm1d
    fq.unprepare(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    for name, module in model.named_modules():
        expected = vars(floats.get_submodule(name))
        assert vars(module).keys() == expected.keys(), name
        for hooks in (key for key in expected if key.endswith("hooks")):
            assert len(vars(module)[hooks]) == len(expected[hooks]), (name, hooks)


def test_user_hooks_survive_prepare_and_see_the_same_values():
    model, calls = Meets(), []
    handles = [
        model.a.register_forward_hook(lambda m, args, y: calls.append(("a", y))),
        model.relu.register_forward_hook(lambda m, args, y: calls.append(("relu", y))),
        model.b.register_forward_pre_hook(lambda m, args: calls.append(("b before", args[0]))),
        model.head.register_full_backward_hook(lambda m, gi, go: calls.append(("head back", go[0]))),
    ]
    x = randn(3, 4)
    off(fq.prepare(model, recipes.int8(), x))
    calls.clear()
    y = model(x)
    y.sum().backward()
    assert [name for name, _ in calls] == ["a", "relu", "b before", "head back"]
    assert calls[2][1] is x
    handles[1].remove()
    assert len(model.relu._forward_hooks) == 1
    fq.unprepare(model)
    assert len(model.relu._forward_hooks) == 0
    assert len(model.a._forward_hooks) == 1


def test_hook_added_after_unpickling_does_not_replace_a_quantizer_hook(monkeypatch):
    model = fq.prepare(Meets(), recipes.int8(), randn(3, 4))
    fq.calibrate(model, [randn(3, 4)], progress=False)
    text = pickle.dumps(model)
    # A new process counts its hooks from zero.
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)
    model = pickle.loads(text)
    for _ in range(1 + max(model.relu._forward_hooks)):
        model.relu.register_forward_hook(lambda m, args, y: None)
    ours = [hook for hook in model.relu._forward_hooks.values() if hook.__module__.startswith("fakequant.")]
    assert len(ours) == 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@each_recipe
def test_prepare_gives_quantizers_the_mode_of_their_layer(config, training):
    model = Mixed().train(training)
    fq.prepare(model, config, randint(9, 3, 6))
    assert {module.training for module in model.modules()} == {training}


def test_prepare_accepts_a_model_that_is_one_layer():
    layer = nn.Linear(4, 2)
    assert fq.prepare(layer, recipes.int8(), randn(3, 4)) is layer
    assert isinstance(layer, nn.Linear)
    assert layer.weight_quantizer.path == "weight_quantizer"
    assert type(fq.unprepare(layer)) is nn.Linear
