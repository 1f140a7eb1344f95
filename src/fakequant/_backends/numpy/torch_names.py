"""The functions with torch's names on NumPy arrays. `fakequant.torch_ops` has the formulas.

Results are in C order, whatever the order of the input.
"""

import numpy as np

from fakequant import _kernels, _native
from fakequant._backends.blocks import channel_shape
from fakequant._backends.numpy.arguments import BFLOAT16, KERNEL_DTYPES
from fakequant._backends.numpy.torch_checks import (
    CHANNEL_KERNEL,
    TENSOR_KERNEL,
    TensorNumbers,
    as_int64,
    axis_length,
    broadcast,
    check_are_arrays,
    check_empty,
    check_floats,
    check_lengths,
    check_observable,
    check_parameters,
    check_quantizable,
    check_writeable,
    check_zero_points,
    checked_arrays,
    checked_numbers,
    expect,
    item_as_float,
    item_as_int,
    kernel_dtype,
    select,
    type_name,
)
from fakequant._backends.torch_rules import (
    ZERO_POINT,
    check,
    sign_zeros,
    zero_point_of_backward,
    zero_point_of_forward,
)
from fakequant._backends.types import FusedArguments, LearnedGradients, Numbers, OutputAndMask

_AXIS = "`axis` must be between 0 and number of dimensions of input"
_RANGE_WITH_ZERO = (
    "`quant_min` should be less than or         equal to `quant_max`, and the quantization range should include 0."
)

# --- per tensor -----------------------------------------------------------------------------------


def _per_tensor(x: np.ndarray, numbers: TensorNumbers, mask_kind: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the fake-quantized values, and a mask unless `mask_kind` is MASK_NONE."""
    dtype = kernel_dtype(x, TENSOR_KERNEL)
    x = np.asarray(x, order="C")
    y = np.empty(x.shape, x.dtype)
    mask = None if mask_kind == _kernels.MASK_NONE else np.empty(x.shape, np.bool_)
    _native.fake_quantize_scalar(x, y, mask, mask_kind, dtype, x.size, _kernels.TORCH_TENSOR, *numbers)
    return y, mask


def _with_mask(x: np.ndarray, numbers: TensorNumbers) -> OutputAndMask[np.ndarray]:
    y, mask = _per_tensor(x, numbers, _kernels.MASK_BYTES)
    assert mask is not None
    return OutputAndMask(y, mask)


def unchanged(x: np.ndarray) -> OutputAndMask[np.ndarray]:
    """Returns a copy and a mask of ones, the result of disabled fake quantization."""
    return OutputAndMask(np.array(x, order="C"), np.ones(x.shape, np.bool_))


def fake_quantize_per_tensor_affine(
    input: np.ndarray, scale: Numbers, zero_point: Numbers, quant_min: int, quant_max: int
) -> np.ndarray:
    """See `fakequant.torch_ops.fake_quantize_per_tensor_affine`."""
    x = np.asarray(input)
    are_arrays = isinstance(scale, np.ndarray) and isinstance(zero_point, np.ndarray)
    numbers = (checked_arrays if are_arrays else checked_numbers)(scale, zero_point, quant_min, quant_max)
    return _per_tensor(x, numbers, _kernels.MASK_NONE)[0]


def fake_quantize_per_tensor_affine_cachemask(
    input: np.ndarray, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> OutputAndMask[np.ndarray]:
    """See `fakequant.torch_ops.fake_quantize_per_tensor_affine_cachemask`."""
    x = np.asarray(input)
    return _with_mask(x, checked_numbers(scale, zero_point, quant_min, quant_max))


def fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    fake_quant_enabled: np.ndarray,
    quant_min: int,
    quant_max: int,
) -> OutputAndMask[np.ndarray]:
    """See `fakequant.torch_ops.fake_quantize_per_tensor_affine_cachemask_tensor_qparams`."""
    x = np.asarray(input)
    numbers = checked_arrays(np.asarray(scale), np.asarray(zero_point), quant_min, quant_max)
    enabled = item_as_int(np.asarray(fake_quant_enabled))
    if not enabled:
        kernel_dtype(x, TENSOR_KERNEL)
        return unchanged(x)
    return _with_mask(x, numbers)


def fake_quantize_per_tensor_affine_cachemask_backward(grad: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """See `fakequant.torch_ops.fake_quantize_per_tensor_affine_cachemask_backward`."""
    grad, mask = np.asarray(grad), np.asarray(mask)
    # torch compares sizes, not shapes.
    expect(mask.dtype == np.bool_, "mask.scalar_type() == ScalarType::Bool")
    check(
        mask.size == grad.size,
        f"`mask` and `dY` are not the same size: `mask` is size {mask.size} and `dY` is size {grad.size}",
    )
    if grad.size == 0:
        return grad
    grad, mask = (np.asarray(a, order="C") for a in broadcast(grad, mask))
    dtype = KERNEL_DTYPES.get(grad.dtype)
    if dtype is None:
        return np.asarray(grad * mask)
    dx = np.empty(grad.shape, grad.dtype)
    _native.mask_backward(grad, mask, _kernels.MASK_BYTES, dx, dtype, grad.size, True)
    return dx


# --- per channel ----------------------------------------------------------------------------------


def fake_quantize_per_channel_affine(
    input: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int, quant_min: int, quant_max: int
) -> np.ndarray:
    """See `fakequant.torch_ops.fake_quantize_per_channel_affine`."""
    return fake_quantize_per_channel_affine_cachemask(input, scale, zero_point, axis, quant_min, quant_max).output


def fake_quantize_per_channel_affine_cachemask(
    input: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int, quant_min: int, quant_max: int
) -> OutputAndMask[np.ndarray]:
    """See `fakequant.torch_ops.fake_quantize_per_channel_affine_cachemask`."""
    x, scale, zero_point = np.asarray(input), np.asarray(scale), np.asarray(zero_point)
    axis, quant_min, quant_max = as_int64(axis), as_int64(quant_min), as_int64(quant_max)
    check_parameters(x, scale, zero_point, axis, quant_min, quant_max)
    if zero_point.dtype == np.int32:
        check_zero_points(zero_point, quant_min, quant_max)
    check(axis >= 0, _AXIS)
    dtype = kernel_dtype(x, CHANNEL_KERNEL)
    numerics, kind = _kernels.TORCH_CHANNEL, _kernels.ZERO_I32
    if zero_point.dtype != np.int32:
        half = zero_point.dtype == np.float16
        numerics, kind = (_kernels.TORCH_CHANNEL_HALF if half else _kernels.TORCH_CHANNEL_FLOAT), _kernels.ZERO_F32
        zero_point = zero_point.astype(np.float32)
    x = np.asarray(x, order="C")
    y, mask = np.empty(x.shape, x.dtype), np.empty(x.shape, np.bool_)
    _native.fake_quantize(
        x, y, mask, _kernels.MASK_BYTES, dtype, channel_shape(x.shape, axis), numerics,
        np.asarray(scale, np.float32, order="C"), False, np.asarray(zero_point, order="C"), kind, quant_min, quant_max,
    )  # fmt: skip
    return OutputAndMask(y, mask)


# torch has the same function under both names.
fake_quantize_per_channel_affine_cachemask_backward = fake_quantize_per_tensor_affine_cachemask_backward


# --- learnable ------------------------------------------------------------------------------------


def fake_quantize_learnable_per_tensor_affine(
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> np.ndarray:
    """See `fakequant.torch_ops.fake_quantize_learnable_per_tensor_affine`."""
    x, scale, zero_point = np.asarray(input), np.asarray(scale), np.asarray(zero_point)
    quant_min, quant_max = as_int64(quant_min), as_int64(quant_max)
    scale_value = item_as_float(select(scale, 0))
    z = zero_point_of_forward(item_as_float(select(zero_point, 0)), quant_min, quant_max)
    return _per_tensor(x, checked_numbers(scale_value, z, quant_min, quant_max), _kernels.MASK_NONE)[0]


def fake_quantize_learnable_per_tensor_affine_backward(
    grad: np.ndarray,
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> LearnedGradients[np.ndarray]:
    """See `fakequant.torch_ops.fake_quantize_learnable_per_tensor_affine_backward`."""
    dy, x, scale, zero_point = map(np.asarray, (grad, input, scale, zero_point))
    quant_min, quant_max = as_int64(quant_min), as_int64(quant_max)
    scale_value = item_as_float(select(scale, 0))
    z = zero_point_of_backward(item_as_float(select(zero_point, 0)), quant_min, quant_max)
    check_floats(dy, x, scale, zero_point)
    check(x.size == dy.size, "`X` and `dY` are not the same size")
    check(quant_min <= 0 <= quant_max, _RANGE_WITH_ZERO)
    check(quant_min <= z <= quant_max, ZERO_POINT)
    if x.size == 0:
        return LearnedGradients(x, np.zeros(scale.shape, np.float32), np.zeros(zero_point.shape, np.float32))
    x, dy = broadcast(x, dy)
    scales, zeros = np.array([scale_value], np.float32), np.array([z], np.int64)
    return _backward(dy, x, None, scales, zeros, quant_min, quant_max, grad_factor)


def fake_quantize_learnable_per_channel_affine(
    input: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> np.ndarray:
    """See `fakequant.torch_ops.fake_quantize_learnable_per_channel_affine`."""
    quant_min, quant_max = as_int64(quant_min), as_int64(quant_max)
    zeros = _to_int(_rounded_per_channel(np.asarray(zero_point), quant_min, quant_max), np.int32)
    return fake_quantize_per_channel_affine(input, scale, zeros, axis, quant_min, quant_max)


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
    """See `fakequant.torch_ops.fake_quantize_learnable_per_channel_affine_backward`."""
    dy, x, scale, zero_point = map(np.asarray, (grad, input, scale, zero_point))
    axis, quant_min, quant_max = map(as_int64, (axis, quant_min, quant_max))
    wide = zero_point.astype(np.float32) if x.dtype == BFLOAT16 else zero_point
    zeros = _rounded_per_channel(wide, quant_min, quant_max)
    check_floats(dy, x, scale, zero_point)
    check(x.shape == dy.shape, "`X` and `dY` are not the same size")
    check(quant_min <= 0 <= quant_max, "Expecting `quant_min` <= 0 and `quant_max` >= 0")
    check_lengths(x, scale, zero_point, axis)
    if np.isnan(zeros).any():
        raise RuntimeError("value cannot be converted to type int64_t without overflow")
    check_zero_points(_to_int(zeros, np.int64), quant_min, quant_max)
    check(axis >= 0, _AXIS)
    if x.size == 0:
        return LearnedGradients(x, np.zeros(scale.shape, np.float32), np.zeros(scale.shape, np.float32))
    zeros = zeros.astype(np.float32)
    return _backward(dy, x, axis, scale.astype(np.float32), zeros, quant_min, quant_max, grad_factor)


def _rounded_per_channel(zero_point: np.ndarray, quant_min: int, quant_max: int) -> np.ndarray:
    """Returns `zero_point.round().clamp(quant_min, quant_max)` in float32, float64 or int64."""
    dtype = zero_point.dtype
    if dtype.kind in "bc":
        raise NotImplementedError(f"\"round_vml_cpu\" not implemented for '{type_name(dtype)}'")
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
) -> LearnedGradients[np.ndarray]:
    dtype = KERNEL_DTYPES[x.dtype]
    dx_dtype = _kernels.F64 if dtype == _kernels.F64 else _kernels.F32
    wide = np.float64 if dtype == _kernels.F64 else np.float32
    if dy.dtype != x.dtype:
        # float32 represents every 16-bit value exactly.
        x, dy, dtype = x.astype(wide), dy.astype(wide), dx_dtype
    x, dy = np.asarray(x, order="C"), np.asarray(dy, order="C")
    shape = (1, 1, 1, x.size) if axis is None else channel_shape(x.shape, axis)
    dx = np.empty(x.shape, wide)
    sums = np.empty((2, scales.size), np.float64)
    kind = _kernels.ZERO_F32 if zeros.dtype == np.float32 else _kernels.ZERO_I64
    if kind == _kernels.ZERO_I64 and ((zeros >= -(2**31)) & (zeros < 2**31)).all():
        zeros, kind = zeros.astype(np.int32), _kernels.ZERO_I32
    _native.learned_backward(
        dy, x, dx, dtype, dx_dtype, shape, _kernels.TORCH_TENSOR, scales, False, zeros, kind,
        quant_min, quant_max, float(grad_factor), sums[0], sums[1],
    )  # fmt: skip
    if axis is not None and x.ndim == 1:
        sums = sums.sum(axis=1)
    with np.errstate(over="ignore"):
        dscale, dzero_point = sums.astype(np.float32)
    return LearnedGradients(dx, np.asarray(dscale), np.asarray(dzero_point))


# --- fused ----------------------------------------------------------------------------------------

_AXIS_0 = "Per-channel FakeQuant in fused_moving_avg_obs_fake_quant is only supported on axis == 0"
_STATE_DTYPES = tuple(map(np.dtype, (np.float32, np.float32, np.float32, np.int32)))


def fused_moving_avg_obs_fake_quant(input: np.ndarray, arguments: FusedArguments) -> np.ndarray:
    """See `fakequant.torch_ops.fused_moving_avg_obs_fake_quant`."""
    if np.size(input) == 0:
        return unchanged(np.asarray(input)).output
    return fused_moving_avg_obs_fq_helper(input, arguments).output


def fused_moving_avg_obs_fq_helper(input: np.ndarray, arguments: FusedArguments) -> OutputAndMask[np.ndarray]:
    """See `fakequant.torch_ops.fused_moving_avg_obs_fq_helper`."""
    x, given, per_row = np.asarray(input), arguments.state, arguments.per_row
    check_are_arrays(*given)
    running_min, running_max, scale, zero_point = given
    quant_min, quant_max, ch_axis = map(as_int64, (arguments.quant_min, arguments.quant_max, arguments.ch_axis))
    check(ch_axis < x.ndim, "Error in fused_moving_avg_obs_fake_quant_cpu: ch_axis must be < self.dim()")
    observe = item_as_int(np.asarray(arguments.observer_on)) != 0
    if per_row:
        axis_length(x, 1)
        # torch checks the axis only when observing. With a negative axis it writes out of bounds, so that is an error.
        check(ch_axis == 0 or (ch_axis > 0 and not observe), _AXIS_0)
    if observe:
        check_observable(x, running_min, running_max, per_row)
    quantize = item_as_int(np.asarray(arguments.fake_quant_on)) != 0
    quant_min, quant_max = _as_int32(quant_min), _as_int32(quant_max)
    check_writeable(*given)
    starting = per_row and running_min.size == 0
    if starting:
        check_empty(*given)
        running_min, running_max, scale, zero_point = (np.ones(x.shape[ch_axis], a.dtype) for a in given)
    if quantize:
        axis = ch_axis if per_row else None
        check_quantizable(x, (running_min, running_max, scale, zero_point), quant_min, quant_max, axis)
    if starting:
        running_min, running_max, scale, zero_point = _start_per_row(x.shape[ch_axis], *given)
    if not (observe or quantize):
        return unchanged(x)
    parameters = x.shape[ch_axis] if per_row else 1
    check(
        min(running_min.size, running_max.size) >= parameters,
        "dimensions of scale and zero-point are not consistent with input tensor",
    )

    originals = (running_min, running_max, scale, zero_point) if quantize else (running_min, running_max)
    state = [np.asarray(a, dtype, order="C") for a, dtype in zip(originals, _STATE_DTYPES, strict=False)]
    unseen = [np.isinf(running) for running in state[:2]] if observe else ()
    unused = () if quantize else (np.empty(parameters, np.float32), np.empty(parameters, np.int32))
    x = np.asarray(x, order="C")
    y, mask = np.empty(x.shape, x.dtype), np.empty(x.shape, np.bool_)
    _native.observe_fake_quantize(
        x, y, mask, _kernels.MASK_BYTES, KERNEL_DTYPES[x.dtype],
        channel_shape(x.shape, ch_axis) if per_row else (1, 1, 1, x.size),
        _kernels.TORCH_CHANNEL if per_row else _kernels.TORCH_TENSOR, quant_min, quant_max,
        _kernels.RANGE_TORCH_FUSED, _kernels.UPDATES["moving_average"], observe, quantize, arguments.symmetric,
        _kernels.SCALE_RULES["any"], float(arguments.averaging_const), 0.0, *state, *unused,
    )  # fmt: skip
    for running, new in zip(state, unseen, strict=False):
        sign_zeros(running, new, x, per_row)
    for original, array in zip(originals, state, strict=True):
        if array is not original:
            original[...] = array.reshape(original.shape)
    if quantize and any(a.dtype != dtype for a, dtype in zip(originals[2:], _STATE_DTYPES[2:], strict=True)):
        # Writing them to another dtype has rounded scale or zero point: quantize with the rounded ones.
        if per_row:
            return fake_quantize_per_channel_affine_cachemask(x, scale, zero_point, ch_axis, quant_min, quant_max)
        on = np.ones(1, np.int64)
        return fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, scale, zero_point, on, quant_min, quant_max)
    if quantize and per_row:
        # A NaN has become a zero point far below the range.
        check_zero_points(zero_point, quant_min, quant_max)
    return OutputAndMask(y, mask)


def _as_int32(value: int) -> int:
    """Returns the low 32 bits, because torch passes the range on as a C int."""
    return (value + 2**31) % 2**32 - 2**31


def _start_per_row(rows: int, *state: np.ndarray) -> tuple[np.ndarray, ...]:
    for array in state:
        array.resize(rows, refcheck=False)
    state[0].fill(np.inf)
    state[1].fill(-np.inf)
    return state
