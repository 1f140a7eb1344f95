"""MX and NVFP4 have the scales and values of torchao, and differ only where these tests say so, and why."""

from fractions import Fraction

import numpy as np
import pytest

from fakequant import presets, reference_formats as formats
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import BF16, to_numpy, to_torch, torch

mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")
ELEMENTS = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m3": mx.DTYPE_FP6_E2M3,
    "e3m2": mx.DTYPE_FP6_E3M2,
    "e2m1": torch.float4_e2m1fn_x2,
}
PRESETS = {"e4m3fn": presets.mxfp8, "e5m2": presets.mxfp8, "e2m3": presets.mxfp6, "e3m2": presets.mxfp6}
by_format = pytest.mark.parametrize("format", ELEMENTS)
by_rule = pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])


def mx_spec(format, rule):
    return presets.mxfp4(scale_rule=rule) if format == "e2m1" else PRESETS[format](format=format, scale_rule=rule)


def mx_by_torchao(x, format, rule):
    """Returns values and the exponents of the scales."""
    mode = mx.ScaleCalculationMode[rule.upper()]
    scale, codes = mx.to_mx(to_torch(x), ELEMENTS[format], 32, mode)
    y = mx.to_dtype(codes, scale, ELEMENTS[format], 32, to_torch(x).dtype)
    return to_numpy(y), scale.view(torch.uint8).numpy().astype(np.int64) - 127


def mx_by_us(x, format, rule):
    result = formats.fake_quantize_blocks(x, mx_spec(format, rule))
    return result.y, np.frexp(result.scale)[1] - 1


def random_blocks(count=3000):
    rng = np.random.default_rng(0)
    return (rng.standard_normal((count, 32)) * np.exp2(rng.uniform(-100, 100, (count, 1)))).astype(np.float32)


def hard_blocks():
    """Returns blocks whose largest magnitude is a power of two, or one times a largest value, or next to that."""
    rng = np.random.default_rng(1)
    factors = [1.0, 1.5, 1.75, 1.875, 1.9375, *(FLOAT_FORMATS[f].largest for f in ELEMENTS)]
    top = np.outer(np.exp2(np.arange(-100.0, 101, 5)), factors).ravel().astype(np.float32)
    top = np.concatenate([top, cases.neighbours(top, 1), cases.neighbours(top, -1)])
    x = (rng.uniform(-1, 1, (len(top), 32)) * top[:, None]).astype(np.float32)
    x[np.arange(len(top)), rng.integers(0, 32, len(top))] = top
    return x


# --- MX -----------------------------------------------------------------------------------


@by_rule
@by_format
def test_mx_of_random_blocks_equals_torchao(format, rule):
    for x in (random_blocks(), random_blocks().astype(BF16)):
        for expected, actual in zip(mx_by_torchao(x, format, rule), mx_by_us(x, format, rule), strict=True):
            assert_same_bits(expected, actual.astype(expected.dtype))


@by_rule
@by_format
def test_mx_of_blocks_at_powers_of_two_equals_torchao_for_equal_scales(format, rule):
    x = hard_blocks()
    (theirs, their_exponent), (ours, our_exponent) = (call(x, format, rule) for call in (mx_by_torchao, mx_by_us))
    equal = (their_exponent == our_exponent)[:, 0]
    assert_same_bits(theirs[equal], ours[equal])
    if rule != "rceil":
        assert equal.all()
        return
    # torchao takes ceil(log2()) in float32, and log2 of a number just above a power of two is rounded to an integer.
    assert 0 < (~equal).sum() < len(x) // 4
    assert (our_exponent[~equal] == their_exponent[~equal] + 1).all()
    absmax = np.abs(x[~equal]).max(axis=1)
    for v, e in zip(absmax, their_exponent[~equal, 0], strict=True):
        assert Fraction(float(v)) > Fraction(FLOAT_FORMATS[format].largest) * Fraction(2) ** int(e)


@by_format
def test_torchao_divides_subnormal_blocks_by_another_scale_than_it_multiplies_by(format):
    x = np.full((1, 32), 2.0**-130, np.float32)
    theirs, exponent = mx_by_torchao(x, format, "floor")
    ours, _ = mx_by_us(x, format, "floor")
    assert exponent == -127
    eighth, _ = formats.round_to_format(np.float32(2.0**-3), format)
    assert_same_bits(np.full((1, 32), eighth * np.float32(2.0**-127)), ours)
    # Divided by 2^-126, which halves the codes.
    halved, _ = formats.round_to_format(np.float32(2.0**-4), format)
    assert_same_bits(np.full((1, 32), halved * np.float32(2.0**-127)), theirs)


@by_rule
@by_format
def test_infinity_decides_the_scale_of_a_block_in_torchao(format, rule):
    x = random_blocks(4)
    x[:, 5] = np.inf
    theirs, _ = mx_by_torchao(x, format, rule)
    ours, _ = mx_by_us(x, format, rule)
    rest = np.arange(32) != 5
    # The other values are lost, or everything is.
    assert ((theirs[:, rest] == 0) | np.isnan(theirs[:, rest])).all()
    finite = x.copy()
    finite[:, 5] = 0
    assert_same_bits(mx_by_us(finite, format, rule)[0][:, rest], ours[:, rest])
    assert np.isfinite(ours).all()


@by_rule
@by_format
def test_nan_makes_a_block_nan_in_torchao(format, rule):
    x = random_blocks(4)
    x[:, 5] = np.nan
    assert np.isnan(mx_by_torchao(x, format, rule)[0]).all()
    assert np.isnan(mx_by_us(x, format, rule)[0]).sum() == 4


# --- NVFP4 --------------------------------------------------------------------------------


def nvfp4_by_torchao(x):
    """Returns codes, block scales and the scale of the tensor."""
    t = to_torch(x)
    tensor_scale = nvfp4.per_tensor_amax_to_scale(t.abs().max())
    block_scale, codes = nvfp4.nvfp4_quantize(t, 16, tensor_scale)
    block_scale = block_scale.float().reshape(len(x), -1)
    return kernels.unpack_uint4(codes).numpy(), block_scale.numpy(), tensor_scale.numpy()


def nvfp4_by_us(x):
    """Returns codes, block scales, the scale of the tensor, and the scale of every element."""
    absmax = np.abs(x.astype(np.float32)).reshape(len(x), -1, 16).max(axis=-1)
    scales = formats.nvfp4_scales(absmax)
    s = np.repeat(scales.scale, 16, axis=1)
    return formats.quantize(x, s, "e2m1"), scales.block_scale, scales.tensor_scale, s


TIES = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def near_ties(seed):
    """Returns data with the scales of random data, and a tie or one of its neighbours everywhere else."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((512, 16, 16)).astype(np.float32)
    scale = formats.nvfp4_scales(np.abs(x).max(axis=-1)).scale[..., None]
    y = rng.choice(TIES, x.shape) * scale * rng.choice(np.float32([-1, 1]), x.shape)
    for ulps in (-1, 1):
        y = np.where(rng.random(x.shape) < 0.25, cases.neighbours(y, ulps), y)
    largest = np.abs(x) == np.abs(x).max(axis=-1, keepdims=True)
    return np.where(largest, x, y).reshape(512, 256)


def check_differences(x):
    """Asserts that all scales are equal, and that ours is the right code where codes differ.

    Returns how many differ, at ties and elsewhere.

    torchao multiplies by a rounded (1 / tensor_scale) / block_scale, which moves values across a tie. We divide by the
    scale that codes are multiplied by. The quotient is rounded to float32 too: one within half an ulp of a tie becomes
    the tie and goes to even, whichever side it was on.
    """
    theirs, *their_scales = nvfp4_by_torchao(x)
    ours, *our_scales, s = nvfp4_by_us(x)
    for expected, actual in zip(their_scales, our_scales, strict=True):
        assert_same_bits(expected, actual)
    differ = theirs != ours
    values = x.astype(np.float32), s, formats.decode(ours, "e2m1"), formats.decode(theirs, "e2m1")
    size, s, q, p = (np.abs(v[differ]) for v in values)
    middle = ((q + p) / 2).astype(np.float64)
    assert np.isin(middle, TIES).all()  # neighbours on the grid
    # The product has at most 27 bits, so this comparison of x / s with the middle is exact.
    side = np.sign(size.astype(np.float64) - middle * s)
    nearer = side == np.sign(q.astype(np.float64) - p)
    tie = size / s == middle
    assert nearer[~tie].all()
    assert np.isin(q[tie], [0, 1, 2, 4]).all()
    return int(tie.sum()), int((~tie).sum())


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spread", [0, 4, 12])
def test_nvfp4_of_random_data_equals_torchao_or_is_nearer(dtype, spread):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((512, 256)) * np.exp2(rng.uniform(-spread, spread, (512, 1)))).astype(dtype)
    # Numbers of few bits are often next to a tie: with one scale for all rows, 1 in 1000 of bfloat16.
    assert sum(check_differences(x)) <= (x.size // 500 if dtype == BF16 else 0)
    codes, *_, s = nvfp4_by_us(x)
    y = formats.fake_quantize_blocks(x, presets.nvfp4()).y
    assert_same_bits(formats.dequantize(codes, s, "e2m1", dtype), y)


@pytest.mark.parametrize("seed", range(4))
def test_nvfp4_next_to_ties_is_nearest_where_torchao_is_not(seed):
    at_ties, elsewhere = check_differences(near_ties(seed))
    assert at_ties > 1000
    assert elsewhere > 1000


def test_zeros_are_nan_in_the_scales_of_torchao():
    x = np.zeros((1, 32), np.float32)
    _, block_scale, tensor_scale = nvfp4_by_torchao(x)
    assert tensor_scale == 0
    assert np.isnan(block_scale).all()
    assert_same_bits(x, formats.fake_quantize_blocks(x, presets.nvfp4()).y)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_one_special_value_spoils_the_tensor_in_torchao(special):
    x = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)
    clean = x.copy()
    x[0, 3], clean[0, 3] = special, 0
    *_, tensor_scale = nvfp4_by_torchao(x)
    assert not np.isfinite(tensor_scale)
    ours, expected = (formats.fake_quantize_blocks(v, presets.nvfp4()) for v in (x, clean))
    assert_same_bits(expected.scale, ours.scale)
    assert (np.delete(ours.y, 3) == np.delete(expected.y, 3)).all()
