"""Scales of blocks in `fakequant.reference_formats`: MX, NVFP4 and float32, at powers of two and next to them."""

from fractions import Fraction

import numpy as np
import pytest

from fakequant import QuantSpec, presets, reference_formats as formats
from fakequant.formats import FLOAT_FORMATS
from fakequant.reference import FLOAT32_EPS
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from float_format_data import by_format, next_to_ties_of_block_scales

NAN, INF = np.nan, np.inf
TINY, MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
# Every float format, and integers of 8 and 4 bits: the largest value, and the bits of the mantissa.
GRIDS = {name: (f.largest, f.mantissa_bits) for name, f in FLOAT_FORMATS.items()} | {"int8": (127, 6), "int4": (7, 2)}
MX = {
    "mxfp8": presets.mxfp8(),
    "mxfp8 e5m2": presets.mxfp8(format="e5m2", scale_rule="rceil"),
    "mxfp6": presets.mxfp6(scale_rule="even"),
    "mxfp6 e3m2": presets.mxfp6(format="e3m2"),
    "mxfp4": presets.mxfp4(scale_rule="ceil"),
    "mxint8": presets.mxint8(),
}
BLOCKS = MX | {"nvfp4": presets.nvfp4(), "float32": QuantSpec(format="e4m3fn", axis=-1, group_size=32)}
by_grid = pytest.mark.parametrize(("largest", "mantissa_bits"), GRIDS.values(), ids=GRIDS)
by_rule = pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
by_spec = pytest.mark.parametrize("spec", BLOCKS.values(), ids=BLOCKS)
by_dtype = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)


def floor_log2(v):
    """Returns the exponent of the largest power of two that is not above a positive fraction."""
    e = v.numerator.bit_length() - v.denominator.bit_length()
    return e if Fraction(2) ** e <= v else e - 1


def ceil_log2(v):
    return -floor_log2(1 / v)


def exponent(absmax, largest, mantissa_bits, rule):
    """Returns the exponent of the scale of one block in exact arithmetic, for a normal float32 `absmax`."""
    v, top = Fraction(float(absmax)), floor_log2(Fraction(largest))
    if rule == "floor":
        e = floor_log2(v) - top
    elif rule == "ceil":
        e = ceil_log2(v) - top
    elif rule == "even":
        step = Fraction(2) ** (floor_log2(v) - mantissa_bits)
        e = floor_log2((v / step + Fraction(1, 2)).__floor__() * step) - top
    else:
        d = absmax / np.float32(largest)
        e = ceil_log2(Fraction(float(d))) if d >= TINY else -126  # the field of every subnormal quotient, plus 1
    return min(max(e, -127), 127)


def edges(largest, mantissa_bits):
    """Returns powers of two times 1, the largest value and the last mantissas, with their neighbours on both sides."""
    half_ulp = 2.0 ** -(mantissa_bits + 1)
    factors = np.array([1.0, largest, 1.5, 2 - half_ulp, 2 - 2 * half_ulp, 1 + half_ulp])
    v = np.outer(np.exp2(np.arange(-118.0, 110, 19)), factors).ravel().astype(np.float32)
    v = np.concatenate([v, np.float32([TINY, MAX, MAX / 2, 2.0**127])])
    v = np.concatenate([v, cases.neighbours(v, 1), cases.neighbours(v, -1)])
    return v[np.isfinite(v) & (v >= TINY)]


@by_rule
@by_grid
def test_powers_of_two_are_those_of_exact_arithmetic(largest, mantissa_bits, rule):
    absmax = edges(largest, mantissa_bits)
    expected = [2.0 ** exponent(v, largest, mantissa_bits, rule) for v in absmax]
    assert_same_bits(np.float32(expected), formats.power_of_two_scale(absmax, largest, mantissa_bits, rule))


@by_grid
def test_rceil_is_the_smallest_power_of_two_with_which_nothing_is_clipped(largest, mantissa_bits):
    absmax = edges(largest, mantissa_bits)
    scale = formats.power_of_two_scale(absmax, largest, mantissa_bits, "rceil").astype(np.float64)
    # The quotient is rounded to float32 once, which may move it down to a power of two.
    inside = (absmax.astype(np.float64) <= largest * scale * (1 + 2.0**-24)) | (scale == 2.0**127)
    needed = (absmax.astype(np.float64) > largest * scale / 2) | (scale == 2.0**-126)  # subnormal quotients
    assert inside.all()
    assert needed.all()


# At a power of two, one ulp above and below, for e2m1: largest 6, one bit of mantissa.
BY_HAND = {
    "floor": [(4, 1), (8, 2), (7.9999995, 1), (8.000001, 2), (6, 1), (6.0000005, 1)],
    "ceil": [(4, 1), (4.0000005, 2), (3.9999998, 1), (8, 2), (8.000001, 4), (6, 2)],
    "even": [(4, 1), (6.9999995, 1), (7, 2), (7.0000005, 2), (3.5, 1), (3.4999998, 0.5)],
    "rceil": [(6, 1), (6.0000005, 2), (5.9999995, 1), (3, 0.5), (12, 2), (12.000001, 4)],
}


@by_rule
def test_powers_of_two_worked_out_by_hand(rule):
    absmax, expected = zip(*BY_HAND[rule], strict=True)
    assert formats.power_of_two_scale(np.float32(absmax), 6.0, 1, rule).tolist() == list(expected)


@by_rule
@by_grid
def test_zeros_and_subnormal_numbers_get_the_smallest_powers(largest, mantissa_bits, rule):
    # A negative zero comes from `-lo` of a block of zeros.
    for absmax in np.float32([0.0, -0.0, 1e-45, 1e-40, TINY / 2]):
        lost = rule != "rceil" or absmax / np.float32(largest) == 0
        scale = formats.power_of_two_scale(absmax, largest, mantissa_bits, rule)
        assert scale == (2.0**-127 if lost else 2.0**-126)


def test_unknown_rules_and_specs_are_refused():
    with pytest.raises(ValueError, match="rule must be floor, ceil, even or rceil, got 'nearest'"):
        formats.power_of_two_scale(1.0, 6.0, 1, "nearest")
    with pytest.raises(ValueError, match="for float formats and block scales, got int8"):
        formats.choose_scale(-1.0, 1.0, QuantSpec())


@by_format
def test_float32_scales_divide_by_the_largest_value(format):
    largest = np.float32(FLOAT_FORMATS[format].largest)
    lo, hi = np.float32([-3, 0, -0.0, 1, -2, -1e-30]), np.float32([1, 7, 0, 5, -1, 0])
    scale = formats.choose_scale(lo, hi, QuantSpec(format=format, axis=0))
    expected = np.float32([3, 7, 0, 5, 2, 1e-30]) / largest
    assert_same_bits(np.maximum(expected, FLOAT32_EPS), scale)
    assert formats.choose_scale(-1e-30, 0.0, QuantSpec(format=format), eps=0.25) == 0.25


def test_block_scales_do_not_use_eps():
    for spec in (presets.mxfp4(), presets.nvfp4()):
        lo, hi = np.float32([-1e-20, 0]), np.float32([0, 3e-20])
        assert_same_bits(formats.choose_scale(lo, hi, spec), formats.choose_scale(lo, hi, spec, eps=1.0))
        assert (formats.choose_scale(lo, hi, spec) < 1e-18).all()


def test_nvfp4_scales_worked_out_by_hand():
    # 5376 / 2688 = 2. Then 5376 / 6 / 2 = 448, 12 / 6 / 2 = 1, 13.5 / 6 / 2 = 1.125 and 12.75 / 6 / 2 = 1.0625, a tie.
    s = formats.nvfp4_scales(np.float32([5376, 12, 13.5, 12.75, 0, 0.1]))
    assert s.tensor_scale == 2
    assert s.block_scale.tolist() == [448, 1, 1.125, 1, 2**-6, 2**-6]
    assert s.scale.tolist() == [896, 2, 2.25, 2, 2**-5, 2**-5]


def test_nvfp4_scales_of_zeros_and_of_values_too_small_for_a_quotient():
    for absmax in (np.float32([0, 0]), np.float32([1e-45, 0]), np.zeros(0, np.float32)):
        s = formats.nvfp4_scales(absmax)
        assert s.tensor_scale == 1
        assert s.scale.tolist() == [2**-6] * absmax.size


def nearest_float32(exact):
    """Returns the float32 nearest to a fraction that is far from the middle of two float64 numbers."""
    return np.float32(float(exact))


@pytest.mark.parametrize("largest", np.float32([3.3, 1e-3, 777.77, 1e20]))
def test_nvfp4_scales_round_after_every_operation(largest):
    absmax = next_to_ties_of_block_scales(largest)
    s = formats.nvfp4_scales(absmax)
    tensor_scale = nearest_float32(Fraction(float(largest)) / 2688)
    assert_same_bits(tensor_scale, s.tensor_scale)
    in_one_step = 0
    for v, block_scale, scale in zip(absmax, s.block_scale, s.scale, strict=True):
        sixth = nearest_float32(Fraction(float(v)) / 6)
        wanted = nearest_float32(Fraction(float(sixth)) / Fraction(float(tensor_scale)))
        rounded, _ = formats.round_to_format(np.float32(min(max(wanted, 2**-6), 448)), "e4m3fn")
        assert block_scale == rounded
        assert_same_bits(nearest_float32(Fraction(float(rounded)) * Fraction(float(tensor_scale))), scale)
        other, _ = formats.round_to_format(v / (np.float32(6) * tensor_scale), "e4m3fn")
        in_one_step += block_scale != other
    assert in_one_step  # another order of operations would be seen


# --- whole blocks -------------------------------------------------------------------------


def data(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.uniform(-9, 9, (*shape[:-1], 1)))).astype(dtype)


@by_dtype
@by_spec
def test_a_shorter_last_block_is_one_padded_with_zeros(spec, dtype):
    x = data((3, 2 * spec.group_size + 5), dtype)
    padded = np.pad(x, ((0, 0), (0, spec.group_size - 5)))
    short, full = (formats.fake_quantize_blocks(v, spec) for v in (x, padded))
    assert short.scale.shape == (3, 3)
    assert_same_bits(full.scale, short.scale)
    assert_same_bits(full.y[:, : x.shape[1]], short.y)
    assert_same_bits(full.mask[:, : x.shape[1]], short.mask)


@by_spec
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_blocks_along_another_axis_are_those_of_the_moved_axis(spec, axis):
    x = data((3, 4, 70), np.float32)
    last = formats.fake_quantize_blocks(x, spec)
    moved = np.moveaxis(x, -1, axis)
    other = formats.fake_quantize_blocks(moved, QuantSpec.from_dict(spec.to_dict() | {"axis": axis}))
    for expected, actual in zip(last, other, strict=True):
        assert_same_bits(np.moveaxis(expected, -1, axis), actual)


@by_dtype
@by_spec
def test_values_that_are_not_finite_do_not_enter_the_scale(spec, dtype):
    x = data((4, 64), dtype)
    expected = formats.fake_quantize_blocks(np.where(np.arange(64) == 7, dtype.type(0), x), spec)
    for special in (NAN, INF, -INF):
        x[:, 7] = special
        result = formats.fake_quantize_blocks(x, spec)
        assert_same_bits(expected.scale, result.scale)
        rest = np.arange(64) != 7
        assert_same_bits(expected.y[:, rest], result.y[:, rest])
        ends = spec.largest * expected.scale[:, 0].astype(np.float64)
        assert_same_bits((np.sign(special) * ends).astype(dtype), result.y[:, 7], special)
        assert not result.mask[:, 7].any()


@by_spec
def test_a_block_without_finite_values_has_the_scale_of_zeros(spec):
    ones = np.ones((2, spec.group_size), np.float32)
    x = np.concatenate([ones, ones * NAN, ones * INF, 0 * ones], axis=1)
    result = formats.fake_quantize_blocks(x, spec)
    assert_same_bits(result.scale[:, 3], result.scale[:, 1])
    assert_same_bits(result.scale[:, 3], result.scale[:, 2])
    assert (result.scale[:, 0] > result.scale[:, 3]).all()


def test_float64_beyond_float32_saturates_the_range():
    x = np.array([[1e300, -1.0, 0.0, 2.0]])
    for spec in (presets.mxfp4(), presets.nvfp4(), presets.mxint8()):
        result = formats.fake_quantize_blocks(x, spec)
        assert_same_bits(formats.choose_scale([[-MAX]], [[MAX]], spec), result.scale)
        assert np.isfinite(result.y).all()


def test_mxint8_worked_out_by_hand():
    # absmax 100: exponent 6 - 6 = 0, so the step is 1; 2.5 is a tie. 127.9 in the second block saturates at 127.
    x = np.zeros((1, 64), np.float32)
    x[0, :4], x[0, 32:35] = [100, 2.5, -3.5, 0.4], [127.9, -127.9, 1]
    y, mask, scale = formats.fake_quantize_blocks(x, presets.mxint8())
    assert scale.tolist() == [[1, 1]]
    assert y[0, :4].tolist() == [100, 2, -4, 0]
    assert y[0, 32:35].tolist() == [127, -127, 1]
    assert np.flatnonzero(~mask[0]).tolist() == [32, 33]


def test_mxfp4_worked_out_by_hand():
    # absmax 12: exponent 3 - 2 = 1, scale 2. 12 -> 6, 7 / 2 = 3.5 -> 4, 5 / 2 = 2.5 -> 2, 0.5 / 2 = 0.25 -> 0.
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = [12, 7, -5, 0.5, -0.5]
    y, mask, scale = formats.fake_quantize_blocks(x, presets.mxfp4())
    assert scale.tolist() == [[2]]
    assert_same_bits(np.float32([12, 8, -4, 0, -0.0]), y[0, :5])
    assert mask.all()
