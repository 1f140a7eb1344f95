"""torch's fused observer: moving average, scale and zero point, and fake quantization in one call."""

import numpy as np

from fakequant import _kernels, _native
from fakequant._backends.blocks import channel_shape
from fakequant._backends.numpy import torch_checks
from fakequant._backends.numpy.float_arrays import KERNEL_DTYPES
from fakequant._backends.numpy.per_channel import (
    KERNEL as CHANNEL_KERNEL,
    check_parameters,
    check_zero_points,
    checked_forward,
)
from fakequant._backends.numpy.per_tensor import KERNEL, fake_quantize_per_tensor_affine_cachemask_tensor_qparams
from fakequant._backends.numpy.strided_arrays import placed, unchanged
from fakequant._backends.results import OutputAndMask

_SIGNATURE = (
    ("Tensor", "input"),
    ("Tensor", "observer_on"),
    ("Tensor", "fake_quant_on"),
    ("Tensor", "running_min"),
    ("Tensor", "running_max"),
    ("Tensor", "scale"),
    ("Tensor", "zero_point"),
    ("float", "averaging_const"),
    ("int", "quant_min"),
    ("int", "quant_max"),
    ("int", "ch_axis"),
    ("bool", "per_row_fake_quant"),
    ("bool", "symmetric_quant"),
)
_AXIS_0 = "Per-channel FakeQuant in fused_moving_avg_obs_fake_quant is only supported on axis == 0"
_STATE_DTYPES = tuple(map(np.dtype, (np.float32, np.float32, np.float32, np.int32)))


def fused_moving_avg_obs_fake_quant(
    input: np.ndarray,
    observer_on: np.ndarray,
    fake_quant_on: np.ndarray,
    running_min: np.ndarray,
    running_max: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> np.ndarray:
    """See `fakequant.fused_moving_avg_obs_fake_quant`."""
    x = torch_checks.as_tensor(input)
    values = (
        x, observer_on, fake_quant_on, running_min, running_max, scale, zero_point, averaging_const,
        quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant,
    )  # fmt: skip
    torch_checks.check_types("fused_moving_avg_obs_fake_quant", values, _SIGNATURE)
    return unchanged(x).output if x.size == 0 else _fused(*values).output


def fused_moving_avg_obs_fq_helper(
    input: np.ndarray,
    observer_on: np.ndarray,
    fake_quant_on: np.ndarray,
    running_min: np.ndarray,
    running_max: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> OutputAndMask[np.ndarray]:
    """See `fakequant.fused_moving_avg_obs_fq_helper`."""
    x = torch_checks.as_tensor(input)
    values = (
        x, observer_on, fake_quant_on, running_min, running_max, scale, zero_point, averaging_const,
        quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant,
    )  # fmt: skip
    torch_checks.check_types("fused_moving_avg_obs_fq_helper", values, _SIGNATURE)
    return _fused(*values)


def _fused(
    x: np.ndarray,
    observer_on: np.ndarray,
    fake_quant_on: np.ndarray,
    running_min: np.ndarray,
    running_max: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row: bool,
    symmetric: bool,
) -> OutputAndMask[np.ndarray]:
    averaging_const = torch_checks.as_float(averaging_const)
    quant_min, quant_max, ch_axis = map(torch_checks.as_int64, (quant_min, quant_max, ch_axis))
    torch_checks.check(ch_axis < x.ndim, "Error in fused_moving_avg_obs_fake_quant_cpu: ch_axis must be < self.dim()")
    observe = torch_checks.item_as_int(observer_on) != 0
    if per_row:
        torch_checks.axis_length(x, 1)
        # torch checks the axis only when observing. With a negative axis it writes out of bounds, so that is an error.
        torch_checks.check(ch_axis == 0 or (ch_axis > 0 and not observe), _AXIS_0)
    if observe:
        _check_observable(x, running_min, running_max, per_row)
    quantize = torch_checks.item_as_int(fake_quant_on) != 0
    quant_min, quant_max = _as_int32(quant_min), _as_int32(quant_max)
    given = (running_min, running_max, scale, zero_point)
    _check_writeable(*given)
    starting = per_row and running_min.size == 0
    if starting:
        _check_empty(*given)
        running_min, running_max, scale, zero_point = (np.ones(x.shape[ch_axis], a.dtype) for a in given)
    if quantize:
        _check_quantizable(x, running_min, running_max, scale, zero_point, quant_min, quant_max, ch_axis, per_row)
    if starting:
        running_min, running_max, scale, zero_point = _start_per_row(x.shape[ch_axis], *given)
    if not (observe or quantize):
        return unchanged(x)
    parameters = x.shape[ch_axis] if per_row else 1
    torch_checks.check(
        min(running_min.size, running_max.size) >= parameters,
        "dimensions of scale and zero-point are not consistent with input tensor",
    )

    originals = (running_min, running_max, scale, zero_point) if quantize else (running_min, running_max)
    state = [np.asarray(a, dtype, order="C") for a, dtype in zip(originals, _STATE_DTYPES, strict=False)]
    unseen = [np.isinf(running) for running in state[:2]] if observe else ()
    unused = () if quantize else (np.empty(parameters, np.float32), np.empty(parameters, np.int32))
    p = placed(x)
    y, mask = np.empty(p.elements.shape, x.dtype), np.empty(p.elements.shape, np.bool_)
    _native.observe_fake_quantize(
        p.elements, y, mask, _kernels.MASK_BYTES, KERNEL_DTYPES[x.dtype],
        channel_shape(p.elements.shape, p.axis(ch_axis)) if per_row else (1, 1, 1, x.size),
        _kernels.TORCH_CHANNEL if per_row else _kernels.TORCH_TENSOR, quant_min, quant_max,
        _kernels.RANGE_TORCH_FUSED, _kernels.RANGE_MOVING_AVERAGE, observe, quantize, symmetric,
        _kernels.SCALE_RULES["any"], averaging_const, 0.0, *state, *unused,
    )  # fmt: skip
    for running, new in zip(state, unseen, strict=False):
        sign_zeros(running, new, x, per_row)
    for original, array in zip(originals, state, strict=True):
        if array is not original:
            original[...] = array.reshape(original.shape)
    if not quantize:
        return OutputAndMask(p.restore(y), p.restore(mask))
    if any(a.dtype != dtype for a, dtype in zip(originals[2:], _STATE_DTYPES[2:], strict=True)):
        # Writing them to another dtype has rounded scale or zero point: quantize with the rounded ones.
        if per_row:
            return checked_forward(x, scale, zero_point, ch_axis, quant_min, quant_max)
        on = np.ones(1, np.int64)
        return fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, scale, zero_point, on, quant_min, quant_max)
    if per_row:
        # A NaN has become a zero point far below the range.
        check_zero_points(zero_point, quant_min, quant_max)
    return OutputAndMask(p.restore(y), p.restore(mask))


def _check_observable(x: np.ndarray, running_min: np.ndarray, running_max: np.ndarray, per_row: bool) -> None:
    if per_row and x.shape[0] > 0 and x.size == 0:
        raise IndexError("aminmax: Expected reduction dim 1 to have non-zero size.")
    torch_checks.check(
        per_row or x.size > 0,
        "aminmax(): cannot compute aminmax over an empty dimension as the operation has no identity.",
    )
    if x.dtype.kind == "c" or x.dtype in (np.uint16, np.uint32, np.uint64):
        raise NotImplementedError(f"\"aminmax_cpu\" not implemented for '{torch_checks.type_name(x.dtype)}'")
    _check_float32(x, running_min, running_max)


def _check_float32(*arrays: np.ndarray) -> None:
    for array in arrays:
        torch_checks.check(
            array.dtype == np.float32, f"expected scalar type Float but found {torch_checks.type_name(array.dtype)}"
        )


def _check_quantizable(
    x: np.ndarray,
    running_min: np.ndarray,
    running_max: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row: bool,
) -> None:
    if per_row:
        _check_float32(running_min, running_max)
        if running_min.size:
            # torch writes the parameters one by one and reports the first index that is missing.
            last = min(running_min.size - 1, *(len(np.atleast_1d(a)) for a in (scale, zero_point)))
            torch_checks.select(scale, last), torch_checks.select(zero_point, last)
        check_parameters(x, scale, zero_point, ch_axis, quant_min, quant_max)
        torch_checks.kernel_dtype(x, CHANNEL_KERNEL)
        return
    torch_checks.item(running_min), torch_checks.item(running_max)
    torch_checks.select(scale, 0), torch_checks.select(zero_point, 0)
    torch_checks.check(quant_min <= quant_max, torch_checks.RANGE)
    torch_checks.item(zero_point), torch_checks.item(scale)
    torch_checks.kernel_dtype(x, KERNEL)


def _as_int32(value: int) -> int:
    """Returns the low 32 bits, because torch passes the range on as a C int."""
    return (value + 2**31) % 2**32 - 2**31


_STATE_NAMES = ("running_min", "running_max", "scale", "zero_point")


def _check_writeable(*state: np.ndarray) -> None:
    for name, array in zip(_STATE_NAMES, state, strict=True):
        torch_checks.check(array.flags.writeable, f"`{name}` is updated in place and must be writeable")


def _check_empty(*state: np.ndarray) -> None:
    """Raises RuntimeError unless all of the state can be resized.

    torch resizes per-row state that starts empty. Resizing an array that has elements could leave its views without
    memory, so either all of the state must be empty or none of it.
    """
    for name, array in zip(_STATE_NAMES, state, strict=True):
        torch_checks.check(
            array.size == 0 and array.flags.owndata,
            f"`running_min` is empty, so the state is resized to one entry per row, but `{name}` of shape "
            f"{array.shape} cannot be resized. Start with empty arrays, or with one entry per row",
        )


def _start_per_row(rows: int, *state: np.ndarray) -> tuple[np.ndarray, ...]:
    for array in state:
        array.resize(rows, refcheck=False)
    state[0].fill(np.inf)
    state[1].fill(-np.inf)
    return state


# torch's eight-lane minimum returns the later of two zeros, first within each lane and then between lanes that are 4,
# 2 and 1 apart. So among the lanes with a zero, the one with the largest bit-reversed index wins.
_LANE_RANK = np.array([0, 4, 2, 6, 1, 5, 3, 7])


def sign_zeros(running: np.ndarray, unseen: np.ndarray, x: np.ndarray, per_row: bool) -> None:
    """Gives a zero in a range that was just initialized the sign that torch gives it.

    If the data has zeros of both signs, the order of torch's reduction decides. For more than 32768 elements that
    depends on torch's number of threads; this is the result of a single thread. Later steps of the moving average do
    not keep the sign.

    Args:
        running: The running minimum or maximum, changed in place.
        unseen: Which entries were infinite before this call.
        x: The data.
        per_row: Whether there is one entry per row.
    """
    running = running.reshape(-1)
    for i in np.flatnonzero(unseen.reshape(-1) & (running == 0)):
        values = (x[i] if per_row else x).reshape(-1)
        zeros = np.flatnonzero(values == 0)
        if per_row:
            decides = zeros[0]
        elif values.size < 8:
            decides = zeros[-1]
        else:
            decides = zeros[np.argmax(_LANE_RANK[zeros % 8] * values.size + zeros)]
        running[i] = values[decides]
