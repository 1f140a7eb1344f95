"""Values, masks, codes and gradients of float formats in `fakequant.reference_formats`, computed in other ways."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from fakequant import reference, reference_formats as formats
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from float_format_data import all_values, by_format, dtype_of, hard_values, magnitudes, nearest

NAN, INF = np.nan, np.inf
by_dtype = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)


def signed(magnitude, t, format):
    """Returns the magnitudes with the signs of `t`, without -0 where the format has none."""
    q = np.copysign(magnitude, t)
    return q if FLOAT_FORMATS[format].has_negative_zero else q + 0.0


@by_format
def test_constants_of_a_format_are_those_of_its_values(format):
    f, grid = FLOAT_FORMATS[format], magnitudes(format)
    info = ml_dtypes.finfo(dtype_of(format))
    assert (f.bits, f.mantissa_bits, f.largest) == (info.bits, info.nmant, float(info.max))
    assert (f.smallest_normal, f.smallest) == (float(info.smallest_normal), float(info.smallest_subnormal))
    assert (f.exponent_bits, f.bias) == (f.bits - 1 - f.mantissa_bits, 1 - int(info.minexp))
    assert f.grid().tolist() == sorted({*grid[:-1].tolist(), *(-grid[:-1]).tolist()})


@by_format
def test_every_code_has_its_value_and_every_value_its_code(format):
    f = FLOAT_FORMATS[format]
    codes = np.arange(1 << f.bits, dtype=np.uint8)
    expected = codes.view(dtype_of(format)).astype(np.float32)
    assert_same_bits(expected, formats.decode(codes, format))
    assert_same_bits(expected, f.values())
    finite = np.isfinite(expected)
    assert_same_bits(codes[finite], formats.encode(expected[finite], format))


@by_format
def test_rounding_finds_the_nearest_value_of_the_grid(format):
    t = all_values(format)
    q, mask = formats.round_to_format(t, format)
    known = ~np.isnan(t)
    magnitude, fits = nearest(t[known], format)
    assert_same_bits(signed(magnitude, t[known], format).astype(np.float32), q[known])
    assert_same_bits(fits, mask[known])
    assert np.isnan(q[~known]).all()
    assert not mask[~known].any()


@by_format
def test_float64_is_rounded_once(format):
    t = hard_values(format).astype(np.float64)
    t = np.concatenate([t, cases.neighbours(t, -1), cases.neighbours(t, 1), [NAN, INF, -INF, 1e300, -5e-324]])
    q, mask = formats.round_to_format(t, format)
    known = ~np.isnan(t)
    magnitude, fits = nearest(t[known], format)
    assert_same_bits(signed(magnitude, t[known], format), q[known])
    assert_same_bits(fits, mask[known])
    assert np.isnan(q[~known]).all()
    # One step above a tie of float64, which is the tie itself in float32.
    above = (magnitudes(format)[1] * 1.5) * (1 + 2**-52)
    assert formats.round_to_format(above, format)[0] == magnitudes(format)[2]


@by_dtype
@by_format
@pytest.mark.parametrize("scale", [1.0, 0.1, 3e-39, 1e30])
def test_fake_quantize_divides_rounds_and_multiplies_in_the_compute_dtype(format, dtype, scale):
    wide = reference.compute_dtype(dtype)
    with np.errstate(all="ignore"):
        x = (hard_values(format).astype(np.float64) * scale).astype(dtype)
        t = x.astype(wide) / wide.type(np.float32(scale))
        magnitude, fits = nearest(t, format)
        expected = (signed(magnitude, t, format).astype(wide) * wide.type(np.float32(scale))).astype(dtype)

    y, mask = formats.fake_quantize(x, np.float32(scale), format)

    assert_same_bits(np.where(np.isnan(t), dtype.type(NAN), expected), y)
    assert_same_bits(fits & ~np.isnan(t), mask)
    codes = formats.quantize(x, np.float32(scale), format)
    known = ~np.isnan(t)
    assert_same_bits(y[known], formats.dequantize(codes, np.float32(scale), format, dtype)[known])


# The ties above the largest values. Only that of e4m3fn goes down, because only its largest value has an even code.
BOUNDS = {
    "e4m3fn": 464.0,
    "e5m2": 61440.0,
    "e4m3fnuz": 248.0,
    "e5m2fnuz": 61440.0,
    "e2m3": 7.75,
    "e3m2": 30.0,
    "e2m1": 7.0,
}


@by_format
def test_mask_ends_where_rounding_would_leave_the_grid(format):
    tie, largest = np.float32([BOUNDS[format]]), FLOAT_FORMATS[format].largest
    t = np.concatenate([cases.neighbours(tie, -1), tie, cases.neighbours(tie, 1)])
    for sign in (1, -1):
        q, mask = formats.round_to_format(sign * t, format)
        assert q.tolist() == [sign * largest] * 3
        assert mask.tolist() == [True, format == "e4m3fn", False]


@by_format
def test_zeros_keep_their_sign_unless_the_format_has_one_zero(format):
    f = FLOAT_FORMATS[format]
    tiny = np.float32([0.0, -0.0, 1e-45, -1e-45, f.smallest / 2, -f.smallest / 2])
    q, mask = formats.round_to_format(tiny, format)
    assert (q == 0).all()
    assert mask.all()
    assert np.signbit(q).tolist() == [False, f.has_negative_zero] * 3
    sign = 1 << (f.bits - 1)
    assert formats.quantize(tiny, 1.0, format).tolist() == [0, sign * f.has_negative_zero] * 3


@by_format
def test_infinities_saturate_and_nan_stays(format):
    f = FLOAT_FORMATS[format]
    t = np.float32([INF, -INF, 3e38, -3e38, NAN, -NAN])
    q, mask = formats.round_to_format(t, format)
    assert_same_bits(np.float32([f.largest, -f.largest] * 2 + [NAN, NAN]), q)
    assert not mask.any()
    top = int(formats.encode(np.float32(f.largest), format))
    lowest = top | 1 << (f.bits - 1)
    nan = {"e4m3fn": 0x7F, "e5m2": 0x7F, "e4m3fnuz": 0x80, "e5m2fnuz": 0x80}.get(format, lowest)
    assert formats.quantize(t, 1.0, format).tolist() == [top, lowest, top, lowest, nan, nan]


def test_quotient_that_overflows_saturates_and_is_outside():
    y, mask = formats.fake_quantize(np.float32([3e38, -3e38]), 1e-30, "e2m1")
    assert_same_bits(np.float32([6, -6]) * np.float32(1e-30), y)
    assert not mask.any()


def test_codes_that_are_not_numbers_have_their_values():
    assert formats.dequantize(np.uint8([0x7C, 0xFC]), 0.5, "e5m2").tolist() == [INF, -INF]
    for format, codes in {"e4m3fn": [0x7F, 0xFF], "e5m2": [0x7D, 0x7F, 0xFE], "e5m2fnuz": [0x80]}.items():
        assert np.isnan(formats.dequantize(np.uint8(codes), 0.5, format)).all()


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 33])
def test_packed_codes_are_one_little_endian_number(bits, count):
    codes = np.random.default_rng(count).integers(0, 1 << bits, count).astype(np.uint8)
    number = sum(int(code) << (bits * i) for i, code in enumerate(codes))

    packed = formats.pack(codes, bits)

    assert packed.tobytes() == number.to_bytes(-(-bits * count // 8), "little")
    assert_same_bits(codes, formats.unpack(packed, bits, count))


def test_layout_of_packed_codes_worked_out_by_hand():
    assert formats.pack([0x1, 0xF, 0x7], 4).tolist() == [0xF1, 0x07]
    # 000001 111111 000000 100000, the first in the lowest bits: 11_000001, 0000_1111, 100000_00
    assert formats.pack([0x01, 0x3F, 0x00, 0x20], 6).tolist() == [0xC1, 0x0F, 0x80]


def test_gradients_worked_out_by_hand():
    # s = 0.5: t is 0.75, a tie that goes to 1; 18 and -18 are clipped; 6.5 is inside and becomes 6.
    x, dy = np.float32([0.375, 9.0, -9.0, 3.25, NAN, INF, -INF]), np.float32([1, 2, 4, 8, 16, 32, NAN])
    dx, ds = formats.learned_backward(dy, x, 0.5, "e2m1", grad_factor=2.0)
    assert dx.tolist() == [1, 0, 0, 8, 0, 0, 0]
    assert ds.tolist() == [0.5, 24, -48, -8, 0, 0, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@by_format
def test_gradient_of_the_scale_is_that_of_the_formula_in_fractions(format, dtype):
    scale = dtype(np.float32(0.1))
    x = (hard_values(format)[::7].astype(dtype) * scale).astype(dtype)
    _, ds = formats.learned_backward(dtype(-1.5), x, scale, format)
    for value, actual in zip(x, ds, strict=True):
        t = value / scale
        magnitude, fits = nearest(t, format)
        q = Fraction(float(np.copysign(magnitude, t)))
        error = q - Fraction(float(t)) if fits else q
        rounded = dtype(float(error))
        assert Fraction(float(rounded)) == error  # q and t are so close that their difference is exact
        assert actual == dtype(-1.5) * rounded, value


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"format must be one of e4m3fn, .* got 'e4m3'"):
        formats.round_to_format(1.0, "e4m3")
