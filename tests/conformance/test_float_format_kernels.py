"""Functions on arrays equal the reference for float formats and block scales, on every instruction set."""

import itertools

import numpy as np
import pytest

import fakequant as fq
from fakequant import reference, reference_formats as formats
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from float_format_blocks import (
    BLOCK_SHAPES,
    BLOCK_SPECS,
    SCALES,
    STATIC,
    along,
    block_case,
    block_data,
    blocks,
    expand,
    expected_of,
    observed_of,
    parameter_shape,
    static_case,
    static_inputs,
)
from float_format_data import all_values, by_format, hard_values, next_to_ties_of_block_scales

by_dtype = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
by_where = pytest.mark.parametrize("where", STATIC)
by_block_spec = pytest.mark.parametrize("spec", BLOCK_SPECS.values(), ids=BLOCK_SPECS)
by_block_shape = pytest.mark.parametrize(("shape", "axis"), BLOCK_SHAPES.values(), ids=BLOCK_SHAPES)


@pytest.fixture
def each_machine(each_target):
    """Iterates over instruction sets with one thread and with two."""

    def each():
        for target in each_target():
            for threads in (1, 2):
                fq.set_num_threads(threads)
                yield target, threads

    return each


def packed_mask(mask):
    return np.packbits(mask, bitorder="little")


def check(x, scale, spec, expected, machines):
    """Compares values, masks and codes with the reference."""
    for machine in machines:
        y, mask = fq.fake_quantize(x, scale, 0, spec, mask="bool")
        assert_same_bits(expected.y, y, "y", *machine)
        assert_same_bits(expected.mask, mask, "mask", *machine)
        y, mask = fq.fake_quantize(x, scale, 0, spec, mask="packed")
        assert_same_bits(expected.y, y, "y with a packed mask", *machine)
        assert_same_bits(packed_mask(expected.mask), mask, "packed mask", *machine)
        assert_same_bits(expected.y, fq.fake_quantize(x, scale, 0, spec), "y without a mask", *machine)
        q = fq.quantize(x, scale, 0, spec)
        assert q.dtype == spec.storage
        assert_same_bits(expected.codes, q, "codes", *machine)
        assert_same_bits(expected.values, fq.dequantize(q, scale, 0, spec, dtype=x.dtype), "values", *machine)
        if spec.bits in (4, 6):
            packed = fq.quantize(x, scale, 0, spec, packed=True)
            low_bits = expected.codes.view(np.uint8) & ((1 << spec.bits) - 1)
            assert_same_bits(formats.pack(low_bits, spec.bits), packed, "packed codes", *machine)
            again = fq.dequantize(packed, scale, 0, spec, shape=x.shape, dtype=x.dtype)
            assert_same_bits(expected.values, again, "values of packed codes", *machine)


# --- float32 scales -----------------------------------------------------------------------


@by_dtype
@by_where
@by_format
def test_values_masks_and_codes_equal_the_reference(format, where, dtype, each_machine):
    spec, x, scale, expected = static_case(format, where, dtype)
    check(x, scale, spec, expected, each_machine())


@by_dtype
@by_format
def test_every_value_next_to_a_tie_equals_the_reference(format, dtype, each_target):
    spec = fq.QuantSpec(format=format)
    for scale in SCALES:
        with np.errstate(all="ignore"):
            x = (hard_values(format).astype(np.float64) * scale).astype(dtype)
        check(x, scale, spec, expected_of(x, scale, spec), ((target, 1) for target in each_target()))


@by_format
def test_a_million_values_equal_the_reference(format, each_machine):
    x, spec = all_values(format), fq.QuantSpec(format=format)
    expected = expected_of(x, 1.0, spec)
    for machine in each_machine():
        y, mask = fq.fake_quantize(x, 1.0, 0, spec, mask="packed")
        assert_same_bits(expected.y, y, *machine)
        assert_same_bits(packed_mask(expected.mask), mask, *machine)
        assert_same_bits(expected.codes, fq.quantize(x, 1.0, 0, spec), *machine)


@by_format
def test_values_of_all_codes_equal_the_reference(format, each_machine):
    spec = fq.QuantSpec(format=format)
    codes = np.resize(np.arange(1 << spec.bits, dtype=np.uint8), 1031)
    for dtype, scale in itertools.product(cases.DTYPES.values(), SCALES):
        with np.errstate(over="ignore"):
            expected = formats.dequantize(codes, scale, format, dtype)
        for machine in each_machine():
            assert_same_bits(expected, fq.dequantize(codes, scale, 0, spec, dtype=dtype), scale, *machine)


@by_format
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 63, 64, 65, 255, 257, 1000, 70001])
def test_codes_of_any_number_are_packed(format, length, each_target):
    spec = fq.QuantSpec(format=format)
    x = np.resize(hard_values(format), length)
    codes = formats.quantize(x, 1.0, format)
    for target in each_target():
        if spec.bits == 8:
            assert_same_bits(codes, fq.quantize(x, 1.0, 0, spec), target)
            continue
        packed = fq.quantize(x, 1.0, 0, spec, packed=True)
        assert_same_bits(formats.pack(codes, spec.bits), packed, target)
        again = fq.dequantize(packed, 1.0, 0, spec, shape=(length,))
        assert_same_bits(formats.dequantize(codes, 1.0, format), again, target)


@by_dtype
@by_format
def test_backward_selects_by_the_mask(format, dtype, each_machine):
    spec = fq.QuantSpec(format=format)
    for length in (0, 9, 64, 70000):
        dy = cases.gradients(length, dtype)
        mask = np.random.default_rng(length).random(length) < 0.6
        expected = reference.fake_quantize_backward(dy, mask, "onnx")
        for machine in each_machine():
            assert_same_bits(expected, fq.fake_quantize_backward(dy, mask, spec), *machine)
            assert_same_bits(expected, fq.fake_quantize_backward(dy, packed_mask(mask), spec), *machine)


@by_dtype
@by_where
@by_format
def test_learned_backward_equals_the_reference_up_to_the_order_of_sums(format, where, dtype, each_machine):
    spec, x, scale = static_inputs(format, where, dtype)
    dy = np.asarray(np.random.default_rng(1).standard_normal(x.shape).astype(dtype))
    dx, terms = formats.learned_backward(dy, x, expand(scale, x.shape, spec), format, grad_factor=0.25)
    results = []
    for machine in each_machine():
        result = fq.fake_quantize_learned_backward(dy, x, scale, 0.0, spec, grad_factor=0.25)
        assert_same_bits(np.asarray(dx).astype(dtype), result.dx, "dx", *machine)
        assert result.dscale.shape == parameter_shape(x.shape, spec)
        results.append(result.dscale)
    for other in results[1:]:
        assert_same_bits(results[0], other, "dscale on other machines")
    for index, block in blocks(np.asarray(terms), spec):
        exact, magnitude = reference.exact_sum(block), np.abs(block.astype(np.float64)).sum()
        # Adding n float64 numbers in any order is off by at most n * 2^-53 of the sum of magnitudes.
        slack = block.size * 2.0**-53 * magnitude
        if np.isfinite(magnitude):
            with np.errstate(over="ignore"):
                low, high = (np.float64(v.astype(results[0].dtype)) for v in (exact - slack, exact + slack))
            assert low <= np.float64(results[0][index]) <= high, index


# --- scales from ranges -------------------------------------------------------------------


def ranges():
    ends = np.float32(
        [0, -0.0, 1, 0.1, 448, 6, 6.0000005, 7, 2**-126, 1e-45, 1e-40, 1e-30, 3.4e38, 2.0**127, 8, 7.9999995]
    )
    lo, hi = (v.reshape(-1) for v in np.meshgrid(np.concatenate([ends, -ends]), np.concatenate([ends, -ends])))
    return lo[lo <= hi], hi[lo <= hi]


SPECS = list(BLOCK_SPECS.values()) + [fq.QuantSpec(format=format, axis=0) for format in FLOAT_FORMATS]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_choose_qparams_equals_the_reference(spec, each_target):
    lo, hi = ranges()
    if spec.scale_format == "e4m3fn":  # the largest block decides about all: leave out one end, then the other
        sets = [(lo, hi), (lo[hi < 1e30], hi[hi < 1e30]), (lo * 0, hi * 0), (lo[:1] * 0 - 1e-30, hi[:1] * 0)]
        sets += [(-v, v) for v in map(next_to_ties_of_block_scales, np.float32([3.3, 1e-3, 777.77, 1e20]))]
    else:
        sets = [(lo, hi)]
    for lo, hi in sets:
        expected = formats.choose_scale(lo, hi, spec)
        for target in each_target():
            scale, zero_point = fq.choose_qparams(lo, hi, spec)
            assert_same_bits(expected, scale, target)
            assert_same_bits(np.zeros(lo.shape, np.int32), zero_point, target)


# --- block scales -------------------------------------------------------------------------


@by_dtype
@by_block_shape
@by_block_spec
def test_blocks_equal_the_reference(spec, shape, axis, dtype, each_machine):
    spec, x, observed, expected = block_case(spec, shape, axis, dtype)
    for machine in each_machine():
        state = [np.full(observed.lo.shape, v, np.float32) for v in (np.inf, -np.inf)]
        result = fq.observe_fake_quantize(x, spec, *state, update="dynamic", mask="bool")
        assert_same_bits(observed.scale, result.scale, "scale", *machine)
        assert_same_bits(np.zeros(observed.lo.shape, np.int32), result.zero_point, "zero point", *machine)
        assert_same_bits(expected.y, result.y, "y", *machine)
        assert_same_bits(expected.mask, result.mask, "mask", *machine)
        assert result.nonfinite == observed.nonfinite
        for name, running, seen in zip(("min", "max"), state, observed, strict=False):
            assert_same_bits(seen, running, name, *machine)
    check(x, observed.scale, spec, expected, each_machine())


@by_dtype
@by_block_shape
def test_min_max_of_blocks_equals_the_reference(shape, axis, dtype, each_machine):
    for spec in (along(BLOCK_SPECS["mxfp4"], axis), along(BLOCK_SPECS["nvfp4"], axis)):
        x = block_data(shape, spec.format, dtype)
        for machine in each_machine():
            seen = fq.min_max(x, spec)
            assert seen.min.shape == parameter_shape(shape, spec)
            for index, block in blocks(x, spec):
                for field, expected in reference.min_max(block)._asdict().items():
                    actual = getattr(seen, field)[index]
                    assert_same_bits(np.asarray(expected).astype(actual.dtype), actual, field, index, *machine)


@by_dtype
@by_where
@by_format
def test_dynamic_float32_scales_equal_the_reference(format, where, dtype, each_machine):
    spec, x, _ = static_inputs(format, where, dtype)
    if not x.size:
        return
    with np.errstate(over="ignore"):
        x = np.where(np.abs(x.astype(np.float64)) > 1e38, dtype.type(np.inf), x)  # ranges are float32
    observed = observed_of(x, spec)
    expected = expected_of(x, observed.scale, spec)
    for machine in each_machine():
        state = [np.full(observed.lo.shape, v, np.float32) for v in (np.inf, -np.inf)]
        result = fq.observe_fake_quantize(x, spec, *state, update="dynamic", mask="packed")
        assert_same_bits(observed.scale, result.scale, "scale", *machine)
        assert_same_bits(expected.y, result.y, "y", *machine)
        assert_same_bits(packed_mask(expected.mask), result.mask, "mask", *machine)
        assert result.nonfinite == observed.nonfinite


def test_many_blocks_have_the_same_bits_on_any_number_of_threads(each_machine):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((300, 1000)) * np.exp2(rng.uniform(-9, 9, (300, 1)))).astype(np.float32)
    for spec in (BLOCK_SPECS["mxfp8"], BLOCK_SPECS["nvfp4"]):
        expected = formats.fake_quantize_blocks(x, spec)
        for machine in each_machine():
            state = [np.full(expected.scale.shape, v, np.float32) for v in (np.inf, -np.inf)]
            result = fq.observe_fake_quantize(x, spec, *state, update="dynamic")
            assert_same_bits(expected.y, result.y, *machine)
            assert_same_bits(expected.scale, result.scale, *machine)
