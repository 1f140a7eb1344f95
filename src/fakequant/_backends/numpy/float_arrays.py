"""What the functions accept as data: float arrays, as the kernels know them."""

import ml_dtypes
import numpy as np

from fakequant import _kernels

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

KERNEL_DTYPES: dict[np.dtype, int] = {
    np.dtype(np.float32): _kernels.F32,
    np.dtype(np.float64): _kernels.F64,
    BFLOAT16: _kernels.BF16,
    np.dtype(np.float16): _kernels.F16,
}


def as_float_array(x: object, name: str = "x") -> tuple[np.ndarray, int]:
    """`x` as an array and the kernels' number for its dtype. Integers are refused, not converted.

    >>> as_float_array(np.float32([1, 2]))[1] == _kernels.F32
    True
    """
    array = x if type(x) is np.ndarray else np.asarray(x)
    dtype = KERNEL_DTYPES.get(array.dtype)
    if dtype is None:
        raise TypeError(
            f"`{name}` must be an array of float32, float64, bfloat16 or float16, got {array.dtype}.\n"
            f"Convert it first, e.g. `{name}.astype(np.float32)`."
        )
    return array, dtype


def parameter_dtype(dtype: int) -> np.dtype:
    """The dtype of scales for data of kernel dtype `dtype`: float64 for float64, else float32."""
    return np.dtype(np.float64) if dtype == _kernels.F64 else np.dtype(np.float32)
