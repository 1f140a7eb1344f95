"""torch's checks of values, for the functions with torch's names on arrays.

Programs match on torch's messages, so they are the same, and so is the order of checks. They call an array a `Tensor`.
Arguments of a wrong type get Python's own errors.
"""

from operator import index
from typing import SupportsIndex, TypeAlias

import numpy as np

from fakequant._backends.numpy.arguments import BFLOAT16, KERNEL_DTYPES
from fakequant._backends.torch_rules import RANGE, ZERO_POINT, check

_TYPE_NAMES = {
    np.dtype(np.float32): "Float",
    np.dtype(np.float64): "Double",
    np.dtype(np.float16): "Half",
    BFLOAT16: "BFloat16",
    np.dtype(np.int8): "Char",
    np.dtype(np.uint8): "Byte",
    np.dtype(np.int16): "Short",
    np.dtype(np.int32): "Int",
    np.dtype(np.int64): "Long",
    np.dtype(np.uint16): "UInt16",
    np.dtype(np.uint32): "UInt32",
    np.dtype(np.uint64): "UInt64",
    np.dtype(np.bool_): "Bool",
    np.dtype(np.complex64): "ComplexFloat",
    np.dtype(np.complex128): "ComplexDouble",
}


def type_name(dtype: np.dtype) -> str:
    """Returns torch's name for a dtype: `Float` for float32, `Long` for int64.

    >>> type_name(np.dtype(np.int64))
    'Long'
    """
    # Not .get(dtype, str(dtype)): str is slow, and most callers discard the message.
    return _TYPE_NAMES[dtype] if dtype in _TYPE_NAMES else str(dtype)


def kernel_dtype(x: np.ndarray, kernel: str) -> int:
    """Returns the kernels' number for the dtype of `x`, or raises the error of torch's dispatch macro."""
    dtype = KERNEL_DTYPES.get(x.dtype)
    if dtype is None:
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{type_name(x.dtype)}'")
    return dtype


def expect(condition: bool | np.bool_, text: str) -> None:
    """Raises torch's error for a failed check that has no message."""
    check(
        condition,
        f"Expected {text} to be true, but got false.  "
        "(Could this error message be improved?  If so, please report an enhancement request to PyTorch.)",
    )


def broadcast(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns both arrays broadcast to their common shape, or raises torch's error."""
    if a.shape == b.shape:
        return a, b
    for back, (m, n) in enumerate(zip(reversed(a.shape), reversed(b.shape), strict=False), start=1):
        axis = max(a.ndim, b.ndim) - back
        check(
            m == n or 1 in (m, n),
            f"The size of tensor a ({m}) must match the size of tensor b ({n}) at non-singleton dimension {axis}",
        )
    a, b = np.broadcast_arrays(a, b)
    return a, b


def item(x: np.ndarray) -> np.generic:
    """Returns the only element of an array."""
    check(x.size == 1, f"a Tensor with {x.size} elements cannot be converted to Scalar")
    element: np.generic = x.reshape(-1)[0]
    return element


def item_as_int(x: np.ndarray) -> int:
    """Returns the only element truncated to a C int. Raises RuntimeError if it does not fit."""
    value = item(x)
    if value.dtype.kind == "c":
        value = value.real if value.imag == 0 else np.float64("nan")
    exact = float(value) if value.dtype.kind not in "iub" else int(value)
    if exact != exact or not -(2**31) <= exact <= 2**31 - 1:
        raise RuntimeError("value cannot be converted to type int without overflow")
    return int(exact)


def item_as_float(x: np.ndarray) -> float:
    """Returns the only element rounded to float32. Raises RuntimeError if it is finite but overflows."""
    value = item(x)
    if value.dtype.kind == "c":
        check(value.imag == 0, "value cannot be converted to type float without overflow")
        value = value.real
    wide = float(value)
    if np.isfinite(wide) and abs(wide) > float(np.finfo(np.float32).max):
        raise RuntimeError("value cannot be converted to type float without overflow")
    return float(np.float32(wide))


def axis_length(x: np.ndarray, axis: int) -> int:
    """Returns `x.shape[axis]`, or raises torch's IndexError. Negative axes count from the end."""
    if x.ndim == 0:
        raise IndexError(f"Dimension specified as {axis} but tensor has no dimensions")
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-x.ndim}, {x.ndim - 1}], but got {axis})"
        )
    length: int = x.shape[axis]
    return length


def select(x: np.ndarray, index: int) -> np.ndarray:
    """Returns `x[index]` as an array, or raises torch's IndexError."""
    if x.ndim == 0:
        raise IndexError("select() cannot be applied to a 0-dim tensor.")
    if index >= x.shape[0]:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(x.shape)} at dimension 0")
    return np.asarray(x[index])


def as_int64(value: SupportsIndex) -> int:
    """Returns a Python or NumPy integer as an int. Raises ValueError if it does not fit int64."""
    integer = index(value)
    if not -(2**63) <= integer < 2**63:
        raise ValueError("Overflow when unpacking long long")
    return integer


# --- parameters -----------------------------------------------------------------------------------

# torch's names of its kernels, which its messages have.
TENSOR_KERNEL = "fake_quantize_tensor_cachemask_kernel_type_handling"
CHANNEL_KERNEL = "fake_quantize_channel_cachemask_cpu_type_handling"


# Scale, zero point, quant_min and quant_max.
TensorNumbers: TypeAlias = tuple[float, int, int, int]


def checked_numbers(scale: float, zero_point: int, quant_min: int, quant_max: int) -> TensorNumbers:
    """Returns scale, zero point and range. Raises torch's error if the range is empty or the zero point outside it."""
    quant_min, quant_max, zero_point = as_int64(quant_min), as_int64(quant_max), as_int64(zero_point)
    check(quant_min <= quant_max, RANGE)
    check(quant_min <= zero_point <= quant_max, ZERO_POINT)
    return float(scale), zero_point, quant_min, quant_max


def checked_arrays(scale: np.ndarray, zero_point: np.ndarray, quant_min: int, quant_max: int) -> TensorNumbers:
    """Returns the same of one-element arrays. The zero point may be outside the range."""
    quant_min, quant_max = as_int64(quant_min), as_int64(quant_max)
    check(quant_min <= quant_max, RANGE)
    zero = item_as_int(zero_point)  # before the scale
    return item_as_float(scale), zero, quant_min, quant_max


def check_parameters(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int, quant_min: int, quant_max: int
) -> None:
    """Raises torch's error for wrong dtypes, lengths or ranges. Does not check the values of the zero points."""
    check(scale.dtype in (np.float32, BFLOAT16), f"Scale must be Float or BFloat16, found {type_name(scale.dtype)}")
    check(
        zero_point.dtype in (np.int32, np.float32, np.float16),
        f"Zero-point must be Int32, Float or Half, found {type_name(zero_point.dtype)}",
    )
    check_lengths(x, scale, zero_point, axis)
    check(quant_min <= quant_max, RANGE)


def check_lengths(x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int) -> None:
    """Raises torch's error unless there is one scale and one zero point per index on `axis`."""
    check(scale.ndim == 1, "scale should be a 1-D tensor")
    check(zero_point.ndim == 1, "zero point should be a 1-D tensor")
    check(scale.size == zero_point.size, "scale and zero-point need to have the same dimensions")
    check(scale.size == axis_length(x, axis), "dimensions of scale and zero-point are not consistent with input tensor")


def check_zero_points(zero_point: np.ndarray, quant_min: int, quant_max: int) -> None:
    """Raises torch's error if a zero point is outside the range. torch checks only integers."""
    check(
        zero_point.size > 0,
        "min(): Expected reduction dim to be specified for input.numel() == 0. "
        "Specify the reduction dim with the 'dim' argument.",
    )
    check(quant_min <= zero_point.min() and zero_point.max() <= quant_max, ZERO_POINT)


def check_floats(dy: np.ndarray, x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> None:
    """Raises torch's error for other dtypes than floats. torch itself accepts only float32, and bfloat16 data."""
    for name, array in (("dY", dy), ("X", x), ("scale", scale), ("zero_point", zero_point)):
        expect(array.dtype in KERNEL_DTYPES, f"{name}_.scalar_type() == ScalarType::Float")


# --- the fused observer ---------------------------------------------------------------------------

_STATE_NAMES = ("running_min", "running_max", "scale", "zero_point")


def check_observable(x: np.ndarray, running_min: np.ndarray, running_max: np.ndarray, per_row: bool) -> None:
    """Raises torch's error for data or a running range that its observer rejects."""
    if per_row and x.shape[0] > 0 and x.size == 0:
        raise IndexError("aminmax: Expected reduction dim 1 to have non-zero size.")
    check(
        per_row or x.size > 0,
        "aminmax(): cannot compute aminmax over an empty dimension as the operation has no identity.",
    )
    if x.dtype.kind == "c" or x.dtype in (np.uint16, np.uint32, np.uint64):
        raise NotImplementedError(f"\"aminmax_cpu\" not implemented for '{type_name(x.dtype)}'")
    _check_float32(x, running_min, running_max)


def _check_float32(*arrays: np.ndarray) -> None:
    for array in arrays:
        check(array.dtype == np.float32, f"expected scalar type Float but found {type_name(array.dtype)}")


def check_quantizable(
    x: np.ndarray, state: tuple[np.ndarray, ...], quant_min: int, quant_max: int, axis: int | None
) -> None:
    """Raises torch's error for state that does not fit. `axis` is None for one range per tensor."""
    running_min, running_max, scale, zero_point = state
    if axis is not None:
        _check_float32(running_min, running_max)
        if running_min.size:
            # torch writes the parameters one by one and reports the first index that is missing.
            last = min(running_min.size - 1, *(len(np.atleast_1d(a)) for a in (scale, zero_point)))
            select(scale, last), select(zero_point, last)
        check_parameters(x, scale, zero_point, axis, quant_min, quant_max)
        kernel_dtype(x, CHANNEL_KERNEL)
        return
    item(running_min), item(running_max)
    select(scale, 0), select(zero_point, 0)
    check(quant_min <= quant_max, RANGE)
    item(zero_point), item(scale)
    kernel_dtype(x, TENSOR_KERNEL)


def check_are_arrays(*state: object) -> None:
    """Raises TypeError unless all of the state is arrays."""
    for name, array in zip(_STATE_NAMES, state, strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"`{name}` is updated in place and must be an array, got {type(array).__name__}")


def check_writeable(*state: np.ndarray) -> None:
    """Raises RuntimeError unless all of the state can be written."""
    for name, array in zip(_STATE_NAMES, state, strict=True):
        check(array.flags.writeable, f"`{name}` is updated in place and must be writeable")


def check_empty(*state: np.ndarray) -> None:
    """Raises RuntimeError unless all of the state can be resized.

    torch resizes per-row state that starts empty. Resizing an array that has elements could leave its views without
    memory, so either all of the state must be empty or none of it.
    """
    for name, array in zip(_STATE_NAMES, state, strict=True):
        check(
            array.size == 0 and array.flags.owndata,
            f"`running_min` is empty, so the state is resized to one entry per row, but `{name}` of shape "
            f"{array.shape} cannot be resized. Start with empty arrays, or with one entry per row",
        )
