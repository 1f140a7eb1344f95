"""Layers keep attributes, children, properties and methods whose names fakequant might use."""

import copy
import pickle
import sys
import types

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
recipes = pytest.importorskip("fakequant.recipes")

NAMES = [
    "norm", "compute", "save_codes", "input_grid", "float_class", "channel_axis", "has_input", "weight_name", "path",
    "unsupported_reason", "deployed_bias", "quantize_input", "quantize_output", "quantized_weight", "weight_spec", 
    "is_integer", "weight_levels", "float_weight", "weight_shape", "along_outputs", "kind", "record", "shift",
]  # fmt: skip


def with_attributes():
    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(8, 4)
            for name in NAMES:
                setattr(self, name, f"my {name}")

    return Layer()


def with_children():
    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(8, 4)
            for name in NAMES:
                setattr(self, name, nn.LayerNorm(4))

    return Layer()


def with_methods():
    return type("Layer", (nn.Linear,), {name: lambda self, name=name: f"my {name}" for name in NAMES})(8, 4)


def with_properties():
    return type("Layer", (nn.Linear,), {n: property(lambda self, n=n: f"my {n}") for n in NAMES})(8, 4)


def seen(layer, name):
    value = getattr(layer, name)
    return value() if callable(value) and not isinstance(value, nn.Module) else value


LAYERS = {f.__name__: f for f in (with_attributes, with_children, with_methods, with_properties)}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_user_attributes_keep_their_names_and_values(make):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(16, 8)
    before = {name: seen(layer, name) for name in NAMES}
    state = list(layer.state_dict())
    plain = nn.Linear(8, 4)
    plain.weight, plain.bias = layer.weight, layer.bias
    model = fq.calibrate(fq.prepare(nn.Sequential(layer), recipes.int8(), x), [x], progress=False)
    usual = fq.calibrate(fq.prepare(nn.Sequential(plain), recipes.int8(), x), [x], progress=False)
    for prepared, expected in ((model, usual), (fq.convert(model), fq.convert(usual))):
        assert {name: seen(prepared[0], name) for name in NAMES}.keys() == before.keys()
        if make is not with_children:
            assert {name: seen(prepared[0], name) for name in NAMES} == before
        assert torch.equal(prepared(x), expected(x))
    model(x).sum().backward()
    layer = fq.unprepare(model)[0]
    assert {name: seen(layer, name) for name in NAMES} == before
    assert list(layer.state_dict()) == state
    assert not any("fakequant" in name for name in layer.__dict__)


@pytest.mark.parametrize("name", ["weight_quantizer", "_fakequant", "weight_codes", "weight_scale", "bias_codes"])
def test_layer_with_a_reserved_attribute_stays_in_float(name):
    layer = nn.Linear(8, 4)
    setattr(layer, name, "mine")
    model = fq.prepare(nn.Sequential(layer, nn.Linear(4, 2)), recipes.int8(), torch.ones(1, 8))
    assert fq.summary(model).floats["0"] == f"it already has an attribute `{name}`"
    assert getattr(model[0], name) == "mine"


class Sum(nn.Module):
    """The output of `act` is an operand of an addition."""

    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x):
        return self.act(self.a(x)) + self.b(x)


@pytest.mark.parametrize("name", ["output_quantizer", "_fakequant"])
def test_activation_with_a_reserved_attribute_is_not_quantized_and_keeps_it(name):
    model = Sum()
    setattr(model.act, name, "mine")
    fq.prepare(model, recipes.int8(), torch.randn(3, 4))
    assert [path for path, _ in fq.nn.named_quantizers(model) if "output" in path] == ["b.output_quantizer"]
    assert f"act.output cannot be quantized: it already has an attribute `{name}`" in str(fq.summary(model))
    fq.calibrate(model, [torch.randn(3, 4)], progress=False)
    assert getattr(fq.unprepare(model).act, name) == "mine"


def test_schedule_refuses_a_batch_norm_with_a_reserved_attribute_with_the_fix():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), recipes.int8(), torch.ones(1, 4))
    model[1]._fakequant = "mine"
    with pytest.raises(ValueError, match=r"`_fakequant`, a name that fakequant reserves.*\nRename the attribute"):
        fq.Schedule(model, quantize_from=1, freeze_norms_at=0)
    assert type(model[1]) is nn.BatchNorm1d
    assert model[1]._fakequant == "mine"


def test_prepare_adds_quantizers_and_one_attribute():
    layer = nn.Linear(8, 4)
    before = set(layer.__dict__)
    fq.prepare(nn.Sequential(layer), recipes.int8(), torch.ones(1, 8))
    assert set(layer.__dict__) - before == {"_fakequant"}
    assert set(layer._modules) == {"weight_quantizer", "input_quantizer", "output_quantizer"}


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * F.linear(x, self.weight, self.bias)


def register(factor):
    @fq.nn.register_layer_kind(Scaled)
    class Kind(fq.nn.LayerKind):
        @staticmethod
        def forward(layer, x):
            return fq.nn.quantize_output(layer, factor * fq.nn.compute(layer, F.linear, x))

    return Kind


@pytest.fixture
def unregistered():
    from fakequant.nn import _layer_kinds as kinds

    before = dict(kinds._KINDS)
    yield kinds._KINDS
    kinds._KINDS.clear()
    kinds._KINDS.update(before)


def test_registering_a_layer_kind_again_replaces_it(unregistered):
    x = torch.ones(2, 4)

    def result():
        torch.manual_seed(0)
        return fq.calibrate(fq.prepare(nn.Sequential(Scaled(4, 3)), recipes.int8(), x), [x], progress=False)(x)

    register(2)
    twice = result()
    register(4)
    assert torch.equal(result(), 2 * twice)


def test_unpickling_without_the_registration_says_what_to_import(unregistered):
    register(2)
    model = fq.prepare(nn.Sequential(Scaled(4, 3)), recipes.int8(), torch.ones(1, 4))
    text = pickle.dumps(model)
    del unregistered[Scaled]
    with pytest.raises(ImportError, match=r"quantized Scaled(.|\n)*register.<locals>.Kind in the module '.*import"):
        pickle.loads(text)


def test_unpickling_imports_the_module_that_registers(unregistered, tmp_path, monkeypatch):
    (tmp_path / "my_kinds.py").write_text(
        "import fakequant as fq\nfrom test_layer_names import Scaled, F\n"
        "@fq.nn.register_layer_kind(Scaled)\nclass Kind(fq.nn.LayerKind):\n    @staticmethod\n"
        "    def forward(layer, x):\n        return fq.nn.quantize_output(layer, fq.nn.compute(layer, F.linear, x))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = types.ModuleType(__name__)
    module.__dict__.update(Scaled=Scaled, F=F)
    monkeypatch.setitem(sys.modules, "test_layer_names", module)
    __import__("my_kinds")
    model = fq.prepare(nn.Sequential(Scaled(4, 3)), recipes.int8(), torch.ones(1, 4))
    text = pickle.dumps(model)
    del unregistered[Scaled]
    monkeypatch.delitem(sys.modules, "my_kinds")
    assert isinstance(pickle.loads(text)[0], fq.nn.QuantizedLayer)


def test_copied_layers_have_separate_records():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), recipes.int8(), torch.ones(1, 4))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        record = copied[0]._fakequant
        assert record is not model[0]._fakequant
        assert record.norm is copied[1]
        assert record.kind is model[0]._fakequant.kind
