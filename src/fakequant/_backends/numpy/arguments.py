"""Checks data, scale and zero point, and converts them with the spec to the form that the kernels take."""

from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from fakequant import _kernels, _native
from fakequant._backends import checks
from fakequant._backends.blocks import Blocks, KernelShape, blocks_of, group_length, has_short_block
from fakequant._kernels import DTYPES, NUMERICS, has_wide_scale, numerics_name
from fakequant.spec import QuantSpec

# --- data -----------------------------------------------------------------------------------------

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
        checks.refuse_data_dtype(name, str(array.dtype), "array")
    return array, dtype


@cache
def dtype_name(dtype: np.dtype) -> str:
    """Returns the name of a dtype. Cached, because NumPy takes longer to compute it than a small kernel to run."""
    return str(dtype)


def parameter_dtype(dtype: int) -> np.dtype:
    """Returns the dtype of ranges for data of the kernel dtype `dtype`: float64 for float64, otherwise float32."""
    return np.dtype(np.float64) if dtype == _kernels.F64 else np.dtype(np.float32)


# --- scale and zero point -------------------------------------------------------------------------


class Grid(NamedTuple):
    """One scale and zero point per block, in the form and order that the kernels take: `*grid` are arguments."""

    shape: KernelShape
    numerics: int
    scale: np.ndarray
    scale_is_f64: bool
    zero_point: np.ndarray | None
    zero_kind: int
    qmin: int
    qmax: int


def kernel_numerics(spec: QuantSpec) -> int:
    """Returns the kernels' number for the spec's numerics."""
    return NUMERICS[numerics_name(spec)]


def _has_f64_scale(dtype: int, spec: QuantSpec) -> bool:
    return has_wide_scale(dtype == _kernels.F64, spec.numerics)


def scale_dtype(dtype: int, spec: QuantSpec) -> np.dtype:
    """Returns the dtype of scales for data of the kernel dtype `dtype`."""
    return np.dtype(np.float64 if _has_f64_scale(dtype, spec) else np.float32)


def resolve(shape: tuple[int, ...], dtype: int, scale: ArrayLike, zero_point: ArrayLike, spec: QuantSpec) -> Grid:
    """Checks scale and zero point, and returns them in the form that the kernels take.

    `shape` is the shape of the data, `dtype` the kernels' number for its dtype.
    """
    checks.check_spec(spec)
    blocks = blocks_of(shape, spec)
    if spec.axis is None and isinstance(scale, float) and type(zero_point) is int:
        return _resolve_numbers(blocks, dtype, scale, zero_point, spec)
    scales = _scales(scale, blocks, shape, spec, scale_dtype(dtype, spec))
    zeros, kind = _zero_points(zero_point, blocks, shape, spec)
    if has_short_block(shape, spec):
        assert spec.axis is not None
        length = shape[spec.axis]
        repeated = np.repeat(scales, group_length(length, spec), axis=spec.axis)
        scales = np.ascontiguousarray(np.take(repeated, np.arange(length), axis=spec.axis))
        zeros, kind = None, _kernels.ZERO_NONE  # always 0
    return Grid(
        blocks.kernel, kernel_numerics(spec), scales, scales.dtype == np.float64, zeros, kind, spec.qmin, spec.qmax
    )


def _resolve_numbers(blocks: Blocks, dtype: int, scale: float, zero_point: int, spec: QuantSpec) -> Grid:
    """Returns the same as `resolve`, in less time than a small kernel takes."""
    check_numbers(scale, zero_point, dtype, spec)
    is_f64 = _has_f64_scale(dtype, spec)
    is_zero = zero_point == 0 and spec.qmin <= 0
    return Grid(
        blocks.kernel,
        kernel_numerics(spec),
        np.array(scale, np.float64 if is_f64 else np.float32),
        is_f64,
        None if is_zero else np.array(zero_point, np.int32),
        _kernels.ZERO_NONE if is_zero else _kernels.ZERO_I32,
        spec.qmin,
        spec.qmax,
    )


def check_numbers(scale: float, zero_point: int, dtype: int, spec: QuantSpec) -> None:
    """Checks one scale and zero point, like `resolve`, without making arrays of them."""
    checks.check_scale_number(scale, _has_f64_scale(dtype, spec))
    checks.check_zero_point_number(zero_point, spec)


def _scales(value: ArrayLike, blocks: Blocks, shape: tuple[int, ...], spec: QuantSpec, dtype: np.dtype) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        checks.refuse_scale_type("scale", str(array.dtype), "array")
    if array.shape != blocks.parameters:
        checks.check_parameter_shape("scale", array.shape, shape, spec, "array")
    if array.dtype == dtype:
        scales = np.asarray(array, order="C")
    else:
        with np.errstate(over="ignore"):  # a scale that overflows is an error below
            scales = np.asarray(array, dtype=dtype, order="C")
    if spec.ggml_type is not None:
        if not np.isfinite(scales).all():
            checks.refuse_ggml_scale(scales[~np.isfinite(scales)][0])
        return scales
    bad = _native.first_invalid_scale(scales, scales.dtype == np.float64, scales.size)
    if bad >= 0:
        index = tuple(int(i) for i in np.unravel_index(bad, scales.shape or (1,)))
        where = "" if scales.size == 1 else f" at index {index}"
        checks.refuse_scale(scales.reshape(-1)[bad], str(scales.dtype), where)
    return scales


def _zero_points(
    value: ArrayLike, blocks: Blocks, shape: tuple[int, ...], spec: QuantSpec
) -> tuple[np.ndarray | None, int]:
    array = np.asarray(value)
    if spec.has_offset:
        return _offsets(array, blocks, shape, spec), _kernels.ZERO_F32
    if array.dtype.kind not in "iu":
        checks.refuse_zero_point_type(str(array.dtype))
    if array.ndim == 0 and array == 0 and spec.qmin <= 0:
        return None, _kernels.ZERO_NONE
    if array.ndim == 0:
        array = np.full(blocks.parameters, array)
    if array.shape != blocks.parameters:
        checks.check_parameter_shape("zero_point", array.shape, shape, spec, "array")
    low, high = (0, 0) if spec.symmetric else (spec.qmin, spec.qmax)
    if array.size and (array.min() < low or array.max() > high):
        bad = int(array[(array < low) | (array > high)].flat[0])
        checks.refuse_zero_point(bad, spec.qmin, spec.qmax, symmetric=spec.symmetric)
    return np.asarray(array, dtype=np.int32, order="C"), _kernels.ZERO_I32


def _offsets(array: np.ndarray, blocks: Blocks, shape: tuple[int, ...], spec: QuantSpec) -> np.ndarray:
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        checks.refuse_scale_type("zero_point", str(array.dtype), "array")
    if array.ndim == 0:
        array = np.full(blocks.parameters, array)
    if array.shape != blocks.parameters:
        checks.check_parameter_shape("zero_point", array.shape, shape, spec, "array")
    if not np.isfinite(array).all():
        checks.refuse_ggml_scale(array[~np.isfinite(array)][0])
    return np.asarray(array, dtype=np.float32, order="C")
