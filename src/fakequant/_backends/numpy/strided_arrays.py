"""The kernels on arrays of any memory layout, for the functions with torch's names.

Results have the strides that torch's results have.
"""

from typing import NamedTuple

import numpy as np

from fakequant import _kernels, _native
from fakequant._backends.blocks import channel_shape, memory_order, order_of_result
from fakequant._backends.results import OutputAndMask

# --- layout ---------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """An array as C-contiguous elements, with its axes in the order of the result's memory."""

    elements: np.ndarray
    order: tuple[int, ...] | None = None  # None for C order
    # The strides of the result, counted in elements. Only set if there are axes of length 1: their strides mean
    # nothing, but torch copies them.
    steps: tuple[int, ...] | None = None

    def restore(self, result: np.ndarray) -> np.ndarray:
        """Returns `result`, which has the axes of `elements`, with the axes of the original array."""
        if self.order is not None:
            result = result.transpose(np.argsort(self.order))
        if self.steps is not None:
            strides = tuple(step * result.itemsize for step in self.steps)
            if strides != result.strides:
                result = np.lib.stride_tricks.as_strided(result, strides=strides)
        return result

    def axis(self, axis: int) -> int:
        """Returns the position in `elements` of `axis` of the original array."""
        return axis if self.order is None else self.order.index(axis)


def placed(x: np.ndarray) -> Placed:
    """Returns `x` with the layout of a result: the strides of `x` if it is dense, otherwise its order of axes.

    >>> placed(np.zeros((2, 4, 3)).transpose(0, 2, 1)[:, :, ::2]).order
    (0, 2, 1)
    """
    if x.ndim <= 1 and x.strides in ((), (x.itemsize,)):
        return Placed(x)  # the most common small case
    steps = tuple(s // x.itemsize for s in x.strides) if 1 in x.shape else None
    if x.flags.c_contiguous:
        return Placed(x, None, steps)
    order = memory_order(x.shape, x.strides) or tuple(range(x.ndim))
    elements = x.transpose(order)
    if elements.flags.c_contiguous:
        return Placed(elements, order, steps)
    return _in_order(x, order_of_result(x.shape, x.strides))


def placed_pair(a: np.ndarray, b: np.ndarray) -> tuple[Placed, np.ndarray]:
    """Returns two arrays of one shape with the layout of their product.

    That is the layout they share; otherwise `a` decides before `b`. torch converts `b` to the dtype of `a` first, so
    the layout after that conversion counts.
    """
    converted = placed(b)
    b = converted.restore(converted.elements)
    if a.flags.c_contiguous and b.flags.c_contiguous:
        return Placed(a), b
    channels_last = (0, 2, 3, 1)
    if a.ndim == 4 and all(x.transpose(channels_last).flags.c_contiguous for x in (a, b)):
        return _in_order(a, channels_last), b.transpose(channels_last)
    place = placed(a)
    same_steps = all(s * b.itemsize == t * a.itemsize for s, t in zip(a.strides, b.strides, strict=True))
    if not (same_steps and np.may_share_memory(place.elements, a)):
        place = _in_order(a, order_of_result(a.shape, a.strides, b.strides))
    return place, np.ascontiguousarray(b.transpose(place.order or range(b.ndim)))


def _in_order(x: np.ndarray, order: tuple[int, ...]) -> Placed:
    # Not ascontiguousarray, which gives a 0-d array a dimension.
    return Placed(np.asarray(x.transpose(order), order="C"), order)


# --- kernels --------------------------------------------------------------------------------------


def per_tensor(
    x: np.ndarray, dtype: int, scale: float, zero_point: int, qmin: int, qmax: int
) -> OutputAndMask[np.ndarray]:
    """Runs the per-tensor kernel on checked arguments. Returns the result and its mask.

    Args:
        x: The data.
        dtype: The kernels' number for its dtype.
        scale: The scale.
        zero_point: The zero point.
        qmin: The lowest code.
        qmax: The highest code.
    """
    p = placed(x)
    y = np.empty(p.elements.shape, x.dtype)
    mask = np.empty(p.elements.shape, np.bool_)
    _native.fake_quantize_scalar(
        p.elements,
        y,
        mask,
        _kernels.MASK_BYTES,
        dtype,
        x.size,
        _kernels.TORCH_TENSOR,
        scale,
        zero_point,
        qmin,
        qmax,
    )
    return OutputAndMask(p.restore(y), p.restore(mask))


def per_tensor_value(x: np.ndarray, dtype: int, scale: float, zero_point: int, qmin: int, qmax: int) -> np.ndarray:
    """Runs the per-tensor kernel on checked arguments, without a mask. See `per_tensor` for the arguments."""
    p = placed(x)
    y = np.empty(p.elements.shape, x.dtype)
    _native.fake_quantize_scalar(
        p.elements,
        y,
        None,
        _kernels.MASK_NONE,
        dtype,
        x.size,
        _kernels.TORCH_TENSOR,
        scale,
        zero_point,
        qmin,
        qmax,
    )
    return p.restore(y)


def per_channel(
    x: np.ndarray, dtype: int, scale: np.ndarray, zero_point: np.ndarray, axis: int, qmin: int, qmax: int
) -> OutputAndMask[np.ndarray]:
    """Runs the per-channel kernel on checked arguments. Returns the result and its mask.

    Args:
        x: The data.
        dtype: The kernels' number for its dtype.
        scale: One scale per channel.
        zero_point: One zero point per channel.
        axis: The axis of the channels.
        qmin: The lowest code.
        qmax: The highest code.
    """
    p = placed(x)
    y = np.empty(p.elements.shape, x.dtype)
    mask = np.empty(p.elements.shape, np.bool_)
    if zero_point.dtype == np.int32:
        numerics, kind = _kernels.TORCH_CHANNEL, _kernels.ZERO_I32
    else:
        half = zero_point.dtype == np.float16
        numerics, kind = (_kernels.TORCH_CHANNEL_HALF if half else _kernels.TORCH_CHANNEL_FLOAT), _kernels.ZERO_F32
        zero_point = zero_point.astype(np.float32)
    _native.fake_quantize(
        p.elements, y, mask, _kernels.MASK_BYTES, dtype, channel_shape(p.elements.shape, p.axis(axis)), numerics,
        np.asarray(scale, np.float32, order="C"), False, np.asarray(zero_point, order="C"), kind, qmin, qmax,
    )  # fmt: skip
    return OutputAndMask(p.restore(y), p.restore(mask))


def unchanged(x: np.ndarray) -> OutputAndMask[np.ndarray]:
    """Returns a copy and a mask of ones, the result of disabled fake quantization."""
    p = placed(x)
    return OutputAndMask(p.restore(p.elements.copy()), p.restore(np.ones(p.elements.shape, np.bool_)))


def masked_gradient(grad: np.ndarray, mask: np.ndarray, dtype: int | None) -> np.ndarray:
    """Returns `grad * mask`. `dtype` is the kernels' number, or None to compute in NumPy for lack of a kernel."""
    p, mask = placed_pair(grad, mask)
    if dtype is None:
        return p.restore(np.asarray(p.elements * mask))
    dx = np.empty(p.elements.shape, grad.dtype)
    _native.mask_backward(p.elements, mask, _kernels.MASK_BYTES, dx, dtype, grad.size, True)
    return p.restore(dx)
