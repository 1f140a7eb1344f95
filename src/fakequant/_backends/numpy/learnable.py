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

from typing import Generic, NamedTuple

import numpy as np

from fakequant import _kernels
from fakequant._backends import Array, aten_on_tensors, is_tensor
from fakequant._backends.blocks import channel_shape
from fakequant._backends.numpy import strided_arrays, torch_checks
from fakequant._backends.numpy.float_arrays import BFLOAT16, KERNEL_DTYPES
from fakequant._backends.numpy.per_channel import AXIS, check_lengths, check_zero_points, checked_forward
from fakequant._backends.numpy.per_tensor import KERNEL, checked_numbers
from fakequant._backends.numpy.strided_arrays import placed
from fakequant._kernels import _native

_RANGE_WITH_ZERO = (
    "`quant_min` should be less than or         equal to `quant_max`, and the quantization range should include 0."
)
_TENSORS = (("Tensor", "input"), ("Tensor", "scale"), ("Tensor", "zero_point"))
_NUMBERS = (("int", "quant_min"), ("int", "quant_max"), ("float", "grad_factor"))
_PER_TENSOR = (*_TENSORS, *_NUMBERS)
_PER_CHANNEL = (*_TENSORS, ("int", "axis"), *_NUMBERS)
_GRAD = ("Tensor", "grad")


class LearnableGradients(NamedTuple, Generic[Array]):
    """Gradients with respect to the input, the scale and the zero point."""

    dx: Array
    dscale: Array
    dzero_point: Array


def clamped_zero_point(z: np.float32, quant_min: int, quant_max: int) -> int:
    """Clamped in float32, then as x86 converts to int64: what does not fit becomes the smallest int64."""
    # Not np.clip, which rounds the bounds to double first. NaN passes both comparisons.
    low, high = np.array([quant_min, quant_max], np.int64).astype(np.float32)
    z = low if z < low else z
    z = high if high < z else z
    return int(z) if -(2.0**63) <= z < 2.0**63 else -(2**63)


def fake_quantize_learnable_per_tensor_affine(
    input: Array,
    scale: Array,
    zero_point: Array,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Array:
    """Forward with `scale[0]` and `clamp(rint(zero_point[0]), quant_min, quant_max)`.

    `grad_factor` only matters to the backward.

    >>> x, s, z = np.float32([0.26, 9.0]), np.float32([0.1]), np.float32([0.5])
    >>> fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7)
    array([0.3, 0.7], dtype=float32)
    """
    if is_tensor(input):
        return aten_on_tensors().fake_quantize_learnable_per_tensor_affine(
            input, scale, zero_point, quant_min, quant_max, grad_factor
        )
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, quant_min, quant_max, grad_factor)
    torch_checks.check_types("fake_quantize_learnable_per_tensor_affine", values, _PER_TENSOR)
    quant_min, quant_max = torch_checks.as_int64(quant_min), torch_checks.as_int64(quant_max)
    torch_checks.as_float(grad_factor)
    scale_value = torch_checks.item_as_float(torch_checks.select(scale, 0))
    z = np.rint(np.float32(torch_checks.item_as_float(torch_checks.select(zero_point, 0))))
    numbers = checked_numbers(scale_value, clamped_zero_point(z, quant_min, quant_max), quant_min, quant_max)
    return strided_arrays.per_tensor_value(x, torch_checks.kernel_dtype(x, KERNEL), *numbers)


def fake_quantize_learnable_per_tensor_affine_backward(
    grad: Array,
    input: Array,
    scale: Array,
    zero_point: Array,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> LearnableGradients[Array]:
    """Gradients of `fake_quantize_learnable_per_tensor_affine`; dscale and dzero_point have shape (1,).

    16-bit input is computed in float32 and dx is float32, as torch returns it for bfloat16.

    >>> x, s, z = np.float32([9.0]), np.float32([0.1]), np.float32([0.0])
    >>> fake_quantize_learnable_per_tensor_affine_backward(np.float32([2.0]), x, s, z, -8, 7).dscale
    array([14.], dtype=float32)
    """
    if is_tensor(input):
        return aten_on_tensors().fake_quantize_learnable_per_tensor_affine_backward(
            grad, input, scale, zero_point, quant_min, quant_max, grad_factor
        )
    x, dy = torch_checks.as_tensor(input), torch_checks.as_tensor(grad)
    values = (dy, x, scale, zero_point, quant_min, quant_max, grad_factor)
    torch_checks.check_types("fake_quantize_learnable_per_tensor_affine_backward", values, (_GRAD, *_PER_TENSOR))
    quant_min, quant_max = torch_checks.as_int64(quant_min), torch_checks.as_int64(quant_max)
    scale_value = torch_checks.item_as_float(torch_checks.select(scale, 0))
    shifted = np.float32(torch_checks.item_as_float(torch_checks.select(zero_point, 0))) + np.float32(0.5)
    z = clamped_zero_point(shifted, quant_min, quant_max)
    _check_floats(dy, x, scale, zero_point)
    torch_checks.check(x.size == dy.size, "`X` and `dY` are not the same size")
    torch_checks.check(quant_min <= 0 <= quant_max, _RANGE_WITH_ZERO)
    torch_checks.check(quant_min <= z <= quant_max, torch_checks.ZERO_POINT)
    if x.size == 0:
        return LearnableGradients(x, np.zeros(scale.shape, np.float32), np.zeros(zero_point.shape, np.float32))
    x, dy = torch_checks.broadcast(x, dy)
    scales, zeros = np.array([scale_value], np.float32), np.array([z], np.int64)
    return LearnableGradients(*_backward(dy, x, None, scales, zeros, quant_min, quant_max, grad_factor))


def fake_quantize_learnable_per_channel_affine(
    input: Array,
    scale: Array,
    zero_point: Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Array:
    """Forward with one scale and one rounded, clamped zero point per index on `axis`.

    >>> x, s, z = np.float32([[0.26], [0.26]]), np.float32([0.1, 1.0]), np.float32([0.0, 0.0])
    >>> fake_quantize_learnable_per_channel_affine(x, s, z, 0, -8, 7)
    array([[0.3],
           [0. ]], dtype=float32)
    """
    if is_tensor(input):
        return aten_on_tensors().fake_quantize_learnable_per_channel_affine(
            input, scale, zero_point, axis, quant_min, quant_max, grad_factor
        )
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, axis, quant_min, quant_max, grad_factor)
    torch_checks.check_types("fake_quantize_learnable_per_channel_affine", values, _PER_CHANNEL)
    axis, quant_min, quant_max = map(torch_checks.as_int64, (axis, quant_min, quant_max))
    torch_checks.as_float(grad_factor)
    zeros = _to_int(_rounded_per_channel(zero_point, quant_min, quant_max), np.int32)
    return checked_forward(x, scale, zeros, axis, quant_min, quant_max).output


def fake_quantize_learnable_per_channel_affine_backward(
    grad: Array,
    input: Array,
    scale: Array,
    zero_point: Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> LearnableGradients[Array]:
    """Gradients of `fake_quantize_learnable_per_channel_affine`; dscale and dzero_point per channel.

    For a 1-D input torch adds up all channels and returns 0-d gradients, and so does this.

    >>> x, s, z = np.float32([[9.0], [9.0]]), np.float32([0.1, 10.0]), np.float32([0.0, 0.0])
    >>> fake_quantize_learnable_per_channel_affine_backward(np.ones_like(x), x, s, z, 0, -8, 7).dx
    array([[0.],
           [1.]], dtype=float32)
    """
    if is_tensor(input):
        return aten_on_tensors().fake_quantize_learnable_per_channel_affine_backward(
            grad, input, scale, zero_point, axis, quant_min, quant_max, grad_factor
        )
    x, dy = torch_checks.as_tensor(input), torch_checks.as_tensor(grad)
    values = (dy, x, scale, zero_point, axis, quant_min, quant_max, grad_factor)
    torch_checks.check_types("fake_quantize_learnable_per_channel_affine_backward", values, (_GRAD, *_PER_CHANNEL))
    axis, quant_min, quant_max = map(torch_checks.as_int64, (axis, quant_min, quant_max))
    wide = zero_point.astype(np.float32) if x.dtype == BFLOAT16 else zero_point
    zeros = _rounded_per_channel(wide, quant_min, quant_max)
    _check_floats(dy, x, scale, zero_point)
    torch_checks.check(x.shape == dy.shape, "`X` and `dY` are not the same size")
    torch_checks.check(quant_min <= 0 <= quant_max, "Expecting `quant_min` <= 0 and `quant_max` >= 0")
    check_lengths(x, scale, zero_point, axis)
    if np.isnan(zeros).any():
        raise RuntimeError("value cannot be converted to type int64_t without overflow")
    check_zero_points(_to_int(zeros, np.int64), quant_min, quant_max)
    torch_checks.check(axis >= 0, AXIS)
    if x.size == 0:
        return LearnableGradients(x, np.zeros(scale.shape, np.float32), np.zeros(scale.shape, np.float32))
    zeros = zeros.astype(np.float32)
    gradients = _backward(dy, x, axis, scale.astype(np.float32), zeros, quant_min, quant_max, grad_factor)
    return LearnableGradients(*gradients)


def _check_floats(dy: np.ndarray, x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> None:
    """torch takes float32, and bfloat16 data; there is no reason to refuse other floats, so this does not."""
    for name, array in (("dY", dy), ("X", x), ("scale", scale), ("zero_point", zero_point)):
        torch_checks.expect(array.dtype in KERNEL_DTYPES, f"{name}_.scalar_type() == ScalarType::Float")


def _rounded_per_channel(zero_point: np.ndarray, quant_min: int, quant_max: int) -> np.ndarray:
    """`zero_point.round().clamp(quant_min, quant_max)`, in float32, float64 or int64."""
    dtype = zero_point.dtype
    if dtype.kind in "bc":
        raise NotImplementedError(f"\"round_vml_cpu\" not implemented for '{torch_checks.type_name(dtype)}'")
    if dtype.kind in "iu":
        return np.clip(zero_point.astype(np.int64), quant_min, quant_max)
    wide = np.float64 if dtype == np.float64 else np.float32
    return np.clip(np.rint(zero_point.astype(wide)), *np.array([quant_min, quant_max], np.int64).astype(wide))


def _to_int(z: np.ndarray, dtype: type) -> np.ndarray:
    """As x86 converts: what does not fit, NaN included, becomes the smallest integer."""
    if z.dtype.kind == "i":
        return z.astype(dtype)
    smallest = float(np.iinfo(dtype).min)
    return np.where(np.abs(z) < -smallest, z, smallest).astype(dtype)


def _backward(dy, x, axis, scales, zeros, quant_min, quant_max, grad_factor):
    dtype = KERNEL_DTYPES[x.dtype]
    dx_dtype = _kernels.F64 if dtype == _kernels.F64 else _kernels.F32
    wide = np.float64 if dtype == _kernels.F64 else np.float32
    if dy.dtype != x.dtype:
        # Nothing is lost by computing in float32 what arrives in 16 bits.
        x, dy, dtype = x.astype(wide), dy.astype(wide), dx_dtype
    p = placed(x)
    dy = np.asarray(dy.transpose(p.order or range(x.ndim)), order="C")
    shape = (1, 1, 1, x.size) if axis is None else channel_shape(p.elements.shape, p.axis(axis))
    dx = np.empty(p.elements.shape, wide)
    sums = np.empty((2, scales.size), np.float64)
    kind = _kernels.ZERO_F32 if zeros.dtype == np.float32 else _kernels.ZERO_I64
    if kind == _kernels.ZERO_I64 and ((zeros >= -(2**31)) & (zeros < 2**31)).all():
        zeros, kind = zeros.astype(np.int32), _kernels.ZERO_I32
    _native.learned_backward(
        dy, p.elements, dx, dtype, dx_dtype, shape, _kernels.TORCH_TENSOR, scales, False, zeros, kind,
        quant_min, quant_max, torch_checks.as_float(grad_factor), sums[0], sums[1],
    )  # fmt: skip
    if axis is not None and x.ndim == 1:
        sums = sums.sum(axis=1)
    with np.errstate(over="ignore"):
        dscale, dzero_point = sums.astype(np.float32)
    return p.restore(dx), np.asarray(dscale), np.asarray(dzero_point)
