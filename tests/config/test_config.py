"""Configs of whole models: which rule decides, JSON round trips, recipes and targets."""

import dataclasses
import json

import pytest

import fakequant as fq
from fakequant import presets

torch = pytest.importorskip("torch")
nn = torch.nn
observers = pytest.importorskip("fakequant.observers")
recipes = pytest.importorskip("fakequant.recipes")
targets = pytest.importorskip("fakequant._runtimes")

LINEAR, CONV = nn.Linear(2, 2), nn.Conv2d(1, 1, 1)
FOUR, EIGHT = fq.LayerConfig(weight=presets.int4(group_size=None)), fq.LayerConfig(weight=presets.int8())


class OwnLinear(nn.Linear):
    pass


# --- rules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*", "", True),
        ("*", "a.b.c", True),
        ("encoder.*", "encoder.0.fc", True),
        ("encoder.*", "encoder", False),
        ("encoder*", "encoder", True),
        ("encoder", "encoder.0", False),
        ("*.fc", "encoder.0.fc", True),
        ("*.fc", "fc", False),
        ("layer?", "layer1", True),
        ("layer?", "layer12", False),
        ("layer[12]", "layer2", True),
        ("layer[12]", "layer3", False),
        ("Head", "head", False),
        ("head", "Head", False),
    ],
)
def test_rule_path_is_a_case_sensitive_glob_whose_star_crosses_dots(pattern, path, matches):
    assert fq.Rule(path=pattern).matches(path, LINEAR) is matches


@pytest.mark.parametrize(
    ("name", "module", "matches"),
    [
        (None, CONV, True),
        ("Linear", LINEAR, True),
        ("Linear", OwnLinear(2, 2), True),
        ("OwnLinear", LINEAR, False),
        ("_ConvNd", nn.ConvTranspose1d(1, 1, 1), True),
        ("_ConvNd", LINEAR, False),
        ("Conv2d", nn.ConvTranspose2d(1, 1, 1), False),
        ("Module", LINEAR, True),
        ("linear", LINEAR, False),
        ("Lin*", LINEAR, False),
    ],
)
def test_rule_type_is_the_name_of_the_class_or_of_a_base_class(name, module, matches):
    assert fq.Rule(type=name).matches("x", module) is matches


def test_rule_matches_only_if_path_and_type_match():
    rule = fq.Rule(path="a.*", type="Linear")
    assert rule.matches("a.b", LINEAR)
    assert not rule.matches("a.b", CONV)
    assert not rule.matches("b.a", LINEAR)


def test_rule_with_a_class_as_type_matches_or_is_refused():
    try:
        rule = fq.Rule(type=nn.Linear)
    except TypeError:
        return
    assert rule.matches("x", LINEAR), "this rule can never match, but was accepted"


def test_rule_type_matches_a_prepared_layer():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)), recipes.int8(), torch.ones(1, 4))
    assert fq.Rule(type="Linear").matches("0", model[0])


def test_first_matching_rule_decides():
    config = fq.QuantConfig(default=EIGHT, rules=(fq.Rule(path="a*"), fq.Rule(path="ab", use=FOUR), fq.Rule(path="c")))
    assert config.find("ab", LINEAR) == (None, 0)
    assert config.find("c", LINEAR) == (None, 2)
    assert config.find("d", LINEAR) == (EIGHT, None)


def test_rule_added_later_is_tried_first():
    config = fq.QuantConfig(default=EIGHT).skip("a.*").rule("a.b", weight=presets.int4(group_size=None))
    assert config.find("a.b", LINEAR) == (FOUR, 0)
    assert config.find("a.c", LINEAR) == (None, 1)
    again = config.skip(type="Linear")
    assert again.find("a.b", LINEAR) == (None, 0)
    assert again.find("a.b", CONV) == (FOUR, 1)


def test_rule_takes_unspecified_fields_from_the_default():
    config = recipes.lsq(3).rule("stem", weight=presets.int8())
    use, _ = config.find("stem", LINEAR)
    assert use == dataclasses.replace(config.default, weight=presets.int8())
    assert use.learned
    assert use.input.bits == 3


def test_rule_can_remove_a_spec():
    use, _ = recipes.int8().rule("stem", input=None).find("stem", LINEAR)
    assert use.input is None
    assert use.weight == presets.int8()


def test_rule_without_a_default_has_only_its_own_fields():
    config = fq.QuantConfig().rule(type="Linear", weight=presets.int8())
    assert config.find("x", LINEAR) == (EIGHT, 0)
    assert config.find("x", CONV) == (None, None)


def test_adding_a_rule_does_not_change_the_config():
    config = recipes.int8()
    config.rule("a", weight=None).skip("b")
    assert config == recipes.int8()
    assert config.rules == ()


def test_rule_with_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="has no field 'wieght'; it has weight, input"):
        recipes.int8().rule("a", wieght=presets.int8())


def test_configs_are_frozen():
    for thing, field in ((recipes.int8(), "target"), (fq.LayerConfig(), "learned"), (fq.Rule(), "path")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, "x")


def test_equal_configs_have_equal_hashes():
    assert len({recipes.int8(), recipes.int8(), recipes.w4a8()}) == 2


# --- JSON ---------------------------------------------------------------------------------------------

CONFIGS = {
    "nothing": fq.QuantConfig(),
    "int8": recipes.int8(target="onnxruntime-x86"),
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(64),
    "w4a8": recipes.w4a8(target="onnxruntime-vnni"),
    "lsq": recipes.lsq(2, activation_bits=4),
    "rules": recipes.int8().skip("head").rule("a.?", type="Conv2d", weight=presets.int2(), learned=True).skip(type="X"),
    "observers": fq.QuantConfig(
        default=fq.LayerConfig(
            weight=presets.int8(),
            output=presets.int16(),
            weight_observer=observers.MSE(steps=9),
            activation_observer=observers.Percentile(99.0, bins=64),
        )
    ),
    "unicode": fq.QuantConfig(default=EIGHT).skip('köpfe."x"\\*'),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@each_config
@pytest.mark.parametrize("indent", [None, 2])
def test_config_round_trips_through_json(config, indent):
    text = config.to_json(indent)
    back = fq.QuantConfig.from_json(text)
    assert back == config
    assert back.to_json(indent) == text
    assert hash(back) == hash(config)


@each_config
def test_config_dict_holds_only_json_types(config):
    fields = config.to_dict()
    assert json.loads(json.dumps(fields)) == fields
    assert fq.QuantConfig.from_dict(fields) == config


@pytest.mark.parametrize("layer", [fq.LayerConfig(), FOUR, CONFIGS["observers"].default], ids=["none", "four", "all"])
def test_layer_config_round_trips_through_a_dict(layer):
    assert fq.LayerConfig.from_dict(json.loads(json.dumps(layer.to_dict()))) == layer


def test_config_with_rules_as_a_list_round_trips_through_json():
    config = fq.QuantConfig(default=EIGHT, rules=[fq.Rule(path="a")])
    assert fq.QuantConfig.from_json(config.to_json()) == config


def test_config_fields_absent_from_json_have_their_defaults():
    assert fq.QuantConfig.from_json("{}") == fq.QuantConfig()
    assert fq.QuantConfig.from_dict({"rules": [{"path": "a"}]}).rules == (fq.Rule(path="a"),)
    assert fq.LayerConfig.from_dict({}) == fq.LayerConfig()
    assert fq.LayerConfig.from_dict({"weight": {"bits": 4}}).weight == fq.QuantSpec(bits=4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"defualt": None}, "QuantConfig has no field 'defualt'"),
        ({"rules": [{"pth": "a"}]}, "Rule has no field 'pth'"),
        ({"default": {"weights": None}}, "LayerConfig has no field 'weights'"),
        ({"default": {"weight": {"bit": 4}}}, "QuantSpec has no field 'bit'"),
        ({"operands": {"bit": 4}}, "QuantSpec has no field 'bit'"),
        ({"rules": [{"use": {"in": None}}]}, "LayerConfig has no field 'in'"),
        ({"default": {"weight_observer": {"kind": "Nobody"}}}, "kind"),
        ({"target": "toaster"}, "toaster"),
    ],
)
def test_unknown_config_names_are_errors_that_name_them(fields, message):
    with pytest.raises(ValueError, match=message):
        fq.QuantConfig.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"int8"', '{"default": "int8"}', '{"default": []}'])
def test_config_json_that_is_not_an_object_is_a_type_error(text):
    with pytest.raises(TypeError):
        fq.QuantConfig.from_json(text)


@pytest.mark.parametrize("name", ["weight", "input", "output", "weight_observer", "activation_observer", "learned"])
def test_layer_config_field_of_the_wrong_type_is_a_type_error(name):
    with pytest.raises(TypeError, match=name):
        fq.LayerConfig(**{name: "int8"})


# --- recipes ------------------------------------------------------------------------------------------

W8 = fq.QuantSpec(bits=8, narrow_range=True, axis=0)
W4 = fq.QuantSpec(bits=4, axis=0)
A8 = fq.QuantSpec(bits=8, signed=False, symmetric=False)
TOKEN = fq.QuantSpec(bits=8, axis=-1, group_size=-1)


def layer(weight, input=None, learned=False, activation_observer=None):
    return fq.LayerConfig(
        weight=weight,
        input=input,
        learned=learned,
        activation_observer=activation_observer,
    )


RECIPES = {
    "int8": (recipes.int8(), layer(W8, A8), layer(W8, A8), A8),
    "int8_dynamic": (
        recipes.int8_dynamic(),
        layer(W8, TOKEN, activation_observer=observers.Dynamic()),
        layer(W8, A8, activation_observer=observers.Dynamic()),
        None,
    ),
    "int4_weight_only": (
        recipes.int4_weight_only(),
        layer(fq.QuantSpec(bits=4, axis=-1, group_size=32)),
        layer(W4),
        None,
    ),
    "int4_weight_only per channel": (recipes.int4_weight_only(None), layer(W4), layer(W4), None),
    "w4a8": (recipes.w4a8(), layer(W4, A8), layer(W4, A8), A8),
    "lsq": (
        recipes.lsq(3),
        layer(fq.QuantSpec(bits=3, axis=0), fq.QuantSpec(bits=3, signed=False, symmetric=False), True),
        layer(fq.QuantSpec(bits=3, axis=0), fq.QuantSpec(bits=3, signed=False, symmetric=False), True),
        fq.QuantSpec(bits=3, signed=False, symmetric=False),
    ),
    "lsq with other activations": (
        recipes.lsq(2, activation_bits=8),
        layer(fq.QuantSpec(bits=2, axis=0), A8, True),
        layer(fq.QuantSpec(bits=2, axis=0), A8, True),
        A8,
    ),
}


@pytest.mark.parametrize(("config", "linear", "conv", "operands"), RECIPES.values(), ids=RECIPES)
def test_recipe_has_exactly_the_documented_specs(config, linear, conv, operands):
    assert config.target == "generic"
    assert config.operands == operands
    assert config.find("any", LINEAR)[0] == linear
    for module in (CONV, nn.Conv1d(1, 1, 1), nn.ConvTranspose3d(1, 1, 1)):
        assert config.find("any", module)[0] == conv


@pytest.mark.parametrize("make", [recipes.int8, recipes.int8_dynamic, recipes.int4_weight_only, recipes.w4a8])
def test_recipe_takes_a_known_target(make):
    assert make(target="onnxruntime-x86").target == "onnxruntime-x86"
    with pytest.raises(ValueError, match="generic, onnxruntime-vnni, onnxruntime-x86"):
        make(target="tpu")


# --- targets ------------------------------------------------------------------------------------------


def test_targets_are_the_documented_ones():
    names = ["generic", "onnxruntime-vnni", "onnxruntime-x86", "openvino-vnni", "openvino", "tensorrt", "xnnpack"]
    names += ["litert", "litert-builtin", "litert-reference", "compressed-tensors", "llama.cpp"]
    assert list(targets.TARGETS) == names
    for name, target in targets.TARGETS.items():
        assert targets.find(name) is target
        assert target.name == name


@pytest.mark.parametrize("bits", [2, 4, 7, 8, 9, 16])
def test_x86_target_without_vnni_reduces_8_bit_weights_to_7_bits(bits):
    spec = fq.QuantSpec(bits=bits, axis=0)
    assert targets.find("generic").fit_weight(spec) == spec
    assert targets.find("onnxruntime-vnni").fit_weight(spec) == spec
    fitted = targets.find("onnxruntime-x86").fit_weight(spec)
    assert fitted == dataclasses.replace(spec, bits=7 if bits == 8 else bits)


@pytest.mark.parametrize(("narrow", "qmin"), [(True, -63), (False, -64)])
def test_x86_target_weights_keep_pairs_of_products_within_16_bits(narrow, qmin):
    spec = targets.find("onnxruntime-x86").fit_weight(fq.QuantSpec(bits=8, narrow_range=narrow, axis=0))
    assert (spec.qmin, spec.qmax) == (qmin, 63)
    assert 2 * 255 * spec.qmin >= -(2**15)
    assert 2 * 255 * spec.qmax < 2**15


@pytest.mark.parametrize(("target", "bits"), [("generic", 8), ("onnxruntime-vnni", 8), ("onnxruntime-x86", 7)])
@pytest.mark.parametrize("learned", [False, True], ids=["observed", "learned"])
def test_prepared_weights_fit_the_target_and_activations_keep_their_bits(target, bits, learned):
    config = recipes.lsq(8) if learned else recipes.int8()
    config = dataclasses.replace(config, target=target)
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.ConvTranspose1d(4, 4, 1)), config, torch.ones(1, 4, 4))
    for module in model:
        assert module.weight_quantizer.spec.bits == bits
        assert module.input_quantizer.spec.bits == 8
    assert model[1].weight_quantizer.spec.axis == 1
