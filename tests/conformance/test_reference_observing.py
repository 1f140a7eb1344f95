"""Ranges, scales and zero points of `fakequant.reference` have torch's bits."""

import numpy as np
import pytest
from torch.ao.quantization import observer as torch_observer

from fakequant import reference
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import to_numpy, to_torch, torch

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")


# --- quantization parameters ------------------------------------------------------------


def wild_floats(rng, size, specials=(np.inf, -np.inf)):
    """Returns floats of every exponent, of ordinary size, and special values."""
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
def test_reference_qparams_equal_those_of_torchs_observers(dtype, bounds, options, symmetric):
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
def test_reference_moving_averages_equal_those_of_torchs_observers(constant):
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
    """Returns two values per row: extreme, NaN, or a range near the smallest scale."""
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
def test_the_reference_equals_the_state_of_torchs_fused_observer_per_row(symmetric):
    rng = np.random.default_rng(7)
    on = torch.ones(1, dtype=torch.int64)
    n = 1200
    for qmin, qmax in FUSED_RANGES:
        state = [torch.full((n,), np.inf), torch.full((n,), -np.inf)]
        state += [torch.ones(n), torch.zeros(n, dtype=torch.int32)]
        lo, hi = np.float32([np.inf, -np.inf])
        for _ in range(2):
            x = fused_rows(rng, n, qmax - qmin)
            # torch writes the state before it refuses the zero point INT32_MIN of a NaN row.
            with pytest.raises(RuntimeError, match="zero_point"):
                torch.fused_moving_avg_obs_fake_quant(to_torch(x), on, on, *state, 0.01, qmin, qmax, 0, True, symmetric)
            lo = reference.moving_average(lo, x.min(axis=1), 0.01)
            hi = reference.moving_average(hi, x.max(axis=1), 0.01)
            scale, z = reference.choose_qparams_fused(lo, hi, qmin, qmax, symmetric)

            expected = ("min", lo), ("max", hi), ("scale", scale), ("zero_point", z)
            for (name, ref), have in zip(expected, state, strict=True):
                assert_same_bits(to_numpy(have), ref, name, qmin, qmax)


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
def test_the_reference_equals_the_output_and_state_of_torchs_fused_observer_per_tensor(symmetric):
    rng = np.random.default_rng(8)
    on = torch.ones(1, dtype=torch.int64)
    for qmin, qmax in (cases.INT8, cases.UINT8, cases.NARROW_INT8, cases.INT4, (3, 3)):
        state = [torch.full((1,), np.inf), torch.full((1,), -np.inf)]
        state += [torch.ones(1), torch.zeros(1, dtype=torch.int32)]
        lo, hi = np.float32([np.inf]), np.float32([-np.inf])
        for x in fused_rows(rng, 200, qmax - qmin):
            if np.isnan(lo).any():  # NaN stays in the state, so start again
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
