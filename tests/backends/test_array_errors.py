"""Errors of the functions on arrays say what is wrong, what was received and what is accepted."""

import numpy as np
import pytest

import fakequant as fq

X = np.zeros((2, 6), np.float32)
SPEC = fq.QuantSpec()
PER_CHANNEL = fq.QuantSpec(symmetric=False, axis=0)


def grid_users():
    """Yields every function that takes a scale, a zero point and a spec."""
    yield "fake_quantize", lambda x, s, z, spec: fq.fake_quantize(x, s, z, spec)
    yield "quantize", lambda x, s, z, spec: fq.quantize(x, s, z, spec)
    yield "learned", lambda x, s, z, spec: fq.fake_quantize_learned_backward(x, x, s, z, spec)


def test_dequantize_refuses_an_invalid_scale_zero_point_or_shape():
    q = np.zeros((2, 6), np.int8)
    with pytest.raises(ValueError, match="`scale` must be finite and greater than 0"):
        fq.dequantize(q, 0.0, 0, SPEC)
    with pytest.raises(ValueError, match="must be 0 for a symmetric spec, got 3"):
        fq.dequantize(q, 0.1, 3, SPEC)
    with pytest.raises(ValueError, match=r"`scale` must have shape \(2,\)"):
        fq.dequantize(q, 0.1, 0, PER_CHANNEL)


def test_arguments_in_the_wrong_order_are_refused():
    for call in (fq.fake_quantize, fq.quantize):
        with pytest.raises(TypeError, match=r"`spec` must be a QuantSpec, got 0\.\n.*scale, zero_point, spec"):
            call(X, SPEC, 0.1, 0)
    with pytest.raises(TypeError, match="`spec` must be a QuantSpec"):
        fq.fake_quantize_backward(X, np.ones(X.shape, bool), "int8")


by_function = pytest.mark.parametrize("call", [f for _, f in grid_users()], ids=[n for n, _ in grid_users()])


@by_function
@pytest.mark.parametrize(
    "x", [np.zeros(3, np.int32), np.zeros(3, np.complex64), np.zeros(3, bool), np.array(["a"]), [1, 2]], ids=str
)
def test_data_that_is_not_float_is_refused(call, x):
    with pytest.raises(TypeError, match="must be an array of float32, float64, bfloat16 or float16, got"):
        call(x, 0.1, 0, SPEC)


@by_function
@pytest.mark.parametrize("scale", [0.0, -0.1, np.nan, np.inf, 1e-50, 1e39])
def test_invalid_scales_are_refused(call, scale):
    for form in (scale, np.float64(scale), np.array(scale), np.array([scale])):
        with pytest.raises(ValueError, match="`scale` must be finite and greater than 0 in float32, got"):
            call(X, form, 0, SPEC)


@by_function
def test_error_names_the_index_of_an_invalid_scale(call):
    with pytest.raises(ValueError, match=r"got 0\.0 at index \(1,\)"):
        call(X, np.float32([1, 0]), 0, PER_CHANNEL)


@by_function
@pytest.mark.parametrize("scale", [np.ones(3, np.float32), np.float32(1), np.ones((2, 1), np.float32)], ids=str)
def test_scales_of_the_wrong_shape_are_refused(call, scale):
    with pytest.raises(ValueError, match=r"`scale` must have shape \(2,\) for an array of shape \(2, 6\)"):
        call(X, scale, 0, PER_CHANNEL)


@by_function
@pytest.mark.parametrize("axis", [2, -3, 100])
def test_axis_out_of_range_is_refused(call, axis):
    with pytest.raises(IndexError, match=f"`axis` {axis} is out of range for an array with 2 dimensions"):
        call(X, np.ones(2, np.float32), 0, fq.QuantSpec(axis=axis))


def test_axis_of_a_0d_array_is_refused():
    with pytest.raises(IndexError, match="a 0-d array has no axes"):
        fq.fake_quantize(np.float32(1), np.ones(1, np.float32), 0, fq.QuantSpec(axis=0))


@by_function
def test_group_size_that_does_not_divide_is_refused_with_the_padding(call):
    with pytest.raises(ValueError, match=r"`group_size` 4 does not divide axis -1 of length 6.*\n.*pad the axis to 8"):
        call(X, np.ones((2, 1), np.float32), 0, fq.QuantSpec(axis=-1, group_size=4))


@pytest.mark.parametrize("zero_point", [128, -129, 10**30])
def test_zero_points_out_of_range_are_refused(zero_point):
    spec = fq.QuantSpec(symmetric=False)
    for call in (fq.fake_quantize, fq.quantize):
        with pytest.raises((ValueError, TypeError), match="`zero_point` must"):
            call(X, 0.1, zero_point, spec)
    if abs(zero_point) < 2**31:
        with pytest.raises(ValueError, match=f"between -128 and 127 .*, got {zero_point}"):
            fq.fake_quantize(X, np.float32([0.1, 0.1]), np.int32([0, zero_point]), PER_CHANNEL)


def test_nonzero_zero_points_of_a_symmetric_spec_are_refused():
    for zero_point in (1, np.int32(1), np.int32([1])):
        with pytest.raises(ValueError, match="must be 0 for a symmetric spec, got 1"):
            fq.fake_quantize(X, 0.1, zero_point, SPEC)


def test_nonzero_learned_zero_points_of_a_symmetric_spec_are_refused():
    with pytest.raises(ValueError, match="must be 0 for a symmetric spec, got 5"):
        fq.fake_quantize_learned_backward(X, X, 0.1, 5.0, SPEC)
    with pytest.raises(ValueError, match="must not be NaN"):
        fq.fake_quantize_learned_backward(X, X, 0.1, np.nan, fq.QuantSpec(symmetric=False, numerics="torch"))


def test_float_zero_points_are_refused():
    with pytest.raises(TypeError, match="`zero_point` must hold integers, got float64"):
        fq.fake_quantize(X, 0.1, 0.5, fq.QuantSpec(symmetric=False))


def test_mask_of_another_call_is_refused():
    for mask in (np.ones((6, 2), bool), np.ones(1, np.uint8), np.ones(3, np.uint8), np.ones((2, 6), np.int8), None):
        with pytest.raises(ValueError, match="`mask` must be the one `fake_quantize` returned"):
            fq.fake_quantize_backward(X, mask, SPEC)


def test_unknown_mask_form_is_refused():
    with pytest.raises(ValueError, match='must be None, "packed" or "bool", got \'bits\''):
        fq.fake_quantize(X, 0.1, 0, SPEC, mask="bits")


def test_gradient_of_another_shape_or_dtype_is_refused():
    for dy in (np.zeros((6, 2), np.float32), np.zeros((2, 6), np.float64)):
        with pytest.raises(ValueError, match="`dy` must have the shape and dtype of `x`"):
            fq.fake_quantize_learned_backward(dy, X, 0.1, 0, SPEC)


def test_codes_of_the_wrong_dtype_or_shape_are_refused():
    with pytest.raises(TypeError, match="`q` must hold int8 codes for this spec, got int16"):
        fq.dequantize(np.zeros(3, np.int16), 0.1, 0, SPEC)
    with pytest.raises(TypeError, match="`q` must hold uint8 codes for this spec, got int8"):
        fq.dequantize(np.zeros(2, np.int8), 0.1, 0, fq.QuantSpec(bits=4), shape=(4,))
    with pytest.raises(ValueError, match=r"are uint8 of shape \(2,\), got shape \(3,\)"):
        fq.dequantize(np.zeros(3, np.uint8), 0.1, 0, fq.QuantSpec(bits=4), shape=(4,))
    with pytest.raises(ValueError, match="6-bit and 4-bit floats can be packed, got 3 bits of the format 'int'"):
        fq.quantize(X, 0.1, 0, fq.QuantSpec(bits=3), packed=True)
    with pytest.raises(TypeError, match="`dtype` must be float32, float64, bfloat16 or float16, got int32"):
        fq.dequantize(np.zeros(3, np.int8), 0.1, 0, SPEC, dtype=np.int32)


def test_choose_qparams_refuses_invalid_ranges():
    for lo, hi in ((np.inf, -np.inf), (np.nan, 1), (0, np.inf), (1, 0)):
        with pytest.raises(ValueError, match="`lo` and `hi` must be finite with lo <= hi"):
            fq.choose_qparams(lo, hi, SPEC)


def test_observe_fake_quantize_without_finite_values_is_an_error():
    lo, hi = np.full(1, np.inf, np.float32), np.full(1, -np.inf, np.float32)
    for x in (np.zeros(0, np.float32), np.float32([np.nan])):
        with pytest.raises(ValueError, match="1 of 1 blocks have not seen a finite value"):
            fq.observe_fake_quantize(x, SPEC, lo, hi)


@pytest.mark.parametrize("eps", [0, -1, np.nan, np.inf, 1e-60])
def test_invalid_eps_is_refused(eps):
    with pytest.raises(ValueError, match="`eps` must be finite and greater than 0 in float32"):
        fq.choose_qparams(0, 1, SPEC, eps=eps)
    with pytest.raises(ValueError, match="`eps` must be finite and greater than 0 in float32"):
        fq.observe_fake_quantize(X, SPEC, np.zeros(1, np.float32), np.zeros(1, np.float32), eps=eps)


@pytest.mark.parametrize("constant", [-0.1, 1.5, np.nan])
def test_averaging_constant_out_of_range_is_refused(constant):
    lo, hi = np.zeros(1, np.float32), np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="`averaging_constant` must be between 0 and 1"):
        fq.observe_fake_quantize(X, SPEC, lo, hi, averaging_constant=constant)


def test_unusable_running_range_is_refused_and_nothing_is_updated():
    good = np.full(2, np.inf, np.float32)
    frozen = good.copy()
    frozen.flags.writeable = False
    for bad in (
        np.zeros(3, np.float32),
        good.astype(np.float64),
        [1.0, 2.0],
        np.zeros((2, 2), np.float32)[:, 0],
        frozen,
    ):
        before = good.copy()
        with pytest.raises(ValueError, match="`running_max`"):
            fq.observe_fake_quantize(X, PER_CHANNEL, good, bad)
        assert good.tolist() == before.tolist()


def test_set_num_threads_refuses_invalid_numbers():
    for n in (0, -1, 1.5, None, True):
        with pytest.raises(ValueError, match="`n` must be a whole number of at least 1"):
            fq.set_num_threads(n)
