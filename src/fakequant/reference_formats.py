"""The numeric contract of float formats and block scales as NumPy code: the second half of `fakequant.reference`.

Rounding is written as a division by the distance of neighbours, a power of two, which is exact. The kernels add and
subtract a constant instead. Only the constants of a format come from `fakequant.formats`.
"""

import math
from collections import namedtuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fakequant import reference
from fakequant.formats import FLOAT_FORMATS, FloatFormat
from fakequant.reference import FLOAT32_EPS, compute_dtype
from fakequant.spec import QuantSpec

NVFP4_LARGEST = np.float32(448 * 6)
FLOAT32_MAX = np.finfo(np.float32).max

BlockFakeQuantize = namedtuple("BlockFakeQuantize", "y mask scale")
NVFP4Scales = namedtuple("NVFP4Scales", "scale block_scale tensor_scale")

# Overflow, 0/0 and NaN are expected results here.
_quiet = np.errstate(all="ignore")


@_quiet
def round_to_format(t: ArrayLike, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds to the nearest value of a float format, ties to even. Returns `(q, mask)`.

        a    = min(|t|, 2 * largest)
        step = 2^(max(floor(log2 a), 1 - bias) - mantissa_bits)        the distance of neighbours at a
        r    = copysign(rint(a / step) * step, t)                      on a grid without an upper end
        q    = clamp(r, -largest, largest)
        mask = q == r

    NaN stays NaN. -0.0 stays -0.0, except in a format without it ("fnuz").

    Args:
        t: The data, already divided by the scale.
        format: The name of a float format.

    >>> q, mask = round_to_format(np.float32([0.1, 0.25, 0.75, 5.0, 6.9, 7.0, -9.0]), "e2m1")
    >>> q
    array([ 0.,  0.,  1.,  4.,  6.,  6., -6.], dtype=float32)
    >>> mask
    array([ True,  True,  True,  True,  True, False, False])
    """
    f = _format(format)
    t = np.asarray(t)
    dtype = compute_dtype(t.dtype)
    t = t.astype(dtype)
    largest = dtype.type(f.largest)
    steps, exponent = _steps(np.minimum(np.abs(t), 2 * largest), f)
    r = np.copysign(np.ldexp(np.rint(steps), exponent), t)
    if not f.has_negative_zero:
        r = r + dtype.type(0)  # -0.0 + 0.0 is +0.0
    q = np.clip(r, -largest, largest)
    return q, q == r


@_quiet
def fake_quantize(x: ArrayLike, scale: ArrayLike, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds `x` to the grid of a float format. Returns `(y, mask)`; the mask is True where `x` was not clipped.

        q, mask = round_to_format(x / scale, format)
        y       = q * scale                                 in the compute dtype, rounded once to that of x

    Args:
        x: The data.
        scale: Scales that broadcast against `x`.
        format: The name of a float format.

    >>> y, mask = fake_quantize(np.float32([0.3, -0.0, 300.0, np.inf, np.nan]), 0.5, "e4m3fn")
    >>> y
    array([  0.3125,  -0.    , 224.    , 224.    ,      nan], dtype=float32)
    >>> mask
    array([ True,  True, False, False, False])
    """
    x = np.asarray(x)
    dtype = compute_dtype(x.dtype)
    s = np.asarray(scale).astype(dtype)
    q, mask = round_to_format(x.astype(dtype) / s, format)
    y: np.ndarray = q * s
    return y.astype(x.dtype), mask


@_quiet
def quantize(x: ArrayLike, scale: ArrayLike, format: str) -> np.ndarray:
    """Returns the codes of `x`, bit patterns of a float format, as uint8.

        code = encode(round_to_format(x / scale, format))

    Args:
        x: The data.
        scale: Scales that broadcast against `x`.
        format: The name of a float format.

    >>> [hex(code) for code in quantize(np.float32([0.25, -1.0, 999.0, np.nan]), 0.5, "e4m3fn")]
    ['0x30', '0xc0', '0x7e', '0x7f']
    """
    x = np.asarray(x)
    dtype = compute_dtype(x.dtype)
    t: np.ndarray = x.astype(dtype) / np.asarray(scale).astype(dtype)
    return encode(round_to_format(t, format)[0], format)


@_quiet
def encode(q: ArrayLike, format: str) -> np.ndarray:
    """Returns the codes of values on the grid of a float format, as uint8.

        steps, e = |q| / 2^e, max(floor(log2 |q|), 1 - bias) - mantissa_bits
        code     = sign bit + ((e + mantissa_bits + bias - 1) << mantissa_bits) + steps

    NaN becomes the code of NaN. In a format without NaN, it becomes the code of the lowest value.

    >>> encode(np.float32([0.0, 0.5, 6.0, -0.0, -1.0, np.nan]), "e2m1")
    array([ 0,  1,  7,  8, 10, 15], dtype=uint8)
    """
    f = _format(format)
    q = np.asarray(q)
    steps, exponent = _steps(np.abs(q), f)
    # The mantissa of a normal value has a leading 1, which adds 1 to the exponent below.
    field = exponent + (f.mantissa_bits + f.bias - 1)
    magnitude = (field << f.mantissa_bits) + np.nan_to_num(steps).astype(np.int64)
    codes = magnitude + (np.signbit(q).astype(np.int64) << (f.bits - 1))
    if not f.has_negative_zero:
        codes = np.where(q == 0, 0, codes)
    lowest = (1 << f.bits) - 1
    codes = np.where(np.isnan(q), lowest if f.nan_code is None else f.nan_code, codes)
    return codes.astype(np.uint8)


def decode(codes: ArrayLike, format: str) -> np.ndarray:
    """Returns the values of codes of a float format, as float32.

        exponent > 0    (2^mantissa_bits + mantissa) * 2^(exponent - bias - mantissa_bits)
        exponent = 0    mantissa * 2^(1 - bias - mantissa_bits)

    Magnitudes above the largest are NaN, except infinity in e5m2. "fnuz" formats have NaN in place of -0.0.

    >>> decode(np.uint8([0, 1, 7, 8, 10, 15]), "e2m1")
    array([ 0. ,  0.5,  6. , -0. , -1. , -6. ], dtype=float32)
    """
    f = _format(format)
    codes = np.asarray(codes).astype(np.int64)
    sign = 1 << (f.bits - 1)
    magnitude = codes % sign
    exponent, mantissa = magnitude >> f.mantissa_bits, magnitude % (1 << f.mantissa_bits)
    steps = mantissa + np.where(exponent > 0, 1 << f.mantissa_bits, 0)
    value = np.ldexp(steps.astype(np.float32), np.maximum(exponent, 1) - (f.bias + f.mantissa_bits))
    value = np.where(value > f.largest, np.float32(np.nan), value)
    if format == "e5m2":
        value = np.where((exponent == 31) & (mantissa == 0), np.float32(np.inf), value)
    value = np.copysign(value, np.where(codes >= sign, np.float32(-1), np.float32(1)))
    if not f.has_negative_zero:
        value = np.where(codes == sign, np.float32(np.nan), value)
    return value


@_quiet
def dequantize(codes: ArrayLike, scale: ArrayLike, format: str, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Returns the values of codes of a float format.

        y = decode(code) * scale        in the compute dtype, rounded once to dtype

    Args:
        codes: The codes.
        scale: Scales that broadcast against `codes`.
        format: The name of a float format.
        dtype: The float dtype of the result.

    >>> dequantize(np.uint8([0x30, 0xC0, 0x7E, 0x7F]), 0.5, "e4m3fn")
    array([  0.25,  -1.  , 224.  ,    nan], dtype=float32)
    """
    wide = compute_dtype(dtype)
    y: np.ndarray = decode(codes, format).astype(wide) * np.asarray(scale).astype(wide)
    return y.astype(dtype)


def pack(codes: ArrayLike, bits: int) -> np.ndarray:
    """Returns codes of `bits` bits as one stream of bits: code i in the bits `bits * i` and up, lowest first.

    The last byte is filled with 0. There are two 4-bit codes in a byte, and four 6-bit codes in three bytes.

    >>> [hex(byte) for byte in pack([0x1, 0xF, 0x7], 4)]
    ['0xf1', '0x7']
    >>> [hex(byte) for byte in pack([0x01, 0x3F, 0x00, 0x20], 6)]
    ['0xc1', '0xf', '0x80']
    """
    codes = np.asarray(codes).reshape(-1).astype(np.uint8)
    return np.packbits((codes[:, None] >> np.arange(bits)) & 1, bitorder="little")


def unpack(packed: ArrayLike, bits: int, count: int) -> np.ndarray:
    """Returns the first `count` codes of `bits` bits that `pack` wrote.

    >>> unpack(np.uint8([0xC1, 0x0F, 0x80]), 6, 4)
    array([ 1, 63,  0, 32], dtype=uint8)
    """
    stream = np.unpackbits(np.asarray(packed), count=bits * count, bitorder="little").reshape(count, bits)
    codes: np.ndarray = (stream << np.arange(bits)).sum(axis=1)
    return codes.astype(np.uint8)


@_quiet
def learned_backward(
    dy: ArrayLike, x: ArrayLike, scale: ArrayLike, format: str, *, grad_factor: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gradients of fake quantization with a learned scale, per element: `(dx, ds)`, in the compute dtype.

        t = x / scale;  q, mask = round_to_format(t, format)
        mask         dx = dy    ds = (dy * (q - t)) * grad_factor
        otherwise    dx = 0     ds = (dy * q) * grad_factor             q is +-largest
        x is not finite: both are 0

    Args:
        dy: The gradient of the result.
        x: The data of the forward.
        scale: Scales that broadcast against `x`.
        format: The name of a float format.
        grad_factor: Multiplies ds.

    >>> x, dy = np.float32([0.375, 9.0, np.inf]), np.float32([1, 2, 4])
    >>> [term.tolist() for term in learned_backward(dy, x, 0.5, "e2m1")]
    [[1.0, 0.0, 0.0], [0.25, 12.0, 0.0]]
    """
    x = np.asarray(x)
    dtype = compute_dtype(x.dtype)
    wide_dy, wide_x = np.asarray(dy).astype(dtype), x.astype(dtype)
    t: np.ndarray = wide_x / np.asarray(scale).astype(dtype)
    q, mask = round_to_format(t, format)
    zero = dtype.type(0)
    ds = wide_dy * np.where(mask, q - t, q) * dtype.type(grad_factor)
    return np.where(mask, wide_dy, zero), np.where(np.isfinite(wide_x), ds, zero)


def choose_scale(lo: ArrayLike, hi: ArrayLike, spec: QuantSpec, eps: float | np.float32 = FLOAT32_EPS) -> np.ndarray:
    """Returns the scale (float32) of blocks with values in `[lo, hi]`, for float formats and block scales.

        absmax = max(-lo, hi, 0)                            float32
        float32     max(absmax / largest, eps)
        e8m0        power_of_two_scale(absmax, ...)
        e4m3fn      nvfp4_scales(absmax).scale              lo and hi are those of all blocks of the tensor

    Args:
        lo: The lower ends of the ranges.
        hi: The upper ends of the ranges.
        spec: A float format or block scales. `reference.choose_qparams` is for other specs.
        eps: The smallest scale. Only float32 scales use it.

    >>> choose_scale([-1.0, 0.0], [3.0, 7.0], QuantSpec(format="e2m1", axis=0)).tolist()
    [0.5, 1.1666666269302368]
    """
    absmax = np.maximum(np.maximum(-np.asarray(lo).astype(np.float32), np.asarray(hi).astype(np.float32)), 0)
    if spec.scale_format == "e8m0":
        mantissa_bits = spec.bits - 2 if spec.float_format is None else spec.float_format.mantissa_bits
        return power_of_two_scale(absmax, spec.largest, mantissa_bits, spec.scale_rule)
    if spec.scale_format == "e4m3fn":
        scale: np.ndarray = nvfp4_scales(absmax, divided=spec.scale_rule == "divided").scale
        return scale
    if spec.float_format is None:
        raise ValueError(f"this function is for float formats and block scales, got {spec}")
    quotient: np.ndarray = absmax / np.float32(spec.largest)
    return reference.rounded_scale(np.maximum(quotient, np.float32(eps)), spec.scale_format)


@_quiet
def power_of_two_scale(absmax: ArrayLike, largest: float, mantissa_bits: int, rule: str) -> np.ndarray:
    """Returns the power of two (e8m0) for blocks with the largest magnitude `absmax`, as float32.

    `exponent` and `mantissa` are fields of the float32 number; 0 and subnormal numbers have the exponent -127.

        floor    e = exponent(absmax) - floor(log2 largest)
        ceil     e as floor, + 1 if mantissa(absmax) is not 0
        even     e as floor, for absmax rounded to mantissa_bits, ties up
        even_e2m1    the same with the 1 mantissa bit of e2m1, whatever the format
        rceil    e = exponent(d), + 1 if mantissa(d) is not 0       d = absmax / largest
        scale = 2^clamp(e, -127, 127)

    Args:
        absmax: The largest magnitude of each block, finite.
        largest: The largest value of the grid.
        mantissa_bits: The bits that "even" rounds to. An integer grid of n bits has n - 2.
        rule: "floor", "ceil", "even", "rceil" or "even_e2m1".

    >>> {rule: power_of_two_scale(7.5, 6.0, 1, rule).item() for rule in ("floor", "ceil", "even", "rceil")}
    {'floor': 1.0, 'ceil': 2.0, 'even': 2.0, 'rceil': 2.0}
    """
    absmax = np.asarray(absmax).astype(np.float32)
    top = math.frexp(largest)[1] - 1  # floor(log2 largest)
    if rule == "rceil":
        absmax, top = absmax / np.float32(largest), 0
    number = absmax.view(np.int32)
    if rule in ("even", "even_e2m1"):
        # Half of the last bit that is kept. The carry may reach the exponent, which is the point.
        number = number + ((1 << 22) >> (mantissa_bits if rule == "even" else 1))
    exponent = (number >> 23) - 127 - top
    if rule in ("ceil", "rceil"):
        exponent = exponent + (number % (1 << 23) != 0)
    elif rule not in ("floor", "even", "even_e2m1"):
        raise ValueError(f"rule must be floor, ceil, even, rceil or even_e2m1, got {rule!r}")
    scale: np.ndarray = np.ldexp(np.float32(1), np.clip(exponent, -127, 127))
    return scale


@_quiet
def nvfp4_scales(
    absmax: ArrayLike, *, divided: bool = False, tensor_scale: ArrayLike | None = None, dtype: DTypeLike = np.float32
) -> NVFP4Scales:
    """Returns the scales of NVFP4 for blocks with the largest magnitude `absmax`, as float32.

        tensor_scale = max over blocks(absmax) / 2688                     1 if that is 0
        block_scale  = round to e4m3fn(clamp((absmax / 6) / tensor_scale, 2^-6, 448))
        scale        = block_scale * tensor_scale                         2^-149 if that is 0

    With `divided`, the tensor scale is a divisor, and FP8 scales may be subnormal:

        tensor_scale = (1 / max over blocks(absmax)) * 2688               1 if that is infinite; absmax at least 2^-126
        block_scale  = round to e4m3fn(min((absmax / 6) * tensor_scale, 448))       0.125 if that is 0
        scale        = block_scale / tensor_scale

    A divisor that was calibrated is given instead. Then `absmax / 6` is rounded to the dtype of the data, as in
    compressed-tensors, and blocks above the calibrated range saturate.

    Args:
        absmax: The largest magnitude of every block of the tensor, finite.
        divided: Whether the tensor scale divides.
        tensor_scale: The divisor, or None to compute it.
        dtype: The dtype of the data. Only with a given `tensor_scale`.

    >>> scales = nvfp4_scales([5376.0, 12.0, 0.0])
    >>> scales.tensor_scale.item(), scales.block_scale.tolist(), scales.scale.tolist()
    (2.0, [448.0, 1.0, 0.015625], [896.0, 2.0, 0.03125])
    """
    absmax = np.asarray(absmax).astype(np.float32)
    if tensor_scale is not None:
        given = np.asarray(tensor_scale).astype(np.float32)
        sixth = (absmax / np.float32(6)).astype(dtype).astype(np.float32)
        value, _ = round_to_format(np.minimum(sixth * given, np.float32(448)), "e4m3fn")
        value = np.where(value == 0, np.float32(0.125), value)
        return NVFP4Scales(value / given, value, given)
    if divided:
        divisor = (np.float32(1) / np.maximum(absmax.max(initial=0), np.float32(2.0**-126))) * NVFP4_LARGEST
        divisor = np.where(np.isinf(divisor), np.float32(1), divisor)
        value, _ = round_to_format(np.minimum((absmax / np.float32(6)) * divisor, np.float32(448)), "e4m3fn")
        value = np.where(value == 0, np.float32(0.125), value)
        return NVFP4Scales(value / divisor, value, divisor)
    factor: np.ndarray = absmax.max(initial=0) / NVFP4_LARGEST
    factor = np.where(factor == 0, np.float32(1), factor)
    wanted = (absmax / np.float32(6)) / factor
    block_scale, _ = round_to_format(np.clip(wanted, np.float32(2**-6), np.float32(448)), "e4m3fn")
    scale = np.maximum(block_scale * factor, np.float32(2.0**-149))
    return NVFP4Scales(scale, block_scale, factor)


def fake_quantize_blocks(x: ArrayLike, spec: QuantSpec) -> BlockFakeQuantize:
    """Rounds `x` in blocks of `spec.group_size` along `spec.axis`, with scales from its own values.

        absmax  = the largest finite magnitude of each block, 0 if there is none; at most the largest float32
        scale   = choose_scale(-absmax, absmax, spec)
        y, mask = fake_quantize(x, scale, spec.format)       MXINT8: the integers of `spec`, onnx numerics

    The last block may be shorter. The gradient of `y` is that of the identity: the mask is not applied.

    Args:
        x: The data.
        spec: A spec per group, with a float format or block scales.

    >>> x = np.float32([[0.1, 0.2, 3.0, 12.0, 7.0]])
    >>> result = fake_quantize_blocks(x, QuantSpec(format="e2m1", scale_format="e8m0", axis=1, group_size=4))
    >>> result.y, result.scale
    (array([[ 0.,  0.,  3., 12.,  6.]], dtype=float32), array([[2., 1.]], dtype=float32))
    """
    x = np.asarray(x)
    assert spec.axis is not None
    assert spec.group_size is not None
    length, size = x.shape[spec.axis], spec.group_size
    magnitude = np.abs(x.astype(compute_dtype(x.dtype)))
    magnitude = np.where(np.isfinite(magnitude), magnitude, 0)
    starts = np.arange(0, length, size)
    absmax = np.minimum(np.maximum.reduceat(magnitude, starts, axis=spec.axis), FLOAT32_MAX)
    scale = choose_scale(-absmax, absmax, spec)
    s = np.repeat(scale, size, axis=spec.axis).take(np.arange(length), axis=spec.axis)
    if spec.float_format is None:
        y, mask = reference.fake_quantize(x, s, 0, spec.qmin, spec.qmax, "onnx")
    else:
        y, mask = fake_quantize(x, s, spec.format)
    return BlockFakeQuantize(y, mask, scale)


def _format(name: str) -> FloatFormat:
    if name not in FLOAT_FORMATS:
        raise ValueError(f"format must be one of {', '.join(FLOAT_FORMATS)}, got {name!r}")
    return FLOAT_FORMATS[name]


def _steps(magnitude: np.ndarray, f: FloatFormat) -> tuple[np.ndarray, np.ndarray]:
    """Returns the magnitude in units of the distance of neighbours, exactly, and the exponent of that distance."""
    lowest = 1 - f.bias
    exponent = np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, lowest)  # 0 and NaN have no exponent
    exponent = np.maximum(exponent, lowest) - f.mantissa_bits
    return np.ldexp(magnitude, -exponent), exponent
