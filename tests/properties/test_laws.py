"""Properties that hold for every input, tested with Hypothesis."""

import dataclasses

import numpy as np
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits

settings.register_profile("fakequant", deadline=None, max_examples=150, derandomize=True)
settings.load_profile("fakequant")

specs = st.builds(
    lambda bits, kind, numerics: fq.QuantSpec(
        bits=bits,
        signed=kind != "unsigned",
        symmetric=kind in ("symmetric", "narrow"),
        narrow_range=kind == "narrow",
        numerics=numerics,
    ),
    st.integers(2, 16),
    st.sampled_from(["symmetric", "narrow", "affine", "unsigned"]),
    st.sampled_from(["torch", "onnx", "half_away"]),
)
scales = st.floats(2**-20, 2**20, width=32)
finite = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=40), elements=st.floats(-1e6, 1e6, width=32))


@st.composite
def quantized(draw):
    spec, x, scale = draw(specs), draw(finite), draw(scales)
    zero_point = 0 if spec.symmetric else draw(st.integers(spec.qmin, spec.qmax))
    return x, scale, zero_point, spec


@given(quantized())
def test_fake_quantize_result_lies_on_the_grid(args):
    _, scale, zero_point, spec = args
    y, q = fq.fake_quantize(*args), fq.quantize(*args)
    assert q.min() >= spec.qmin
    assert q.max() <= spec.qmax
    assert_same_bits(fq.dequantize(q, scale, zero_point, spec), y)


@given(quantized())
def test_fake_quantize_is_idempotent(args):
    x, *grid = args
    once = fq.fake_quantize(x, *grid)
    assert_same_bits(once, fq.fake_quantize(once, *grid))


@given(quantized())
def test_quantize_is_monotonic(args):
    x, *grid = args
    ordered = np.sort(x.reshape(-1))
    assert (np.diff(fq.quantize(ordered, *grid).astype(np.int64)) >= 0).all()


@given(quantized())
def test_error_inside_the_range_is_at_most_half_a_step(args):
    x, scale, zero_point, _ = args
    y, mask = fq.fake_quantize(*args, mask="bool")
    error = np.abs(x.astype(np.float64) - y)[mask]
    # The quotient and the product are each rounded once, which costs a few units in the last place of x. The numerics
    # `half_away` also round the sum of quotient and zero point.
    slack = 4 * np.spacing(np.abs(x[mask])).astype(np.float64) + 2 * np.spacing(np.float32(scale))
    slack += scale * np.spacing(np.abs(x[mask] / np.float32(scale)) + np.float32(abs(zero_point)))
    assert (error <= scale / 2 + slack).all()


@given(quantized())
def test_fake_quantize_maps_zero_to_zero(args):
    _, *grid = args
    assert_same_bits(np.zeros(3, np.float32), fq.fake_quantize(np.float32([0, -0.0, 1e-45]), *grid))


@given(quantized())
def test_mask_marks_the_elements_that_are_not_clamped(args):
    x, scale, zero_point, spec = args
    _, mask = fq.fake_quantize(*args, mask="bool")
    wide = fq.QuantSpec(bits=32, symmetric=False, numerics=spec.numerics)
    unclamped = fq.quantize(x, scale, zero_point, wide).astype(np.int64)
    assert ((spec.qmin <= unclamped) & (unclamped <= spec.qmax)).tolist() == mask.tolist()


@given(finite, st.randoms(use_true_random=False))
def test_min_max_does_not_depend_on_the_order(x, random):
    shuffled = x.reshape(-1).copy()
    random.shuffle(shuffled)
    assert fq.min_max(x)[:2] == fq.min_max(shuffled)[:2]


@given(finite, finite)
def test_min_max_of_two_arrays_is_that_of_their_concatenation(a, b):
    first, second = fq.min_max(a), fq.min_max(b)
    both = fq.min_max(np.concatenate([a.reshape(-1), b.reshape(-1)]))
    assert both.min == min(first.min, second.min)
    assert both.max == max(first.max, second.max)


@given(finite, specs)
def test_chosen_qparams_represent_zero_and_cover_the_range(x, spec):
    seen = fq.min_max(x)
    scale, zero_point = fq.choose_qparams(seen.min, seen.max, spec)
    assert scale > 0
    assert spec.qmin <= zero_point <= spec.qmax
    assert fq.dequantize(np.asarray(zero_point, spec.storage), scale, zero_point, spec) == 0
    y = fq.fake_quantize(x, scale, zero_point, spec)
    # Rounding the zero point may move an end of the range by half a step. A symmetric scale spreads the
    # range over qmax - qmin, so the positive end loses half a step.
    slack = 4 * np.spacing(np.abs(x).astype(np.float64).max().astype(np.float32))
    assert (np.abs(x.astype(np.float64) - y) <= 1.01 * scale + slack).all()


@given(quantized(), st.integers(1, 3))
def test_per_channel_equals_per_tensor_on_every_channel(args, channels):
    x, scale, zero_point, spec = args
    rows = np.resize(x, (channels, x.size))
    per_channel = dataclasses.replace(spec, axis=0)
    y = fq.fake_quantize(rows, np.full(channels, scale, np.float32), np.full(channels, zero_point), per_channel)
    for row, result in zip(rows, y, strict=True):
        assert_same_bits(fq.fake_quantize(row, float(np.float32(scale)), zero_point, spec), result)
