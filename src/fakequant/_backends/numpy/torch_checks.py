"""Argument checks in torch's order, with torch's exception types and messages.

Programs match on these messages, so they have to be the same. They call an array a `Tensor`.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import NoReturn

import numpy as np

from fakequant._backends.argument_types import Unchecked
from fakequant._backends.numpy.float_arrays import BFLOAT16, KERNEL_DTYPES

# The spaces are in torch's message: its source has a line continuation inside a string literal.
RANGE = "`quant_min` should be less than or         equal to `quant_max`."
ZERO_POINT = "`zero_point` must be between `quant_min` and `quant_max`."

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


def check(condition: bool | np.bool_, message: str) -> None:
    """Raises RuntimeError with `message` unless `condition`."""
    if not condition:
        raise RuntimeError(message)


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
    wide = _real(value, "float")
    if np.isfinite(wide) and abs(wide) > float(np.finfo(np.float32).max):
        raise RuntimeError("value cannot be converted to type float without overflow")
    return float(np.float32(wide))


def as_float(value: Unchecked) -> float:
    """Returns a Python or NumPy number, or a 0-d array, as a float."""
    return _real(value.reshape(-1)[0], "double") if isinstance(value, np.ndarray) else float(value)


def _real(value: np.generic, kind: str) -> float:
    if value.dtype.kind != "c":
        return float(value)
    if value.imag != 0:
        raise RuntimeError(f"value cannot be converted to type {kind} without overflow")
    return float(value.real)


# --- argument types -------------------------------------------------------------------------------


def as_tensor(value: object) -> Unchecked:
    """Returns a NumPy scalar as a 0-d array, and any other value unchanged."""
    return np.asarray(value) if isinstance(value, np.generic) else value


_USUAL = {"float": (float, int), "int": (int,), "bool": (bool,), "Tensor": (np.ndarray,)}


def _matches(kind: str, value: object) -> bool:
    if type(value) in _USUAL[kind]:
        return True  # isinstance with the abstract number types below is slow
    if kind == "Tensor":
        return isinstance(value, np.ndarray)
    if kind == "float":
        return isinstance(value, Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
    if kind == "bool":
        return False
    return (isinstance(value, Integral) and not isinstance(value, (bool, np.bool_))) or (
        isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu"
    )


def _received(value: object) -> str:
    if isinstance(value, np.ndarray):
        return "Tensor"
    name = type(value).__name__
    return f"numpy.{name}" if isinstance(value, np.generic) else name


def _marked(kind: str, received: str) -> str:
    """Marks a type name that differs from the expected one. Like torch, also if the value would be accepted."""
    return received if received == kind or (kind, received) == ("float", "int") else f"!{received}!"


Signature = Sequence[tuple[str, str]]


def choose_signature(function: str, values: Sequence[object], signatures: Sequence[Signature]) -> int:
    """Returns the index of the first signature that fits `values`. Raises torch's TypeError if none does."""
    for index, signature in enumerate(signatures):
        if all(_matches(kind, value) for (kind, _), value in zip(signature, values, strict=True)):
            return index
    if len(signatures) == 1:
        _one_signature_error(function, values, signatures[0])
    lines = []
    for signature in signatures:
        lines.append(f" * ({', '.join(f'{kind} {name}' for kind, name in signature)})\n")
        marked = (_marked(kind, _received(v)) for (kind, _), v in zip(signature, values, strict=True))
        lines.append(f"      didn't match because some of the arguments have invalid types: ({', '.join(marked)})\n")
    raise TypeError(
        f"{function}() received an invalid combination of arguments - got "
        f"({', '.join(map(_received, values))}), but expected one of:\n{''.join(lines)}"
    )


def check_types(function: str, values: Sequence[object], signature: Signature) -> None:
    """Raises torch's TypeError if `values` do not fit the only signature of `function`."""
    choose_signature(function, values, (signature,))


def _one_signature_error(function: str, values: Sequence[object], signature: Signature) -> NoReturn:
    for position, ((kind, name), value) in enumerate(zip(signature, values, strict=True), start=1):
        if not _matches(kind, value):
            raise TypeError(
                f"{function}(): argument '{name}' (position {position}) must be {kind}, not {_received(value)}"
            )
    raise AssertionError("the arguments fit the signature")


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


def as_int64(value: Unchecked) -> int:
    """Returns a Python or NumPy integer as an int. Raises ValueError if it does not fit int64."""
    integer = int(value)
    if not -(2**63) <= integer < 2**63:
        raise ValueError("Overflow when unpacking long long")
    return integer
