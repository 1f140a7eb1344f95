"""`min_max`, the range of data; `choose_qparams`, scale and zero point of a range; block scales as bytes."""

from typing import Any, overload

import numpy as np  # noqa: F401 - for the examples

from fakequant._backends import backend_of
from fakequant._backends.checks import EPS as _EPS, both_ends
from fakequant._backends.types import Array, EncodedScales as EncodedScales, Numbers, QParams as QParams, Range as Range
from fakequant.spec import QuantSpec


def min_max(x: Array, spec: QuantSpec | None = None) -> Range[Array]:
    """Returns the range of the finite values of `x` per block of `spec`, and counts of the non-finite ones.

    A block without finite values has min = +inf and max = -inf. Without a spec, all of `x` is one block.

    >>> r = min_max(np.float32([[3, -1, np.nan], [2, np.inf, 5]]), QuantSpec(axis=0))
    >>> r.min, r.max, r.nan, r.posinf
    (array([-1.,  2.], dtype=float32), array([3., 5.], dtype=float32), array([1, 0]), array([0, 1]))
    """
    return backend_of(x).min_max(x, spec)


@overload
def choose_qparams(lo: Range[Array], hi: QuantSpec, *, eps: float = _EPS) -> QParams[Array]: ...
@overload
def choose_qparams(lo: Range[Array], *, spec: QuantSpec, eps: float = _EPS) -> QParams[Array]: ...
@overload  # of arrays, or of tensors if one end is a tensor
def choose_qparams(lo: Numbers, hi: Numbers, spec: QuantSpec, *, eps: float = _EPS) -> QParams[Any]: ...
def choose_qparams(lo: Numbers, hi: Numbers = None, spec: Any = None, *, eps: float = _EPS) -> QParams[Any]:
    """Returns scale and zero point for values between `lo` and `hi`, one pair per entry.

    A range that `min_max` returned may stand for both ends: `choose_qparams(min_max(x, spec), spec)`.

        symmetric   s = max(absmax / ((qmax - qmin) / 2), eps)      z = 0
        affine      s = max((hi - lo) / (qmax - qmin), eps)         z = clamp(qmin - rint(lo / s), qmin, qmax)
                    after extending the range to include 0

        float       s = max(absmax / largest, eps)                  z = 0

    The arithmetic is float32, as in torch's observers.

    A block scale is a power of two (MX), or an e4m3fn value times one number per tensor (NVFP4). Here e(v) is the
    exponent of v, and M the number of mantissa bits of the format:

        floor   s = 2^(e(absmax) - e(largest))
        ceil    + 1 in the exponent unless absmax is a power of two
        even    floor, after adding half a unit of the last of M mantissa bits to absmax
        rceil   s = absmax / largest, rounded up to a power of two
        even_e2m1       even with M = 1, as compressed-tensors chooses the scales of MXFP8
        NVFP4   t = max(absmax of all blocks) / 2688;   s = e4m3fn(clamp(absmax / 6 / t, 2^-6, 448)) * t

    All entries of `lo` and `hi` are blocks of one tensor for NVFP4. `eps` is not used for block scales.

    Args:
        lo: The lower ends of the ranges, finite, or a `Range` with both ends.
        hi: The upper ends of the ranges, finite and at least `lo`. Left out after a `Range`.
        spec: The grid.
        eps: The smallest scale.

    >>> choose_qparams(-1.0, 3.0, QuantSpec(signed=False, symmetric=False))
    QParams(scale=array(0.01568628, dtype=float32), zero_point=array(64, dtype=int32))
    >>> choose_qparams(min_max(np.float32([-1.0, 3.0])), QuantSpec(signed=False, symmetric=False))
    QParams(scale=array(0.01568628, dtype=float32), zero_point=array(64, dtype=int32))
    """
    if isinstance(lo, Range):
        lo, hi, spec = both_ends(lo, hi, spec)
    return backend_of(lo, hi).choose_qparams(lo, hi, spec, eps=eps)


def encode_scales(scale: Array, spec: QuantSpec) -> EncodedScales[Array]:
    """Returns block scales (MX, NVFP4) as bytes.

        e8m0     scale = 2^(code - 127)                   for integers 2^(code - 127 - floor(log2(qmax))); NaN is 255
        e4m3fn   scale = value(code) * tensor_scale       rounded to float32

    `decode_scales` returns the same bits. For integers the code is the shared exponent of MX, which counts elements as
    fractions: MXINT8 has steps of 2^-6. The tensor scale of NVFP4 is found from the scales alone. If several fit, the
    result is the one that gives the largest scale the largest code.

    Args:
        scale: The scales of one tensor, float32, as `choose_qparams` returns them.
        spec: The grid, with `scale_format` "e8m0" or "e4m3fn".

    Raises:
        ValueError: If a scale is not of the format.

    >>> from fakequant import presets
    >>> encode_scales(np.float32([0.25, 1.0]), presets.mxfp8())
    EncodedScales(codes=array([125, 127], dtype=uint8), tensor_scale=None)
    >>> codes, tensor_scale = encode_scales(np.float32([1.0, 7.0]), presets.nvfp4())  # 64 and 448, times 2^-6
    >>> codes, float(tensor_scale)
    (array([104, 126], dtype=uint8), 0.015625)
    """
    return backend_of(scale).encode_scales(scale, spec)


def decode_scales(codes: Array, tensor_scale: Numbers | None, spec: QuantSpec) -> Array:
    """Returns the float32 scales of the bytes that `encode_scales` made.

    Args:
        codes: The codes, uint8.
        tensor_scale: The scale of the whole tensor for NVFP4. None for MX.
        spec: The grid, with `scale_format` "e8m0" or "e4m3fn".

    >>> from fakequant import presets
    >>> decode_scales(np.uint8([125, 127]), None, presets.mxfp8())
    array([0.25, 1.  ], dtype=float32)
    """
    return backend_of(codes).decode_scales(codes, tensor_scale, spec)
