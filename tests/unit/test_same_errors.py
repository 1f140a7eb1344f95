"""The same mistake is the same exception, whether it is made with arrays or with tensors."""

import numpy as np
import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")

SPEC, AFFINE = fq.QuantSpec(bits=4), fq.QuantSpec(bits=4, symmetric=False)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)
INTEGERS, MASK = X.astype(np.int32), np.ones((2, 6), bool)


def running():
    return np.full(1, -1, np.float32), np.full(1, 1, np.float32)


# What is called with a conversion to arrays or to tensors, and what is raised.
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
}


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor], ids=["array", "tensor"])
@pytest.mark.parametrize(("call", "error"), MISTAKES.values(), ids=MISTAKES)
def test_one_type_of_exception(call, error, convert):
    with pytest.raises(error) as raised:
        call(convert)
    assert type(raised.value) is error
    if "bits for a spec" in str(raised.value):
        assert "QuantSpec, got 8" in str(raised.value)


def test_a_mask_of_bools_from_observing():
    for x in (X, np.asfortranarray(X), X[:, ::2]):
        state, tensors = running(), [torch.from_numpy(v) for v in running()]
        of_arrays = fq.observe_fake_quantize(x, AFFINE, *state, mask="bool", averaging_constant=0.0)
        of_tensors = fq.observe_fake_quantize(
            torch.from_numpy(x), AFFINE, *tensors, mask="bool", averaging_constant=0.0
        )
        assert_same_bits(of_arrays.mask, of_tensors.mask.numpy())
        assert of_tensors.mask.dtype == torch.bool
