"""The numeric contract of the block types of ggml as NumPy code: the third part of `fakequant.reference`.

Data are rounded to float32 first, and every operation is rounded to float32. `s` is the scale that quantizers keep, `z`
the offset. Scales are rounded to float16 only in the value:

    rule         s                  inverse    code                    value            block
    q4_0         m / -8             1 / s      floor(x * inv + 8.5) - 8      q * f16(s)       32
    q4_1         (max - min) / 15   1 / s      floor((x - z) * inv + 0.5)    q * f16(s) + f16(z), z = min       32
    q8_0         absmax / 127       1 / s      half_away(x * inv)      q * f16(s)       32
    tq2_0        absmax             1 / s      half_away(x * inv)      q * f16(s)       256
    q8_0_input   absmax             127 / s    rint(x * inv)           q * f16(s / 127)         32
    q8_k_input   m                  -127 / s   rint(x * inv)           q * (1 / inv)    256
    q4_k         d * 6 bits                    rint((x - z) / s)       q * s + z, z = -(dmin * 6 bits)         32
    q6_k         d * 8 bits                    rint(x / s)             q * s            16

`m` is the first value with the largest magnitude, with its sign. An inverse is at most the largest float32. The scales
of K-quants (q4_k, q6_k) are those of `to_super_blocks`.
"""

from collections import namedtuple

import numpy as np
from numpy.typing import ArrayLike

from fakequant.formats import SUPER_BLOCKS
from fakequant.reference import compute_dtype
from fakequant.spec import QuantSpec

FLOAT32_MAX = np.finfo(np.float32).max
FLOAT16_MAX = np.float32(65504)

GgmlBlocks = namedtuple("GgmlBlocks", "y codes mask scale offset")

_quiet = np.errstate(all="ignore")
_f32 = np.float32


@_quiet
def choose_scale(lo: ArrayLike, hi: ArrayLike, spec: QuantSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale and the offset (float32) of blocks with values in `[lo, hi]`.

    The range of q4_0, q8_k_input and q6_k goes from 0 to the value with the largest magnitude. Of two ends with the
    same magnitude, the lower one counts. The offset is 0 in all rules but q4_1 and q4_k.

    >>> from fakequant import presets
    >>> [v.tolist() for v in choose_scale([-4.0, 0.0], [0.0, 2.0], presets.q4_0())]
    [[0.5, -0.25], [0.0, 0.0]]
    """
    lo, hi = np.asarray(lo).astype(_f32), np.asarray(hi).astype(_f32)
    absmax = np.maximum(np.maximum(-lo, hi), _f32(0))
    signed = np.where(-lo >= hi, lo, hi)
    if spec.scale_rule in SUPER_BLOCKS:
        return _choose_in_super_blocks(signed / _f32(-32), lo, hi, spec)
    scale = {
        "q4_0": signed / _f32(-8),
        "q4_1": np.minimum((hi - lo) / _f32(15), FLOAT32_MAX),
        "q8_0": absmax / _f32(127),
        "tq2_0": absmax,
        "q8_0_input": absmax,
        "q8_k_input": signed,
    }[spec.scale_rule]
    return scale, lo if spec.has_offset else np.zeros_like(lo)


def _choose_in_super_blocks(
    signed: np.ndarray, lo: np.ndarray, hi: np.ndarray, spec: QuantSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales and offsets of K-quants. The blocks of a super-block are neighbours in C order."""
    if spec.scale_rule == "q6_k":
        return to_super_blocks(signed, spec), np.zeros_like(lo)
    depth = np.maximum(-lo, _f32(0))
    scale = np.minimum((hi + depth) / _f32(15), FLOAT32_MAX)
    return to_super_blocks(scale, spec), -to_super_blocks(depth, spec)


@_quiet
def to_super_blocks(scale: ArrayLike, spec: QuantSpec) -> np.ndarray:
    """Returns the scales of K-quants next to given ones: small integers times one float16 number per super-block.

        q4_k    d = f16(max(s) / 63)       f16(d) * clamp(rint(s / d), 0, 63)
        q6_k    d = f16(m / -128)          f16(d) * clamp(rint(s / d), -128, 127)

    `m` is the scale with the largest magnitude, with its sign; of two, the negative one. The offsets of q4_k have the
    same rule, without their sign. If d is 0, so are all scales.

    >>> from fakequant import presets
    >>> to_super_blocks([63.0, 1.4, 0.4, 7.0, 0.0, 0.0, 0.0, 31.5], presets.q4_k()).tolist()
    [63.0, 1.0, 0.0, 7.0, 0.0, 0.0, 0.0, 32.0]
    """
    s = np.asarray(scale).astype(_f32)
    size = SUPER_BLOCKS[spec.scale_rule]
    rows = np.pad(s.reshape(-1), (0, -s.size % size)).reshape(-1, size)
    low, high = rows.min(-1, keepdims=True, initial=0), rows.max(-1, keepdims=True, initial=0)
    first, last, one = (0, 63, 63) if spec.scale_rule == "q4_k" else (-128, 127, -128)
    d = _f16(np.where(-low >= high, low, high) / _f32(one))
    times = np.where(d == 0, 0, np.clip(np.rint(rows / d), first, last)) + _f32(0)
    return (d * times).astype(_f32).reshape(-1)[: s.size].reshape(s.shape)


@_quiet
def quantize(x: ArrayLike, scale: ArrayLike, offset: ArrayLike, spec: QuantSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes of `x` before and after clamping, as float32. NaN stays NaN.

    Args:
        x: The data.
        scale: Scales that broadcast against `x`, as `choose_scale` returns them.
        offset: Offsets that broadcast against `x`.
        spec: The rule.

    >>> from fakequant import presets
    >>> quantize(np.float32([8.0, -1.5, -0.5]), -1.0, 0.0, presets.q4_0())[1].tolist()
    [-8.0, 2.0, 1.0]
    """
    t = steps(x, scale, offset, spec)
    if spec.scale_rule == "q4_0":
        code = np.floor(t + _f32(8.5)) - _f32(8)
    elif spec.scale_rule == "q4_1":
        code = np.floor(t + _f32(0.5))
    elif spec.scale_rule in ("q8_0", "tq2_0"):
        whole = np.trunc(t)
        code = np.where(np.abs(t - whole) >= 0.5, whole + np.copysign(_f32(1), t), whole)
    else:
        code = np.rint(t)
    return code, np.clip(code, _f32(spec.qmin), _f32(spec.qmax)) + _f32(0)  # -0.0 + 0.0 is +0.0


@_quiet
def steps(x: ArrayLike, scale: ArrayLike, offset: ArrayLike, spec: QuantSpec) -> np.ndarray:
    """Returns the distance of `x` from code 0 in steps, before rounding.

    The K-quants divide by the scale, or by the largest float32 if it is 0.

    >>> from fakequant import presets
    >>> steps([1.0, 0.25], 0.5, 0.0, presets.q8_0()).tolist()
    [2.0, 0.5]
    """
    t = np.asarray(x).astype(_f32) - np.asarray(offset).astype(_f32)
    s = np.asarray(scale).astype(_f32)
    is_divided = spec.scale_rule in SUPER_BLOCKS
    found: np.ndarray = t / np.where(s == 0, FLOAT32_MAX, s) if is_divided else t * inverse(s, spec)
    return found


@_quiet
def inverse(scale: ArrayLike, spec: QuantSpec) -> np.ndarray:
    """Returns the factor of data, within float32.

    >>> from fakequant import presets
    >>> inverse([0.5, 0.0], presets.q8_0()).tolist()
    [2.0, 3.4028234663852886e+38]
    """
    one = _f32({"q8_0_input": 127, "q8_k_input": -127}.get(spec.scale_rule, 1))
    found: np.ndarray = np.clip(one / np.asarray(scale).astype(_f32), -FLOAT32_MAX, FLOAT32_MAX)
    return found


@_quiet
def stored_scale(scale: ArrayLike, spec: QuantSpec) -> np.ndarray:
    """Returns the factor of codes, as float32: the number that ggml stores.

    A float16 scale is at most 65504; ggml stores an infinity instead.

    >>> from fakequant import presets
    >>> stored_scale([0.1, -1e9], presets.q4_0()).tolist()
    [0.0999755859375, -65504.0]
    """
    scale = np.asarray(scale).astype(_f32)
    if spec.scale_rule in SUPER_BLOCKS:
        return scale
    if spec.scale_rule == "q8_k_input":
        return np.where(scale == 0, _f32(0), _f32(1) / inverse(scale, spec))
    scale = scale / _f32(127) if spec.scale_rule == "q8_0_input" else scale
    return _f16(scale)


def _f16(value: ArrayLike) -> np.ndarray:
    return np.clip(np.asarray(value).astype(_f32), -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16).astype(_f32)


@_quiet
def dequantize(codes: ArrayLike, scale: ArrayLike, offset: ArrayLike, spec: QuantSpec) -> np.ndarray:
    """Returns the values of codes, as float32.

    >>> from fakequant import presets
    >>> dequantize([-8, 0, 7], -0.1, 0.0, presets.q4_0()).tolist()
    [0.7998046875, -0.0, -0.6998291015625]
    """
    y: np.ndarray = np.asarray(codes).astype(_f32) * stored_scale(scale, spec)
    if spec.scale_rule == "q4_k":
        return y + np.asarray(offset).astype(_f32)
    return y + _f16(offset) if spec.has_offset else y


@_quiet
def learned_backward(
    dy: ArrayLike, x: ArrayLike, scale: ArrayLike, offset: ArrayLike, spec: QuantSpec, *, grad_factor: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the gradients with a learned scale and offset, per element: `(dx, ds, dz)`, in the compute dtype.

    The rounding of scales to float16 has the gradient of the identity.

        t = steps(x, scale, offset, spec);  q is its code
        inside       dx = dy    ds = (dy * (q - t)) * grad_factor    dz = 0
        outside      dx = 0     ds = (dy * q) * grad_factor          dz = dy * grad_factor
        x is not finite: all are 0

    Args:
        dy: The gradient of the result.
        x: The data of the forward.
        scale: Scales that broadcast against `x`.
        offset: Offsets that broadcast against `x`.
        spec: The rule, not one of inputs.
        grad_factor: Multiplies ds and dz.

    >>> from fakequant import presets
    >>> x, dy = np.float32([0.375, 9.0, np.inf]), np.float32([1, 2, 4])
    >>> [term.tolist() for term in learned_backward(dy, x, 0.5, 0.0, presets.tq2_0())]
    [[1.0, 0.0, 0.0], [0.25, 2.0, 0.0], [0.0, 2.0, 0.0]]
    """
    x = np.asarray(x)
    dtype = compute_dtype(x.dtype)
    wide_dy, finite = np.asarray(dy).astype(dtype), np.isfinite(x.astype(dtype))
    code, q = quantize(x, scale, offset, spec)
    inside = finite & (code == q)
    t, factor, zero = steps(x, scale, offset, spec).astype(dtype), dtype.type(grad_factor), dtype.type(0)
    ds = wide_dy * np.where(inside, q.astype(dtype) - t, q) * factor
    dz = np.where(inside, zero, wide_dy * factor)
    return np.where(inside, wide_dy, zero), np.where(finite, ds, zero), np.where(finite, dz, zero)


def block_ranges(x: ArrayLike, spec: QuantSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range (float32) of the finite values of every block, from which its scale is chosen.

        q4_1, q4_k              lowest to highest value
        q4_0, q8_k_input, q6_k  0 to the first value with the largest magnitude
        others                  -absmax to absmax

    A block without finite values has the range 0 to 0. A zero is +0.0.

    >>> from fakequant import presets
    >>> block_ranges(np.float32([-2.0] + 30 * [0.5] + [2.0]), presets.q4_0())
    (array([-2.], dtype=float32), array([0.], dtype=float32))
    """
    x = np.asarray(x)
    assert spec.axis is not None
    axis = spec.axis % x.ndim
    size = spec.group_size
    assert size is not None
    wide = x.astype(compute_dtype(x.dtype))
    blocks = wide.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    within = axis + 1
    finite = np.isfinite(blocks)
    if spec.has_offset:
        nothing = ~finite.any(within)
        lo = np.where(nothing, 0, np.where(finite, blocks, np.inf).min(within))
        hi = np.where(nothing, 0, np.where(finite, blocks, -np.inf).max(within))
    else:
        magnitude = np.where(finite, np.abs(blocks), 0)
        hi = magnitude.max(within)
        lo = -hi
        if spec.scale_rule in ("q4_0", "q8_k_input", "q6_k"):
            first = np.take_along_axis(blocks, np.expand_dims(magnitude.argmax(within), within), within).squeeze(within)
            is_negative = np.signbit(first)
            lo, hi = np.where(is_negative, lo, 0), np.where(is_negative, 0, hi)
    lo, hi = (np.clip(end, -FLOAT32_MAX, FLOAT32_MAX).astype(_f32) + _f32(0) for end in (lo, hi))
    return lo, hi


def fake_quantize_blocks(x: ArrayLike, spec: QuantSpec) -> GgmlBlocks:
    """Rounds `x` in blocks along `spec.axis`, with scales and offsets from its own values.

    `codes` are those of `fakequant.quantize`: ggml stores q4_0 codes + 8 and tq2_0 codes + 1. NaN has the lowest code.
    The gradient of `y` is that of the identity: the mask is not applied.

    Args:
        x: The data.
        spec: One of the specs of ggml.

    >>> from fakequant import presets
    >>> result = fake_quantize_blocks(np.float32([1.0, -3.0] + 30 * [0.25]), presets.q4_0())
    >>> result.y[:3].tolist(), result.codes[:3].tolist(), result.scale.tolist()
    ([1.125, -3.0, 0.375], [3, -8, 1], [0.375])
    """
    x = np.asarray(x)
    assert spec.axis is not None
    scale, offset = choose_scale(*block_ranges(x, spec), spec)
    s, z = (np.repeat(v, spec.group_size or 1, axis=spec.axis) for v in (scale, offset))
    code, q = quantize(x, s, z, spec)
    y = dequantize(q, s, z, spec).astype(x.dtype)
    codes = np.where(np.isnan(q), spec.qmin, q).astype(spec.storage)
    return GgmlBlocks(y, codes, q == code, scale, offset)
