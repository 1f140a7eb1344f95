"""`prepare` on configs and models it cannot use: an error or a listing with the fix, and an unchanged model."""

import pytest

import fakequant as fq
from fakequant import presets
from model_snapshots import Snapshot, X, assert_refused, calibrate, prepared, small
from prepare_cases import INT8

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.gain


def five():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


# --- a config that matches nothing ------------------------------------------------------------------

NAMED = {"encoder": nn.Linear, "head": nn.Linear}


def named():
    return nn.ModuleDict({name: make(4, 4) for name, make in NAMED.items()})


NOTHING = {
    "a path with a typo": (fq.QuantConfig().rule("haed", weight=presets.int8()), ["path='haed'", "near: head"]),
    "another case": (fq.QuantConfig().rule("HEAD*", weight=presets.int8()), ["path='HEAD*'", "matches nothing"]),
    "a type that does not occur": (fq.QuantConfig().rule(type="Conv2d", weight=presets.int8()), ["type='Conv2d'"]),
    "a type in lower case": (fq.QuantConfig().rule(type="linear", weight=presets.int8()), ["type='linear'"]),
    "empty config": (fq.QuantConfig(), ["encoder: the config says so", "head: the config says so"]),
    "a rule without specs": (fq.QuantConfig().rule("head"), ["head: the config has no spec for any of its tensors"]),
}


@pytest.mark.parametrize(("config", "words"), NOTHING.values(), ids=NOTHING)
def test_config_that_matches_nothing_is_refused_with_the_reasons(config, words):
    model = named()
    assert_refused(model, lambda: fq.prepare(model, config), ValueError, "Nothing in the model", *words)


def test_summary_lists_rules_that_match_nothing():
    with pytest.warns(UserWarning, match="match no module"):
        model = fq.prepare(named(), INT8.skip("haed").rule(type="linear", weight=presets.int4(group_size=None)))
    text = str(fq.summary(model))
    assert "Rule(path='haed', type=None)" in text
    assert "Rule(path='*', type='linear')" in text
    assert len(fq.summary(model).layers) == 2


# --- models that cannot be prepared -----------------------------------------------------------------


def test_preparing_twice_is_refused_and_names_unprepare():
    model = prepared(calibrated=True)
    assert_refused(model, lambda: fq.prepare(model, recipes.lsq(4), X), ValueError, "already", "0", "unprepare(model)")


def test_model_with_a_prepared_part_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), prepared())
    assert_refused(model, lambda: fq.prepare(model, recipes.int8(), X), ValueError, "already", "1.0")


@pytest.mark.parametrize("recipe", [recipes.int8(), recipes.lsq(4)], ids=["int8", "lsq"])
@pytest.mark.parametrize("part", [None, "4"], ids=["all of it", "the last layer"])
def test_model_on_meta_is_refused_with_the_parameter_and_the_fix(recipe, part):
    model = small()
    (model if part is None else model.get_submodule(part)).to("meta")
    first = f"{part or '0'}.weight"
    assert_refused(model, lambda: fq.prepare(model, recipe, X), ValueError, first, "meta", "to_empty", "load its state")


@pytest.mark.parametrize("recipe", [recipes.int8(), recipes.lsq(4)], ids=["int8", "lsq"])
def test_lazy_layer_beside_others_is_listed_and_stays_lazy(recipe):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    fq.prepare(model, fq.QuantConfig(default=recipe.default))
    assert type(model[1]) is nn.LazyLinear
    assert "no shape yet" in fq.summary(model).floats["1"]
    assert "run the model once" in str(fq.summary(model))


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.LazyConv2d(3, 3)], ids=["Linear", "Conv2d"])
def test_model_of_lazy_layers_only_is_refused_with_the_fix(make):
    model = nn.Sequential(make())
    with pytest.raises(ValueError, match="no shape yet; run the model once first"):
        fq.prepare(model, recipes.int8())
    assert nn.parameter.is_lazy(model[0].weight)


# --- rules for what cannot be quantized -------------------------------------------------------------


def with_others():
    return nn.ModuleDict(
        {"fc": nn.Linear(4, 4), "two": nn.Bilinear(4, 4, 4), "norm": nn.BatchNorm2d(4), "relu": nn.ReLU(), "own": Own()}
    )


CANNOT = {
    "Bilinear": ("two", "Bilinear is not a supported layer type"),
    "BatchNorm2d": ("norm", "batch norm"),
    "Own": ("own", "Own is not a supported layer type"),
    "ReLU": ("relu", "ReLU"),
}
each_type = pytest.mark.parametrize(("kind", "path", "reason"), [(k, *v) for k, v in CANNOT.items()], ids=CANNOT)


@each_type
def test_config_for_unsupported_layers_only_is_refused_with_the_reason(kind, path, reason):
    model, config = with_others(), fq.QuantConfig().rule(type=kind, weight=presets.int8())
    assert_refused(model, lambda: fq.prepare(model, config), ValueError, "Nothing in the model", path, reason)


@each_type
def test_rule_for_an_unsupported_layer_is_listed_with_the_reason(kind, path, reason):
    model = with_others()
    before = Snapshot(model.get_submodule(path))
    fq.prepare(model, INT8.rule(type=kind, weight=presets.int8()))
    text = str(fq.summary(model))
    assert path in text
    assert reason in text
    before.assert_unchanged(model.get_submodule(path))


@pytest.mark.parametrize("kind", [nn.LSTM, 3, nn.ReLU()], ids=["a class", "a number", "a module"])
def test_rule_type_that_is_not_a_class_name_is_a_type_error_with_an_example(kind):
    with pytest.raises(TypeError, match=r"`type` must be the name of a class, such as 'Linear', got"):
        recipes.int8().rule(type=kind, weight=presets.int8())


MISFITS = {
    "group size does not divide": (presets.int4(group_size=3), ["`group_size` 3 does not divide", "length 4"]),
    "axis out of range": (fq.QuantSpec(axis=5), ["5"]),
}


@pytest.mark.parametrize(("spec", "words"), MISFITS.values(), ids=MISFITS)
def test_rule_whose_spec_does_not_fit_its_layer_is_listed_with_the_sizes(spec, words):
    with pytest.warns(UserWarning, match="does not fit"):
        model = fq.prepare(five(), recipes.int8().rule("2", weight=spec), X)
    found = fq.summary(model)
    assert [layer.path for layer in found.layers] == ["0", "1", "3", "4"]
    for word in words:
        assert word in found.floats["2"]
    assert type(model[2]) is nn.Linear
    calibrate(model, [X])


# --- failures halfway -------------------------------------------------------------------------------


class Registered(nn.Linear):
    """A class that cannot be subclassed without a keyword argument."""

    def __init_subclass__(cls, **options):
        if "name" not in options:
            raise TypeError("name your layer: class Mine(Registered, name=...)")


def third_has_no_values():
    model = five()
    nn.init.constant_(model[2].weight, torch.nan)
    return model


def third_has_a_class_of_its_own():
    model = five()
    model[2] = Registered(4, 4)
    return model


@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
@pytest.mark.parametrize("make", [third_has_no_values, third_has_a_class_of_its_own], ids=["NaN", "class"])
def test_failure_at_the_third_layer_leaves_the_model_unchanged_or_is_listed(make):
    model = make()
    model[0].register_forward_hook(lambda *_: None)
    before = Snapshot(model)
    try:
        fq.prepare(model, recipes.lsq(4), X)
    except (ValueError, TypeError, RuntimeError) as error:
        assert "2" in str(error), "the message does not say where"  # noqa: PT017
        before.assert_unchanged(model)
    else:
        assert "2" in fq.summary(model).floats
