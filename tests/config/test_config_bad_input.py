"""Configs and recipes with wrong values: errors that name the field."""

import copy
import json

import pytest

import fakequant as fq

recipes = pytest.importorskip("fakequant.recipes")

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")


@pytest.mark.parametrize("text", ["", "{", '{"default": }', "int8"], ids=repr)
def test_broken_json_is_a_value_error_with_the_position(text):
    with pytest.raises(ValueError, match=r"line 1 column \d+"):
        fq.QuantConfig.from_json(text)


WRONG = {
    "rules: a number": ({"rules": 3}, "rules"),
    "rules: null": ({"rules": None}, "rules"),
    "rules: an object": ({"rules": {"path": "a"}}, "`rules` must be a list"),
    "rules: strings": ({"rules": ["head"]}, "Rule is read from a dict"),
    "rules: a path that is a number": ({"rules": [{"path": 3}]}, "`path` must be a path"),
    "target: a list": ({"target": ["generic"]}, "`target` must be one of"),
    "target: null": ({"target": None}, "`target` must be one of generic"),
    "target: a runtime": ({"target": "executorch"}, r"\nDid you mean xnnpack\?"),
    "target: two of a runtime": ({"target": "ORT"}, "\nDid you mean onnxruntime-x86, or onnxruntime-vnni for a CPU"),
    "target: misspelt": ({"target": "open_vino"}, r"\nDid you mean openvino\?"),
    "target: unknown": ({"target": "toaster"}, r"got 'toaster'\.$"),
    "a spec: a number": ({"default": {"weight": 8}}, "QuantSpec"),
    "a spec: its name": ({"operands": "uint8"}, "QuantSpec"),
    "a spec: too many bits": ({"default": {"weight": {"bits": 99}}}, "`bits` must be between 2 and 32"),
    "an observer: its name": ({"default": {"weight_observer": "MinMax"}}, "bserver"),
    "an observer: empty": ({"default": {"weight_observer": {}}}, "`kind` must be one of"),
    "sums: a bool": ({"sums": True}, "`sums` must be 'exact' or 'float', got True"),
    "save_codes: a number": ({"save_codes": 1}, "`save_codes` must be True or False, got 1"),
    "a recipe": ({"int8": {}}, "no field 'int8'; it has default, rules"),
}


@pytest.mark.parametrize(("fields", "words"), WRONG.values(), ids=WRONG)
def test_json_with_a_field_of_the_wrong_type_names_the_field(fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        fq.QuantConfig.from_json(json.dumps(fields))


def test_from_dict_does_not_change_its_argument():
    fields = recipes.int8().skip("head").to_dict()
    before = copy.deepcopy(fields)
    fq.QuantConfig.from_dict(fields)
    assert fields == before


@pytest.mark.parametrize("bits", [0, 1, 33, "4", 2.0], ids=repr)
def test_recipe_refuses_invalid_bits(bits):
    with pytest.raises((ValueError, TypeError), match=rf"`bits` must be .*, got {bits!r}"):
        recipes.lsq(bits)


@pytest.mark.parametrize("bits", [4, 9, 32, None, "16"])
def test_int8_has_activations_of_8_or_16_bits(bits):
    with pytest.raises(ValueError, match="`activation_bits` must be 8 or 16"):
        recipes.int8(activation_bits=bits)


def test_activations_of_16_bits_need_a_target_that_has_them():
    for target in ("xnnpack", "tensorrt"):
        with pytest.raises(ValueError, match=f"'{target}' has no kernels for activations of 16 bits"):
            recipes.int8(activation_bits=16, target=target)
    assert recipes.int8(activation_bits=16, target="litert").operands.bits == 16


@pytest.mark.parametrize("group", [0, "x", 2.5], ids=repr)
def test_recipe_refuses_an_invalid_group_size(group):
    with pytest.raises((ValueError, TypeError), match=rf"`group_size` must be .*, got {group!r}"):
        recipes.int4_weight_only(group)
