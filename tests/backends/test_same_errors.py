"""The same mistake raises the same exception for arrays and tensors."""

import numpy as np
import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")

SPEC, AFFINE = fq.QuantSpec(bits=4), fq.QuantSpec(bits=4, symmetric=False)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)
CHANNELS = fq.QuantSpec(bits=4, symmetric=False, axis=0)
INTEGERS, MASK = X.astype(np.int32), np.ones((2, 6), bool)


def running():
    return np.full(1, -1, np.float32), np.full(1, 1, np.float32)


# A call that takes a conversion to arrays or tensors, and the exception it raises.
MISTAKES = {
    "integers": (lambda c: fq.fake_quantize(c(INTEGERS), 0.1, 0, SPEC), TypeError),
    "integers, quantize": (lambda c: fq.quantize(c(INTEGERS), 0.1, 0, SPEC), TypeError),
    "integers, learned": (lambda c: fq.fake_quantize_learned(c(INTEGERS), 0.1, 0, SPEC), TypeError),
    "integers, min_max": (lambda c: fq.min_max(c(INTEGERS)), TypeError),
    "integers, observe": (lambda c: fq.observe_fake_quantize(c(INTEGERS), SPEC, *map(c, running())), TypeError),
    "integers, dy": (lambda c: fq.fake_quantize_backward(c(INTEGERS), c(MASK), SPEC), TypeError),
    "integers, FakeQuantizer": (lambda c: fq.FakeQuantizer().forward(c(INTEGERS)), TypeError),
    "mask of another shape": (lambda c: fq.fake_quantize_backward(c(X), c(MASK.T.copy()), SPEC), ValueError),
    "mask of another dtype": (lambda c: fq.fake_quantize_backward(c(X), c(X), SPEC), ValueError),
    "no mask": (lambda c: fq.fake_quantize_backward(c(X), None, SPEC), ValueError),
    "dy of another shape": (lambda c: fq.fake_quantize_learned_backward(c(X.T.copy()), c(X), 0.1, 0, SPEC), ValueError),
    "dy of another dtype": (
        lambda c: fq.fake_quantize_learned_backward(c(X.astype(np.float64)), c(X), 0.1, 0, SPEC),
        ValueError,
    ),
    "unknown mask": (lambda c: fq.fake_quantize(c(X), 0.1, 0, SPEC, mask="bits"), ValueError),
    "mask of what passes": (
        lambda c: fq.fake_quantize(c(X), 0.1, 0, SPEC, mask="packed", gradient="pass"),
        ValueError,
    ),
    "mask of what passes, observe": (
        lambda c: fq.observe_fake_quantize(c(X), SPEC, *map(c, running()), mask="packed", gradient="pass"),
        ValueError,
    ),
    "codes of another dtype": (lambda c: fq.dequantize(c(INTEGERS), 0.1, 0, SPEC), TypeError),
    "packed codes of another dtype": (
        lambda c: fq.dequantize(c(np.zeros(2, np.int8)), 0.1, 0, SPEC, shape=(4,)),
        TypeError,
    ),
    "packed codes of another shape": (
        lambda c: fq.dequantize(c(np.zeros(3, np.uint8)), 0.1, 0, SPEC, shape=(4,)),
        ValueError,
    ),
    "bits for a spec, choose_qparams": (lambda c: fq.choose_qparams(c(X[0]), c(X[0]), 8), TypeError),
    "bits for a spec, round_zero_point": (lambda c: fq.round_zero_point(c(X[0]), 8), TypeError),
    "bits for a spec, min_max": (lambda c: fq.min_max(c(X), 8), TypeError),
    "bits for a spec, learned": (lambda c: fq.fake_quantize_learned(c(X), 0.1, 0, 8), TypeError),
    "bits for a spec, learned backward": (
        lambda c: fq.fake_quantize_learned_backward(c(X), c(X), 0.1, 0, 8),
        TypeError,
    ),
    "bits for a spec, dequantize": (lambda c: fq.dequantize(c(INTEGERS), 0.1, 0, 8), TypeError),
    "learned zero point": (lambda c: fq.fake_quantize(c(X), 0.1, c(np.float32(0.5)), AFFINE), TypeError),
    "NaN for a zero point": (lambda c: fq.round_zero_point(c(np.float32(np.nan)), AFFINE), ValueError),
    "scales of another shape": (lambda c: fq.quantize(c(X), c(np.ones(3, np.float32)), 0, CHANNELS), ValueError),
    "zero points of another shape": (
        lambda c: fq.quantize(c(X), c(np.ones(2, np.float32)), c(np.zeros(3, np.int32)), CHANNELS),
        ValueError,
    ),
    "complex scale": (lambda c: fq.quantize(c(X), c(np.complex64(1)), 0, SPEC), TypeError),
    "scale of 0": (lambda c: fq.quantize(c(X), c(np.float32(0)), 0, SPEC), ValueError),
    "number 0 for a scale": (lambda c: fq.fake_quantize(c(X), 0.0, 0, SPEC), ValueError),
    "infinite number for a scale": (lambda c: fq.fake_quantize(c(X), 1e300, 0, SPEC), ValueError),
    "zero point out of range": (lambda c: fq.fake_quantize(c(X), 0.1, 8, AFFINE), ValueError),
    "zero points out of range": (lambda c: fq.quantize(c(X), 0.1, c(np.int32([8])), AFFINE), ValueError),
    "zero point of a symmetric spec": (lambda c: fq.fake_quantize(c(X), 0.1, 1, SPEC), ValueError),
    "codes that cannot be packed": (lambda c: fq.quantize(c(X), 0.1, 0, fq.QuantSpec(), packed=True), ValueError),
    "unknown gradient": (lambda c: fq.fake_quantize(c(X), 0.1, 0, SPEC, gradient="none"), ValueError),
    "unknown update": (
        lambda c: fq.observe_fake_quantize(c(X), SPEC, *map(c, running()), update="last"),
        ValueError,
    ),
    "running range of another dtype": (
        lambda c: fq.observe_fake_quantize(c(X), SPEC, *(c(v.astype(np.float64)) for v in running())),
        ValueError,
    ),
    "no finite value observed": (
        lambda c: fq.observe_fake_quantize(c(X * np.nan), SPEC, *(c(np.float32([v])) for v in (np.inf, -np.inf))),
        ValueError,
    ),
    "eps of 0": (lambda c: fq.choose_qparams(c(X[0]), c(X[0]), SPEC, eps=0.0), ValueError),
    "range that ends before it starts": (lambda c: fq.choose_qparams(c(X[1]), c(X[0]), SPEC), ValueError),
}


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor], ids=["array", "tensor"])
@pytest.mark.parametrize(("call", "error"), MISTAKES.values(), ids=MISTAKES)
def test_arrays_and_tensors_raise_the_same_exception_type(call, error, convert):
    with pytest.raises(error) as raised:
        call(convert)
    assert type(raised.value) is error
    if "bits for a spec" in str(raised.value):
        assert "QuantSpec, got 8" in str(raised.value)


@pytest.mark.parametrize("call", [call for call, _ in MISTAKES.values()], ids=MISTAKES)
def test_arrays_and_tensors_raise_the_same_message(call):
    texts = []
    for convert in (np.asarray, torch.as_tensor):
        with pytest.raises((TypeError, ValueError)) as raised:
            call(convert)
        texts.append(str(raised.value))
    of_arrays, of_tensors = texts
    of_tensors = of_tensors.replace("a tensor", "an array").replace("tensor", "array")
    assert of_tensors.replace(".float()", ".astype(np.float32)") == of_arrays


def test_arrays_and_tensors_get_the_same_bool_mask_from_observing():
    for x in (X, np.asfortranarray(X), X[:, ::2]):
        state, tensors = running(), [torch.from_numpy(v) for v in running()]
        of_arrays = fq.observe_fake_quantize(x, AFFINE, *state, mask="bool", averaging_constant=0.0)
        of_tensors = fq.observe_fake_quantize(
            torch.from_numpy(x), AFFINE, *tensors, mask="bool", averaging_constant=0.0
        )
        assert_same_bits(of_arrays.mask, of_tensors.mask)
        assert of_tensors.mask.dtype == torch.bool
