"""Rounding of learned zero points to integers, by fakequant's rule and by torch's."""

import numpy as np
from numpy.typing import ArrayLike

from fakequant._backends.checks import refuse_nan_zero_point
from fakequant.spec import QuantSpec


def round_forward(zero_point: ArrayLike, spec: QuantSpec) -> np.ndarray:
    """Returns `clamp(rint(zero_point), qmin, qmax)` as int32. Raises ValueError for NaN."""
    z = np.asarray(zero_point)
    if np.isnan(z).any():
        refuse_nan_zero_point()
    return np.clip(np.rint(z.astype(np.float64)), spec.qmin, spec.qmax).astype(np.int32)


def round_backward(zero_point: ArrayLike, spec: QuantSpec) -> np.ndarray:
    """Returns the zero point of the backward. torch's per-tensor rule truncates `zero_point + 0.5` there."""
    rounded = round_forward(zero_point, spec)
    if spec.numerics == "torch" and spec.axis is None and not spec.symmetric:
        shifted = (np.asarray(zero_point, np.float32) + np.float32(0.5)).astype(np.float64)
        return np.trunc(np.clip(shifted, spec.qmin, spec.qmax)).astype(np.int32)
    return rounded


def torch_forward(zero_point: float, quant_min: int, quant_max: int) -> int:
    """Returns the zero point of torch's learnable per-tensor forward: rounded, then clamped in float32."""
    return _clamped(np.rint(np.float32(zero_point)), quant_min, quant_max)


def torch_backward(zero_point: float, quant_min: int, quant_max: int) -> int:
    """Returns the zero point of torch's per-tensor backward: `zero_point + 0.5`, clamped in float32 and truncated."""
    return _clamped(np.float32(zero_point) + np.float32(0.5), quant_min, quant_max)


def _clamped(z: np.float32, quant_min: int, quant_max: int) -> int:
    """Clamps in float32, then converts as x86 does: values that do not fit int64 become the smallest int64."""
    # Not np.clip, which rounds the bounds to double first. NaN passes both comparisons.
    low, high = np.array([quant_min, quant_max], np.int64).astype(np.float32)
    z = low if z < low else z
    z = high if high < z else z
    return int(z) if -(2.0**63) <= z < 2.0**63 else -(2**63)
