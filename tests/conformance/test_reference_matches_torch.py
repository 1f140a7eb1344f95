"""`fakequant.reference` against torch itself: equal bits, no tolerance."""

import ctypes
import ctypes.util
from fractions import Fraction

import numpy as np
import pytest
from torch.ao.quantization import observer as torch_observer
from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers its ops)

from fakequant import reference
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import BF16, aten, each_dtype, to_numpy, to_torch, torch

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")
FLOAT32 = cases.DTYPES["float32"]
ALL_SCALES = cases.SCALES + cases.EXTREME_SCALES + cases.BROKEN_SCALES


def zero_points(qmin, qmax):
    """Both ends, the middle, and the values next to zero that fit."""
    return sorted({qmin, qmax, (qmin + qmax) // 2, *(min(max(z, qmin), qmax) for z in (0, 3))})


def grids():
    """Every scale on a few ranges, a few scales on every range."""
    for qmin, qmax in [cases.INT8, cases.UINT8, (5, 5), (-(2**31), 2**31 - 1)]:
        for scale in ALL_SCALES:
            yield from ((scale, z, qmin, qmax) for z in zero_points(qmin, qmax))
    for i, (qmin, qmax) in enumerate([*cases.ranges(), *cases.INT64_RANGES]):
        for scale in (0.1, 1 / 3, cases.SCALES[i % len(cases.SCALES)]):
            yield from ((scale, z, qmin, qmax) for z in zero_points(qmin, qmax))


GRIDS = list(grids())


# --- forward and mask -------------------------------------------------------------------


@each_dtype
def test_per_tensor(dtype):
    for scale, z, qmin, qmax in GRIDS:
        x = cases.values(scale, z, qmin, qmax, dtype)
        y, mask = aten.fake_quantize_per_tensor_affine_cachemask(to_torch(x), float(scale), z, qmin, qmax)
        ref_y, ref_mask = reference.fake_quantize(x, scale, z, qmin, qmax, "torch")

        assert_same_bits(to_numpy(y), ref_y, "y", scale, z, qmin, qmax)
        assert_same_bits(to_numpy(mask), ref_mask, "mask", scale, z, qmin, qmax)


@each_dtype
def test_per_tensor_with_tensor_parameters_allows_any_zero_point(dtype):
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
def test_per_channel_with_integer_zero_points(dtype):
    for scale, z, qmin, qmax in GRIDS:
        if -(2**31) <= z < 2**31:
            x = cases.values(scale, z, qmin, qmax, dtype)[None]
            scale32 = np.array([scale]).astype(np.float32)
            check_channels(x, scale32, np.array([z], np.int32), 0, qmin, qmax)


@each_dtype
@pytest.mark.parametrize("z_dtype", [np.float32, np.float16])
def test_per_channel_with_float_zero_points(dtype, z_dtype):
    # Fractions behind the float64 fma are slow: fewer grids there.
    step = 5 if dtype == np.float64 and z_dtype == np.float32 else 2
    for i, (scale, z, qmin, qmax) in enumerate(GRIDS[::step]):
        x = cases.values(scale, z, qmin, qmax, dtype)[None]
        scale32 = np.array([scale]).astype(np.float32)
        fraction = (0, 0.25, 0.5, -0.3)[i % 4]
        check_channels(x, scale32, np.array([z + fraction]).astype(z_dtype), 0, qmin, qmax)


@each_dtype
def test_per_channel_zero_points_may_be_special_floats(dtype):
    z = np.float32([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-45, -0.0, 0.49999997])
    x = np.stack([cases.values(0.1, 0, -8, 7, dtype)] * len(z))
    for z_dtype in (np.float32, np.float16):
        check_channels(x, np.full(len(z), 0.1, np.float32), z.astype(z_dtype), 0, -8, 7)


@each_dtype
def test_channels_on_every_axis_keep_their_own_parameters(dtype):
    x = cases.values(0.1, 0, -8, 7, dtype)[:360].reshape(6, 5, 12)
    for axis, count in enumerate(x.shape):
        scale = np.float32([0.1, 1 / 3, 0.02, -0.5, 1e-3, 7.0] * 2)[:count]
        z = np.int32([0, 3, -8, 7, -1, 2] * 2)[:count]
        check_channels(x, scale, z, axis, -8, 7)
        check_channels(x, scale, (z + 0.5).astype(np.float32), axis, -8, 7)


# --- codes ------------------------------------------------------------------------------


def test_codes_equal_the_decomposed_quantize_op():
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
def test_unclamped_codes_beyond_int64(dtype):
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
    # torch's mask tells the same: they all count as -2**63, which this range contains.
    _, mask = aten.fake_quantize_per_channel_affine_cachemask(
        to_torch(x[None]), torch.tensor([1e-15]), torch.zeros(1, dtype=torch.int32), 0, -(2**63), 0
    )
    assert mask.tolist() == [[True, True, True, True, False]]


@each_dtype
@pytest.mark.parametrize("granularity", reference.GRANULARITIES)
def test_dequantized_codes_are_the_fake_quantized_values(dtype, granularity):
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
def test_onnx_numerics_equal_torch_where_the_reciprocal_is_exact(dtype):
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
def test_own_numerics_have_one_rule_for_special_values(dtype, numerics):
    x = np.array([np.nan, np.inf, -np.inf, -0.0, -0.01]).astype(dtype)
    for granularity in reference.GRANULARITIES:
        y, mask = reference.fake_quantize(x, 0.5, 3, -8, 7, numerics, granularity=granularity)

        assert_same_bits(np.array([np.nan, 2, -5.5, 0, 0]).astype(dtype), y)
        assert mask.tolist() == [False, False, False, True, True]
        q = reference.quantize(x, 0.5, 3, -8, 7, numerics, granularity=granularity)
        assert q.tolist() == [-8 if numerics == "onnx" else 0, 7, -8, 3, 3]


def integer_model(x, scale, z, qmin, qmax, numerics):
    """The code as an unbounded integer, and y, for one finite `x`: an independent reading."""
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
def test_own_numerics_equal_unbounded_integers(dtype, numerics):
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


def test_learned_gradients_of_non_finite_inputs_are_zero():
    x, dy = np.float32([np.nan, np.inf, -np.inf]), np.float32([np.nan, -1, np.inf])
    for numerics in ("onnx", "half_away"):
        for term in reference.learned_backward(dy, x, 0.1, 0.4, -8, 7, numerics):
            assert_same_bits(np.zeros(3, np.float32), term, numerics)


# --- gradients --------------------------------------------------------------------------


@each_dtype
def test_backward_is_a_multiplication_by_the_mask(dtype):
    dy = cases.gradients(4000, dtype)
    mask = np.random.default_rng(1).random(4000) < 0.5
    for op in (
        aten.fake_quantize_per_tensor_affine_cachemask_backward,
        aten.fake_quantize_per_channel_affine_cachemask_backward,
    ):
        dx = op(to_torch(dy), to_torch(mask))

        assert_same_bits(to_numpy(dx), reference.fake_quantize_backward(dy, mask, "torch"))


def learned_zero_points(qmin, qmax):
    candidates = [float(qmin), (qmin + qmax) / 2, 0.0, 0.5, 1.5, -2.5, -0.7, -57.0, 3.3]
    candidates += [float(qmax), 1e9, -1e9]
    # Clamping in float32 may leave a wide range by rounding its ends; torch refuses those.
    ends = np.float32(qmin), np.float32(qmax)
    return [z for z in candidates if qmin <= int(np.clip(np.float32(z), *ends)) <= qmax]


LEARNED_RANGES = [
    *(r for r in cases.ranges() if r[0] <= 0 <= r[1]),
    (-(2**53) - 1, 2**53 + 1),
]


@each_dtype
def test_learnable_forward(dtype):
    for i, (qmin, qmax) in enumerate(LEARNED_RANGES):
        scale = np.float32([(0.1, 1 / 3, -0.5, 0.02)[i % 4]])
        x = cases.values(float(scale[0]), max(qmin, -3), qmin, qmax, dtype)
        for z in np.float32(learned_zero_points(qmin, qmax)).reshape(-1, 1):
            parameters = to_torch(scale), to_torch(z)
            y = torch._fake_quantize_learnable_per_tensor_affine(to_torch(x), *parameters, qmin, qmax)
            used = reference.forward_zero_point(z, qmin, qmax)
            ref, _ = reference.fake_quantize(x, scale, used, qmin, qmax, "torch")
            assert_same_bits(to_numpy(y), ref, "tensor", scale, z, qmin, qmax)

            used = reference.forward_zero_point(z, qmin, qmax, granularity="channel")
            if not qmin <= used[0] <= qmax:
                continue  # torch's own cast to int32 left the range, and it raises
            y = torch._fake_quantize_learnable_per_channel_affine(to_torch(x[None]), *parameters, 0, qmin, qmax)
            ref, _ = reference.fake_quantize(
                x[None], scale[:, None], used[:, None], qmin, qmax, "torch", granularity="channel"
            )
            assert_same_bits(to_numpy(y), ref, "channel", scale, z, qmin, qmax)


def learned_cases():
    factors = (1.0, 0.1, 1 / 3, 1e-3, 0.0, -2.0, 1e39)
    for i, scale in enumerate(ALL_SCALES):
        for qmin, qmax in (cases.INT8, (0, 2**25 - 1), (-(2**31), 2**31 - 1)):
            for z in learned_zero_points(qmin, qmax)[:6]:
                yield scale, z, qmin, qmax, factors[i % len(factors)]
    for i, (qmin, qmax) in enumerate(LEARNED_RANGES):
        for z in learned_zero_points(qmin, qmax):
            yield 1 / 3, z, qmin, qmax, factors[i % len(factors)]


def learned_data(scale, z, qmin, qmax, dtype, limit):
    x = cases.values(scale, min(max(int(z), qmin), qmax), qmin, qmax, dtype)
    x = np.random.default_rng(len(x)).permutation(x)[:limit]
    return x, cases.gradients(len(x), dtype, seed=len(x))


def assert_same_terms(expected, terms, *names):
    for name, want, got in zip(("dx", "ds", "dz"), expected, terms, strict=True):
        # torch's sum over one element is 0 + term, which loses the sign of a zero.
        got = got if name == "dx" else got + np.float32(0)
        assert_same_bits(to_numpy(want), got, name, *names)


@pytest.mark.parametrize("dtype", [FLOAT32, BF16], ids=["float32", "bfloat16"])
def test_learnable_backward_per_channel(dtype):
    op = aten._fake_quantize_learnable_per_channel_affine_backward
    for scale, z, qmin, qmax, factor in learned_cases():
        x, dy = (a[:, None] for a in learned_data(scale, z, qmin, qmax, dtype, None))
        # One channel per element: every sum has one term.
        scales = np.full(len(x), scale).astype(np.float32)
        zs = np.full(len(x), z, np.float32)
        out = op(*map(to_torch, (dy, x, scales, zs)), 0, qmin, qmax, factor)
        dx, ds, dz = reference.learned_backward(
            dy, x, scales[:, None], zs[:, None], qmin, qmax, "torch",
            grad_factor=factor, granularity="channel",
        )  # fmt: skip

        assert_same_terms(out, (dx, ds[:, 0], dz[:, 0]), scale, z, qmin, qmax, factor)


@pytest.mark.parametrize("dtype", [FLOAT32, BF16], ids=["float32", "bfloat16"])
def test_learnable_backward_per_tensor(dtype):
    op = aten._fake_quantize_learnable_per_tensor_affine_backward
    for scale, z, qmin, qmax, factor in learned_cases():
        x, dy = learned_data(scale, z, qmin, qmax, dtype, 24)
        scale32, z32 = np.array([scale]).astype(np.float32), np.float32([z])
        parameters = to_torch(scale32), to_torch(z32)
        out = [
            op(*pair, *parameters, qmin, qmax, factor)
            for pair in zip(to_torch(dy).split(1), to_torch(x).split(1), strict=True)
        ]
        terms = reference.learned_backward(dy, x, scale32, z32, qmin, qmax, "torch", grad_factor=factor)

        out = [torch.cat(column) for column in zip(*out, strict=True)]
        assert_same_terms(out, terms, scale, z, qmin, qmax, factor)


def test_exact_sums_agree_with_torch_up_to_its_rounding():
    rng = np.random.default_rng(3)
    dy, x = rng.standard_normal((2, 3, 1000)).astype(np.float32)
    scale, z = np.float32([0.1, 0.02, 1.0]), np.zeros(3, np.float32)
    _, ds, _ = aten._fake_quantize_learnable_per_channel_affine_backward(
        *map(to_torch, (dy, x, scale, z)), 0, -8, 7, 1.0
    )
    terms = reference.learned_backward(dy, x, scale[:, None], z[:, None], -8, 7, "torch", granularity="channel")[1]

    exact = reference.exact_sum(terms, axis=1)
    assert np.all(np.abs(ds.numpy() - exact) < 1e-5 * np.abs(terms).sum(axis=1))


def test_exact_sums_equal_rational_sums():
    rng = np.random.default_rng(4)
    terms = rng.standard_normal((2, 3, 50)) * 10.0 ** rng.integers(-30, 30, (2, 3, 50))
    terms[..., 25:] = -terms[..., :25] * (1 + 1e-15)

    def exact(row):
        return float(sum(map(Fraction, row.ravel().tolist())))

    assert reference.exact_sum(terms).item() == exact(terms)
    by_axis = [[exact(terms[i, j]) for j in range(3)] for i in range(2)]
    assert reference.exact_sum(terms, axis=-1).tolist() == by_axis
    by_channel = [exact(terms[:, j]) for j in range(3)]
    assert reference.exact_sum(terms, axis=(0, 2)).tolist() == by_channel
    assert reference.exact_sum(np.float64([1e308, 1e308, -1e308])).item() == 1e308
    assert reference.exact_sum(np.zeros((0, 2)), axis=0).tolist() == [0.0, 0.0]
    assert_same_bits(np.float64(0.0), reference.exact_sum(np.float32([-0.0])))
    specials = np.float32([[1, np.inf], [np.inf, -np.inf], [np.nan, 1]])
    assert_same_bits(np.array([np.inf, np.nan, np.nan]), reference.exact_sum(specials, axis=1))


# --- quantization parameters ------------------------------------------------------------


def wild_floats(rng, size, specials=(np.inf, -np.inf)):
    """Every exponent, ordinary sizes, and landmarks."""
    landmarks = [0.0, -0.0, 1e-45, -1e-45, 3e-38, 3.4028235e38, -3.4028235e38, 1, -1, 127.5]
    everywhere = np.exp(rng.uniform(-103, 88, size)) * rng.choice([-1, 1], size)
    ordinary = rng.standard_normal(size) * 10.0 ** rng.integers(-8, 4, size)
    kind = rng.choice(3, size, p=[0.3, 0.5, 0.2])
    chosen = [everywhere, ordinary, rng.choice([*landmarks, *specials], size)]
    return np.choose(kind, chosen).astype(np.float32)


def min_max_pairs(rng, size, specials=(np.inf, -np.inf)):
    a, b = wild_floats(rng, size, specials), wild_floats(rng, size, specials)
    b = np.choose(rng.choice(3, size, p=[0.8, 0.1, 0.1]), [b, a, -a])
    return np.minimum(a, b), np.maximum(a, b)


OBSERVED = [
    (torch.qint8, cases.INT8, {}),
    (torch.quint8, cases.UINT8, {}),
    (torch.qint8, cases.NARROW_INT8, {"eps": 2**-12}),
    (torch.qint8, cases.INT4, {}),
    (torch.qint8, (-1, 1), {}),
    (torch.int16, (-(2**15), 2**15 - 1), {}),
    (torch.uint16, (0, 2**16 - 1), {}),
    (torch.int32, (-(2**31), 2**31 - 1), {}),
]


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
@pytest.mark.parametrize(("dtype", "bounds", "options"), OBSERVED)
def test_observer_parameters(dtype, bounds, options, symmetric):
    rng = np.random.default_rng(5)
    lo, hi = min_max_pairs(rng, 5000)
    # A finite range wider than float32 has an infinite scale in torch, and a finite one here.
    keep = np.isfinite(np.maximum(hi, 0) - np.minimum(lo, 0)) | np.isinf(lo) | np.isinf(hi)
    lo, hi = lo[keep], hi[keep]
    qmin, qmax = bounds
    full = options or bounds in (cases.INT4, (-1, 1))
    limits = {"quant_min": qmin, "quant_max": qmax} if full else {}
    scheme = torch.per_channel_symmetric if symmetric else torch.per_channel_affine
    channels = torch_observer.PerChannelMinMaxObserver(dtype=dtype, qscheme=scheme, **limits, **options)
    channels.min_val, channels.max_val = to_torch(lo), to_torch(hi)
    scale, z = channels.calculate_qparams()
    ref_scale, ref_z = reference.choose_qparams(lo, hi, qmin, qmax, symmetric=symmetric, **options)
    assert_same_bits(to_numpy(scale), ref_scale, "scale")
    if qmax - qmin >= 2**31 and not symmetric:
        return  # torch's `qmin - round(lo / scale)` overflows int32; ours does not
    assert_same_bits(to_numpy(z.to(torch.int32)), ref_z, "zero_point")

    scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    for kind in (torch_observer.MinMaxObserver, torch_observer.MovingAverageMinMaxObserver):
        whole = kind(dtype=dtype, qscheme=scheme, **limits, **options)
        for i in range(50):
            whole.min_val, whole.max_val = torch.tensor(lo[i]), torch.tensor(hi[i])
            scale, z = whole.calculate_qparams()
            assert_same_bits(to_numpy(scale), ref_scale[i : i + 1], "scale", lo[i], hi[i])
            assert_same_bits(to_numpy(z.to(torch.int32)), ref_z[i : i + 1], "zero_point")


@pytest.mark.parametrize("constant", [0.01, 1 / 3, 0.1, 1.0, 0.0])
def test_moving_average_observers(constant):
    rng = np.random.default_rng(6)
    channels = torch_observer.MovingAveragePerChannelMinMaxObserver(averaging_constant=constant)
    whole = torch_observer.MovingAverageMinMaxObserver(averaging_constant=constant)
    rows = whole_range = (np.float32(np.inf), np.float32(-np.inf))
    for _ in range(30):
        size = 10.0 ** rng.integers(-20, 20, (300, 1))
        x = (rng.standard_normal((300, 3)) * size).astype(np.float32)
        channels(to_torch(x)), whole(to_torch(x[0]))
        seen = (x.min(axis=1), x.max(axis=1))
        rows = [reference.moving_average(r, s, constant) for r, s in zip(rows, seen, strict=True)]
        whole_range = [reference.moving_average(r, s[0], constant) for r, s in zip(whole_range, seen, strict=True)]

        assert_same_bits(to_numpy(channels.min_val), rows[0], "rows min")
        assert_same_bits(to_numpy(channels.max_val), rows[1], "rows max")
        assert_same_bits(to_numpy(whole.min_val), whole_range[0], "min")
        assert_same_bits(to_numpy(whole.max_val), whole_range[1], "max")


# --- the fused op -----------------------------------------------------------------------

FUSED_RANGES = [r for r in cases.ranges(31) if r[0] < r[1]] + [(5, 300), (-300, -5), (3, 3)]


def fused_rows(rng, size, levels):
    """Pairs of values per row: wild, NaN, and ranges around the smallest scale."""
    lo, hi = min_max_pairs(rng, size, (np.inf, -np.inf, np.nan))
    factor = rng.choice([1, 1, 0.5, 2, 0.999, 1.001, 1e-3, 1e-30], size)
    width = (6.1e-5 * max(levels, 1) * factor).astype(np.float32)
    part = rng.choice([0, 1, 0.5, 0.25, 1 / 3], size).astype(np.float32)
    near_hi = width * (1 - part)
    near_hi = np.where(near_hi > 0, cases.neighbours(near_hi, rng.integers(-3, 4)), near_hi)
    near = rng.random(size) < 0.4
    x = np.stack([np.where(near, -width * part, lo), np.where(near, near_hi, hi)], axis=1)
    # Opposite zeros in one row have no defined minimum.
    return np.where(x == 0, np.float32(0), x)


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
def test_fused_state_per_row(symmetric):
    rng = np.random.default_rng(7)
    on = torch.ones(1, dtype=torch.int64)
    n = 1200
    for qmin, qmax in FUSED_RANGES:
        state = [torch.full((n,), np.inf), torch.full((n,), -np.inf)]
        state += [torch.ones(n), torch.zeros(n, dtype=torch.int32)]
        lo, hi = np.float32([np.inf, -np.inf])
        for _ in range(2):
            x = fused_rows(rng, n, qmax - qmin)
            # Written before the zero point INT32_MIN of a NaN row is refused.
            with pytest.raises(RuntimeError, match="zero_point"):
                torch.fused_moving_avg_obs_fake_quant(to_torch(x), on, on, *state, 0.01, qmin, qmax, 0, True, symmetric)
            lo = reference.moving_average(lo, x.min(axis=1), 0.01)
            hi = reference.moving_average(hi, x.max(axis=1), 0.01)
            scale, z = reference.choose_qparams_fused(lo, hi, qmin, qmax, symmetric)

            expected = ("min", lo), ("max", hi), ("scale", scale), ("zero_point", z)
            for (name, ref), have in zip(expected, state, strict=True):
                assert_same_bits(to_numpy(have), ref, name, qmin, qmax)


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
def test_fused_output_and_state_per_tensor(symmetric):
    rng = np.random.default_rng(8)
    on = torch.ones(1, dtype=torch.int64)
    for qmin, qmax in (cases.INT8, cases.UINT8, cases.NARROW_INT8, cases.INT4, (3, 3)):
        state = [torch.full((1,), np.inf), torch.full((1,), -np.inf)]
        state += [torch.ones(1), torch.zeros(1, dtype=torch.int32)]
        lo, hi = np.float32([np.inf]), np.float32([-np.inf])
        for x in fused_rows(rng, 200, qmax - qmin):
            if np.isnan(lo).any():  # NaN stays for ever, so start again
                lo, hi = np.float32([np.inf]), np.float32([-np.inf])
                state[0].fill_(np.inf), state[1].fill_(-np.inf)
            x = np.append(x, x.mean())
            y, mask = torch._fused_moving_avg_obs_fq_helper(
                to_torch(x), on, on, *state, 0.1, qmin, qmax, -1, False, symmetric
            )
            lo = reference.moving_average(lo, x.min(), 0.1)
            hi = reference.moving_average(hi, x.max(), 0.1)
            scale, z = reference.choose_qparams_fused(lo, hi, qmin, qmax, symmetric)
            ref_y, ref_mask = reference.fake_quantize(x, scale, z, qmin, qmax, "torch")

            pairs = zip((*state, y, mask), (lo, hi, scale, z, ref_y, ref_mask), strict=True)
            for have, ref in pairs:
                assert_same_bits(to_numpy(have), ref, qmin, qmax, x)


# --- building blocks --------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "fmaf"), (np.float64, "fma")])
def test_fma_equals_the_c_library(dtype, name):
    library = ctypes.util.find_library("m")
    if library is None:
        pytest.skip("no C math library found")
    kind = np.ctypeslib.as_ctypes_type(dtype)
    function = getattr(ctypes.CDLL(library), name)
    function.restype, function.argtypes = kind, [kind] * 3
    rng, size = np.random.default_rng(9), 20000
    integer = np.dtype(f"u{np.dtype(dtype).itemsize}")
    info = np.finfo(dtype)
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.tiny, info.smallest_subnormal], dtype)
    # All bit patterns, then near cancellation, ties from short integers, specials.
    a, b, c = (rng.integers(0, 2 ** (8 * integer.itemsize), size, dtype=integer).view(dtype) for _ in range(3))
    with np.errstate(all="ignore"):
        near = -(a * b) * (1 + rng.integers(-3, 4, size).astype(dtype) * info.eps)
    c = np.where(rng.random(size) < 0.5, near, c).astype(dtype)
    short = rng.random(size) < 0.2
    a[short], b[short] = rng.integers(1, 2**12, (2, short.sum()))
    b[short] *= dtype(2) ** -rng.integers(0, 30, short.sum()).astype(dtype)
    c[short] = rng.integers(-(2**24), 2**24, short.sum())
    # A hair beside a tie of the result: half an ulp of c, times (1 + eps)(1 - eps).
    tie = rng.random(size) < 0.2
    c[tie] = rng.uniform(1, 2, tie.sum())
    sign, up = rng.choice([-1, 1], (2, tie.sum()))
    a[tie], b[tie] = sign * (1 + up * info.eps), (1 - up * info.eps) * info.eps / 2
    for values in (a, b, c):
        places = rng.random(size) < 0.05
        values[places] = rng.choice(specials, places.sum())

    expected = [function(*abc) for abc in zip(*(v.tolist() for v in (a, b, c)), strict=True)]
    assert_same_bits(np.array(expected, dtype), reference.fma(a, b, c))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_round_half_away_equals_exact_rational_rounding(dtype):
    halves = np.arange(-40, 40).astype(dtype) / 2
    large = np.array([2.0**k + h for k in range(20, 54) for h in (-0.5, 0.5, 1)]).astype(dtype)
    v = np.concatenate([halves, large, -large])
    v = np.concatenate([cases.neighbours(v, step) for step in (-1, 0, 1)])

    def exact(value):
        whole = int(abs(Fraction(value)) + Fraction(1, 2))
        return whole if value >= 0 else -whole

    expected = np.array([exact(value) for value in v.tolist()], dtype)
    assert_same_bits(expected + dtype(0), reference.round_half_away(v) + dtype(0))


@pytest.mark.parametrize(
    ("expected", "actual", "message"),
    [
        (np.float32([0.0]), np.float32([-0.0]), r"1 of 1 differ.*0x00000000.*0x80000000"),
        (np.float32([1, 2]), np.float32([1, 3]), r"first at \(1,\): expected 2.0.*got 3.0"),
        (np.float32([np.nan]), np.float32([1]), r"expected nan"),
        (np.float32([1]), np.float64([1]), "dtype"),
        (np.float32([1]), np.float32([[1]]), "shape"),
    ],
)
def test_the_comparison_sees_differences(expected, actual, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(expected, actual)
    other_nan = np.uint32([0xFFC00001]).view(np.float32)
    assert_same_bits(np.float32([np.nan]), other_nan)
