"""Expected integers worked out by hand, independent of any code in this repository.

Ties at a scale of 1 and 0.5, where every intermediate is exact, and a few awkward scales whose
quotients were worked out to the last bit.
"""

import numpy as np
import pytest

import fakequant as fq

pytestmark = pytest.mark.usefixtures("target")

NAN, INF = np.nan, np.inf

# numerics, scale, zero point, (qmin, qmax as bits, signed), x, expected codes
VECTORS = {
    "ties go to even": ("onnx", 1.0, 0, 8, True, [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5], [-2, -2, 0, 0, 2, 2]),
    "ties go to even before the zero point is added": ("onnx", 1.0, 1, 8, True, [0.5, 1.5, 2.5], [1, 3, 3]),
    "torch adds the zero point after rounding": ("torch", 1.0, 1, 8, True, [0.5, 1.5, 2.5], [1, 3, 3]),
    "half_away adds the zero point before rounding": ("half_away", 1.0, 1, 8, True, [0.5, 1.5, 2.5], [2, 3, 4]),
    "half_away rounds negative ties down": ("half_away", 1.0, 0, 8, True, [-0.5, -1.5, 0.49999997], [-1, -2, 0]),
    # 0.05 / 0.1 and 0.15 / 0.1 in float32 are exactly 0.5 and 1.5 after rounding of the quotient.
    "float32 quotients at a scale of 0.1": ("onnx", 0.1, 0, 4, True, [0.05, 0.15, 0.25, 0.35], [0, 2, 2, 4]),
    "values beyond the ends are clipped": ("onnx", 0.5, 0, 4, True, [-4.25, -4.0, 3.5, 3.75, 100.0], [-8, -8, 7, 7, 7]),
    "unsigned codes with a zero point": ("onnx", 0.5, 3, 4, False, [-2.0, -1.5, 0.0, 6.0, 6.5], [0, 0, 3, 15, 15]),
    "infinities saturate with their sign": ("onnx", 1.0, 0, 8, True, [INF, -INF], [127, -128]),
    "torch saturates infinities per tensor": ("torch", 1.0, 0, 8, True, [INF, -INF, NAN], [127, -128, -128]),
    "NaN becomes qmin in onnx": ("onnx", 1.0, 5, 8, True, [NAN], [-128]),
    "NaN becomes 0 in half_away": ("half_away", 1.0, 5, 8, True, [NAN], [0]),
    "zeros of both signs become 0": ("onnx", 0.1, 0, 8, True, [0.0, -0.0, 1e-45, -1e-45], [0, 0, 0, 0]),
    "values beyond int64 saturate": ("onnx", 1.0, 0, 8, True, [1e30, -1e30, 9.3e18], [127, -128, 127]),
    "codes of two bits": ("onnx", 1.0, 0, 2, True, [-3.0, -2.0, -1.0, 0.4, 0.6, 3.0], [-2, -2, -1, 0, 1, 1]),
    "codes of one bit": ("onnx", 1.0, 0, 1, False, [-1.0, 0.4, 0.6, 9.0], [0, 0, 1, 1]),
    "32 bits clamp exactly": ("onnx", 1.0, 0, 32, True, [2.0**31, -(2.0**31), 2147483520.0],
                              [2**31 - 1, -(2**31), 2147483520]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("numerics", "scale", "zero_point", "bits", "signed", "x", "expected"), VECTORS.values(), ids=VECTORS
)
def test_quantize_gives_the_codes_worked_out_by_hand(numerics, scale, zero_point, bits, signed, x, expected):
    spec = fq.QuantSpec(bits=bits, signed=signed, symmetric=False, numerics=numerics)
    assert fq.quantize(np.float32(x), scale, zero_point, spec).tolist() == expected


def test_torch_per_channel_sends_everything_beyond_int64_to_qmin():
    spec = fq.QuantSpec(axis=0, numerics="torch")
    x = np.float32([[INF, -INF, NAN, 9.3e18, 9.2e18, -9.3e18]])
    assert fq.quantize(x, np.float32([1]), 0, spec).tolist() == [[-128, -128, -128, -128, 127, -128]]


def test_onnx_numerics_divide_where_torch_numerics_multiply_by_the_reciprocal():
    # With s = float32(0.7), 1/s rounds down and 2.5 * s rounds so that x / s is exactly 2.5, a tie
    # that goes to 2, while x * (1/s) lies just above it.
    s = np.float32(0.7)
    x = np.float32([k + 0.5 for k in range(-128, 127)]) * s
    divided = fq.quantize(x, float(s), 0, fq.QuantSpec())
    multiplied = fq.quantize(x, float(s), 0, fq.QuantSpec(numerics="torch"))
    exact = np.rint(x / s).astype(np.int8)

    assert divided.tolist() == exact.tolist()
    assert (divided != multiplied).any()


def test_the_mask_is_computed_after_rounding():
    _, mask = fq.fake_quantize(np.float32([-128.5, -128.51, 127.49, 127.5]), 1.0, 0, fq.QuantSpec(), mask="bool")
    assert mask.tolist() == [True, False, True, False]


def test_nan_stays_nan_and_has_no_gradient():
    y, mask = fq.fake_quantize(np.float32([NAN, INF, 1.0]), 1.0, 0, fq.QuantSpec(), mask="packed")
    assert np.isnan(y[0])
    assert y[1:].tolist() == [127, 1]
    dx = fq.fake_quantize_backward(np.float32([NAN, INF, 2.0]), mask, fq.QuantSpec())
    assert dx.tolist() == [0, 0, 2]


def test_packed_4_bit_codes_start_with_the_low_bits():
    q = fq.quantize(np.float32([1, -1, 7, -8, 3]), 1.0, 0, fq.QuantSpec(bits=4), packed=True)
    assert q.tolist() == [0xF1, 0x87, 0x03]


def test_packed_2_bit_codes_start_with_the_low_bits():
    q = fq.quantize(np.float32([1, -1, 0, -2, 1]), 1.0, 0, fq.QuantSpec(bits=2), packed=True)
    assert q.tolist() == [0b10_00_11_01, 0b01]


def test_learned_gradients_equal_those_worked_out_by_hand():
    # s = 0.5, z = 0, [-8, 7]: 0.375 / s = 0.75 -> 1: inside, 1 - 0.75 = 0.25. 9 and -9 are clipped.
    x, dy = np.float32([0.375, 9.0, -9.0, NAN, INF]), np.float32([1, 2, 4, 8, 16])
    dx, dscale, dzero_point = fq.fake_quantize_learned_backward(dy, x, 0.5, 0.0, fq.QuantSpec(bits=4, symmetric=False))
    assert dx.tolist() == [1, 0, 0, 0, 0]
    assert dscale == 1 * 0.25 + 2 * 7 + 4 * -8
    assert dzero_point == -2 * 0.5 - 4 * 0.5
