"""Arrays of hard values in blocks, for every float format and kind of scale, and what the reference says of them."""

import functools
from typing import NamedTuple

import numpy as np

from fakequant import QuantSpec, presets, reference, reference_formats as formats
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from float_format_data import frozen, hard_values

SCALES = np.float32([1.0, 0.1, 1 / 3, 12345.678, 3.0517578e-05, 1e30, 1e-40, 3e-39])
SPECIAL = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38])

# Blocks of float32 scales: shapes whose blocks start at every position of a byte and of a vector.
STATIC = {
    "tensor": ((731,), {}),
    "0-d": ((), {}),
    "empty": ((0, 3), {}),
    "channel, first axis": ((5, 67), dict(axis=0)),
    "channel, middle axis": ((3, 4, 17), dict(axis=1)),
    "channel, last axis": ((7, 37), dict(axis=-1)),
    "group, last axis": ((3, 60), dict(axis=-1, group_size=15)),
    "group, middle axis": ((2, 6, 5), dict(axis=1, group_size=3)),
    "token": ((3, 5, 19), dict(axis=-1, group_size=-1)),
    "block": ((2, 6, 60), dict(axis=-1, group_size=15, group_rows=3)),
    "block, shorter at the end": ((7, 37), dict(axis=-1, group_size=15, group_rows=3)),
}
BLOCK_SPECS = {
    "mxfp8": presets.mxfp8(),
    "mxfp8 e5m2, even": presets.mxfp8(format="e5m2", scale_rule="even"),
    "mxfp6, ceil": presets.mxfp6(scale_rule="ceil"),
    "mxfp8, even_e2m1": presets.mxfp8(scale_rule="even_e2m1"),
    "mxfp6 e3m2, rceil": presets.mxfp6(format="e3m2", scale_rule="rceil"),
    "mxfp4": presets.mxfp4(),
    "mxfp4, rceil": presets.mxfp4(scale_rule="rceil"),
    "mxfp4, even": presets.mxfp4(scale_rule="even"),
    "mxint8": presets.mxint8(),
    "mxint8, rceil": presets.mxint8(scale_rule="rceil"),
    "e4m3fnuz in blocks of 8": QuantSpec(format="e4m3fnuz", scale_format="e8m0", axis=-1, group_size=8),
    "4-bit integers": QuantSpec(bits=4, scale_format="e8m0", scale_rule="ceil", axis=-1, group_size=32),
    "nvfp4": presets.nvfp4(),
}
# Block scales: the axis, and shapes with blocks that are full, shorter at the end, or only one and short.
BLOCK_SHAPES = {
    "full": ((5, 96), -1),
    "short last block": ((5, 77), -1),
    "one short block": ((4, 3), -1),
    "middle axis, short": ((2, 41, 5), 1),
    "first axis": ((64, 9), 0),
    "one row": ((1, 200), 1),
}


def along(spec, axis):
    """Returns the spec with another axis."""
    return QuantSpec.from_dict(spec.to_dict() | {"axis": axis})


def parameter_shape(shape, spec):
    """Returns the shape of the array of scales."""
    if spec.axis is None:
        return ()
    axis = spec.axis % len(shape)
    if spec.group_size is None:
        return (shape[axis],)
    size = shape[axis] if spec.group_size == -1 else spec.group_size
    before = shape[:axis] if spec.group_rows is None else (*shape[: axis - 1], -(-shape[axis - 1] // spec.group_rows))
    return (*before, -(-shape[axis] // size), *shape[axis + 1 :])


def expand(parameters, shape, spec):
    """Returns one entry per element for one per block."""
    parameters = np.asarray(parameters)
    if spec.axis is None:
        return np.broadcast_to(parameters, shape)
    axis = spec.axis % len(shape)
    if spec.group_size is None:
        others = [d for d in range(len(shape)) if d != axis]
        return np.broadcast_to(np.expand_dims(parameters, others), shape)
    size = shape[axis] if spec.group_size == -1 else spec.group_size
    if spec.group_rows is not None:
        parameters = np.repeat(parameters, spec.group_rows, axis=-2)[..., : shape[-2], :]
    return np.repeat(parameters, size, axis=axis).take(np.arange(shape[axis]), axis=axis)


def blocks(x, spec):
    """Yields the index of every block in the array of scales, and its elements."""
    number = np.arange(np.prod(parameter_shape(x.shape, spec), dtype=int)).reshape(parameter_shape(x.shape, spec))
    of_element = expand(number, x.shape, spec)
    for index in np.ndindex(number.shape):
        yield index, x[of_element == number[index]]


@functools.cache
def static_inputs(format, where, dtype):
    """Returns the spec, data and scales of one of `STATIC`."""
    shape, options = STATIC[where]
    spec = QuantSpec(format=format, **options)
    rng = np.random.default_rng(len(format))
    scale = rng.choice(SCALES, parameter_shape(shape, spec))
    scale = np.float32(0.1) if spec.axis is None else scale
    t = rng.choice(hard_values(format), shape)
    t = np.where(rng.random(shape) < 0.05, rng.choice(SPECIAL, shape), t)
    with np.errstate(all="ignore"):
        x = (t * expand(scale, shape, spec).astype(np.float64)).astype(dtype)
    return spec, frozen(np.asarray(x)), frozen(np.asarray(scale))


@functools.cache
def block_data(shape, format, dtype):
    """Returns data of mixed magnitudes, with special values, zeros, and one row without a finite value."""
    rng = np.random.default_rng(sum(shape))
    values = hard_values(format) if format in FLOAT_FORMATS else np.arange(-127, 128, 0.5, dtype=np.float32)
    x = rng.choice(values, shape) * np.exp2(rng.integers(-12, 12, (*shape[:-1], 1)))
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    x = np.where(rng.random(shape) < 0.05, rng.choice(special, shape), x)
    if shape[0] > 2:
        x[-1], x[-2] = np.nan, 0.0
    with np.errstate(all="ignore"):
        return frozen(x.astype(dtype))


class Expected(NamedTuple):
    """What the functions return."""

    y: np.ndarray
    mask: np.ndarray
    codes: np.ndarray
    values: np.ndarray  # of the codes


def expected_of(x, scale, spec):
    """Returns the results of the reference for given scales."""
    s = expand(scale, x.shape, spec)
    if spec.format == "int":
        ends = spec.qmin, spec.qmax, "onnx"
        codes = reference.quantize(x, s, 0, *ends).astype(spec.storage)
        return Expected(*reference.fake_quantize(x, s, 0, *ends), codes, reference.dequantize(codes, s, 0, x.dtype))
    codes = np.asarray(formats.quantize(x, s, spec.format))
    values = formats.dequantize(codes, s, spec.format, x.dtype)
    return Expected(*map(np.asarray, formats.fake_quantize(x, s, spec.format)), codes, np.asarray(values))


class Observed(NamedTuple):
    """What a dynamic range is."""

    lo: np.ndarray
    hi: np.ndarray
    scale: np.ndarray
    nonfinite: int


def observed_of(x, spec):
    """Returns the float32 range of every block, 0 to 0 without a finite value, and the scale. No zero is negative."""
    shape = parameter_shape(x.shape, spec)
    lo, hi = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for index, block in blocks(x, spec):
        seen = reference.min_max(block)
        if seen.min <= seen.max:
            lo[index], hi[index] = seen.min, seen.max
    scale = np.asarray(formats.choose_scale(lo, hi, spec))
    if spec.has_block_scales:  # their range is that of magnitudes
        hi = np.maximum(-lo, hi) + np.float32(0)
        lo = -hi + np.float32(0)
    return Observed(lo, hi, scale, int((~np.isfinite(x.astype(np.float64))).sum()))


@functools.cache
def static_case(format, where, dtype):
    """Returns the spec, data and scales of one of `STATIC`, and the results of the reference."""
    spec, x, scale = static_inputs(format, where, dtype)
    return spec, x, scale, expected_of(x, scale, spec)


class BlockCase(NamedTuple):
    """Data in blocks, their ranges and scales, and the results of the reference."""

    spec: QuantSpec
    x: np.ndarray
    observed: Observed
    expected: Expected


@functools.cache
def block_case(spec, shape, axis, dtype):
    """Returns the case of a spec with another axis."""
    spec = along(spec, axis)
    x = block_data(shape, spec.format, dtype)
    observed, whole = observed_of(x, spec), formats.fake_quantize_blocks(x, spec)
    expected = expected_of(x, observed.scale, spec)
    for one, other in ((whole.scale, observed.scale), (whole.y, expected.y), (whole.mask, expected.mask)):
        assert_same_bits(one, other)
    return BlockCase(spec, x, observed, expected)


def gradients(shape, dtype):
    return np.asarray(cases.gradients(shape, dtype, seed=3)) if shape else np.ones((), dtype)
