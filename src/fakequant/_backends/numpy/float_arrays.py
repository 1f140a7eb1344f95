"""The float dtypes that the kernels accept, and the conversion of data to arrays."""

from functools import cache

import ml_dtypes
import numpy as np

from fakequant import _kernels
from fakequant._backends.checks import refuse_data_dtype
from fakequant._backends.kernel_enums import DTYPES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

KERNEL_DTYPES = {BFLOAT16 if name == "bfloat16" else np.dtype(name): number for name, number in DTYPES.items()}


def as_float_array(x: object, name: str = "x") -> tuple[np.ndarray, int]:
    """Returns `x` as an array and the kernels' number for its dtype.

    Raises TypeError for other dtypes: integers are not converted.

    >>> as_float_array(np.float32([1, 2]))[1] == _kernels.F32
    True
    """
    array = x if type(x) is np.ndarray else np.asarray(x)
    dtype = KERNEL_DTYPES.get(array.dtype)
    if dtype is None:
        refuse_data_dtype(name, str(array.dtype), "array")
    return array, dtype


@cache
def dtype_name(dtype: np.dtype) -> str:
    """Returns the name of a dtype. NumPy computes it anew every time, which takes longer than a small kernel."""
    return str(dtype)


def parameter_dtype(dtype: int) -> np.dtype:
    """Returns the dtype of ranges for data of the kernel dtype `dtype`: float64 for float64, otherwise float32."""
    return np.dtype(np.float64) if dtype == _kernels.F64 else np.dtype(np.float32)
