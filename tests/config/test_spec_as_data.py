"""A `QuantSpec` as dict, JSON, numbers and text, and the presets field by field."""

import copy
import dataclasses
import inspect
import itertools
import json
import pickle

import numpy as np
import pytest

from fakequant import QuantSpec, presets
from fakequant.formats import FLOAT_FORMATS, FORMATS, GGML_TYPES, SCALE_RULES
from fakequant.spec import NUMERICS

DEFAULTS = dict(
    bits=8, signed=True, symmetric=True, narrow_range=False, axis=None, group_size=None, numerics="onnx", format="int",
    scale_format="float32", scale_rule="floor", group_rows=None,
)  # fmt: skip
MX = dict(axis=-1, group_size=32, scale_format="e8m0")
GGML = dict(axis=-1, group_size=32, scale_format="float16")


def every_kind():
    """Yields every valid combination of fields, with `bits` at its limits."""
    kinds = [dict(signed=True, symmetric=s, narrow_range=n) for s in (True, False) for n in (True, False)]
    kinds.append(dict(signed=False, symmetric=False))
    places = [{}, dict(axis=0), dict(axis=-1), dict(axis=1, group_size=1), dict(axis=-2, group_size=32)]
    places += [dict(axis=-1, group_size=-1), dict(axis=-1, group_size=32, group_rows=8)]
    for kind, place, numerics in itertools.product(kinds, places, NUMERICS):
        for bits in (2, 4, 8, 31, 32) if kind["signed"] else (1, 4, 8, 31):
            yield QuantSpec(bits=bits, numerics=numerics, **kind, **place)
    for name, place in itertools.product(FLOAT_FORMATS, places):
        yield QuantSpec(format=name, **place)
    powers = [rule for rule in SCALE_RULES if rule not in ("divided", *GGML_TYPES)]
    for name, rule, axis in itertools.product(FORMATS, powers, (0, -1)):
        yield QuantSpec(format=name, scale_format="e8m0", scale_rule=rule, axis=axis, group_size=32)
    yield presets.nvfp4()
    yield presets.nvfp4(scale_rule="divided")
    yield from (getattr(presets, name)() for name in GGML_TYPES)
    for scale_format, place in itertools.product(("float16", "bfloat16"), places):
        yield QuantSpec(bits=4, scale_format=scale_format, **place)


SPECS = list(every_kind())


def test_spec_dict_has_every_field():
    assert QuantSpec().to_dict() == DEFAULTS
    assert list(QuantSpec().to_dict()) == list(DEFAULTS)
    assert QuantSpec(bits=3, axis=-1, group_size=16, narrow_range=True, numerics="torch").to_dict() == {
        **DEFAULTS, "bits": 3, "narrow_range": True, "axis": -1, "group_size": 16, "numerics": "torch",
    }  # fmt: skip


def test_spec_dict_is_a_copy():
    spec = QuantSpec()
    spec.to_dict()["bits"] = 4
    assert spec.bits == 8


@pytest.mark.parametrize(
    "back",
    [
        lambda s: QuantSpec.from_dict(s.to_dict()),
        lambda s: QuantSpec.from_dict(json.loads(json.dumps(s.to_dict()))),
        lambda s: QuantSpec.from_json(s.to_json()),
        lambda s: QuantSpec.from_numbers(s.to_numbers()),
        lambda s: QuantSpec.from_numbers(np.array(s.to_numbers(), np.int64).tolist()),
        lambda s: QuantSpec.from_numbers(np.array(s.to_numbers(), np.int32).tolist()),
        lambda s: pickle.loads(pickle.dumps(s)),
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        lambda s: eval(repr(s)),
    ],
    ids=["dict", "JSON-of-dict", "JSON", "numbers", "int64", "int32", "pickle", "copy", "deepcopy", "replace", "repr"],
)
def test_spec_round_trips_through_every_form(back):
    for spec in SPECS:
        found = back(spec)
        assert type(found) is QuantSpec
        assert found == spec
        assert hash(found) == hash(spec)
        for name, value in spec.to_dict().items():  # True == 1, so == is not enough
            assert type(getattr(found, name)) is type(value)


def test_different_specs_differ_in_every_form():
    for form in (hash, str, repr, QuantSpec.to_json, lambda s: tuple(s.to_numbers())):
        assert len({form(spec) for spec in SPECS}) == len(SPECS)
    assert len(set(SPECS)) == len(SPECS)


@pytest.mark.parametrize("name", DEFAULTS)
def test_changing_one_field_makes_another_spec(name):
    changes = dict(bits=7, signed=False, symmetric=False, narrow_range=True, axis=1, group_size=4, numerics="torch")
    other = changes.get(name)
    base = QuantSpec(symmetric=False, axis=0)
    if name == "group_rows":
        base, other = QuantSpec(axis=-1, group_size=4), 4
    if name == "symmetric":
        base, other = QuantSpec(axis=0), False
    if name in ("format", "scale_format", "scale_rule"):
        base, other = presets.mxint8(), {"format": "e4m3fn", "scale_format": "float32", "scale_rule": "even"}[name]
        base = dataclasses.replace(base, narrow_range=False)
    changed = dataclasses.replace(base, **{name: other})
    assert changed != base
    assert changed.to_numbers() != base.to_numbers()
    assert base == dataclasses.replace(base)


@pytest.mark.parametrize("other", [None, 8, "int8, per tensor", DEFAULTS, tuple(DEFAULTS.values())], ids=repr)
def test_spec_equals_only_specs(other):
    assert QuantSpec() != other


def test_spec_cannot_be_changed_or_extended():
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantSpec().axis = 0
    with pytest.raises((AttributeError, TypeError)):
        object.__setattr__(QuantSpec(), "axes", 0)
    with pytest.raises(ValueError, match="must be between 2 and 32"):
        dataclasses.replace(QuantSpec(), bits=33)


def test_spec_fields_absent_from_data_have_their_defaults():
    assert QuantSpec.from_dict({}) == QuantSpec.from_json("{}") == QuantSpec()
    assert QuantSpec.from_json('{"signed": false, "symmetric": false, "axis": null}') == presets.uint8()


def test_spec_json_is_one_flat_object():
    assert json.loads(QuantSpec(bits=4, axis=0).to_json()) == {**DEFAULTS, "bits": 4, "axis": 0}


def test_spec_numbers_have_a_fixed_order():
    absent = -(2**31)
    assert QuantSpec().to_numbers() == [8, 1, 1, 0, absent, absent, 1]
    token = QuantSpec(bits=4, symmetric=False, narrow_range=True, axis=-1, group_size=-1, numerics="half_away")
    assert token.to_numbers() == [4, 1, 0, 1, -1, -1, 2]
    # Float formats and block scales append three numbers.
    assert presets.mxfp4(scale_rule="even").to_numbers() == [4, 1, 1, 0, -1, 32, 1, 7, 1, 2]
    # Blocks of rows append one more.
    assert QuantSpec(axis=-1, group_size=32, group_rows=8).to_numbers() == [8, 1, 1, 0, -1, 32, 1, 0, 0, 0, 8]
    assert all(type(n) is int for spec in SPECS for n in spec.to_numbers())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "int8, per tensor"),
        (dict(bits=4, narrow_range=True), "int4 narrow, per tensor"),
        (dict(symmetric=False), "int8 affine, per tensor"),
        (dict(symmetric=False, narrow_range=True), "int8 narrow affine, per tensor"),
        (dict(bits=1, signed=False, symmetric=False), "uint1, per tensor"),
        (dict(axis=0), "int8, per channel on axis 0"),
        (dict(axis=-1, group_size=32), "int8, per group of 32 on axis -1"),
        (dict(axis=-1, group_size=-1), "int8, per token over axis -1"),
        (dict(axis=-1, group_size=32, group_rows=8), "int8, per block of 8 x 32 on axis -1"),
        (dict(axis=1, numerics="torch"), "int8, per channel on axis 1, torch numerics"),
        (dict(format="e5m2"), "e5m2, per tensor"),
        (dict(format="e2m1", **MX), "e2m1, per group of 32 on axis -1, scales e8m0 (floor)"),
        (dict(scale_rule="rceil", **MX), "int8, per group of 32 on axis -1, scales e8m0 (rceil)"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_spec_text_is_short_and_complete(options, text):
    assert str(QuantSpec(**options)) == text
    assert f"{QuantSpec(**options)}" == text


@pytest.mark.parametrize(
    ("bits", "signed", "storage"),
    [
        (2, True, "int8"), (8, True, "int8"), (9, True, "int16"), (16, True, "int16"), (17, True, "int32"),
        (32, True, "int32"), (1, False, "uint8"), (8, False, "uint8"), (9, False, "uint16"), (31, False, "uint32"),
    ],
)  # fmt: skip
def test_spec_storage_holds_qmin_and_qmax(bits, signed, storage):
    spec = QuantSpec(bits=bits, signed=signed, symmetric=False)
    assert spec.storage == storage
    limits = np.iinfo(storage)
    assert limits.min <= spec.qmin <= spec.qmax <= limits.max


# --- presets ------------------------------------------------------------------------------

PRESETS = {
    "int8": (presets.int8(), dict(narrow_range=True, axis=0), (-127, 127)),
    "int8, group": (presets.int8(group_size=64), dict(narrow_range=True, axis=-1, group_size=64), (-127, 127)),
    "int8, axis": (presets.int8(axis=1), dict(narrow_range=True, axis=1), (-127, 127)),
    "int8, group and axis": (
        presets.int8(group_size=4, axis=0),
        dict(narrow_range=True, axis=0, group_size=4),
        (-127, 127),
    ),
    "int4": (presets.int4(), dict(bits=4, axis=-1, group_size=32), (-8, 7)),
    "int4, group": (presets.int4(group_size=128), dict(bits=4, axis=-1, group_size=128), (-8, 7)),
    "int4, channel": (presets.int4(group_size=None), dict(bits=4, axis=0), (-8, 7)),
    "int4, channel and axis": (presets.int4(group_size=None, axis=1), dict(bits=4, axis=1), (-8, 7)),
    "int4, axis": (presets.int4(axis=1), dict(bits=4, axis=1, group_size=32), (-8, 7)),
    "int2": (presets.int2(), dict(bits=2, axis=-1, group_size=32), (-2, 1)),
    "int2, channel": (presets.int2(group_size=None), dict(bits=2, axis=0), (-2, 1)),
    "uint8": (presets.uint8(), dict(signed=False, symmetric=False), (0, 255)),
    "uint4": (presets.uint4(), dict(bits=4, signed=False, symmetric=False), (0, 15)),
    "int16": (presets.int16(), dict(bits=16), (-32768, 32767)),
    "int8_per_token": (presets.int8_per_token(), dict(axis=-1, group_size=-1), (-128, 127)),
    "fp8_e4m3": (presets.fp8_e4m3(), dict(format="e4m3fn"), (0, 255)),
    "fp8_e4m3, axis": (presets.fp8_e4m3(axis=0), dict(format="e4m3fn", axis=0), (0, 255)),
    "fp8_e5m2": (presets.fp8_e5m2(), dict(format="e5m2"), (0, 255)),
    "mxfp8": (presets.mxfp8(), dict(format="e4m3fn", **MX), (0, 255)),
    "mxfp8, e5m2": (presets.mxfp8(format="e5m2", axis=1), {**MX, "format": "e5m2", "axis": 1}, (0, 255)),
    "mxfp6": (presets.mxfp6(), dict(format="e2m3", bits=6, **MX), (0, 63)),
    "mxfp6, e3m2": (presets.mxfp6(format="e3m2"), dict(format="e3m2", bits=6, **MX), (0, 63)),
    "mxfp4": (presets.mxfp4(), dict(format="e2m1", bits=4, **MX), (0, 15)),
    "mxfp4, rule": (presets.mxfp4(scale_rule="even"), dict(format="e2m1", bits=4, scale_rule="even", **MX), (0, 15)),
    "mxint8": (presets.mxint8(), dict(narrow_range=True, **MX), (-127, 127)),
    "nvfp4": (
        presets.nvfp4(),
        dict(format="e2m1", bits=4, axis=-1, group_size=16, scale_format="e4m3fn"),
        (0, 15),
    ),
    "q4_0": (presets.q4_0(), dict(bits=4, **GGML, scale_rule="q4_0"), (-8, 7)),
    "q4_1": (presets.q4_1(), dict(bits=4, signed=False, symmetric=False, **GGML, scale_rule="q4_1"), (0, 15)),
    "q4_k": (presets.q4_k(), dict(bits=4, signed=False, symmetric=False, **GGML, scale_rule="q4_k"), (0, 15)),
    "q6_k": (presets.q6_k(), {**GGML, "bits": 6, "group_size": 16, "scale_rule": "q6_k"}, (-32, 31)),
    "q8_0": (presets.q8_0(), dict(narrow_range=True, **GGML, scale_rule="q8_0"), (-127, 127)),
    "q8_0_input": (presets.q8_0_input(), dict(narrow_range=True, **GGML, scale_rule="q8_0_input"), (-127, 127)),
    "tq2_0": (
        presets.tq2_0(),
        {**GGML, "bits": 2, "narrow_range": True, "group_size": 256, "scale_rule": "tq2_0"},
        (-1, 1),
    ),
    "q8_k_input": (
        presets.q8_k_input(),
        dict(narrow_range=True, axis=-1, group_size=256, scale_rule="q8_k_input"),
        (-127, 127),
    ),
}


@pytest.mark.parametrize(("spec", "fields", "ends"), PRESETS.values(), ids=PRESETS)
def test_preset_has_the_documented_fields(spec, fields, ends):
    assert spec.to_dict() == {**DEFAULTS, **fields}
    assert (spec.qmin, spec.qmax) == ends


def test_table_of_this_file_covers_every_preset():
    public = {n for n, f in inspect.getmembers(presets, inspect.isfunction) if not n.startswith("_")}
    assert public == {name.split(",")[0] for name in PRESETS}


@pytest.mark.parametrize("make", [presets.int8, presets.int4, presets.int2])
@pytest.mark.parametrize("group", [0, -2])
def test_preset_refuses_an_invalid_group_size(make, group):
    with pytest.raises(ValueError, match="`group_size` must be at least 1"):
        make(group_size=group)


def test_preset_takes_keyword_arguments_only():
    with pytest.raises(TypeError, match="positional"):
        presets.int4(32)


# --- bad input ----------------------------------------------------------------------------

BAD_FORMATS = {
    "unknown format": (dict(format="fp8"), "`format` must be one of int, e4m3fn"),
    "unknown scale format": (dict(scale_format="e8m0fnu"), "`scale_format` must be one of float32, e8m0, e4m3fn"),
    "unknown rule": (dict(scale_rule="round"), "`scale_rule` must be one of floor, ceil, even, rceil"),
    "unsigned": (dict(format="e4m3fn", signed=False, symmetric=False), "needs signed=True and symmetric=True"),
    "affine": (dict(format="e4m3fn", symmetric=False), "needs signed=True and symmetric=True"),
    "narrow": (dict(format="e4m3fn", narrow_range=True), "needs narrow_range=False"),
    "bits": (dict(format="e2m1", bits=5), "`bits` must be 4 for `format='e2m1'`, got 5"),
    "numerics": (dict(format="e2m1", numerics="torch"), "has one rounding rule, numerics='onnx', got 'torch'"),
    "rule without powers": (dict(scale_rule="ceil"), "which scales of the format 'float32' are not"),
    "blocks per tensor": (dict(scale_format="e8m0"), "one scale per block of neighbours, got 'tensor'"),
    "blocks per token": (dict(scale_format="e8m0", axis=-1, group_size=-1), "one scale per block of neighbours"),
    "affine blocks": (dict(symmetric=False, **MX), "needs signed=True and symmetric=True"),
    "NVFP4 in FP8": (
        dict(format="e4m3fn", scale_format="e4m3fn", axis=-1, group_size=16), "is defined for format='e2m1'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD_FORMATS.values(), ids=BAD_FORMATS)
def test_formats_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QuantSpec(**options)


@pytest.mark.parametrize("make", [presets.mxfp8, presets.mxfp6])
def test_preset_refuses_a_format_of_other_bits(make):
    with pytest.raises(ValueError, match=r"`format` must be .* here, got 'e2m1'"):
        make(format="e2m1")


@pytest.mark.parametrize("bits", [-8, 0, 1, 33, 2**40])
def test_bits_out_of_range_of_a_signed_grid_are_refused(bits):
    with pytest.raises(ValueError, match=f"`bits` must be between 2 and 32 for a signed grid, got {bits}"):
        QuantSpec.from_dict({"bits": bits})


@pytest.mark.parametrize("bits", [-1, 0, 32, 64])
def test_bits_out_of_range_of_an_unsigned_grid_are_refused(bits):
    with pytest.raises(ValueError, match=f"`bits` must be between 1 and 31 for an unsigned grid, got {bits}"):
        QuantSpec(bits=bits, signed=False, symmetric=False)


def test_symmetric_unsigned_spec_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="needs a signed grid") as caught:
        QuantSpec.from_json('{"signed": false}')
    assert "QuantSpec(signed=False, symmetric=False)" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [("bit", "bits"), ("Bits", "bits"), ("symetric", "symmetric"), ("groupsize", "group_size"), ("axes", "axis"),
     ("numeric", "numerics"), ("sign", "signed")],
)  # fmt: skip
def test_unknown_field_is_refused_with_the_nearest_name(name, near):
    with pytest.raises(ValueError, match=f"no field '{name}', did you mean '{near}'?") as caught:
        QuantSpec.from_dict({"bits": 4, name: 1})
    assert f"The fields are {', '.join(DEFAULTS)}." in str(caught.value)


@pytest.mark.parametrize("name", ["", "zzz", 3, None])
def test_unknown_field_without_a_near_name_is_refused_with_all_fields(name):
    with pytest.raises(ValueError, match=r"has no field .*\.\nThe fields are bits"):
        QuantSpec.from_dict({name: 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("bits", v) for v in (8.0, "8", None, True, np.int64(8), [8])),
        *((name, v) for name in ("signed", "symmetric", "narrow_range") for v in (0, 1, None, "True", np.True_)),
        *(("axis", v) for v in (0.0, "0", False, np.int64(0), (0,))),
        *(("group_size", v) for v in (32.0, "32", True, np.int32(32))),
    ],
    ids=repr,
)
def test_field_of_the_wrong_type_is_refused_with_name_and_value(field, value):
    with pytest.raises(TypeError) as caught:
        QuantSpec.from_dict({"axis": 0, field: value})
    assert f"`{field}` must be" in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("numerics", ["ONNX", "", None, 1, ["onnx"]], ids=repr)
def test_unknown_numerics_are_refused(numerics):
    with pytest.raises(ValueError, match="`numerics` must be one of torch, onnx, half_away"):
        QuantSpec(numerics=numerics)


@pytest.mark.parametrize("text", ["[]", "8", "null", '"int8"', "true"])
def test_spec_json_that_is_not_an_object_is_refused(text):
    with pytest.raises(TypeError, match="A QuantSpec in JSON is an object with its fields"):
        QuantSpec.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "{bits: 8}", "{'bits': 8}"])
def test_text_that_is_not_json_is_refused(text):
    with pytest.raises(ValueError, match="Expecting"):
        QuantSpec.from_json(text)


@pytest.mark.parametrize(
    "numbers",
    [
        [8, 1, 1, 0, 0, 0],
        [8, 1, 1, 0, 0, 1, 1, 1],
        [33, 1, 1, 0, 0, 1, 1],
        [8, 0, 1, 0, 0, 1, 1],
        [8, 1, 1, 0, 0, 0, 1],
    ],
    ids=["too few", "too many", "bits", "symmetric and unsigned", "group"],
)
def test_invalid_spec_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match=r"."):
        QuantSpec.from_numbers(numbers)
