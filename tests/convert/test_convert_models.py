"""Whole converted models: files, copies, errors."""

import copy
import json

import pytest

import fakequant as fq
from convert_cases import same
from fakequant import QuantSpec, presets

torch = pytest.importorskip("torch")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")

RECIPES = {
    "int8": recipes.int8(),
    "int8 for x86": recipes.int8(target="onnxruntime-x86"),
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(4),
    "w4a8": recipes.w4a8(),
    "lsq": recipes.lsq(4),
}
each_recipe = pytest.mark.parametrize("config", RECIPES.values(), ids=RECIPES)


# --- whole models -----------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.pool(self.act(x + self.norm(self.conv(x)))).flatten(1))


def trained_norms(model):
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight.data, module.bias.data, module.running_mean):
                value.copy_(torch.randn(value.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return model


MODELS = {
    "residual": (lambda: trained_norms(Residual()), torch.randn(16, 3, 8, 8)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(64, 16)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 4)), torch.randint(0, 12, (4, 6))),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1),
        torch.randn(4, 6, 16),
    ),
}
each_model = pytest.mark.parametrize(("make", "x"), MODELS.values(), ids=MODELS)


def prepared(make, x, config):
    torch.manual_seed(0)
    return fq.calibrate(fq.prepare(make(), config, x), [x], progress=False)


@each_recipe
@each_model
def test_convert_leaves_the_prepared_model_unchanged(make, x, config):
    model = prepared(make, x, config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    fq.convert(model)(x)
    assert [module.training for module in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name


@each_recipe
@each_model
def test_converted_layers_hold_no_float_weights(make, x, config):
    golden = fq.convert(prepared(make, x, config))
    layers = [m for m in golden.modules() if isinstance(m, integer.IntegerLayer)]
    assert layers
    for layer in layers:
        assert layer._fakequant.kind.weight_name not in layer._parameters
        assert not layer.weight_codes.is_floating_point()


@each_recipe
@each_model
def test_saved_model_loads_with_the_same_results(make, x, config, tmp_path):
    pytest.importorskip("safetensors")
    golden = fq.convert(prepared(make, x, config))
    fq.save_converted(golden, tmp_path / "model.safetensors")
    loaded = fq.load_converted(make(), tmp_path / "model.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert set(loaded.state_dict()) == set(golden.state_dict())
    same(golden(x), loaded(x))


@each_recipe
@each_model
def test_copy_of_a_converted_model_computes_the_same(make, x, config):
    golden = fq.convert(prepared(make, x, config))
    same(golden(x), copy.deepcopy(golden)(x))


def test_cross_attention_is_converted():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    query, other = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    model = fq.prepare(model, recipes.int8(), (query, other, other))
    fq.calibrate(model, lambda m: m(query, other, other), progress=False)
    golden = fq.convert(model)
    difference = (model.eval()(query, other, other)[0].detach() - golden(query, other, other)[0]).abs().max()
    assert float(difference) < 0.02  # a few steps of the output grid


def test_parametrized_weights_become_codes():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))
    x = torch.randn(5, 8)
    model = fq.calibrate(fq.prepare(model, recipes.int8(), x), [x], progress=False)
    golden = fq.convert(model)
    assert not any("parametrizations" in name for name in golden.state_dict())
    assert float((model.eval()(x).detach() - golden(x)).abs().max()) < 0.01


# --- errors -----------------------------------------------------------------------------------------


def test_convert_refuses_a_model_without_scales_and_names_the_quantizers():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), recipes.int8(), torch.ones(1, 4))
    with pytest.raises(RuntimeError, match=r"0\.input_quantizer, 1\.input_quantizer(.|\n)*fakequant\.calibrate"):
        fq.convert(model)


def test_a_learned_scale_that_no_data_has_reached_is_not_written():
    """It is NaN, which is not a difference from itself."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) if x.dim() == 2 else self.b(x)

    x = torch.ones(3, 4)
    model = fq.prepare(Either(), recipes.lsq(3), x)
    with pytest.warns(UserWarning, match="No data reached the quantizers of b"):
        fq.calibrate(model, [x], progress=False)
    model.train()(x).sum().backward()
    torch.optim.SGD(model.parameters(), 1e-3).step()
    scale = model.b.input_quantizer.step_size
    version = scale._version
    with pytest.warns(UserWarning, match="seen no data"):
        fq.convert(model.eval())
    assert scale.isnan().all()
    assert scale._version == version


def test_convert_refuses_a_float_model():
    with pytest.raises(ValueError, match=r"fakequant\.prepare"):
        fq.convert(nn.Linear(2, 2))


def test_convert_refuses_an_unknown_target():
    model = prepared(*MODELS["perceptron"], recipes.int8())
    with pytest.raises(ValueError, match="generic"):
        fq.convert(model, target="toaster")


def test_save_converted_refuses_a_model_that_is_not_converted(tmp_path):
    with pytest.raises(ValueError, match=r"fakequant\.convert"):
        fq.save_converted(nn.Linear(2, 2), tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_failed_save_leaves_no_file(tmp_path):
    golden = fq.convert(prepared(*MODELS["perceptron"], recipes.int8()))
    with pytest.raises(FileNotFoundError, match="missing"):
        fq.save_converted(golden, tmp_path / "missing" / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_load_converted_refuses_a_file_of_another_model_and_says_where(tmp_path):
    fq.save_converted(fq.convert(prepared(*MODELS["perceptron"], recipes.int8())), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"'0' is Linear in the file but Conv2d in the model"):
        fq.load_converted(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Linear(32, 4)), tmp_path / "m.safetensors")


def test_load_converted_refuses_a_file_it_did_not_write(tmp_path):
    save = pytest.importorskip("safetensors.torch").save_file
    save({"weight": torch.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="not written by"):
        fq.load_converted(nn.Linear(2, 2), tmp_path / "m.safetensors")


def test_saved_file_describes_every_tensor(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    fq.save_converted(fq.convert(prepared(*MODELS["residual"], recipes.w4a8())), tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        described = json.loads(file.metadata()["fakequant"])
    assert described["target"] == "generic"
    assert QuantSpec.from_dict(described["layers"]["conv"]["weight"]["spec"]).bits == 4
    assert QuantSpec.from_dict(described["grids"]["head.input_quantizer"]["spec"]) == presets.uint8()
    assert described["inputs_from"] == {"conv": "stem.2.output_quantizer"}
