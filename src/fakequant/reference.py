"""The numeric contract as NumPy code, written to be read, not to be fast.

Every docstring states its formula in evaluation order. Arithmetic is done in the *compute dtype*: float64 for
float64 input, float32 for float32, bfloat16 and float16. The tests compare the native kernels with this file bit
for bit, so it deliberately shares no code with them. `_backends/torch/formula.py`, the same formulas in torch
operations for other devices, is compared with the kernels.
"""

import math
from collections import namedtuple
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

NUMERICS = ("torch", "onnx", "half_away")
GRANULARITIES = ("tensor", "channel")

FLOAT32_EPS = np.finfo(np.float32).eps
# A float32 constant, even in expressions with doubles.
SMALL_SCALE = np.float32(6.1e-5)

MinMax = namedtuple("MinMax", "min max nan posinf neginf")

# NumPy's annotations lose the type of an `np.ndarray` of any dtype in arithmetic. Some results are therefore annotated
# before they are returned.

# Overflow, 0/0 and NaN are expected results here.
_quiet = np.errstate(all="ignore")


def compute_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype for computing with values of `dtype`: float64 for float64, otherwise float32.

    >>> compute_dtype(np.float16)
    dtype('float32')
    """
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


@_quiet
def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> np.ndarray:
    """Returns `a * b + c` with a single rounding, for float32 and float64.

        fma(a, b, c) = round(a * b + c)

    >>> a = np.float32(1 + 2**-12)
    >>> float(fma(a, a, np.float32(-1)) - (a * a - np.float32(1)))
    5.960464477539063e-08
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    if a.dtype == np.float32:
        # The product of two floats is exact in double. The double sum is rounded to odd, so that rounding it to
        # float32 gives the same result as rounding the exact sum.
        product, addend = a.astype(np.float64) * b, c.astype(np.float64)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        lossy = np.isfinite(total) & (error != 0) & (total.view(np.int64) % 2 == 0)
        odd = np.nextafter(total, np.copysign(np.inf, error))
        rounded: np.ndarray = np.where(lossy, odd, total)
        return rounded.astype(np.float32)
    # With an infinite c the sum is c, even where the rounded product a * b would overflow.
    finite = np.isfinite(a) & np.isfinite(b)
    out = np.where(finite & np.isinf(c), c, a * b + c)
    # With a zero factor, a * b + c above is already exact and its zero has the right sign.
    hard = finite & np.isfinite(c) & (a != 0) & (b != 0)
    terms = zip(a[hard].tolist(), b[hard].tolist(), c[hard].tolist(), strict=True)
    out[hard] = [_nearest_double(Fraction(i) * Fraction(j) + Fraction(k)) for i, j, k in terms]
    return out


def _nearest_double(exact: Fraction | int) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@_quiet
def round_half_away(v: ArrayLike) -> np.ndarray:
    """Rounds to the nearest integer, ties away from zero.

        t = trunc(v);  t + copysign(1, v) if |v - t| >= 1/2, otherwise t

    >>> round_half_away(np.float32([-2.5, -0.5, 0.49999997, 0.5, 2.5]))
    array([-3., -1.,  0.,  1.,  3.], dtype=float32)
    """
    # v - trunc(v) is exact. Adding 1/2 first would not be: 0.49999997 + 0.5 is 1.
    v = np.asarray(v)
    whole = np.trunc(v)
    up = np.abs(v - whole) >= 0.5
    rounded: np.ndarray = np.where(up, whole + np.copysign(v.dtype.type(1), v), whole)
    return rounded


@_quiet
def unclamped_code(
    x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike, numerics: str, *, granularity: str = "tensor"
) -> np.ndarray:
    """Returns the integer code of `x` before clamping, as a float of the compute dtype.

        torch              zero_point + rint(x * inv)        inv = 1 / scale in float32
        torch, float zp    rint(fma(x, inv, zero_point))     float16 zp: two roundings
        onnx               rint(x / scale) + zero_point
        half_away          round_half_away(x / scale + zero_point)

    With granularity "channel", torch first casts the code to int64. On x86, NaN and codes beyond int64 become
    -2**63. This function returns -inf for them.

    Args:
        x: The data.
        scale: Scales that broadcast against `x`.
        zero_point: Zero points that broadcast against `x`.
        numerics: "torch", "onnx" or "half_away".
        granularity: "tensor" or "channel". Only "torch" distinguishes them.

    >>> x = np.float32([0.5, 1.5, 2.5, np.inf])
    >>> unclamped_code(x, 1.0, 1, "onnx")
    array([ 1.,  3.,  3., inf], dtype=float32)
    >>> unclamped_code(x, 1.0, 1, "half_away")
    array([ 2.,  3.,  4., inf], dtype=float32)
    >>> unclamped_code(x, np.float32([1.0]), np.float32([1]), "torch", granularity="channel")
    array([  2.,   2.,   4., -inf], dtype=float32)
    """
    _check_names(numerics, granularity)
    x = np.asarray(x)
    dtype = compute_dtype(x.dtype)
    if numerics != "torch":
        return _exact_code(x, scale, zero_point, numerics).astype(dtype)
    x = x.astype(dtype)
    inv = (np.float32(1) / _cast(scale, np.float32)).astype(dtype)
    z = np.asarray(zero_point)
    if z.dtype.kind in "iu":
        code: np.ndarray = z.astype(dtype) + np.rint(x * inv)
    elif granularity == "tensor":
        raise ValueError(f"granularity 'tensor' takes an integer zero_point, got {z.dtype}")
    else:
        single_rounding = z.dtype == np.float32
        total = fma(x, inv, z.astype(dtype)) if single_rounding else z.astype(dtype) + x * inv
        # torch rounds the sum with a float32 function even if x is float64.
        code = np.rint(total.astype(np.float32)).astype(dtype)
    if granularity == "channel":
        code = np.where(np.abs(code) < 2.0**63, code, dtype.type(-np.inf))
    return code


@_quiet
def fake_quantize(
    x: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike,
    qmin: int,
    qmax: int,
    numerics: str,
    *,
    granularity: str = "tensor",
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds `x` to the grid. Returns `(y, mask)`; the mask is True where `x` was not clipped.

        code = unclamped_code(x, scale, zero_point, numerics)
        q    = clamp(code, qmin, qmax)
        y    = (q - zero_point) * scale
        mask = qmin <= code <= qmax

    In torch numerics `y` is computed in float32 per tensor (even for float64) and in float64 per channel. In onnx
    and half_away numerics NaN stays NaN, and codes are exact for ranges within +-2**52.

    Args:
        x: The data.
        scale: Scales that broadcast against `x`.
        zero_point: Zero points that broadcast against `x`.
        qmin: The lowest code.
        qmax: The highest code.
        numerics: "torch", "onnx" or "half_away".
        granularity: "tensor" or "channel". Only "torch" distinguishes them.

    >>> x = np.float32([-0.3, 0.05, 0.15, 9.0, np.nan])
    >>> y, mask = fake_quantize(x, 0.1, 0, -8, 7, "onnx")
    >>> y
    array([-0.3,  0. ,  0.2,  0.7,  nan], dtype=float32)
    >>> mask
    array([ True,  True,  True, False, False])
    >>> fake_quantize(x, 0.1, 0, -8, 7, "torch")[0]
    array([-0.3,  0. ,  0.2,  0.7, -0.8], dtype=float32)
    """
    x = np.asarray(x)
    dtype = compute_dtype(x.dtype)
    if numerics != "torch":
        _check_names(numerics, granularity)
        code = _exact_code(x, scale, zero_point, numerics)
        mask = (qmin <= code) & (code <= qmax)
        steps = np.clip(code, qmin, qmax) - zero_point + 0.0  # + 0.0: no negative zero
        y = steps.astype(dtype) * _cast(scale, dtype)
        return y.astype(x.dtype), mask
    q, mask = _torch_codes(x, scale, zero_point, qmin, qmax, granularity)
    z = np.asarray(zero_point)
    if granularity == "tensor":
        steps = _cast_integer(q, np.int64) - z.astype(np.int64)
        y = steps.astype(np.float32) * _cast(scale, np.float32)
    else:
        y = (q - z.astype(np.float64)) * _cast(scale, np.float32).astype(np.float64)
    # From double to bfloat16 or float16 through float32: two roundings, as in torch.
    return y.astype(dtype).astype(x.dtype), mask


@_quiet
def quantize(
    x: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike,
    qmin: int,
    qmax: int,
    numerics: str,
    *,
    granularity: str = "tensor",
) -> np.ndarray:
    """Returns the integer codes of `x` as int64.

        q = clamp(unclamped_code(x, scale, zero_point, numerics), qmin, qmax)

    NaN becomes qmin (torch, onnx) or 0 clamped into the range (half_away).

    Args:
        x: The data.
        scale: Scales that broadcast against `x`.
        zero_point: Zero points that broadcast against `x`.
        qmin: The lowest code.
        qmax: The highest code.
        numerics: "torch", "onnx" or "half_away".
        granularity: "tensor" or "channel". Only "torch" distinguishes them.

    >>> quantize(np.float32([0.5, 1.5, -200, np.nan]), 1.0, 0, -128, 127, "onnx")
    array([   0,    2, -128, -128])
    """
    _check_names(numerics, granularity)
    x = np.asarray(x)
    if numerics == "torch":
        q, _ = _torch_codes(x, scale, zero_point, qmin, qmax, granularity)
        return _cast_integer(q, np.int64)
    code = _exact_code(x, scale, zero_point, numerics)
    nan_code = qmin if numerics == "onnx" else min(max(0, qmin), qmax)
    q = np.where(np.isnan(code), nan_code, np.clip(code, qmin, qmax))
    return q.astype(np.int64)


@_quiet
def dequantize(q: ArrayLike, scale: ArrayLike, zero_point: ArrayLike, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Returns the values of the codes `q`.

        y = (q - zero_point) * scale        in the compute dtype, rounded once to dtype

    Args:
        q: The codes.
        scale: Scales that broadcast against `q`.
        zero_point: Zero points that broadcast against `q`.
        dtype: The float dtype of the result.

    >>> dequantize(np.int8([-128, 3, 127]), 0.5, 3)
    array([-65.5,   0. ,  62. ], dtype=float32)
    """
    wide = compute_dtype(dtype)
    steps = _cast(q, np.int64) - _cast(zero_point, np.int64)
    y: np.ndarray = steps.astype(wide) * _cast(scale, wide)
    return y.astype(dtype)


@_quiet
def fake_quantize_backward(dy: ArrayLike, mask: ArrayLike, numerics: str) -> np.ndarray:
    """Returns the gradient of `fake_quantize` with respect to `x`.

        torch               dx = dy * mask
        onnx, half_away     dx = dy where mask, otherwise 0

    >>> fake_quantize_backward(np.float32([-1, np.inf]), np.array([False, False]), "torch")
    array([-0., nan], dtype=float32)
    >>> fake_quantize_backward(np.float32([-1, np.inf]), np.array([False, False]), "onnx")
    array([0., 0.], dtype=float32)
    """
    _check_names(numerics)
    dy, mask = np.asarray(dy), np.asarray(mask)
    if numerics == "torch":
        product: np.ndarray = dy * mask.astype(dy.dtype)
        return product
    return np.where(mask, dy, np.zeros((), dy.dtype))


@_quiet
def learned_backward(
    dy: ArrayLike,
    x: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike,
    qmin: int,
    qmax: int,
    numerics: str,
    *,
    grad_factor: float = 1.0,
    granularity: str = "tensor",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the gradients of fake quantization with learned scale and zero point, per element.

    The result is `(dx, ds, dz)` in the compute dtype, before summation over blocks. In the formulas, z is the
    rounded zero point and bound is qmin or qmax, whichever clipped the element.

        torch: z = backward_zero_point_per_tensor(zero_point); channel: clamp(rint(...))
            code = rint(fma(x, inv, z)), below the range for NaN and +-inf
            dx = dy * (qmin <= code <= qmax)
            inside    ds = ((dy * fma(code - z, scale, -x)) * inv) * grad_factor    dz = 0
            outside   ds = (dy * (bound - z)) * grad_factor
                      dz = (-dy * scale) * grad_factor
        onnx, half_away: z = clamp(rint(zero_point)); code as in fake_quantize
            dx = dy where qmin <= code <= qmax, otherwise 0
            inside    ds = (dy * ((code - z) - x / scale)) * grad_factor    dz = 0
            outside   ds, dz as above; all three are 0 if x is not finite

    Args:
        dy: The gradient of the result.
        x: The data of the forward.
        scale: Scales that broadcast against `x`.
        zero_point: The learned zero points before rounding.
        qmin: The lowest code.
        qmax: The highest code.
        numerics: "torch", "onnx" or "half_away".
        grad_factor: Multiplies ds and dz.
        granularity: "tensor" or "channel". Only "torch" distinguishes them.

    >>> x, dy = np.float32([0.375, 9.0]), np.float32([1, 1])
    >>> [term.tolist() for term in learned_backward(dy, x, 0.5, 0.0, -8, 7, "onnx")]
    [[1.0, 0.0], [0.25, 7.0], [0.0, -0.5]]
    """
    _check_names(numerics, granularity)
    x = np.asarray(x)
    dtype = compute_dtype(x.dtype)
    factor = _cast(grad_factor, dtype)
    dy, wide_x = _cast(dy, dtype), x.astype(dtype)
    if numerics == "torch":
        s = _cast(scale, np.float32)
        s, inv = s.astype(dtype), (np.float32(1) / s).astype(dtype)
        if granularity == "tensor":
            z = backward_zero_point_per_tensor(zero_point, qmin, qmax)
        else:
            z = _round_and_clamp(zero_point, qmin, qmax).astype(dtype)
        code = _cast_integer(np.rint(fma(wide_x, inv, z.astype(dtype))), np.int64)
        below, above = code < qmin, code > qmax
        inside = ~(below | above)
        ds_inside = dy * fma(_minus(code, z, dtype), s, -wide_x) * inv * factor
    else:
        s = _cast(scale, dtype)
        z = np.clip(np.rint(_cast(zero_point, np.float64)), qmin, qmax)
        code = _exact_code(x, scale, z, numerics)
        finite = np.isfinite(wide_x)
        below, above = finite & (code < qmin), finite & (code > qmax)
        inside = finite & (qmin <= code) & (code <= qmax)
        ds_inside = dy * (_minus(code, z, dtype) - wide_x / s) * factor
    bound = np.where(below, np.int64(qmin), np.int64(qmax))
    ds_outside, dz_outside = dy * _minus(bound, z, dtype) * factor, -dy * s * factor
    zero = dtype.type(0)
    ds = np.where(inside, ds_inside, np.where(below | above, ds_outside, zero))
    dz = np.where(below | above, dz_outside, zero)
    return fake_quantize_backward(dy, inside, numerics), ds, dz


def forward_zero_point(zero_point: ArrayLike, qmin: int, qmax: int, *, granularity: str = "tensor") -> np.ndarray:
    """Returns the integer zero point that torch's learnable forward uses.

        z = int(clamp(rint(zero_point), qmin, qmax))        clamped in float32

    Args:
        zero_point: The learned zero points before rounding.
        qmin: The lowest code.
        qmax: The highest code.
        granularity: "tensor" for int64 zero points, "channel" for int32.

    >>> forward_zero_point(np.float32([0.5, -0.7, 1.5, 900]), -128, 127)
    array([  0,  -1,   2, 127])
    """
    z = _round_and_clamp(zero_point, qmin, qmax)
    return _cast_integer(z, np.int64 if granularity == "tensor" else np.int32)


def backward_zero_point_per_tensor(zero_point: ArrayLike, qmin: int, qmax: int) -> np.ndarray:
    """Returns the integer zero point that torch's learnable per-tensor backward uses.

        z = int(clamp(zero_point + 0.5, qmin, qmax))

    The cast truncates, so a negative result is one more than in the forward.

    >>> backward_zero_point_per_tensor(np.float32([0.5, -0.7, -57, 900]), -128, 127)
    array([  1,   0, -56, 127])
    """
    z = _cast(zero_point, np.float32) + np.float32(0.5)
    return _cast_integer(np.clip(z, _bound(qmin, np.float32), _bound(qmax, np.float32)), np.int64)


def exact_sum(terms: ArrayLike, axis: int | Sequence[int] | None = None) -> np.ndarray:
    """Returns the float64 nearest to the exact sum of `terms` over `axis`.

    >>> float(exact_sum(np.float32([1e30, 1.0, -1e30])))
    1.0
    """
    terms = _cast(terms, np.float64)
    axes = tuple(range(terms.ndim)) if axis is None else tuple(np.atleast_1d(axis).tolist())
    rows = np.moveaxis(terms, axes, range(-len(axes), 0))
    total = np.empty(rows.shape[: terms.ndim - len(axes)])
    for index in np.ndindex(total.shape):
        total[index] = _sum_row(rows[index].ravel())
    return total


@_quiet
def _sum_row(row: np.ndarray) -> float:
    if not np.isfinite(row).all():
        special: float = row[~np.isfinite(row)].sum()
        return special
    try:
        return math.fsum(row)
    except OverflowError:  # an intermediate sum overflowed; the result may still be finite
        return _nearest_double(sum(map(Fraction, row.tolist())))


def min_max(x: ArrayLike) -> MinMax:
    """Returns the range of the finite values of `x`, and counts of the non-finite ones.

    Without finite values the range is `(inf, -inf)`. A zero in the range is always +0.0.

    >>> m = min_max(np.float32([3, np.nan, -2, np.inf]))
    >>> float(m.min), float(m.max), m.nan, m.posinf, m.neginf
    (-2.0, 3.0, 1, 1, 0)
    """
    x = np.asarray(x)
    x = x.astype(compute_dtype(x.dtype))
    finite = x[np.isfinite(x)] + x.dtype.type(0)  # -0.0 + 0.0 is +0.0
    counts = [int(np.count_nonzero(c)) for c in (np.isnan(x), x == np.inf, x == -np.inf)]
    return MinMax(finite.min(initial=np.inf), finite.max(initial=-np.inf), *counts)


@_quiet
def choose_qparams(
    lo: ArrayLike,
    hi: ArrayLike,
    qmin: int,
    qmax: int,
    *,
    symmetric: bool,
    eps: float | np.float32 = FLOAT32_EPS,
    scale_format: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale (float32) and zero point (int32) for values in `[lo, hi]`, as torch's observers compute them.

        lo, hi = min(lo, 0), max(hi, 0)
        symmetric   scale = max(max(-lo, hi) / ((qmax - qmin) / 2), eps)
                    zero_point = 0, or the upper middle of a range without negative codes
        affine      scale = max((hi - lo) / (qmax - qmin), eps)
                    zero_point = clamp(qmin - rint(lo / scale), qmin, qmax)

    Args:
        lo: The lower ends of the ranges.
        hi: The upper ends of the ranges.
        qmin: The lowest code.
        qmax: The highest code.
        symmetric: Whether the zero point is fixed.
        eps: The smallest scale.
        scale_format: What scales are rounded to, before the zero point is found; see `rounded_scale`.

    >>> [v.item() for v in choose_qparams(-1.0, 3.0, 0, 255, symmetric=False)]
    [0.01568627543747425, 64]
    >>> [v.item() for v in choose_qparams(-1.0, 63.5, -127, 127, symmetric=True)]
    [0.5, 0]
    """
    low: np.ndarray = np.minimum(_cast(lo, np.float32), 0)
    high: np.ndarray = np.maximum(_cast(hi, np.float32), 0)
    eps = np.float32(eps)
    if symmetric:
        scale = np.maximum(np.maximum(-low, high) / np.float32((qmax - qmin) / 2), eps)
        scale = rounded_scale(scale, scale_format)
        middle = 0 if qmin < 0 else (qmin + qmax + 1) // 2
        return scale, np.full(scale.shape, middle, np.int32)
    levels = np.float32(qmax - qmin)
    width = high - low
    # The width of a range may overflow float32 although the scale does not.
    wide = ((high.astype(np.float64) - low) / levels).astype(np.float32)
    scale = np.maximum(np.where(np.isinf(width) & np.isfinite(low) & np.isfinite(high), wide, width / levels), eps)
    scale = rounded_scale(scale, scale_format)
    steps = _cast_integer(np.rint(low / scale), np.int64)
    return scale, np.clip(qmin - steps, qmin, qmax).astype(np.int32)


@_quiet
def rounded_scale(scale: ArrayLike, scale_format: str) -> np.ndarray:
    """Returns positive scales rounded to a format of 16 bits, ties to even, or float32 scales unchanged.

    A scale below the smallest value of the format becomes that value, and one above the largest becomes the largest.

        float16    11 significant bits, 2^-24 to 65504
        bfloat16   8 significant bits, 2^-133 to 2^127 * (2 - 2^-7)

    >>> rounded_scale([0.1, 1e-9], "float16").tolist()
    [0.0999755859375, 5.960464477539063e-08]
    """
    scale = _cast(scale, np.float32)
    if scale_format == "float32":
        return scale
    bits, lowest, largest = (11, -14, 65504.0) if scale_format == "float16" else (8, -126, 2.0**127 * (2 - 2.0**-7))
    exponent = np.maximum(np.frexp(scale)[1] - 1, lowest) - (bits - 1)
    rounded = np.ldexp(np.rint(np.ldexp(scale.astype(np.float64), -exponent)), exponent)
    limited: np.ndarray = np.clip(rounded, 2.0 ** (lowest - (bits - 1)), largest).astype(np.float32)
    return limited


@_quiet
def choose_qparams_fused(
    lo: ArrayLike, hi: ArrayLike, qmin: int, qmax: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale (float32) and zero point (int32) as torch's fused observer operator computes them.

        symmetric and lo < 0 < hi
                    half = (qmax - qmin) // 2
                    scale = max(|lo / -(half + 1)|, |hi / half|)
                    lo, hi = scale * -(half + 1), scale * half
        lo, hi = min(lo, 0), max(hi, 0)
        scale = (hi - lo) / (qmax - qmin)               in float64, then float32
        scale = 0.1 if scale is 0 or its reciprocal is infinite
        scale < 6.1e-5: scale = 6.1e-5, and lo, hi are stretched to match
        symmetric and lo < 0 < hi
                    zero_point = (qmin + qmax) / 2
        |qmin| + |lo / scale| < |qmax| + |hi / scale|
                    zero_point = qmin - lo / scale
        otherwise   zero_point = qmax - hi / scale
        zero_point = rint(clamp(zero_point, qmin, qmax))

    Args:
        lo: The lower ends of the ranges.
        hi: The upper ends of the ranges.
        qmin: The lowest code.
        qmax: The highest code.
        symmetric: Whether the range is made symmetric around 0.

    >>> [v.tolist() for v in choose_qparams_fused([-1.0, 0.0], [3.0, 0.0], 0, 255, False)]
    [[0.01568627543747425, 0.10000000149011612], [64, 0]]
    """
    lo, hi = _cast(lo, np.float32), _cast(hi, np.float32)
    levels = qmax - qmin
    if symmetric:
        half = levels // 2
        a, b = np.abs(lo / np.float32(-(half + 1))), np.abs(hi / np.float32(half))
        widest = np.where(a < b, b, a).astype(np.float64)
        both = (lo < 0) & (hi > 0)
        lo = np.where(both, (widest * -(half + 1)).astype(np.float32), lo)
        hi = np.where(both, (widest * half).astype(np.float32), hi)
    # Not np.minimum and np.maximum: NaN at either end must stay NaN.
    lo, hi = np.where(lo > 0, np.float32(0), lo), np.where(hi < 0, np.float32(0), hi)
    scale = ((hi.astype(np.float64) - lo) / levels).astype(np.float32)
    useless = (scale == 0) | np.isinf(np.float32(1) / scale)
    scale = np.where(useless, np.float32(0.1), scale)
    small = scale < SMALL_SCALE
    stretch = SMALL_SCALE / scale
    end = SMALL_SCALE * np.float32(levels)
    new_lo = np.where(lo == 0, lo, np.where(hi == 0, -end, lo * stretch))
    new_hi = np.where(lo == 0, end, np.where(hi == 0, hi, hi * stretch))
    lo, hi = np.where(small, new_lo, lo), np.where(small, new_hi, hi)
    scale = np.where(small, SMALL_SCALE, scale)
    lo_steps, hi_steps = lo / scale.astype(np.float64), hi / scale.astype(np.float64)
    # torch computes abs(qmin) in 32 bits, where abs(-2**31) overflows to -2**31.
    low_end = qmin if qmin == -(2**31) else abs(qmin)
    from_lo = low_end + np.abs(lo_steps) < abs(qmax) + np.abs(hi_steps)
    zero_point = np.where(from_lo, qmin - lo_steps, qmax - hi_steps)
    if symmetric:
        zero_point = np.where((lo < 0) & (hi > 0), (qmin + qmax) / 2, zero_point)
    return scale, _cast_integer(np.rint(np.clip(zero_point, qmin, qmax)), np.int32)


@_quiet
def moving_average(running: ArrayLike, value: ArrayLike, averaging_constant: float) -> np.ndarray:
    """Returns the moving average after one more value, in float32.

        value if running is infinite, otherwise running + averaging_constant * (value - running)

    >>> float(moving_average(1.0, 3.0, 0.25)), float(moving_average(np.inf, 3.0, 0.25))
    (1.5, 3.0)
    """
    running, value = _cast(running, np.float32), _cast(value, np.float32)
    moved = running + np.float32(averaging_constant) * (value - running)
    return np.where(np.isinf(running), value, moved)


def _check_names(numerics: str, granularity: str = "tensor") -> None:
    if numerics not in NUMERICS:
        raise ValueError(f"numerics must be one of {NUMERICS}, got {numerics!r}")
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {GRANULARITIES}, got {granularity!r}")


def _cast(value: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    return np.asarray(value).astype(dtype)


def _bound(value: int, dtype: DTypeLike) -> np.generic:
    # Rounds once: dtype(value) would round a Python int to double first.
    return np.int64(value).astype(dtype)


def _exact_code(x: np.ndarray, scale: ArrayLike, zero_point: ArrayLike, numerics: str) -> np.ndarray:
    """Returns the onnx or half_away code in float64, in which every 52-bit code is exact."""
    dtype = compute_dtype(x.dtype)
    ratio = x.astype(dtype) / _cast(scale, dtype)
    if numerics == "onnx":
        code: np.ndarray = np.rint(ratio).astype(np.float64) + zero_point
        return code
    return round_half_away(ratio + _cast(zero_point, dtype)).astype(np.float64)


def _torch_codes(
    x: np.ndarray, scale: ArrayLike, zero_point: ArrayLike, qmin: int, qmax: int, granularity: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the clamped codes as float64, and the mask."""
    code = unclamped_code(x, scale, zero_point, "torch", granularity=granularity)
    if granularity == "tensor":
        mask = (_bound(qmin, code.dtype) <= code) & (code <= _bound(qmax, code.dtype))
    else:
        code = _cast_integer(code, np.int64)
        mask = (qmin <= code) & (code <= qmax)
    # fmax before fmin: NaN becomes qmin.
    wide = code.astype(np.float64)
    q = np.fmin(np.fmax(wide, _bound(qmin, np.float64)), _bound(qmax, np.float64))
    return q, mask


def _round_and_clamp(zero_point: ArrayLike, qmin: int, qmax: int) -> np.ndarray:
    z = np.rint(_cast(zero_point, np.float32))
    clamped: np.ndarray = np.clip(z, _bound(qmin, np.float32), _bound(qmax, np.float32))
    return clamped


def _minus(code: np.ndarray, zero_point: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns `code - zero_point`, computed in integers if both are integers, otherwise in the zero point's dtype."""
    if zero_point.dtype.kind == "f":
        code = code.astype(zero_point.dtype)
    steps: np.ndarray = code - zero_point
    return steps.astype(dtype)


def _cast_integer(v: np.ndarray, dtype: type[np.signedinteger]) -> np.ndarray:
    """Converts floats to integers as x86 does: values that do not fit become the smallest integer."""
    smallest = np.dtype(dtype).type(np.iinfo(dtype).min)
    fits = np.abs(v) < -float(smallest)
    codes: np.ndarray = np.where(fits, np.where(fits, v, 0).astype(dtype), smallest)
    return codes
