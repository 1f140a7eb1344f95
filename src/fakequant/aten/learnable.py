"""Fake quantization with learned scale and zero point, with torch's names (there with a leading `_`).

The forward rounds the zero point half to even; the per-tensor backward cuts off the fraction of
`zero_point + 0.5` instead, and both backwards add the zero point before rounding:

    code = rint(fma(x, 1 / scale, z))
    inside     dx = dy       dscale += ((dy * fma(q - z, scale, -x)) * inv) * grad_factor      dz += 0
    outside    dx = dy * 0   dscale += (dy * (quant_min - z or quant_max - z)) * grad_factor
                             dz     += (-dy * scale) * grad_factor

The terms have torch's bits. Their sums are taken in float64, in an order that depends only on the
shape, and rounded once; torch's depend on its number of threads.
"""

from typing import NamedTuple

import numpy as np

from fakequant import native
from fakequant.aten import checks, forward
from fakequant.aten.per_channel import check_axis, fake_quantize_per_channel_affine
from fakequant.aten.per_tensor import fake_quantize_per_tensor_affine
from fakequant.layout import channel_shape, dense
from fakequant.native import _native

_RANGE_WITH_ZERO = (
    "`quant_min` should be less than or         equal to `quant_max`, and the quantization range should include 0."
)


class LearnableGradients(NamedTuple):
    """Gradients with respect to the input, the scale and the zero point."""

    dx: np.ndarray
    dscale: np.ndarray
    dzero_point: np.ndarray


def _first(x: np.ndarray) -> float:
    """`x[0]` as a float32 value."""
    if x.ndim == 0:
        raise IndexError("select() cannot be applied to a 0-dim tensor.")
    if x.shape[0] == 0:
        raise IndexError(f"select(): index 0 out of range for tensor of size {list(x.shape)} at dimension 0")
    return checks.item_as_float(x[0:1] if x.ndim == 1 else x[0])


def _clamped_zero_point(z: np.float32, quant_min: int, quant_max: int) -> int:
    """float32 clamp, then the conversion to int64; NaN stays out of every range."""
    if np.isnan(z):
        return -(2**63)
    return int(min(max(z, np.float32(quant_min)), np.float32(quant_max)))


def fake_quantize_learnable_per_tensor_affine(
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> np.ndarray:
    """Forward with `scale[0]` and `clamp(rint(zero_point[0]), quant_min, quant_max)`.

    `grad_factor` only matters to the backward.

    >>> x, s, z = np.float32([0.26, 9.0]), np.float32([0.1]), np.float32([0.5])
    >>> fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7)
    array([0.3, 0.7], dtype=float32)
    """
    quant_min, quant_max = checks.as_int64(quant_min), checks.as_int64(quant_max)
    scale_value = _first(np.asarray(scale))
    z = _clamped_zero_point(np.rint(np.float32(_first(np.asarray(zero_point)))), quant_min, quant_max)
    return fake_quantize_per_tensor_affine(input, scale_value, z, quant_min, quant_max)


def fake_quantize_learnable_per_tensor_affine_backward(
    grad: np.ndarray,
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> LearnableGradients:
    """Gradients of `fake_quantize_learnable_per_tensor_affine`; dscale and dzero_point have shape (1,).

    16-bit input is computed in float32 and dx is float32, as torch returns it for bfloat16.

    >>> x, s, z = np.float32([9.0]), np.float32([0.1]), np.float32([0.0])
    >>> fake_quantize_learnable_per_tensor_affine_backward(np.float32([2.0]), x, s, z, -8, 7).dscale
    array([14.], dtype=float32)
    """
    quant_min, quant_max = checks.as_int64(quant_min), checks.as_int64(quant_max)
    x, dy = np.asarray(input), np.asarray(grad)
    scale_value = _first(np.asarray(scale))
    z = np.float32(_first(np.asarray(zero_point))) + np.float32(0.5)
    z = _clamped_zero_point(z, quant_min, quant_max)
    checks.check(x.size == dy.size, "`X` and `dY` are not the same size")
    checks.check(quant_min <= 0 <= quant_max, _RANGE_WITH_ZERO)
    checks.check(quant_min <= z <= quant_max, checks.ZERO_POINT)
    if x.size == 0:
        return LearnableGradients(x, np.zeros(1, np.float32), np.zeros(1, np.float32))
    x, dy = _broadcast(x, dy)
    scales, zeros = np.float32([scale_value]), np.array([z], np.int64)
    dx, dscale, dzero_point = _backward(dy, x, None, scales, zeros, quant_min, quant_max, grad_factor)
    return LearnableGradients(dx, dscale.reshape(1), dzero_point.reshape(1))


def fake_quantize_learnable_per_channel_affine(
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> np.ndarray:
    """Forward with one scale and one rounded, clamped zero point per index on `axis`.

    >>> x, s, z = np.float32([[0.26], [0.26]]), np.float32([0.1, 1.0]), np.float32([0.0, 0.0])
    >>> fake_quantize_learnable_per_channel_affine(x, s, z, 0, -8, 7)
    array([[0.3],
           [0. ]], dtype=float32)
    """
    quant_min, quant_max = checks.as_int64(quant_min), checks.as_int64(quant_max)
    zeros = _rounded_per_channel(np.asarray(zero_point), quant_min, quant_max)
    return fake_quantize_per_channel_affine(
        input, np.asarray(scale), _to_int32(zeros), axis, quant_min, quant_max
    )


def fake_quantize_learnable_per_channel_affine_backward(
    grad: np.ndarray,
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> LearnableGradients:
    """Gradients of `fake_quantize_learnable_per_channel_affine`; dscale and dzero_point per channel.

    For a 1-D input torch adds up all channels and returns 0-d gradients, and so does this.

    >>> x, s, z = np.float32([[9.0], [9.0]]), np.float32([0.1, 10.0]), np.float32([0.0, 0.0])
    >>> fake_quantize_learnable_per_channel_affine_backward(np.ones_like(x), x, s, z, 0, -8, 7).dx
    array([[0.],
           [1.]], dtype=float32)
    """
    axis, quant_min, quant_max = map(checks.as_int64, (axis, quant_min, quant_max))
    x, dy = np.asarray(input), np.asarray(grad)
    scale, zero_point = np.asarray(scale), np.asarray(zero_point)
    checks.check(x.shape == dy.shape, "`X` and `dY` are not the same size")
    checks.check(quant_min <= 0 <= quant_max, "Expecting `quant_min` <= 0 and `quant_max` >= 0")
    checks.check(scale.ndim == 1, "scale should be a 1-D tensor")
    checks.check(zero_point.ndim == 1, "zero point should be a 1-D tensor")
    checks.check(scale.size == zero_point.size, "scale and zero-point need to have the same dimensions")
    check_axis(x, axis)
    checks.check(
        scale.size == x.shape[axis], "dimensions of scale and zero-point are not consistent with input tensor"
    )
    rounded = _rounded_per_channel(zero_point.astype(np.float32), quant_min, quant_max)
    if np.isnan(rounded).any():
        raise RuntimeError("value cannot be converted to type int64_t without overflow")
    checks.check(0 <= axis <= x.ndim, "`axis` must be between 0 and number of dimensions of input")
    if x.size == 0:
        return LearnableGradients(x, np.zeros(scale.shape, np.float32), np.zeros(scale.shape, np.float32))
    dx, dscale, dzero_point = _backward(
        dy, x, axis, scale.astype(np.float32), rounded.astype(np.int64), quant_min, quant_max, grad_factor
    )
    return LearnableGradients(dx, dscale, dzero_point)


def _rounded_per_channel(zero_point: np.ndarray, quant_min: int, quant_max: int) -> np.ndarray:
    """`zero_point.round().clamp(quant_min, quant_max)`, in the zero point's own dtype."""
    if zero_point.dtype.kind in "iub":
        return np.clip(zero_point, quant_min, quant_max)
    wide = np.rint(zero_point.astype(np.float32) if zero_point.dtype.itemsize < 8 else zero_point)
    return np.clip(wide, wide.dtype.type(quant_min), wide.dtype.type(quant_max))


def _to_int32(z: np.ndarray) -> np.ndarray:
    """As x86 converts: what does not fit, NaN included, becomes the smallest int32."""
    if z.dtype.kind in "iub":
        return z.astype(np.int32)
    fits = (z >= -(2.0**31)) & (z < 2.0**31)
    return np.where(fits, z, -(2.0**31)).astype(np.int32)


def _broadcast(x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if x.shape == dy.shape:
        return x, dy
    for back, (a, b) in enumerate(zip(reversed(x.shape), reversed(dy.shape), strict=False), start=1):
        if a != b and 1 not in (a, b):
            axis = max(x.ndim, dy.ndim) - back
            raise RuntimeError(
                f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension {axis}"
            )
    x, dy = np.broadcast_arrays(x, dy)
    return x, dy


def _backward(dy, x, axis, scales, zeros, quant_min, quant_max, grad_factor):
    dtype = checks.kernel_dtype(x, "fake_quantize_learnable_backward")
    dx_dtype = native.F64 if dtype == native.F64 else native.F32
    if dy.dtype != x.dtype:
        # Nothing is lost by computing in float32 what arrives in 16 bits.
        wide = np.float64 if dtype == native.F64 else np.float32
        x, dy, dtype = x.astype(wide), dy.astype(wide), dx_dtype
    d = dense(x)
    order = d.order if d.order is not None else range(x.ndim)
    dy = np.asarray(dy.transpose(tuple(order)), order="C")
    shape = (1, 1, 1, x.size) if axis is None else channel_shape(d.elements.shape, d.axis(axis))
    dx = np.empty(d.elements.shape, np.float64 if dx_dtype == native.F64 else np.float32)
    sums = np.empty((2, scales.size), np.float64)
    fits = bool((np.abs(zeros) < 2**31).all())
    _native.learned_backward(
        dy, d.elements, dx, dtype, dx_dtype, shape,
        native.TORCH_TENSOR, scales, False, zeros.astype(np.int32) if fits else zeros,
        native.ZERO_I32 if fits else native.ZERO_I64, quant_min, quant_max, float(grad_factor), sums[0], sums[1],
    )  # fmt: skip
    if axis is not None and x.ndim == 1:
        sums = sums.sum(axis=1)
    dscale, dzero_point = sums.astype(np.float32)
    return d.restore(dx), np.asarray(dscale), np.asarray(dzero_point)
