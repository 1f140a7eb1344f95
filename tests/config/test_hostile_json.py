"""Deeply nested JSON and huge names or values are refused quickly, with a short message."""

import pytest

import fakequant as fq
from fakequant import QuantSpec

pytest.importorskip("torch")

LONG = "x" * 10_000_000
READERS = {"spec": QuantSpec.from_json, "config": fq.QuantConfig.from_json}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"bits":' * 100_000], ids=["lists", "objects"])
def test_deeply_nested_json_is_refused_in_one_line(read, text):
    with pytest.raises(ValueError, match=r"^The text is nested too deeply to be read as JSON\.$"):
        read(text)


NAMES = {
    "spec": (QuantSpec.from_json, f'{{"{LONG}": 1}}'),
    "config": (fq.QuantConfig.from_json, f'{{"{LONG}": 1}}'),
    "spec in a config": (fq.QuantConfig.from_json, f'{{"default": {{"weight": {{"{LONG}": 1}}}}}}'),
    "observer in a config": (
        fq.QuantConfig.from_json,
        f'{{"default": {{"weight_observer": {{"kind": "MinMax", "{LONG}": 1}}}}}}',
    ),
}


@pytest.mark.parametrize(("read", "text"), NAMES.values(), ids=NAMES)
def test_huge_field_name_is_refused_with_a_short_message(read, text, monkeypatch):
    monkeypatch.setattr("fakequant.spec.get_close_matches", None)  # it would take most of a minute
    with pytest.raises(ValueError, match=r"has no (field|setting) 'xxx") as caught:
        read(text)
    assert len(str(caught.value)) < 500


def test_huge_value_is_refused_with_a_short_message():
    with pytest.raises(TypeError, match="`bits` must be an int") as caught:
        QuantSpec.from_json(f'{{"bits": "{LONG}"}}')
    assert len(str(caught.value)) < 500
