"""`min_max`, `choose_qparams` and `observe_fake_quantize` equal the reference."""

import dataclasses
import itertools

import numpy as np
import pytest

import fakequant as fq
from fakequant import reference
from fakequant._backends.blocks import blocks_of
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits

pytestmark = pytest.mark.usefixtures("target")

by_dtype = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
LAYOUTS = {
    "tensor": ((1013,), {}),
    "long tensor": ((70000,), {}),
    "channel, first": ((7, 133), dict(axis=0)),
    "channel, middle": ((5, 6, 50), dict(axis=1)),
    "channel, last": ((40, 37), dict(axis=1)),
    "channel, many rows": ((3000, 9), dict(axis=1)),
    "group": ((4, 96), dict(axis=1, group_size=32)),
    "group, first": ((12, 10), dict(axis=0, group_size=4)),
    "token": ((3, 5, 66), dict(axis=-1, group_size=-1)),
    "block": ((2, 6, 66), dict(axis=-1, group_size=33, group_rows=3)),
    "block, shorter at the end": ((7, 50), dict(axis=-1, group_size=33, group_rows=3)),
}
by_layout = pytest.mark.parametrize(("shape", "where"), LAYOUTS.values(), ids=LAYOUTS)


def blocks(x, spec):
    """Returns the elements of every block, in the order of the parameters."""
    if spec.axis is None:
        return [x.reshape(-1)]
    if spec.group_size is None:
        return [np.take(x, i, axis=spec.axis).reshape(-1) for i in range(x.shape[spec.axis])]
    if spec.group_rows is not None:
        (*_, height, width), r, c = x.shape, spec.group_rows, spec.group_size
        parts = (part for matrix in x.reshape(-1, height, width) for part in np.split(matrix, range(r, height, r)))
        return [block.reshape(-1) for part in parts for block in np.split(part, range(c, width, c), axis=1)]
    axis = spec.axis % x.ndim
    size = x.shape[axis] if spec.group_size == -1 else spec.group_size
    grouped = x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return list(np.moveaxis(grouped, axis + 1, -1).reshape(-1, size))


@by_dtype
@by_layout
def test_min_max_ignores_and_counts_nonfinite_values(shape, where, dtype):
    spec = fq.QuantSpec(**where)
    for specials in (0, 0.001, 0.3, 1):
        rng = np.random.default_rng(0)
        x = (rng.standard_normal(shape) * 100).astype(dtype)
        places = rng.random(shape) < specials
        x[places] = rng.choice(np.array([np.nan, np.inf, -np.inf]).astype(dtype), int(places.sum()))
        expected = [reference.min_max(b) for b in blocks(x, spec)]
        for threads in (1, 3):
            fq.set_num_threads(threads)

            seen = fq.min_max(x, spec)

            for field in seen._fields:
                values = np.array([getattr(e, field) for e in expected]).reshape(blocks_of(shape, spec).parameters)
                actual = getattr(seen, field)
                assert_same_bits(values.astype(actual.dtype), actual, field, specials, threads)


def test_min_max_returns_positive_zeros():
    for x in (np.float32([-0.0, 1]), np.float32([0.0, -0.0] * 40), np.full((9, 30), -0.0, np.float32)):
        seen = fq.min_max(x)
        assert not np.signbit(seen.min)
        assert not np.signbit(seen.max)


def test_min_max_gives_absmax_of_finite_values():
    assert fq.min_max(np.float32([-3, 2])).absmax == 3
    assert fq.min_max(np.float32([[-3, 2], [1, np.inf]]), fq.QuantSpec(axis=0)).absmax.tolist() == [3, 1]


def test_min_max_of_an_empty_array_is_infinite():
    seen = fq.min_max(np.zeros((0, 3), np.float32))
    assert (seen.min, seen.max, seen.nan) == (np.inf, -np.inf, 0)
    assert fq.min_max(np.zeros((0, 3), np.float32), fq.QuantSpec(axis=1)).min.tolist() == [np.inf] * 3


SPECS = [
    fq.QuantSpec(),
    fq.QuantSpec(narrow_range=True),
    fq.QuantSpec(symmetric=False),
    fq.QuantSpec(signed=False, symmetric=False),
    fq.QuantSpec(bits=4),
    fq.QuantSpec(bits=2, signed=False, symmetric=False),
    fq.QuantSpec(bits=16, symmetric=False),
    fq.QuantSpec(bits=31, signed=False, symmetric=False),
]


def ranges_to_try():
    ends = np.float32([0, -0.0, 1, 0.1, 2.55, 1e-45, 1e-38, 1e-7, 1.1920929e-07, 3e-5, 12345.678, 1e30, 3.4e38])
    ends = np.concatenate([ends, -ends])
    lo, hi = (v.reshape(-1) for v in np.meshgrid(ends, ends))
    rng = np.random.default_rng(0)
    more = np.sort(rng.standard_normal((2, 500)).astype(np.float32) * np.float32([[1], [1]]), axis=0)
    keep = lo <= hi
    return np.concatenate([lo[keep], more[0]]), np.concatenate([hi[keep], more[1]])


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_choose_qparams_equals_the_reference(spec):
    lo, hi = ranges_to_try()
    scale, zero_point = reference.choose_qparams(lo, hi, spec.qmin, spec.qmax, symmetric=spec.symmetric)

    result = fq.choose_qparams(lo, hi, spec)

    assert_same_bits(scale, result.scale, "scale")
    assert_same_bits(zero_point, result.zero_point, "zero point")
    assert np.isfinite(result.scale).all()


@by_dtype
@by_layout
def test_observe_fake_quantize_equals_its_three_separate_steps(shape, where, dtype):
    for spec, update in itertools.product(SPECS[:5], ("moving_average", "min_max", "dynamic")):
        check_observing_fused(dataclasses.replace(spec, **where), update, shape, dtype)


def check_observing_fused(spec, update, shape, dtype):
    parameters = blocks_of(shape, spec).parameters
    running_min, running_max = np.full(parameters, np.inf, np.float32), np.full(parameters, -np.inf, np.float32)
    lo, hi = running_min.copy(), running_max.copy()
    rng = np.random.default_rng(0)
    for step in range(3):
        x = (rng.standard_normal(shape) * (step + 1)).astype(dtype)
        x.reshape(-1)[step::97] = [np.nan, np.inf, -np.inf][step]
        seen = fq.min_max(x, spec)
        if update == "moving_average":
            lo = reference.moving_average(lo, seen.min, 0.1).reshape(parameters)
            hi = reference.moving_average(hi, seen.max, 0.1).reshape(parameters)
        else:
            old = (lo, hi) if update == "min_max" else np.float32([np.inf, -np.inf])
            lo = np.minimum(old[0], seen.min.astype(np.float32))
            hi = np.maximum(old[1], seen.max.astype(np.float32))
        scale, zero_point = fq.choose_qparams(lo, hi, spec)
        y, mask = fq.fake_quantize(x, scale, zero_point, spec, mask="packed")

        result = fq.observe_fake_quantize(
            x, spec, running_min, running_max, update=update, averaging_constant=0.1, mask="packed"
        )

        case = (spec, update, step)
        assert_same_bits(lo, running_min, "running_min", *case)
        assert_same_bits(hi, running_max, "running_max", *case)
        assert_same_bits(scale, result.scale, "scale", *case)
        assert_same_bits(zero_point, result.zero_point, "zero point", *case)
        assert_same_bits(y, result.y, "y", *case)
        assert_same_bits(mask, result.mask, "mask", *case)
        assert result.nonfinite == int((~np.isfinite(x)).sum()), case


def test_observing_keeps_the_range_of_a_block_without_finite_values():
    spec = fq.QuantSpec(axis=0)
    lo, hi = np.float32([-1, -2]), np.float32([1, 2])

    fq.observe_fake_quantize(np.float32([[np.nan, np.inf], [-4, 4]]), spec, lo, hi, averaging_constant=0.5)

    assert lo.tolist() == [-1, -3]
    assert hi.tolist() == [1, 3]


def test_dynamic_observing_forgets_earlier_ranges_and_gives_0_without_finite_values():
    spec = fq.QuantSpec(axis=0)
    lo, hi = np.float32([-1, 1e8]), np.float32([1, 3e8])

    result = fq.observe_fake_quantize(np.float32([[np.nan, np.inf], [-0.1, 0.1]]), spec, lo, hi, update="dynamic")

    assert_same_bits(lo, np.float32([0, -0.1]))
    assert_same_bits(hi, np.float32([0, 0.1]))
    assert result.nonfinite == 2


@pytest.mark.parametrize("x", [np.float32([-3e38, 3e38]), np.float64([-1e300, 1e300])], ids=["float32", "float64"])
def test_observing_the_widest_range_gives_a_finite_scale(x):
    lo, hi = np.float32([np.inf]), np.float32([-np.inf])
    result = fq.observe_fake_quantize(x, fq.QuantSpec(symmetric=False), lo, hi)
    assert np.isfinite(result.scale)
    assert np.isfinite(result.y).all()
    assert np.isfinite([lo, hi]).all()


def test_observing_that_fails_leaves_the_running_range_unchanged():
    spec = fq.QuantSpec(axis=0)
    lo, hi = np.full(2, np.inf, np.float32), np.full(2, -np.inf, np.float32)
    with pytest.raises(ValueError, match="1 of 2 blocks have not seen a finite value"):
        fq.observe_fake_quantize(np.float32([[1, 2], [np.nan, np.nan]]), spec, lo, hi)
    assert lo.tolist() == [np.inf] * 2
    assert hi.tolist() == [-np.inf] * 2
