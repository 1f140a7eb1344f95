"""The shared part of all forward functions: layout in, kernel, layout out."""

from typing import NamedTuple

import numpy as np

from fakequant import native
from fakequant.layout import channel_shape, dense
from fakequant.native import _native


class OutputAndMask(NamedTuple):
    """The fake-quantized values, and which elements were inside the range."""

    output: np.ndarray
    mask: np.ndarray


def per_tensor(x: np.ndarray, dtype: int, scale: float, zero_point: int, qmin: int, qmax: int) -> OutputAndMask:
    d = dense(x)
    y = np.empty(d.elements.shape, x.dtype)
    mask = np.empty(d.elements.shape, np.bool_)
    _native.fake_quantize_scalar(
        d.elements, y, mask, native.MASK_BYTES, dtype, x.size, native.TORCH_TENSOR, scale, zero_point, qmin, qmax, False
    )
    return OutputAndMask(d.restore(y), d.restore(mask))


def per_tensor_value(x: np.ndarray, dtype: int, scale: float, zero_point: int, qmin: int, qmax: int) -> np.ndarray:
    d = dense(x)
    y = np.empty(d.elements.shape, x.dtype)
    _native.fake_quantize_scalar(
        d.elements, y, None, native.MASK_NONE, dtype, x.size, native.TORCH_TENSOR, scale, zero_point, qmin, qmax, False
    )
    return d.restore(y)


def per_channel(
    x: np.ndarray, dtype: int, scale: np.ndarray, zero_point: np.ndarray, axis: int, qmin: int, qmax: int
) -> OutputAndMask:
    d = dense(x)
    y = np.empty(d.elements.shape, x.dtype)
    mask = np.empty(d.elements.shape, np.bool_)
    if zero_point.dtype == np.int32:
        numerics, kind = native.TORCH_CHANNEL, native.ZERO_I32
    else:
        half = zero_point.dtype == np.float16
        numerics, kind = (native.TORCH_CHANNEL_HALF if half else native.TORCH_CHANNEL_FLOAT), native.ZERO_F32
        zero_point = zero_point.astype(np.float32)
    _native.fake_quantize(
        d.elements, y, mask, native.MASK_BYTES, dtype, channel_shape(d.elements.shape, d.axis(axis)), numerics,
        np.asarray(scale, np.float32, order="C"), False, np.asarray(zero_point, order="C"), kind, qmin, qmax, False,
    )  # fmt: skip
    return OutputAndMask(d.restore(y), d.restore(mask))


def unchanged(x: np.ndarray) -> OutputAndMask:
    """A copy and a mask of ones: what a switched-off fake-quantize returns."""
    d = dense(x)
    return OutputAndMask(d.restore(d.elements.copy()), d.restore(np.ones(d.elements.shape, np.bool_)))


def masked_gradient(grad: np.ndarray, mask: np.ndarray, dtype: int) -> np.ndarray:
    """`grad * mask`, with the strides of `grad`."""
    d = dense(grad)
    order = d.order if d.order is not None else range(grad.ndim)
    mask = np.asarray(mask.transpose(tuple(order)), order="C")
    dx = np.empty(d.elements.shape, grad.dtype)
    _native.mask_backward(d.elements, mask, native.MASK_BYTES, dx, dtype, grad.size, True)
    return d.restore(dx)
