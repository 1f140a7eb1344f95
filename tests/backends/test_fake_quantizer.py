"""`FakeQuantizer` against exact arithmetic and its formulas in float32."""

from fractions import Fraction

import numpy as np
import pytest

from fakequant import FakeQuantConfig, FakeQuantizer, reference
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits

CONFIGS = {
    "q4 symmetric": FakeQuantConfig.q4_symmetric(),
    "q8 symmetric": FakeQuantConfig.q8_symmetric(),
    "q4 asymmetric": FakeQuantConfig.q4_asymmetric(),
    "q8 asymmetric": FakeQuantConfig.q8_asymmetric(),
    "custom": FakeQuantConfig(bits=8, symmetric=False, qmin=-128, qmax=127),
}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def round_half_away_scalar(v):
    return np.float32(np.trunc(v) + (np.sign(v) if abs(v - np.trunc(v)) >= 0.5 else 0)) if np.isfinite(v) else v


def as_i32(v):
    """Converts a float to int32; saturates and maps NaN to 0."""
    return 0 if np.isnan(v) else int(np.clip(float(v), -(2**31), 2**31 - 1))


def expected_value(x, fq):
    """Returns the result for one element, in the order of operations of the formulas."""
    c, scale = fq.config, fq.scale
    with np.errstate(all="ignore"):
        t = x / scale if c.symmetric else x / scale + np.float32(fq.zero_point)
        rounded = round_half_away_scalar(t)
        q = as_i32(rounded if np.isnan(rounded) else min(max(rounded, np.float32(c.qmin)), np.float32(c.qmax)))
        return np.float32(q if c.symmetric else q - fq.zero_point) * scale


@by_config
def test_forward_returns_what_the_formulas_return(config):
    fq = FakeQuantizer(config)
    for low, high in ((-1.0, 1.0), (-0.3, 2.7), (0.1, 0.9), (-5.0, -1.0), (0.0, 1e-20)):
        fq.calibrate(np.float32([low, high]))
        x = cases.values(float(fq.scale), fq.zero_point, config.qmin, config.qmax, np.float32)
        expected = np.array([expected_value(v, fq) for v in x], np.float32)
        assert_same_bits(expected, fq.forward(x), low, high)


@by_config
def test_calibrate_sets_scale_and_zero_point(config):
    fq = FakeQuantizer(config)
    assert not fq.is_initialized
    assert (fq.scale, fq.zero_point) == (1, 0)

    fq.calibrate(np.float32([]))
    assert not fq.is_initialized

    data = np.float32([0.7, -1.3, 2.9])
    fq.calibrate(data)
    assert fq.is_initialized
    if config.symmetric:
        assert fq.scale == np.float32(2.9) / np.float32(config.qmax)
        assert fq.zero_point == 0
    else:
        scale = (np.float32(2.9) - np.float32(-1.3)) / np.float32(config.qmax - config.qmin)
        assert fq.scale == scale
        assert fq.zero_point == round_half_away_scalar(np.float32(config.qmin) - np.float32(-1.3) / scale)
    assert fq.num_levels == config.qmax - config.qmin + 1


def exact_levels(config, scale, zero_point):
    """Returns the values of the grid as exact fractions."""
    return [(code - zero_point) * Fraction(float(scale)) for code in range(config.qmin, config.qmax + 1)]


DATA = [[0.7, -1.3, 2.9], [3.0, 4.0, 5.0], [-5.0, -4.5, -3.0], [0.1, 0.2], [-1e-3, 1e3]]


@by_config
@pytest.mark.parametrize("data", DATA, ids=str)
def test_calibrated_grid_is_the_smallest_that_covers_zero_and_the_data(config, data):
    data = np.float32(data)
    fq = FakeQuantizer(config)
    fq.calibrate(data)
    levels = exact_levels(config, fq.scale, fq.zero_point)
    values = [Fraction(float(v)) for v in data]
    lo, hi = min(*values, Fraction(0)), max(*values, Fraction(0))
    step, needed = Fraction(float(fq.scale)), hi - lo
    if config.symmetric:
        needed = max(-lo, hi) * (config.qmax - config.qmin) / config.qmax
    assert Fraction(0) in levels
    assert min(levels) - step / 2 <= lo * (1 + Fraction(1, 2**20))
    assert max(levels) + step / 2 >= hi * (1 - Fraction(1, 2**20))
    # The scale is rounded to float32 twice.
    assert abs(step * (config.qmax - config.qmin) - needed) <= needed * Fraction(1, 2**22)


@by_config
@pytest.mark.parametrize("data", DATA, ids=str)
def test_forward_returns_the_nearest_value_of_the_grid(config, data):
    fq = FakeQuantizer(config)
    fq.calibrate(np.float32(data))
    levels = exact_levels(config, fq.scale, fq.zero_point)
    x = np.concatenate([np.float32(data), np.linspace(-2, 4, 41, dtype=np.float32)])
    for value, result in zip(x, fq.forward(x), strict=True):
        exact = Fraction(float(value))
        nearest = min(abs(exact - level) for level in levels)
        # The quotient, the sum with the zero point, and the product are rounded.
        slack = (max(map(abs, levels)) + abs(exact)) * Fraction(1, 2**22)
        assert abs(exact - Fraction(float(result))) <= nearest + slack


def test_scale_has_a_floor_of_1e_10():
    for config in CONFIGS.values():
        fq = FakeQuantizer(config)
        fq.calibrate(np.zeros(4, np.float32))
        assert fq.scale == np.float32(1e-10)


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if not config.symmetric])
@pytest.mark.parametrize("data", [[3, 4, 5], [-5, -4.5, -3], [2, 2], [-2, -2], [0, 1], [-1, 2]], ids=str)
def test_asymmetric_range_contains_zero_and_the_data(name, data):
    config, data = CONFIGS[name], np.float32(data)
    fq = FakeQuantizer(config)
    fq.calibrate(data)
    lo, hi = min(data.min(), 0), max(data.max(), 0)
    scale = np.float32(hi - lo) / np.float32(config.qmax - config.qmin)
    zero_point = round_half_away_scalar(np.float32(config.qmin) - np.float32(lo) / scale)
    assert (fq.scale, fq.zero_point) == (scale, np.clip(zero_point, config.qmin, config.qmax))
    # Nothing is clipped: every value is at most half a step away.
    assert (np.abs(fq.forward(data) - data) <= scale * np.float32(0.5001)).all()
    assert fq.forward(np.zeros(1, np.float32)) == 0
    assert (fq.backward_clamped(np.ones_like(data[1:-1]), data[1:-1]) == 1).all()


def test_calibration_ignores_nan_and_forward_maps_it_to_code_zero():
    fq = FakeQuantizer(FakeQuantConfig.q8_asymmetric())
    fq.calibrate(np.float32([np.nan, -1.0, 1.55]))
    assert (fq.scale, fq.zero_point) == (np.float32(2.55) / np.float32(255), 100)
    assert_same_bits(np.float32([0 - 100]) * fq.scale, fq.forward(np.float32([np.nan])))


def test_calibration_on_nan_only_changes_nothing():
    for config in CONFIGS.values():
        fq = FakeQuantizer(config)
        fq.calibrate(np.float32([np.nan, np.nan]))
        assert not fq.is_initialized


def test_fake_quantizer_refuses_invalid_data_and_configs():
    fq = FakeQuantizer.q8()
    for call in (fq.calibrate, fq.forward, fq.backward):
        for data in (np.zeros(3, np.int32), np.zeros(3, np.complex64), ["a"]):
            with pytest.raises(TypeError, match="must be an array of float32"):
                call(data)
    with pytest.raises(ValueError, match=r"`dy` must have the shape of `x`, \(2,\), got \(3,\)"):
        fq.backward_clamped(np.zeros(3, np.float32), np.zeros(2, np.float32))
    with pytest.raises(TypeError, match="`config` must be a FakeQuantConfig, got 'q8'"):
        FakeQuantizer("q8")
    with pytest.raises(TypeError, match=r"`bits` must be an int, got 4\.5"):
        FakeQuantConfig(bits=4.5, symmetric=True, qmin=-7, qmax=7)


def test_forward_with_calibration_calibrates_once():
    fq = FakeQuantizer.q8()
    fq.forward_with_calibration(np.float32([12.7]))
    assert fq.scale == np.float32(12.7) / np.float32(127)
    fq.forward_with_calibration(np.float32([1270.0]))
    assert fq.scale == np.float32(12.7) / np.float32(127)


def test_backward_returns_a_copy_of_the_gradient():
    dy = np.float32([1, np.nan, -3])
    dx = FakeQuantizer.q4().backward(dy)
    assert_same_bits(dy, dx)
    assert not np.shares_memory(dy, dx)


def test_clamped_backward_is_zero_outside_a_symmetric_range():
    fq = FakeQuantizer.q4()
    fq.calibrate(np.float32([-7, 7]))
    x = np.float32([-7.5, -7, 0, 7, 7.0000005, np.nan])
    assert fq.backward_clamped(np.ones_like(x), x).tolist() == [0, 1, 1, 1, 0, 1]


def test_clamped_backward_accounts_for_the_zero_point():
    fq = FakeQuantizer(FakeQuantConfig.q8_asymmetric())
    fq.calibrate(np.float32([-128, 127]))
    assert fq.zero_point == 128
    x = np.float32([-128.5, -128, -1, 0, 127, 127.5])
    assert fq.backward_clamped(np.ones_like(x), x).tolist() == [0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("numerics", ["torch", "onnx"])
def test_forward_with_other_numerics_matches_the_reference(numerics):
    fq = FakeQuantizer(FakeQuantConfig.q8_asymmetric(), numerics=numerics)
    fq.calibrate(np.float32([-1.0, 1.55]))
    x = cases.values(float(fq.scale), fq.zero_point, 0, 255, np.float32)
    expected, _ = reference.fake_quantize(x, fq.scale, fq.zero_point, 0, 255, numerics)
    assert_same_bits(expected, fq.forward(x))


def test_fake_quant_config_refuses_invalid_values():
    for bad, words in (
        (dict(bits=1, symmetric=True, qmin=-1, qmax=1), "between 2 and 24"),
        (dict(bits=8, symmetric=True, qmin=5, qmax=5), "`qmin` must be less than `qmax`"),
        (dict(bits=8, symmetric=True, qmin=-8, qmax=0), "needs `qmax` > 0"),
        (dict(bits=8, symmetric=False, qmin=0, qmax=2**25), "within 2^24"),
    ):
        with pytest.raises(ValueError, match=words.replace("^", r"\^")):
            FakeQuantConfig(**bad)
    with pytest.raises(ValueError, match="one of torch, onnx, half_away"):
        FakeQuantizer(numerics="up")
    with pytest.raises(ValueError, match="between 2 and 24"):
        FakeQuantConfig.of(bits=0, symmetric=True)
