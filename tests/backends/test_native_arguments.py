"""Native functions refuse arguments that would access memory out of bounds. No public call passes them."""

import numpy as np
import pytest

from fakequant import _kernels as native, _native

X = np.linspace(-1, 1, 16, dtype=np.float32)
HUGE = 1 << 62
SHAPES = [
    (1, 1, -8, -2), (-1, 1, 1, -16), (1, 1, 1, -16), (HUGE, 4, 1, 1), (1, 1, 1, HUGE), (1 << 40, 1 << 40, 1, 1),
    (0, HUGE, HUGE, 1), (1, 1, 1, 17), (1, 1, 16, 2), (4, 1, 1, 5),
]  # fmt: skip
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.int32)
ONNX = native.NUMERICS["onnx"]
# One more than the last enumerator.
NO_NUMERICS, NO_SCALE_RULE = (1 + max(values.values()) for values in (native.NUMERICS, native.SCALE_RULES))
OF_SHAPES = {
    "fake_quantize": lambda shape: _native.fake_quantize(
        X, np.empty_like(X), None, native.MASK_NONE, native.F32, shape, ONNX, ONE, False, None,
        native.ZERO_NONE, -8, 7),
    "quantize": lambda shape: _native.quantize(
        X, np.empty(16, np.int8), native.F32, native.CODE_TYPES["int8"], shape, ONNX, ONE, False, None,
        native.ZERO_NONE, -8, 7),
    "dequantize": lambda shape: _native.dequantize(
        np.zeros(16, np.int8), np.empty_like(X), native.F32, native.CODE_TYPES["int8"], shape, ONNX, ONE, False, None,
        native.ZERO_NONE, -8, 7),
    "learned_backward": lambda shape: _native.learned_backward(
        X, X, np.empty_like(X), native.F32, native.F32, shape, ONNX, ONE, False, None, native.ZERO_NONE, -8, 7,
        1.0, np.empty(1), np.empty(1)),
    "min_max": lambda shape: _native.min_max(X, native.F32, shape, np.empty(1), np.empty(1), np.empty(3, np.int64)),
    "histogram": lambda shape: _native.histogram(X, shape, ONE, 4, np.zeros(8, np.int64)),
    "observe": lambda shape: _native.observe_fake_quantize(
        X, np.empty_like(X), None, native.MASK_NONE, native.F32, shape, ONNX, -8, 7, native.RANGE_OWN,
        native.UPDATES["moving_average"], True, True, True, 0, 0.1, 1e-7,
        ONE.copy(), ONE.copy(), ONE.copy(), ZERO.copy()),
}  # fmt: skip


@by_shape
@pytest.mark.parametrize("call", OF_SHAPES.values(), ids=OF_SHAPES)
def test_shapes_beyond_the_memory_are_refused(call, shape):
    with pytest.raises(ValueError, match=r"fakequant\._native: "):
        call(shape)


@pytest.mark.parametrize("shape", [(1, 1, 1, 0), (0, 1, 1, 16), (1, 0, 1, 16), (1, 1, 0, 16)], ids=str)
@pytest.mark.parametrize("call", OF_SHAPES.values(), ids=OF_SHAPES)
def test_shapes_without_elements_are_accepted(call, shape):
    call(shape)


def fake_quantize(**changes):
    """Makes a valid call with some arguments changed."""
    arguments = dict(
        x=X, y=np.empty_like(X), mask=None, mask_kind=native.MASK_NONE, dtype=native.F32, shape=(1, 1, 1, 16),
        numerics=ONNX, scale=ONE, scale_is_f64=False, zero_point=None, zero_kind=native.ZERO_NONE, qmin=-8,
        qmax=7,
    )  # fmt: skip
    _native.fake_quantize(**(arguments | changes))


CHANGES = [
    dict(mask_kind=native.MASK_PACKED), dict(mask_kind=native.MASK_BYTES), dict(mask_kind=3), dict(mask_kind=-1),
    dict(mask=np.zeros(1, np.uint8), mask_kind=native.MASK_PACKED), dict(x=None), dict(y=None), dict(scale=None),
    dict(zero_kind=native.ZERO_I32), dict(zero_kind=native.ZERO_I64), dict(zero_kind=native.ZERO_F32),
    dict(zero_kind=4), dict(dtype=4), dict(dtype=-1), dict(dtype=native.F64), dict(numerics=NO_NUMERICS),
    dict(numerics=-1), dict(scale_is_f64=True),
]  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_inconsistent_arguments_are_refused(changes):
    fake_quantize()
    with pytest.raises((ValueError, TypeError), match=r"fakequant\._native: |incompatible function arguments"):
        fake_quantize(**changes)


REFUSED = {
    "scalar, no mask": lambda: _native.fake_quantize_scalar(
        X, np.empty_like(X), None, native.MASK_BYTES, native.F32, 16, ONNX, 0.1, 0, -8, 7),
    "scalar, negative": lambda: _native.fake_quantize_scalar(
        X, np.empty_like(X), None, native.MASK_NONE, native.F32, -1, ONNX, 0.1, 0, -8, 7),
    "scalar, huge": lambda: _native.fake_quantize_scalar(
        X, np.empty_like(X), None, native.MASK_NONE, native.F32, HUGE, ONNX, 0.1, 0, -8, 7),
    "mask_backward, no mask": lambda: _native.mask_backward(
        X, None, native.MASK_BYTES, np.empty_like(X), native.F32, 16, True),
    "mask_backward, huge": lambda: _native.mask_backward(
        X, X, native.MASK_BYTES, np.empty_like(X), native.F32, HUGE, True),
    "first_outside, None": lambda: _native.first_outside(None, native.ZERO_I32, 1, 0, 1),
    "first_outside, kind": lambda: _native.first_outside(ZERO, 9, 1, 0, 1),
    "first_outside, huge": lambda: _native.first_outside(ZERO, native.ZERO_I32, HUGE, 0, 1),
    "first_invalid_scale, None": lambda: _native.first_invalid_scale(None, False, 1),
    "first_invalid_scale, negative": lambda: _native.first_invalid_scale(ONE, False, -1),
    "choose_qparams, huge": lambda: _native.choose_qparams(
        ONE, ONE, HUGE, ONNX, -8, 7, True, 0, 1e-7, ONE.copy(), ZERO.copy()),
    "choose_qparams, scale rule": lambda: _native.choose_qparams(
        ONE, ONE, 1, ONNX, -8, 7, True, NO_SCALE_RULE, 1e-7, ONE.copy(), ZERO.copy()),
    "choose_qparams, numerics": lambda: _native.choose_qparams(
        ONE, ONE, 1, NO_NUMERICS, -8, 7, True, 0, 1e-7, ONE.copy(), ZERO.copy()),
    "keep_within, None": lambda: _native.keep_within(None, ONE.copy(), 1, 0.0, 1.0),
    "quantize, code": lambda: _native.quantize(
        X, np.empty(16, np.int8), native.F32, 11, (1, 1, 1, 16), ONNX, ONE, False, None, native.ZERO_NONE,
        -8, 7),
    "observe, update": lambda: _native.observe_fake_quantize(
        X, np.empty_like(X), None, native.MASK_NONE, native.F32, (1, 1, 1, 16), ONNX, -8, 7, native.RANGE_OWN,
        3, True, True, True, 0, 0.1, 1e-7, ONE.copy(), ONE.copy(), ONE.copy(), ZERO.copy()),
    **{
        f"histogram, half {half}": lambda half=half: _native.histogram(
            X, (1, 1, 1, 16), ONE, half, np.zeros(8, np.int64))
        for half in (0, -1, -4, 5, HUGE, 1 << 63 - 1)
    },
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_invalid_sizes_and_enum_values_are_refused(call):
    with pytest.raises((ValueError, TypeError), match=r"fakequant\._native: |incompatible function arguments"):
        call()


@pytest.mark.parametrize("inverse", [np.nan, np.inf, -1.0, -np.inf, 3e38])
def test_histogram_counts_values_beyond_every_bin_within_its_memory(inverse):
    """The counts lie between two guard regions."""
    fenced = np.full(8 + 16, -7, np.int64)
    counts = fenced[8:16]
    counts[:] = 0
    x = np.float32([0, -0.0, 1, -1, 3e38, -3e38, 1e-40])
    _native.histogram(x, (1, 1, 1, 7), np.float32([inverse]), 4, counts)
    assert (fenced[:8] == -7).all()
    assert (fenced[16:] == -7).all()
    assert counts.sum() == 7
