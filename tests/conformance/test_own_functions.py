"""fakequant's own functions equal the reference, bit for bit, on every instruction set."""

import dataclasses
import functools

import numpy as np
import pytest

import fakequant as fq
from fakequant import reference
from fakequant._backends.blocks import blocks_of
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from thoroughness import pairs_of

on_each_target = pytest.mark.usefixtures("target")

INT8 = fq.QuantSpec()
NARROW = fq.QuantSpec(narrow_range=True)
UINT8 = fq.QuantSpec(signed=False, symmetric=False)
ASYMMETRIC = fq.QuantSpec(symmetric=False)
INT4 = fq.QuantSpec(bits=4, symmetric=False)
INT2 = fq.QuantSpec(bits=2)
UINT1 = fq.QuantSpec(bits=1, signed=False, symmetric=False)
INT16 = fq.QuantSpec(bits=16, symmetric=False)
INT24 = fq.QuantSpec(bits=24, symmetric=False)
INT32 = fq.QuantSpec(bits=32, symmetric=False)
UINT31 = fq.QuantSpec(bits=31, signed=False, symmetric=False)
SPECS = {
    "int8": INT8,
    "narrow": NARROW,
    "uint8": UINT8,
    "asymmetric": ASYMMETRIC,
    "int4": INT4,
    "int2": INT2,
    "uint1": UINT1,
    "int16": INT16,
    "int24": INT24,
    "int32": INT32,
    "uint31": UINT31,
}
# The scales that functions with checked arguments accept.
SCALES = cases.SCALES + cases.EXTREME_SCALES

by_dtype = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)
by_numerics = pytest.mark.parametrize("numerics", reference.NUMERICS)


def zero_points(spec):
    if spec.symmetric:
        return [0]
    middle = (spec.qmin + spec.qmax) // 2
    return sorted({spec.qmin, spec.qmax, middle, 0, min(3, spec.qmax)})


def per_tensor_inputs(spec, dtype):
    for scale in SCALES:
        for zero_point in zero_points(spec):
            yield scale, zero_point, cases.values(scale, zero_point, spec.qmin, spec.qmax, dtype)


by_pair = pytest.mark.parametrize(
    ("numerics", "spec", "dtype"), pairs_of([*reference.NUMERICS], [*SPECS.values()], [*cases.DTYPES.values()])
)


@by_pair
def test_per_tensor_forward_and_masks_equal_the_reference(spec, numerics, dtype, each_target):
    spec = dataclasses.replace(spec, numerics=numerics)
    for scale, zero_point, x in per_tensor_inputs(spec, dtype):
        expected, inside = reference.fake_quantize(x, scale, zero_point, spec.qmin, spec.qmax, numerics)
        bits = np.packbits(inside, bitorder="little")
        for target in each_target():
            y, packed = fq.fake_quantize(x, scale, zero_point, spec, mask="packed")
            y_too, mask = fq.fake_quantize(x, scale, zero_point, spec, mask="bool")

            case = (target, scale, zero_point)
            assert_same_bits(expected, y, "y", *case)
            assert_same_bits(expected, y_too, "y with a bool mask", *case)
            assert_same_bits(expected, fq.fake_quantize(x, scale, zero_point, spec), "y without a mask", *case)
            assert_same_bits(inside, mask, "mask", *case)
            assert_same_bits(bits, packed, "packed mask", *case)


@by_pair
def test_per_tensor_codes_and_values_equal_the_reference(spec, numerics, dtype, each_target):
    spec = dataclasses.replace(spec, numerics=numerics)
    for scale, zero_point, x in per_tensor_inputs(spec, dtype):
        expected = reference.quantize(x, scale, zero_point, spec.qmin, spec.qmax, numerics)
        # torch multiplies in float32 for float64 data too.
        value_dtype = np.float32 if numerics == "torch" and dtype == np.float64 else dtype
        values = reference.dequantize(expected, scale, zero_point, value_dtype).astype(dtype)
        for target in each_target():
            q = fq.quantize(x, scale, zero_point, spec)

            case = (target, scale, zero_point)
            assert q.dtype == spec.storage
            assert_same_bits(expected, q.astype(np.int64), "codes", *case)
            assert_same_bits(values, fq.dequantize(q, scale, zero_point, spec, dtype=dtype), "values", *case)


# Shapes whose blocks start at every position of a byte and of a vector.
BLOCKED = {
    "channel, first axis": ((5, 9), dict(axis=0)),
    "channel, middle axis": ((3, 4, 17), dict(axis=1)),
    "channel, last axis": ((7, 37), dict(axis=-1)),
    "channel, one long": ((1, 133), dict(axis=0)),
    # Blocks of at least 64 elements that do not start at a multiple of 64.
    "channel, several long": ((3, 133), dict(axis=0)),
    "group, last axis": ((3, 60), dict(axis=-1, group_size=15)),
    "group, first axis": ((6, 11), dict(axis=0, group_size=2)),
    "group, middle axis": ((2, 6, 5), dict(axis=1, group_size=3)),
    "group of one": ((4, 5), dict(axis=1, group_size=1)),
    # Enough groups of whole vectors for the loop over several of them, and some more.
    "groups of whole vectors": ((19, 64), dict(axis=-1, group_size=32)),
    "groups of one vector": ((7, 48), dict(axis=-1, group_size=16)),
    "token": ((3, 5, 19), dict(axis=-1, group_size=-1)),
    "token, first axis": ((19, 6), dict(axis=0, group_size=-1)),
    "block": ((2, 6, 20), dict(axis=-1, group_size=5, group_rows=3)),
    "block, shorter at the end": ((7, 11), dict(axis=1, group_size=4, group_rows=3)),
}
by_blocks = pytest.mark.parametrize(("shape", "where"), BLOCKED.values(), ids=BLOCKED)


def expand(parameters, shape, spec):
    """Expands one entry per block to one per element, independently of fakequant."""
    if spec.group_size is None:
        return np.expand_dims(parameters, [d for d in range(len(shape)) if d != spec.axis % len(shape)])
    if spec.group_rows is not None:
        rows, columns = (np.arange(length) // n for length, n in zip(shape[-2:], (spec.group_rows, spec.group_size)))
        return parameters[..., rows[:, None], columns]
    return np.repeat(parameters, shape[spec.axis] // parameters.shape[spec.axis], axis=spec.axis)


def blocked_inputs(shape, spec, dtype):
    """Returns x, scales and zero points, the same for all numerics."""
    return _blocked_inputs(shape, dataclasses.replace(spec, numerics=INT8.numerics), dtype)


@functools.cache
def _blocked_inputs(shape, spec, dtype, seed=0):
    rng = np.random.default_rng(seed)
    parameters = blocks_of(shape, spec).parameters
    scale = rng.choice(np.float32(SCALES), parameters)
    zero_point = rng.integers(spec.qmin, spec.qmax, parameters, endpoint=True).astype(np.int32)
    if spec.symmetric:
        zero_point[...] = 0
    x = np.empty(shape, dtype)
    scales, zeros = (np.broadcast_to(expand(a, shape, spec), shape) for a in (scale, zero_point))
    for index in np.ndindex(shape):
        s, z = scales[index], zeros[index]
        x[index] = rng.choice(cases.values(float(s), int(z), spec.qmin, spec.qmax, dtype, seed=1))
    for array in (x, scale, zero_point):
        array.flags.writeable = False  # shared by tests
    return x, scale, zero_point


@by_dtype
@by_numerics
@by_blocks
def test_fake_quantize_and_codes_equal_the_reference_in_every_granularity(shape, where, numerics, dtype, each_target):
    spec = fq.QuantSpec(symmetric=False, numerics=numerics, **where)
    x, scale, zero_point = blocked_inputs(shape, spec, dtype)
    s, z = expand(scale, shape, spec), expand(zero_point, shape, spec)
    expected, inside = reference.fake_quantize(x, s, z, spec.qmin, spec.qmax, numerics, granularity="channel")
    codes = reference.quantize(x, s, z, spec.qmin, spec.qmax, numerics, granularity="channel")
    values = reference.dequantize(codes, s, z, dtype)
    for target in each_target():
        y, packed = fq.fake_quantize(x, scale, zero_point, spec, mask="packed")
        _, mask = fq.fake_quantize(x, scale, zero_point, spec, mask="bool")
        q = fq.quantize(x, scale, zero_point, spec)

        assert_same_bits(expected, y, "y", target)
        assert_same_bits(expected, fq.fake_quantize(x, scale, zero_point, spec), "y without a mask", target)
        assert_same_bits(inside, mask, "mask", target)
        assert_same_bits(np.packbits(inside, bitorder="little"), packed, "packed mask", target)
        assert_same_bits(codes, q.astype(np.int64), "codes", target)
        assert_same_bits(values, fq.dequantize(q, scale, zero_point, spec, dtype=dtype), "values", target)


@on_each_target
@pytest.mark.parametrize("length", [*range(70), 97, 127, 128, 129, 1000, 4095, 4097, 32769, 65600])
def test_fake_quantize_equals_the_reference_at_lengths_around_vector_widths_and_chunks(length):
    x = np.resize(cases.values(0.1, 3, -128, 127, np.float32), length)
    expected, inside = reference.fake_quantize(x, 0.1, 3, -128, 127, "onnx")
    for threads in (1, 2, 3):
        fq.set_num_threads(threads)

        y, packed = fq.fake_quantize(x, 0.1, 3, ASYMMETRIC, mask="packed")

        assert_same_bits(expected, y)
        assert_same_bits(np.packbits(inside, bitorder="little"), packed)


@on_each_target
@by_dtype
@by_numerics
def test_backward_from_either_mask_equals_the_reference(numerics, dtype):
    spec = dataclasses.replace(INT8, numerics=numerics)
    for length in (0, 1, 7, 8, 9, 31, 33, 64, 1000, 70000):
        dy = cases.gradients(length, dtype)
        mask = np.random.default_rng(length).random(length) < 0.6
        expected = reference.fake_quantize_backward(dy, mask, numerics)

        assert_same_bits(expected, fq.fake_quantize_backward(dy, mask, spec), "bool", length)
        packed = np.packbits(mask, bitorder="little")
        assert_same_bits(expected, fq.fake_quantize_backward(dy, packed, spec), "packed", length)


@by_dtype
@by_numerics
@pytest.mark.parametrize(
    ("shape", "where"), [*BLOCKED.values(), ((731,), {}), ((), {})], ids=[*BLOCKED, "tensor", "0-d"]
)
def test_learned_backward_equals_the_reference_up_to_the_order_of_sums(shape, where, numerics, dtype, each_target):
    spec = fq.QuantSpec(symmetric=False, numerics=numerics, **where)
    granularity = "channel" if where else "tensor"
    if where:
        x, scale, zero_point = blocked_inputs(shape, spec, dtype)
        s = expand(scale, shape, spec)
    else:
        x = np.resize(cases.values(0.1, 3, -128, 127, dtype), shape)
        scale, zero_point = np.float32(0.1), np.int32(3)
        s = scale
    raw = (zero_point + np.random.default_rng(0).uniform(-0.5, 0.5, zero_point.shape)).astype(np.float32)
    z = expand(raw, shape, spec) if where else raw
    finite = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    dx, ds_terms, dz_terms = reference.learned_backward(
        finite, x, s, z, spec.qmin, spec.qmax, numerics, grad_factor=0.25, granularity=granularity
    )

    results = {}
    for target in each_target():
        for threads in (1, 3):
            fq.set_num_threads(threads)
            result = fq.fake_quantize_learned_backward(finite, x, scale, raw, spec, grad_factor=0.25)

            assert_same_bits(dx.astype(dtype), result.dx, "dx", target, threads)
            results[target, threads] = result
    parameters = blocks_of(shape, spec).parameters
    assert_close_to_exact_sums(ds_terms, {case: result.dscale for case, result in results.items()}, parameters)
    assert_close_to_exact_sums(dz_terms, {case: result.dzero_point for case, result in results.items()}, parameters)


def assert_close_to_exact_sums(terms, results, parameters):
    """Asserts that each result is the float64 sum of its terms, rounded once.

    Adding n float64 numbers in any order is off by at most n * 2^-53 of the sum of magnitudes.
    """
    dtype = next(iter(results.values())).dtype
    for case, actual in results.items():
        assert (actual.shape, actual.dtype) == (parameters, dtype), case
    for index in np.ndindex(parameters):
        block = terms.reshape(-1) if parameters == () else block_of(terms, parameters, index)
        exact, magnitude = reference.exact_sum(block), np.abs(block.astype(np.float64)).sum()
        if not np.isfinite(magnitude):
            continue
        slack = block.size * 2.0**-53 * magnitude
        with np.errstate(over="ignore"):
            low, high = (np.float64(np.asarray(v).astype(dtype)) for v in (exact - slack, exact + slack))
        for case, actual in results.items():
            assert low <= np.float64(actual[index]) <= high, (case, index, exact, actual[index])


def block_of(terms, parameters, index):
    if len(parameters) == 1 and terms.ndim > 1:  # per channel
        axis = terms.shape.index(parameters[0])
        return np.take(terms, index[0], axis=axis).reshape(-1)
    sizes = [-(-n // p) for n, p in zip(terms.shape, parameters, strict=True)]
    slices = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True))
    return terms[slices].reshape(-1)


@on_each_target
def test_learned_sums_have_the_same_bits_for_any_number_of_threads():
    rng = np.random.default_rng(0)
    for shape, where in [
        ((1 << 18,), {}),
        ((37, 64, 49), dict(axis=1)),
        ((5000, 24), dict(axis=1)),
        ((64, 999), dict(axis=0)),
    ]:
        spec = fq.QuantSpec(bits=4, **where)
        x, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        scale = np.full(blocks_of(shape, spec).parameters, 0.2, np.float32)
        fq.set_num_threads(1)
        first = fq.fake_quantize_learned_backward(dy, x, scale, 0, spec)
        for threads in (2, 3, 5, 8):
            fq.set_num_threads(threads)
            again = fq.fake_quantize_learned_backward(dy, x, scale, 0, spec)
            for name, a, b in zip(first._fields, first, again, strict=True):
                assert_same_bits(a, b, name, threads)


@on_each_target
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 63, 64, 65, 255, 256, 257, 511, 1000, 70001])
def test_packed_codes_are_in_onnx_order(bits, signed, length):
    spec = fq.QuantSpec(bits=bits, signed=signed, symmetric=False)
    x = np.random.default_rng(0).uniform(spec.qmin - 1, spec.qmax + 1, length).astype(np.float32)
    q = fq.quantize(x, 1.0, 0, spec)
    padded = np.pad(q.view(np.uint8) & (2**bits - 1), (0, -length % (8 // bits)))
    expected = sum(padded[i :: 8 // bits] << (bits * i) for i in range(8 // bits)).astype(np.uint8)

    packed = fq.quantize(x, 1.0, 0, spec, packed=True)

    assert_same_bits(expected, packed)
    assert_same_bits(fq.dequantize(q, 1.0, 0, spec), fq.dequantize(packed, 1.0, 0, spec, shape=(length,)))


@on_each_target
def test_packed_codes_are_right_for_blocks_that_start_inside_a_byte():
    spec = fq.QuantSpec(bits=4, axis=0)
    x = np.random.default_rng(0).uniform(-9, 9, (5, 7)).astype(np.float32)
    scale = np.float32([0.5, 1, 1.5, 2, 3])
    q = fq.quantize(x, scale, 0, spec)

    packed = fq.quantize(x, scale, 0, spec, packed=True)

    nibbles = np.pad(q.reshape(-1).view(np.uint8) & 15, (0, 1))
    assert_same_bits(nibbles[::2] | nibbles[1::2] << 4, packed)
    assert_same_bits(fq.dequantize(q, scale, 0, spec), fq.dequantize(packed, scale, 0, spec, shape=x.shape))


@on_each_target
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x[::2],
        lambda x: x[::-1],
        lambda x: x.T,
        lambda x: np.asfortranarray(x),
        lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
        lambda x: np.broadcast_to(x[:1], x.shape),
    ],
    ids=["every other row", "reversed", "transposed", "Fortran", "misaligned", "broadcast"],
)
def test_an_array_in_any_layout_gives_the_values_of_its_c_ordered_copy(layout):
    x = layout(np.resize(cases.values(0.1, 0, -8, 7, np.float32), (24, 13)))
    copy = np.array(x, order="C")
    spec = fq.QuantSpec(bits=4, axis=1)
    scale = np.linspace(0.05, 0.5, x.shape[1]).astype(np.float32)

    for ours, expected in zip(
        fq.fake_quantize(x, scale, 0, spec, mask="packed"),
        fq.fake_quantize(copy, scale, 0, spec, mask="packed"),
        strict=True,
    ):
        assert_same_bits(expected, ours)
    assert_same_bits(fq.quantize(copy, scale, 0, spec), fq.quantize(x, scale, 0, spec))
