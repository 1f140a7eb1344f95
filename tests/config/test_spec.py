"""`QuantSpec`: code ranges, granularity, and values that are refused."""

import dataclasses

import pytest

from fakequant import QuantSpec


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(bits=8), (-128, 127)),
        (dict(bits=8, narrow_range=True), (-127, 127)),
        (dict(bits=2), (-2, 1)),
        (dict(bits=2, narrow_range=True), (-1, 1)),
        (dict(bits=7, symmetric=False), (-64, 63)),
        (dict(bits=8, signed=False, symmetric=False), (0, 255)),
        (dict(bits=1, signed=False, symmetric=False), (0, 1)),
        (dict(bits=32), (-(2**31), 2**31 - 1)),
    ],
)
def test_code_range_follows_from_bits_sign_and_narrow_range(options, expected):
    spec = QuantSpec(**options)
    assert (spec.qmin, spec.qmax) == expected
    assert spec.levels == expected[1] - expected[0] + 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "tensor"),
        (dict(axis=0), "channel"),
        (dict(axis=-1, group_size=32), "group"),
        (dict(axis=-1, group_size=-1), "token"),
        (dict(axis=-1, group_size=32, group_rows=4), "block"),
    ],
)
def test_granularity_follows_from_axis_and_group_size(options, expected):
    assert QuantSpec(**options).granularity == expected


def test_per_token_shares_a_scale_along_the_whole_axis():
    spec = QuantSpec(bits=4, symmetric=False, axis=0, group_size=32)
    assert spec.per_token() == QuantSpec(bits=4, symmetric=False, axis=-1, group_size=-1)
    assert dataclasses.replace(spec, axis=1, group_rows=4).per_token() == spec.per_token()
    assert spec.per_token(axis=1) == QuantSpec(bits=4, symmetric=False, axis=1, group_size=-1)
    with pytest.raises(ValueError, match="one scale per block of neighbours"):
        QuantSpec(format="e2m1", scale_format="e8m0", axis=-1, group_size=32).per_token()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(bits=1), ValueError, "`bits` must be between 2 and 32 for a signed grid, got 1."),
        (dict(bits=33), ValueError, "got 33"),
        (dict(bits=32, signed=False, symmetric=False), ValueError, "between 1 and 31 for an unsigned grid"),
        (dict(bits=8.0), TypeError, "`bits` must be an int, got 8.0."),
        (dict(bits=True), TypeError, "`bits` must be an int, got True."),
        (dict(signed=1), TypeError, "`signed` must be True or False, got 1."),
        (dict(signed=False), ValueError, "`symmetric=True` needs a signed grid"),
        (dict(signed=False, symmetric=False, narrow_range=True), ValueError, "an unsigned grid starts at 0"),
        (dict(group_size=32), ValueError, "needs the axis that is cut into groups"),
        (dict(axis=0, group_size=0), ValueError, "at least 1, or -1 for the whole axis, got 0"),
        (dict(axis=0, group_size=-2), ValueError, "got -2"),
        (dict(axis=-1, group_size=4, group_rows=0), ValueError, "`group_rows` must be at least 1"),
        (dict(axis=-1, group_size=4, group_rows=2.0), TypeError, "`group_rows` must be an int, got 2.0."),
        (dict(axis=-1, group_rows=4), ValueError, "needs groups along an axis that has another one before it"),
        (dict(axis=-1, group_size=-1, group_rows=4), ValueError, "got axis=-1 and group_size=-1"),
        (dict(axis=0, group_size=4, group_rows=4), ValueError, "got axis=0"),
        (dict(format="e2m1", scale_format="e8m0", axis=-1, group_size=32, group_rows=4), ValueError, "got 'block'"),
        (dict(axis=1.5), TypeError, "`axis` must be an int, got 1.5."),
        (dict(numerics="tflite"), ValueError, "one of torch, onnx, half_away, got 'tflite'"),
    ],
)
def test_invalid_spec_is_refused_with_the_reason(options, error, words):
    with pytest.raises(error) as caught:
        QuantSpec(**options)
    assert words in str(caught.value)


def test_spec_is_a_frozen_hashable_value():
    assert QuantSpec(bits=4, axis=0) == QuantSpec(bits=4, axis=0)
    assert len({QuantSpec(), QuantSpec(), QuantSpec(bits=4)}) == 2
    assert QuantSpec(**dataclasses.asdict(QuantSpec(bits=4))) == QuantSpec(bits=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantSpec().bits = 4
    with pytest.raises(TypeError, match="positional"):
        QuantSpec(8)
