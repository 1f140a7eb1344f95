"""Scale, zero point and spec, checked and in the form the kernels take."""

from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from fakequant import _kernels
from fakequant._backends.blocks import Blocks, KernelShape, blocks_of
from fakequant._backends.numpy.float_arrays import parameter_dtype
from fakequant._kernels import _native
from fakequant.spec import QuantSpec


class Grid(NamedTuple):
    """One scale and zero point per block."""

    shape: KernelShape
    parameters: tuple[int, ...]
    numerics: int
    scale: np.ndarray
    scale_is_f64: bool
    zero_point: np.ndarray | None
    zero_kind: int
    qmin: int
    qmax: int


def kernel_numerics(spec: QuantSpec) -> int:
    """The kernels' number for the spec's numerics. torch has two rules, by granularity."""
    if spec.numerics == "onnx":
        return _kernels.ONNX
    if spec.numerics == "half_away":
        return _kernels.HALF_AWAY
    return _kernels.TORCH_TENSOR if spec.axis is None else _kernels.TORCH_CHANNEL


def scale_dtype(dtype: int, spec: QuantSpec) -> np.dtype:
    """float64 for float64 data, else float32; torch's rules know float32 scales only."""
    return np.dtype(np.float32) if spec.numerics == "torch" else parameter_dtype(dtype)


def resolve(shape: tuple[int, ...], dtype: int, scale: ArrayLike, zero_point: ArrayLike, spec: QuantSpec) -> Grid:
    """Checks `scale` and `zero_point` against an array of `shape` and `spec`."""
    check_spec(spec)
    blocks = blocks_of(shape, spec)
    if spec.axis is None and isinstance(scale, float) and type(zero_point) is int:
        check_scalars(scale, zero_point, dtype, spec)
        scales = np.array(scale, scale_dtype(dtype, spec))
        return Grid(blocks.kernel, (), kernel_numerics(spec), scales, scales.dtype.itemsize == 8,
                    np.array(zero_point, np.int32), _kernels.ZERO_I32, spec.qmin, spec.qmax)  # fmt: skip
    scales = _as_parameters("scale", scale, blocks, shape, spec, scale_dtype(dtype, spec))
    check_scale(scales)
    zeros, kind = _as_zero_points(zero_point, blocks, shape, spec)
    return Grid(
        blocks.kernel,
        blocks.parameters,
        kernel_numerics(spec),
        scales,
        scales.dtype == np.float64,
        zeros,
        kind,
        spec.qmin,
        spec.qmax,
    )


def check_spec(spec: object, order: str = "the array, then scale, zero_point, spec") -> None:
    """Arguments in the wrong order show here."""
    if not isinstance(spec, QuantSpec):
        raise TypeError(
            f"`spec` must be a QuantSpec, got {spec!r}.\nThe order of arguments is {order}.\n"
            "Use e.g. QuantSpec(bits=8) or fakequant.presets.uint8()."
        )


# What rounds to 0 or to infinity in float32 (ties go to the even neighbour).
ZERO_IN_F32 = 2.0**-150
INF_IN_F32 = 2.0**128 - 2.0**103


def check_scalars(scale: float, zero_point: int, dtype: int, spec: QuantSpec) -> None:
    """The checks of `resolve` for one scale and zero point given as numbers."""
    in_f64 = scale_dtype(dtype, spec) == np.float64
    low, high = (0.0, np.inf) if in_f64 else (ZERO_IN_F32, INF_IN_F32)
    if not low < scale < high:
        with np.errstate(over="ignore"):
            check_scale(np.asarray(scale, scale_dtype(dtype, spec)))
    if zero_point != 0 and (spec.symmetric or not spec.qmin <= zero_point <= spec.qmax):
        refuse_zero_point(zero_point, spec)


def check_scale(scales: np.ndarray) -> None:
    """Every scale must be finite and positive."""
    bad = _native.first_invalid_scale(scales, scales.dtype == np.float64, scales.size)
    if bad >= 0:
        index = tuple(int(i) for i in np.unravel_index(bad, scales.shape or (1,)))
        where = "" if scales.size == 1 else f" at index {index}"
        raise ValueError(
            f"`scale` must be finite and greater than 0 in {scales.dtype}, got {scales.reshape(-1)[bad]}{where}.\n"
            "Observe finite data first: `choose_qparams` never returns such a scale."
        )


def _as_parameters(
    name: str, value: ArrayLike, blocks: Blocks, shape: tuple[int, ...], spec: QuantSpec, dtype: np.dtype
) -> np.ndarray:
    array = np.asarray(value)
    wanted = blocks.parameters
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"`{name}` must be a real number or an array of them, got {array.dtype}.")
    if not _shape_fits(array.shape, wanted, spec):
        raise ValueError(
            f"`{name}` must have shape {wanted} for an array of shape {shape} quantized per {spec.granularity}"
            f"{f' on axis {spec.axis}' if spec.axis is not None else ''}, got shape {array.shape}."
        )
    with np.errstate(over="ignore"):  # a scale that overflows is refused by `check_scale`
        return np.asarray(array, dtype=dtype, order="C")


def _shape_fits(shape: tuple[int, ...], wanted: tuple[int, ...], spec: QuantSpec) -> bool:
    if spec.axis is None:
        return shape in ((), (1,))
    if spec.granularity == "token":
        axis = spec.axis % len(wanted)
        return shape in (wanted, wanted[:axis] + wanted[axis + 1 :])
    return shape == wanted


def _as_zero_points(
    value: ArrayLike, blocks: Blocks, shape: tuple[int, ...], spec: QuantSpec
) -> tuple[np.ndarray | None, int]:
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"`zero_point` must hold integers, got {array.dtype}.\n"
            "Round a learned zero point first: `round_zero_point(zero_point, spec)`."
        )
    if array.ndim == 0 and array == 0 and spec.qmin <= 0:
        return None, _kernels.ZERO_NONE
    if array.ndim == 0:
        array = np.full(blocks.parameters, array)
    if not _shape_fits(array.shape, blocks.parameters, spec):
        raise ValueError(
            f"`zero_point` must be an int or have shape {blocks.parameters} for an array of shape {shape} "
            f"quantized per {spec.granularity}, got shape {array.shape}."
        )
    low, high = (0, 0) if spec.symmetric else (spec.qmin, spec.qmax)
    if array.size and (array.min() < low or array.max() > high):
        refuse_zero_point(int(array[(array < low) | (array > high)].flat[0]), spec)
    return np.asarray(array, dtype=np.int32, order="C"), _kernels.ZERO_I32


def refuse_zero_point(bad: int, spec: QuantSpec) -> NoReturn:
    """The error for a zero point that the spec does not allow."""
    raise ValueError(
        f"`zero_point` must be 0 for a symmetric spec, got {bad}.\nUse QuantSpec(symmetric=False) for other values."
        if spec.symmetric
        else f"`zero_point` must be between {spec.qmin} and {spec.qmax} (the spec's range), got {bad}."
    )
