"""Models that `prepare` refuses and leaves unchanged, and layers that it leaves in float."""

import copy

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_state
from prepare_cases import INT8, each_recipe, randn

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
parametrizations = pytest.importorskip("torch.nn.utils.parametrizations")

# --- bad input --------------------------------------------------------------------------------------


class Taken(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.output_quantizer = "mine"


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.LazyLinear(4)


def nothing_but_nan():
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, torch.nan)
    return nn.Sequential(nn.Linear(4, 4), layer)


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


BAD = {
    "a rule matches nothing": (small, fq.QuantConfig().rule("haed", weight=presets.int8()), ValueError, "haed"),
    "no quantizable layer": (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), recipes.int8(), ValueError, "Nothing"),
    "only a Bilinear": (lambda: nn.Sequential(nn.Bilinear(4, 4, 4)), recipes.int8(), ValueError, "not a supported"),
    "an empty model": (nn.Identity, recipes.int8(), ValueError, "Nothing"),
    "everything is skipped": (small, recipes.int8().skip(), ValueError, "the config says so"),
    "already prepared": (lambda: fq.prepare(small(), INT8), recipes.int8(), ValueError, "already"),
    "a part is prepared": (
        lambda: nn.Sequential(nn.Linear(4, 4), fq.prepare(small(), INT8)), recipes.int8(), ValueError, "1.0",
    ),
    "meta device": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), recipes.int8(), ValueError, "meta",
    ),
    "group size does not divide": (small, recipes.int4_weight_only(3), ValueError, "3"),
    "input per channel": (
        small, fq.QuantConfig(default=fq.LayerConfig(input=fq.QuantSpec(axis=1))), ValueError, "channel",
    ),
    "axis out of range": (
        small, fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(axis=5))), ValueError, "5",
    ),
    "config without specs": (small, fq.QuantConfig(default=fq.LayerConfig()), ValueError, "no spec"),
    "a layer config": (small, recipes.int8().default, TypeError, "QuantConfig"),
    "a dict": (small, recipes.int8().to_dict(), TypeError, "QuantConfig"),
    "a recipe that was not called": (small, recipes.int8, TypeError, "QuantConfig"),
    "None": (small, None, TypeError, "QuantConfig"),
    "learned scales of NaN": (nothing_but_nan, recipes.lsq(4), RuntimeError, "finite"),
}  # fmt: skip


def snapshot(model):
    return {
        name: (type(module), {key: list(v) if hasattr(v, "keys") else v for key, v in vars(module).items()})
        for name, module in model.named_modules()
    }


@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
@pytest.mark.parametrize(("make", "config", "error", "message"), BAD.values(), ids=BAD)
def test_refused_model_is_unchanged(make, config, error, message):
    model = make()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        fq.prepare(model, config)
    assert snapshot(model) == before


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_layers_are_refused_until_they_have_a_shape():
    model = Lazy()
    with pytest.raises(ValueError, match="no shape yet"):
        fq.prepare(model, recipes.int8())
    assert type(model.fc) is nn.LazyLinear
    model.fc(randn(2, 3))
    fq.prepare(model, INT8)
    assert type(model.fc) is not nn.Linear
    assert isinstance(model.fc, nn.Linear)


def test_layer_with_an_attribute_named_output_quantizer_stays_in_float():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), Taken(4, 4)), recipes.int8(), torch.ones(1, 4))
    assert fq.summary(model).floats == {"1": "it already has an attribute `output_quantizer`"}
    assert type(model[1]) is Taken


@pytest.mark.parametrize(
    "model", [None, [nn.Linear(2, 2)], nn.Linear, torch.relu], ids=["None", "list", "class", "function"]
)
def test_prepare_of_a_non_module_is_a_type_error(model):
    with pytest.raises(TypeError, match="`model` must be"):
        fq.prepare(model, recipes.int8())


# --- layers that stay in float ----------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class OwnLSTM(nn.LSTM):
    def forward(self, x, hx=None):
        return super().forward(x, hx)


FLOATS = {
    "max_norm": lambda: nn.Embedding(4, 4, max_norm=1.0),
    "sparse": lambda: nn.EmbeddingBag(4, 4, sparse=True),
    "overridden forward": lambda: OwnForward(4, 4),
    "Bilinear": lambda: nn.Bilinear(4, 4, 4),
    "LSTM, overridden forward": lambda: OwnLSTM(4, 4),
    "GRUCell, parametrized": lambda: parametrizations.weight_norm(nn.GRUCell(4, 4), "weight_hh"),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "BatchNorm": lambda: nn.BatchNorm1d(4),
}


@pytest.mark.parametrize("make", FLOATS.values(), ids=FLOATS)
def test_unsupported_layer_is_unchanged_by_prepare(make):
    layer = make()
    model = nn.ModuleDict({"other": layer, "fc": nn.Linear(4, 4)})
    before = snapshot(layer)
    fq.prepare(model, INT8)
    assert snapshot(layer) == before


# --- parametrized layers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
    ids=lambda f: f.__name__,
)
@each_recipe
def test_prepare_does_not_change_the_state_of_a_parametrization(norm, config):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(4, 4)))
    before = copy.deepcopy(model.state_dict())
    fq.prepare(model, config, randn(2, 4))
    added = ("quantizer", "fakequant_flow")
    assert_same_state(before, {n: v for n, v in model.state_dict().items() if not any(word in n for word in added)})
    fq.unprepare(model)
    assert_same_state(before, model.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_output_quantizers_of_operands_have_the_mode_of_the_model(training):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.fc(x) + self.norm(x)

    model = fq.prepare(Sum().train(training), recipes.int8(), randn(2, 4))
    modes = {path: quantizer.training for path, quantizer in fqnn.named_quantizers(model)}
    assert {"fc.output_quantizer", "norm.output_quantizer"} <= modes.keys()
    assert set(modes.values()) == {training}
