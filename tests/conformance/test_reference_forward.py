"""Values, masks and codes of `fakequant.reference` have torch's bits."""

from fractions import Fraction

import numpy as np
import pytest
from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers its ops)

from fakequant import reference
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import ALL_SCALES, FLOAT32, aten, each_dtype, to_numpy, to_torch, torch

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")


def zero_points(qmin, qmax):
    """Returns both ends, the middle, and values next to zero, clamped to the range."""
    return sorted({qmin, qmax, (qmin + qmax) // 2, *(min(max(z, qmin), qmax) for z in (0, 3))})


def grids():
    """Yields every scale on a few ranges and a few scales on every range."""
    for qmin, qmax in [cases.INT8, cases.UINT8, (5, 5), (-(2**31), 2**31 - 1)]:
        for scale in ALL_SCALES:
            yield from ((scale, z, qmin, qmax) for z in zero_points(qmin, qmax))
    for i, (qmin, qmax) in enumerate([*cases.ranges(), *cases.INT64_RANGES]):
        for scale in (0.1, 1 / 3, cases.SCALES[i % len(cases.SCALES)]):
            yield from ((scale, z, qmin, qmax) for z in zero_points(qmin, qmax))


GRIDS = list(grids())


# --- forward and mask -------------------------------------------------------------------


@each_dtype
def test_per_tensor_reference_equals_torch_on_every_grid(dtype):
    for scale, z, qmin, qmax in GRIDS:
        x = cases.values(scale, z, qmin, qmax, dtype)
        y, mask = aten.fake_quantize_per_tensor_affine_cachemask(to_torch(x), float(scale), z, qmin, qmax)
        ref_y, ref_mask = reference.fake_quantize(x, scale, z, qmin, qmax, "torch")

        assert_same_bits(to_numpy(y), ref_y, "y", scale, z, qmin, qmax)
        assert_same_bits(to_numpy(mask), ref_mask, "mask", scale, z, qmin, qmax)


@each_dtype
def test_per_tensor_reference_equals_torch_for_zero_points_outside_the_range(dtype):
    op = torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    enabled = torch.ones(1, dtype=torch.int64)
    for z in (-(2**31), -500, -1, 300, 2**24 + 1, 2**31 - 1):
        for scale in (0.1, -0.1, 0.0, np.inf, np.nan, 1e-45):
            for qmin, qmax in (cases.INT8, cases.UINT8, (5, 5)):
                x = cases.values(scale, 0, qmin, qmax, dtype)
                y, mask = op(to_torch(x), torch.tensor([scale]), torch.tensor([z]), enabled, qmin, qmax)
                ref_y, ref_mask = reference.fake_quantize(x, scale, z, qmin, qmax, "torch")

                assert_same_bits(to_numpy(y), ref_y, "y", scale, z, qmin, qmax)
                assert_same_bits(to_numpy(mask), ref_mask, "mask", scale, z, qmin, qmax)


def check_channels(x, scale, z, axis, qmin, qmax):
    shape = [-1 if d == axis else 1 for d in range(x.ndim)]
    y, mask = aten.fake_quantize_per_channel_affine_cachemask(
        to_torch(x), to_torch(scale), to_torch(z), axis, qmin, qmax
    )
    ref_y, ref_mask = reference.fake_quantize(
        x, scale.reshape(shape), z.reshape(shape), qmin, qmax, "torch", granularity="channel"
    )
    assert_same_bits(to_numpy(y), ref_y, "y", scale, z, qmin, qmax)
    assert_same_bits(to_numpy(mask), ref_mask, "mask", scale, z, qmin, qmax)


@each_dtype
def test_per_channel_reference_equals_torch_with_integer_zero_points(dtype):
    for scale, z, qmin, qmax in GRIDS:
        if -(2**31) <= z < 2**31:
            x = cases.values(scale, z, qmin, qmax, dtype)[None]
            scale32 = np.array([scale]).astype(np.float32)
            check_channels(x, scale32, np.array([z], np.int32), 0, qmin, qmax)


@each_dtype
@pytest.mark.parametrize("z_dtype", [np.float32, np.float16])
def test_per_channel_reference_equals_torch_with_float_zero_points(dtype, z_dtype):
    # The float64 fma computes with slow fractions, so it gets fewer grids.
    step = 5 if dtype == np.float64 and z_dtype == np.float32 else 2
    for i, (scale, z, qmin, qmax) in enumerate(GRIDS[::step]):
        x = cases.values(scale, z, qmin, qmax, dtype)[None]
        scale32 = np.array([scale]).astype(np.float32)
        fraction = (0, 0.25, 0.5, -0.3)[i % 4]
        check_channels(x, scale32, np.array([z + fraction]).astype(z_dtype), 0, qmin, qmax)


@each_dtype
def test_per_channel_reference_equals_torch_with_special_float_zero_points(dtype):
    z = np.float32([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-45, -0.0, 0.49999997])
    x = np.stack([cases.values(0.1, 0, -8, 7, dtype)] * len(z))
    for z_dtype in (np.float32, np.float16):
        check_channels(x, np.full(len(z), 0.1, np.float32), z.astype(z_dtype), 0, -8, 7)


@each_dtype
def test_per_channel_reference_equals_torch_on_every_axis(dtype):
    x = cases.values(0.1, 0, -8, 7, dtype)[:360].reshape(6, 5, 12)
    for axis, count in enumerate(x.shape):
        scale = np.float32([0.1, 1 / 3, 0.02, -0.5, 1e-3, 7.0] * 2)[:count]
        z = np.int32([0, 3, -8, 7, -1, 2] * 2)[:count]
        check_channels(x, scale, z, axis, -8, 7)
        check_channels(x, scale, (z + 0.5).astype(np.float32), axis, -8, 7)


# --- codes ------------------------------------------------------------------------------


def test_reference_codes_equal_the_decomposed_quantize_op():
    kinds = {cases.INT8: torch.int8, cases.UINT8: torch.uint8, cases.NARROW_INT8: torch.int8}
    op = torch.ops.quantized_decomposed.quantize_per_tensor
    for (qmin, qmax), kind in kinds.items():
        for scale in cases.SCALES:
            for z in zero_points(qmin, qmax):
                x = cases.values(scale, z, qmin, qmax, FLOAT32)
                x = x[~np.isnan(x)]
                q = op(to_torch(x), float(np.float32(scale)), z, qmin, qmax, kind)
                ref = reference.quantize(x, scale, z, qmin, qmax, "torch")

                assert_same_bits(to_numpy(q).astype(np.int64), ref, scale, z, qmin, qmax)


@each_dtype
def test_unclamped_reference_codes_beyond_int64_depend_on_the_granularity(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 6e4, 0.5]).astype(dtype)
    scale = np.float32(1e-15)
    code = reference.unclamped_code(x, scale, 0, "torch")
    assert np.isnan(code[0])
    assert code[1] == np.inf
    assert code[2] == -np.inf
    assert code[3] > 2**63

    code = reference.unclamped_code(x, scale, 0, "torch", granularity="channel")
    assert (code[:4] == -np.inf).all()
    assert np.isfinite(code[4])
    # torch's mask agrees: all of them count as -2**63, which is inside this range.
    _, mask = aten.fake_quantize_per_channel_affine_cachemask(
        to_torch(x[None]), torch.tensor([1e-15]), torch.zeros(1, dtype=torch.int32), 0, -(2**63), 0
    )
    assert mask.tolist() == [[True, True, True, True, False]]


@each_dtype
@pytest.mark.parametrize("granularity", reference.GRANULARITIES)
def test_dequantized_reference_codes_equal_the_fake_quantized_values(dtype, granularity):
    for scale in cases.SCALES:
        x = cases.values(scale, 3, -128, 127, dtype)
        z = np.int32(3)
        q = reference.quantize(x, scale, z, -128, 127, "torch", granularity=granularity)
        y, _ = reference.fake_quantize(x, scale, z, -128, 127, "torch", granularity=granularity)
        if dtype == np.float64:  # per tensor float32, per channel float64 with a float32 scale
            wide = np.float32 if granularity == "tensor" else np.float64
            back = reference.dequantize(q, np.float32(scale), z, wide).astype(dtype)
        else:
            back = reference.dequantize(q, scale, z, dtype)

        assert_same_bits(y, back, dtype, scale)


@each_dtype
def test_onnx_reference_equals_torch_where_the_reciprocal_is_exact(dtype):
    for scale in (0.25, 1.0, 2.0**-7):
        for z in zero_points(*cases.INT8):
            x = cases.values(scale, z, *cases.INT8, dtype)
            x = x[~np.isnan(x)]
            y, mask = aten.fake_quantize_per_tensor_affine_cachemask(to_torch(x), scale, z, *cases.INT8)
            ref_y, ref_mask = reference.fake_quantize(x, scale, z, *cases.INT8, "onnx")

            assert_same_bits(to_numpy(y), ref_y, "y", scale, z)
            assert_same_bits(to_numpy(mask), ref_mask, "mask", scale, z)


@pytest.mark.parametrize("numerics", ["onnx", "half_away"])
@each_dtype
def test_onnx_and_half_away_reference_treat_special_values_alike_in_every_granularity(dtype, numerics):
    x = np.array([np.nan, np.inf, -np.inf, -0.0, -0.01]).astype(dtype)
    for granularity in reference.GRANULARITIES:
        y, mask = reference.fake_quantize(x, 0.5, 3, -8, 7, numerics, granularity=granularity)

        assert_same_bits(np.array([np.nan, 2, -5.5, 0, 0]).astype(dtype), y)
        assert mask.tolist() == [False, False, False, True, True]
        q = reference.quantize(x, 0.5, 3, -8, 7, numerics, granularity=granularity)
        assert q.tolist() == [-8 if numerics == "onnx" else 0, 7, -8, 3, 3]


def integer_model(x, scale, z, qmin, qmax, numerics):
    """Returns the unbounded integer code and y of one finite `x`, computed independently of the reference."""
    with np.errstate(all="ignore"):
        ratio = x / scale
        shifted = ratio + type(x)(z)
    if not np.isfinite(ratio):
        code = qmax + 1 if ratio > 0 else qmin - 1
    elif numerics == "onnx":
        code = round(Fraction(float(ratio))) + z
    else:
        away = int(abs(Fraction(float(shifted))) + Fraction(1, 2))
        code = away if shifted >= 0 else -away
    steps = np.int64(min(max(code, qmin), qmax) - z).astype(type(x))
    with np.errstate(all="ignore"):
        return code, steps * scale


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numerics", ["onnx", "half_away"])
def test_onnx_and_half_away_reference_equal_arithmetic_with_unbounded_integers(dtype, numerics):
    for i, (qmin, qmax) in enumerate(cases.ranges()):
        scale = dtype(np.float32(cases.SCALES[i % len(cases.SCALES)]))
        for z in zero_points(qmin, qmax):
            x = cases.values(float(scale), z, qmin, qmax, np.dtype(dtype))[i % 17 :: 17]
            x, dy = x[np.isfinite(x)], dtype(-1.5)
            y, mask = reference.fake_quantize(x, scale, z, qmin, qmax, numerics)
            raw = dtype(z) if int(dtype(z)) == z else z  # not every 32-bit z is a float32
            dx, ds, dz = reference.learned_backward(dy, x, scale, raw, qmin, qmax, numerics, grad_factor=3)
            expected = [integer_model(v, scale, z, qmin, qmax, numerics) for v in x]
            codes = [code for code, _ in expected]

            assert_same_bits(np.array([v for _, v in expected], dtype), y, scale, z, qmin, qmax)
            assert mask.tolist() == [qmin <= code <= qmax for code in codes]
            for v, code, *terms in zip(x, codes, dx, ds, dz, strict=True):
                steps = np.int64(min(max(code, qmin), qmax) - z).astype(dtype)
                with np.errstate(all="ignore"):
                    if qmin <= code <= qmax:
                        want = dy, dy * (steps - v / scale) * dtype(3), dtype(0)
                    else:
                        want = dtype(0), dy * steps * dtype(3), -dy * scale * dtype(3)
                assert_same_bits(np.array(want), np.array(terms), scale, z, qmin, qmax, v)
