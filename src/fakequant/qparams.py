"""From data to a range, and from a range to scale and zero point."""

from math import prod
from typing import Any, Generic, NamedTuple

import numpy as np

from fakequant._backends import Array, is_tensor, own_on_tensors
from fakequant._backends.blocks import blocks_of
from fakequant._backends.numpy.array_grid import INF_IN_F32, ZERO_IN_F32, check_spec
from fakequant._backends.numpy.float_arrays import as_float_array, parameter_dtype
from fakequant._kernels import _native
from fakequant.spec import QuantSpec

EPS = float(np.finfo(np.float32).eps)


class QParams(NamedTuple, Generic[Array]):
    """Scale (float32) and zero point (int32) of every block."""

    scale: Array
    zero_point: Array


class Range(NamedTuple, Generic[Array]):
    """The smallest and largest finite value of every block, and how many values were not finite."""

    min: Array
    max: Array
    nan: Array
    posinf: Array
    neginf: Array

    @property
    def absmax(self) -> Array:
        """The largest magnitude of every block."""
        return self.max.clip(-self.min)


def min_max(x: Array, spec: QuantSpec | None = None) -> Range[Array]:
    """The range of `x`, per block of `spec`. Values that are not finite are left out and counted.

    A block without a finite value has min = +inf and max = -inf.

    >>> r = min_max(np.float32([[3, -1, np.nan], [2, np.inf, 5]]), QuantSpec(axis=0))
    >>> r.min, r.max, r.nan, r.posinf
    (array([-1.,  2.], dtype=float32), array([3., 5.], dtype=float32), array([1, 0]), array([0, 1]))
    """
    if is_tensor(x):
        return own_on_tensors().min_max(x, spec)
    x, dtype = as_float_array(x)
    spec = QuantSpec() if spec is None else spec
    check_spec(spec, "x, spec")
    blocks = blocks_of(x.shape, spec)
    count = prod(blocks.parameters)
    limits = np.empty((2, count), np.float64)
    counts = np.empty((3, count), np.int64)
    _native.min_max(np.asarray(x, order="C"), dtype, blocks.kernel, limits[0], limits[1], counts)
    lo, hi = limits.astype(parameter_dtype(dtype)).reshape(2, *blocks.parameters)
    return Range(lo, hi, *(c.reshape(blocks.parameters) for c in counts))


def check_eps(eps: float) -> None:
    """The smallest scale has to be one: finite and positive, in float32."""
    if not ZERO_IN_F32 < eps < INF_IN_F32:
        raise ValueError(f"`eps` must be finite and greater than 0 in float32, got {eps}.")


def choose_qparams(lo: Any, hi: Any, spec: QuantSpec, *, eps: float = EPS) -> QParams:
    """Scale and zero point for values between `lo` and `hi`, one pair per entry.

        symmetric   s = max(absmax / ((qmax - qmin) / 2), eps)      z = 0
        affine      s = max((hi - lo) / (qmax - qmin), eps)         z = clamp(qmin - rint(lo / s), qmin, qmax)
                    after extending the range to hold 0

    All in float32, as torch's observers compute it.

    >>> choose_qparams(-1.0, 3.0, QuantSpec(signed=False, symmetric=False))
    QParams(scale=array(0.01568628, dtype=float32), zero_point=array(64, dtype=int32))
    """
    check_spec(spec, "lo, hi, spec")
    if is_tensor(lo) or is_tensor(hi):
        return own_on_tensors().choose_qparams(lo, hi, spec, eps=eps)
    shape = np.broadcast_shapes(np.shape(lo), np.shape(hi))
    if np.iscomplexobj(lo) or np.iscomplexobj(hi):
        raise TypeError("`lo` and `hi` must be real numbers, got complex ones.")
    low, high = (np.array(np.broadcast_to(v, shape), np.float32, order="C") for v in (lo, hi))
    ordered = (low <= high) & np.isfinite(low) & np.isfinite(high)
    if not ordered.all():
        bad = int(np.argmin(ordered))
        raise ValueError(
            f"`lo` and `hi` must be finite with lo <= hi, got lo={low.flat[bad]}, hi={high.flat[bad]}"
            f"{f' at index {bad}' if low.size > 1 else ''}.\n"
            "An observer that has seen nothing finite has no range: observe data first."
        )
    check_eps(eps)
    scale, zero_point = np.empty(shape, np.float32), np.empty(shape, np.int32)
    _native.choose_qparams(low, high, low.size, spec.qmin, spec.qmax, spec.symmetric, float(eps), scale, zero_point)
    return QParams(scale, zero_point)
