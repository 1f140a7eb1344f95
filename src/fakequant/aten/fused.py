"""torch's fused observer and fake-quantize: moving average, parameters, forward in one call.

    running = value where running is infinite, else running + averaging_const * (value - running)

The parameters come from another rule than torch's observers use, see
`fakequant.reference.choose_qparams_fused`. NaN and infinities enter the running range and stay.
"""


import numpy as np

from fakequant import native
from fakequant.aten import checks
from fakequant.aten.forward import OutputAndMask, unchanged
from fakequant.layout import channel_shape, dense
from fakequant.native import _native


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
    """Updates `running_min`, `running_max`, `scale` and `zero_point` in place and fake-quantizes.

    `observer_on` 0 leaves the running range as it is; `fake_quant_on` 0 returns a copy of the input
    and leaves scale and zero point as they are.

    >>> on, lo, hi = np.int64([1]), np.float32([np.inf]), np.float32([-np.inf])
    >>> s, z = np.float32([1]), np.int32([0])
    >>> x = np.float32([-1.0, 0.3, 1.55])
    >>> y = fused_moving_avg_obs_fake_quant(x, on, on, lo, hi, s, z, 0.01, 0, 255, -1)
    >>> s, z
    (array([0.01], dtype=float32), array([100], dtype=int32))
    """
    return fused_moving_avg_obs_fq_helper(
        input, observer_on, fake_quant_on, running_min, running_max, scale, zero_point, averaging_const,
        quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant,
    ).output  # fmt: skip


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
) -> OutputAndMask:
    """`fused_moving_avg_obs_fake_quant` together with its mask.

    >>> on, lo, hi = np.int64([1]), np.float32([np.inf]), np.float32([-np.inf])
    >>> s, z = np.float32([1]), np.int32([0])
    >>> fused_moving_avg_obs_fq_helper(np.float32([1.0]), on, on, lo, hi, s, z, 0.01, 0, 255, -1).mask
    array([ True])
    """
    x = np.asarray(input)
    quant_min, quant_max, ch_axis = map(checks.as_int64, (quant_min, quant_max, ch_axis))
    if x.size == 0:
        return unchanged(x)
    checks.check(
        ch_axis < x.ndim, "Error in fused_moving_avg_obs_fake_quant_cpu: ch_axis must be < self.dim()"
    )
    observe = checks.item_as_int(observer_on) != 0
    if per_row_fake_quant:
        checks.check(
            ch_axis == 0,
            "Per-channel FakeQuant in fused_moving_avg_obs_fake_quant is only supported on axis == 0",
        )
        if running_min.size == 0:
            _start_per_row(x.shape[0], running_min, running_max, scale, zero_point)
    quantize = checks.item_as_int(fake_quant_on) != 0
    if quantize:
        checks.check(quant_min <= quant_max, checks.RANGE)
    if observe and x.dtype != np.float32:
        raise RuntimeError(f"expected scalar type Float but found {checks.type_name(x.dtype)}")
    dtype = checks.kernel_dtype(x, "fake_quantize_tensor_cachemask_kernel_type_handling")

    rows = x.shape[0] if per_row_fake_quant else 1
    if per_row_fake_quant:
        checks.check(
            running_min.size == rows, "dimensions of scale and zero-point are not consistent with input tensor"
        )
    d = dense(x)
    shape = channel_shape(d.elements.shape, d.axis(0)) if per_row_fake_quant else (1, 1, 1, x.size)
    y, mask = np.empty(d.elements.shape, x.dtype), np.empty(d.elements.shape, np.bool_)
    state = [_Writable(a, t) for a, t in zip((running_min, running_max, scale, zero_point), "fffi", strict=True)]
    _native.observe_fake_quantize(
        d.elements, y, mask, native.MASK_BYTES, dtype, shape,
        native.TORCH_CHANNEL if per_row_fake_quant else native.TORCH_TENSOR, quant_min, quant_max,
        native.RANGE_TORCH_FUSED, observe, quantize, bool(symmetric_quant), float(averaging_const), 0.0,
        *(s.array for s in state),
    )  # fmt: skip
    for s in state:
        s.write_back()
    return OutputAndMask(d.restore(y), d.restore(mask))


def _start_per_row(rows: int, running_min, running_max, scale, zero_point) -> None:
    """torch lets per-row state start empty and resizes it at the first call."""
    for array in (running_min, running_max, scale, zero_point):
        array.resize(rows, refcheck=False)
    running_min.fill(np.inf)
    running_max.fill(-np.inf)


class _Writable:
    """A state array in the kernels' dtype, written back if that took a copy."""

    def __init__(self, original: np.ndarray, kind: str) -> None:
        self.original = original
        self.array = np.asarray(original, np.float32 if kind == "f" else np.int32, order="C")

    def write_back(self) -> None:
        if self.array is not self.original:
            self.original[...] = self.array
