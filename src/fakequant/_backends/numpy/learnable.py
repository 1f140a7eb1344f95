"""Fake quantization with learned scale and zero point under torch's names. `fakequant.torch_names` has the formulas."""

import numpy as np

from fakequant import _kernels, _native
from fakequant._backends.blocks import channel_shape
from fakequant._backends.numpy import strided_arrays, torch_checks
from fakequant._backends.numpy.float_arrays import BFLOAT16, KERNEL_DTYPES
from fakequant._backends.numpy.per_channel import AXIS, check_lengths, check_zero_points, checked_forward
from fakequant._backends.numpy.per_tensor import KERNEL, checked_numbers
from fakequant._backends.numpy.strided_arrays import placed
from fakequant._backends.numpy.zero_points import torch_backward, torch_forward
from fakequant._backends.results import LearnedGradients

_RANGE_WITH_ZERO = (
    "`quant_min` should be less than or         equal to `quant_max`, and the quantization range should include 0."
)
_TENSORS = (("Tensor", "input"), ("Tensor", "scale"), ("Tensor", "zero_point"))
_NUMBERS = (("int", "quant_min"), ("int", "quant_max"), ("float", "grad_factor"))
_PER_TENSOR = (*_TENSORS, *_NUMBERS)
_PER_CHANNEL = (*_TENSORS, ("int", "axis"), *_NUMBERS)
_GRAD = ("Tensor", "grad")


def fake_quantize_learnable_per_tensor_affine(
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> np.ndarray:
    """See `fakequant.fake_quantize_learnable_per_tensor_affine`."""
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, quant_min, quant_max, grad_factor)
    torch_checks.check_types("fake_quantize_learnable_per_tensor_affine", values, _PER_TENSOR)
    quant_min, quant_max = torch_checks.as_int64(quant_min), torch_checks.as_int64(quant_max)
    torch_checks.as_float(grad_factor)
    scale_value = torch_checks.item_as_float(torch_checks.select(scale, 0))
    z = torch_forward(torch_checks.item_as_float(torch_checks.select(zero_point, 0)), quant_min, quant_max)
    numbers = checked_numbers(scale_value, z, quant_min, quant_max)
    return strided_arrays.per_tensor_value(x, torch_checks.kernel_dtype(x, KERNEL), *numbers)


def fake_quantize_learnable_per_tensor_affine_backward(
    grad: np.ndarray,
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> LearnedGradients[np.ndarray]:
    """See `fakequant.fake_quantize_learnable_per_tensor_affine_backward`."""
    x, dy = torch_checks.as_tensor(input), torch_checks.as_tensor(grad)
    values = (dy, x, scale, zero_point, quant_min, quant_max, grad_factor)
    torch_checks.check_types("fake_quantize_learnable_per_tensor_affine_backward", values, (_GRAD, *_PER_TENSOR))
    quant_min, quant_max = torch_checks.as_int64(quant_min), torch_checks.as_int64(quant_max)
    scale_value = torch_checks.item_as_float(torch_checks.select(scale, 0))
    z = torch_backward(torch_checks.item_as_float(torch_checks.select(zero_point, 0)), quant_min, quant_max)
    _check_floats(dy, x, scale, zero_point)
    torch_checks.check(x.size == dy.size, "`X` and `dY` are not the same size")
    torch_checks.check(quant_min <= 0 <= quant_max, _RANGE_WITH_ZERO)
    torch_checks.check(quant_min <= z <= quant_max, torch_checks.ZERO_POINT)
    if x.size == 0:
        return LearnedGradients(x, np.zeros(scale.shape, np.float32), np.zeros(zero_point.shape, np.float32))
    x, dy = torch_checks.broadcast(x, dy)
    scales, zeros = np.array([scale_value], np.float32), np.array([z], np.int64)
    return LearnedGradients(*_backward(dy, x, None, scales, zeros, quant_min, quant_max, grad_factor))


def fake_quantize_learnable_per_channel_affine(
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> np.ndarray:
    """See `fakequant.fake_quantize_learnable_per_channel_affine`."""
    x = torch_checks.as_tensor(input)
    values = (x, scale, zero_point, axis, quant_min, quant_max, grad_factor)
    torch_checks.check_types("fake_quantize_learnable_per_channel_affine", values, _PER_CHANNEL)
    axis, quant_min, quant_max = map(torch_checks.as_int64, (axis, quant_min, quant_max))
    torch_checks.as_float(grad_factor)
    zeros = _to_int(_rounded_per_channel(zero_point, quant_min, quant_max), np.int32)
    return checked_forward(x, scale, zeros, axis, quant_min, quant_max).output


def fake_quantize_learnable_per_channel_affine_backward(
    grad: np.ndarray,
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> LearnedGradients[np.ndarray]:
    """See `fakequant.fake_quantize_learnable_per_channel_affine_backward`."""
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
        return LearnedGradients(x, np.zeros(scale.shape, np.float32), np.zeros(scale.shape, np.float32))
    zeros = zeros.astype(np.float32)
    gradients = _backward(dy, x, axis, scale.astype(np.float32), zeros, quant_min, quant_max, grad_factor)
    return LearnedGradients(*gradients)


def _check_floats(dy: np.ndarray, x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> None:
    """Raises torch's error for other dtypes than floats. torch itself accepts only float32, and bfloat16 data."""
    for name, array in (("dY", dy), ("X", x), ("scale", scale), ("zero_point", zero_point)):
        torch_checks.expect(array.dtype in KERNEL_DTYPES, f"{name}_.scalar_type() == ScalarType::Float")


def _rounded_per_channel(zero_point: np.ndarray, quant_min: int, quant_max: int) -> np.ndarray:
    """Returns `zero_point.round().clamp(quant_min, quant_max)` in float32, float64 or int64."""
    dtype = zero_point.dtype
    if dtype.kind in "bc":
        raise NotImplementedError(f"\"round_vml_cpu\" not implemented for '{torch_checks.type_name(dtype)}'")
    if dtype.kind in "iu":
        return np.clip(zero_point.astype(np.int64), quant_min, quant_max)
    wide = np.float64 if dtype == np.float64 else np.float32
    low, high = np.array([quant_min, quant_max], np.int64).astype(wide)
    rounded: np.ndarray = np.clip(np.rint(zero_point.astype(wide)), low, high)
    return rounded


def _to_int(z: np.ndarray, dtype: type) -> np.ndarray:
    """Converts to integers as x86 does: values that do not fit, and NaN, become the smallest integer."""
    if z.dtype.kind == "i":
        return z.astype(dtype)
    smallest = float(np.iinfo(dtype).min)
    return np.where(np.abs(z) < -smallest, z, smallest).astype(dtype)


def _backward(
    dy: np.ndarray,
    x: np.ndarray,
    axis: int | None,
    scales: np.ndarray,
    zeros: np.ndarray,
    quant_min: int,
    quant_max: int,
    grad_factor: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dtype = KERNEL_DTYPES[x.dtype]
    dx_dtype = _kernels.F64 if dtype == _kernels.F64 else _kernels.F32
    wide = np.float64 if dtype == _kernels.F64 else np.float32
    if dy.dtype != x.dtype:
        # float32 represents every 16-bit value exactly.
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
