"""The shared part of all functions with torch's names: layout in, kernel, layout out."""

from typing import NamedTuple

import numpy as np

from fakequant import _kernels, _native
from fakequant._backends.blocks import channel_shape, memory_order, order_of_result
from fakequant._backends.results import OutputAndMask

# --- layout ---------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """An array's elements in C order, with the axes in the order they have in the memory of the result."""

    elements: np.ndarray
    order: tuple[int, ...] | None = None  # None: C order
    # The strides of the result in elements; only needed if there are axes of length 1, whose
    # strides mean nothing but are copied.
    steps: tuple[int, ...] | None = None

    def restore(self, result: np.ndarray) -> np.ndarray:
        """`result`, computed in memory order, with its axes where the caller expects them."""
        if self.order is not None:
            result = result.transpose(np.argsort(self.order))
        if self.steps is not None:
            strides = tuple(step * result.itemsize for step in self.steps)
            if strides != result.strides:
                result = np.lib.stride_tricks.as_strided(result, strides=strides)
        return result

    def axis(self, axis: int) -> int:
        """Where `axis` of the original is in `elements`."""
        return axis if self.order is None else self.order.index(axis)


def placed(x: np.ndarray) -> Placed:
    """`x` with the layout of results: its own strides if it is dense, else none but its order of axes.

    >>> placed(np.zeros((2, 4, 3)).transpose(0, 2, 1)[:, :, ::2]).order
    (0, 2, 1)
    """
    if x.ndim <= 1 and x.strides in ((), (x.itemsize,)):
        return Placed(x)  # nothing to work out for the most common small case
    steps = tuple(s // x.itemsize for s in x.strides) if 1 in x.shape else None
    if x.flags.c_contiguous:
        return Placed(x, None, steps)
    order = memory_order(x.shape, x.strides) or tuple(range(x.ndim))
    elements = x.transpose(order)
    if elements.flags.c_contiguous:
        return Placed(elements, order, steps)
    return _in_order(x, order_of_result(x.shape, x.strides))


def placed_pair(a: np.ndarray, b: np.ndarray) -> tuple[Placed, np.ndarray]:
    """Two arrays of one shape with the layout of their product: what they agree on, else `a` first.

    `b` counts with the layout it has after a conversion to the dtype of `a`.
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
    # asarray: unlike ascontiguousarray it leaves an array without dimensions as it is.
    return Placed(np.asarray(x.transpose(order), order="C"), order)


# --- kernels --------------------------------------------------------------------------------------


def per_tensor(
    x: np.ndarray, dtype: int, scale: float, zero_point: int, qmin: int, qmax: int
) -> OutputAndMask[np.ndarray]:
    """The formula of `per_tensor.py` on checked arguments."""
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
    """The same without a mask."""
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
    """The formula of `per_channel.py` on checked arguments."""
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
    """A copy and a mask of ones: what a switched-off fake-quantize returns."""
    p = placed(x)
    return OutputAndMask(p.restore(p.elements.copy()), p.restore(np.ones(p.elements.shape, np.bool_)))


def masked_gradient(grad: np.ndarray, mask: np.ndarray, dtype: int | None) -> np.ndarray:
    """`grad * mask`. Dtypes that have no kernel (`None`) are left to NumPy."""
    p, mask = placed_pair(grad, mask)
    if dtype is None:
        return p.restore(np.asarray(p.elements * mask))
    dx = np.empty(p.elements.shape, grad.dtype)
    _native.mask_backward(p.elements, mask, _kernels.MASK_BYTES, dx, dtype, grad.size, True)
    return p.restore(dx)
