"""The library's own functions, in which a `QuantSpec` describes the grid.

They take NumPy arrays or torch tensors and return the same type. Results on tensors are differentiable.

With the numerics "onnx" and "half_away", special values follow one rule in every granularity and dtype
(docs/numerics.md): NaN stays NaN, infinities saturate, and both have gradient 0. With "torch" they follow torch's
operators. For arrays, results are in C order, whatever the order of the input.
"""

from typing import Any, overload

import numpy as np  # noqa: F401 - for the examples

from fakequant._backends import backend_of
from fakequant._backends.checks import EPS as _EPS
from fakequant._backends.types import (
    Array,
    DType,
    Gradient as Gradient,
    LearnedGradients as LearnedGradients,
    MaskForm as MaskForm,
    Numbers,
    ObservedFakeQuantize as ObservedFakeQuantize,
    Update as Update,
)
from fakequant.qparams import QParams
from fakequant.spec import QuantSpec


@overload
def fake_quantize(
    x: Array, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, mask: None = None, gradient: Gradient = "clipped"
) -> Array: ...
@overload
def fake_quantize(
    x: Array, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, mask: MaskForm, gradient: Gradient = "clipped"
) -> tuple[Array, Array]: ...
def fake_quantize(
    x: Array,
    scale: Numbers,
    zero_point: Numbers,
    spec: QuantSpec,
    *,
    mask: MaskForm | None = None,
    gradient: Gradient = "clipped",
) -> Array | tuple[Array, Array]:
    """Rounds `x` to the grid of `spec` and returns the result as floats.

        q = clamp(rint(x / scale) + zero_point, qmin, qmax)        (numerics "onnx")
        y = (q - zero_point) * scale

    With a float format, q is the nearest value of the format to `x / scale`, half to even, and at most
    `spec.largest` in magnitude. The zero point is 0.

    With `mask`, also returns which elements were inside the range before clamping. "packed" is one bit per element
    (element 8*i + j in bit j of byte i, like `np.packbits(bitorder="little")`), "bool" is an array like `x`.
    `fake_quantize_backward` takes both.

    `scale` and `zero_point` have one entry per block of the spec: a number per tensor, shape `(channels,)` per
    channel, the shape of `x` with the axis divided by the group size per group.

    On a tensor, autograd sets the gradient of clipped elements to 0, for which it saves one bit per element. With
    `gradient="pass"` all gradients pass and nothing is saved. Scale and zero point are constants: use
    `fake_quantize_learned` to differentiate with respect to them.

    Args:
        x: The data, a float array or tensor.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Integers, one per block, or one integer for all blocks.
        spec: The grid, and which elements share a scale.
        mask: The form of the mask to return, "packed" or "bool", or None for no mask.
        gradient: The derivative on tensors, "clipped" or "pass".

    Returns:
        The fake-quantized values, or a tuple of these and the mask if `mask` is not None.

    >>> spec = QuantSpec(bits=4)
    >>> x = np.float32([-0.3, 0.05, 0.15, 9.0])
    >>> y, inside = fake_quantize(x, 0.1, 0, spec, mask="bool")
    >>> y
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    >>> inside
    array([ True,  True,  True, False])
    """
    if mask is None:
        return backend_of(x).fake_quantize(x, scale, zero_point, spec, gradient=gradient)
    return backend_of(x).fake_quantize_and_mask(x, scale, zero_point, spec, mask=mask, gradient=gradient)


def fake_quantize_backward(dy: Array, mask: Array, spec: QuantSpec) -> Array:
    """Returns the straight-through gradient: `dy` where the element was inside the range, otherwise 0.

        dx = mask ? dy : 0          (numerics "torch": dy * mask)

    >>> y, mask = fake_quantize(np.float32([0.2, 9.0]), 0.1, 0, QuantSpec(bits=4), mask="packed")
    >>> fake_quantize_backward(np.float32([1.5, np.inf]), mask, QuantSpec(bits=4))
    array([1.5, 0. ], dtype=float32)
    """
    return backend_of(dy).fake_quantize_backward(dy, mask, spec)


def round_zero_point(zero_point: Numbers, spec: QuantSpec) -> Any:  # an array, or a tensor for a tensor
    """Rounds a learned (float) zero point to the integer that forward and backward use.

        z = clamp(rint(zero_point), qmin, qmax)

    >>> round_zero_point(np.float32([2.5, 300.0]), QuantSpec(signed=False, symmetric=False))
    array([  2, 255], dtype=int32)
    """
    return backend_of(zero_point).round_zero_point(zero_point, spec)


def fake_quantize_learned(
    x: Array, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, grad_factor: float | None = 1.0
) -> Array:
    """Rounds `x` to the grid of `spec`, like `fake_quantize`, with learned scale and zero point.

        y = fake_quantize(x, scale, round_zero_point(zero_point))

    On tensors the result is differentiable with respect to `x`, `scale` and `zero_point`;
    `fake_quantize_learned_backward` has the formulas.

    Args:
        x: The data, a float array or tensor.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Numbers, one per block. They are rounded, and may have a fraction.
        spec: The grid, and which elements share a scale.
        grad_factor: Multiplies the gradients of scale and zero point. None means LSQ's,
            `1 / sqrt(x.numel() * spec.largest)`.

    >>> spec = QuantSpec(bits=4, symmetric=False)
    >>> fake_quantize_learned(np.float32([0.26, 9.0]), 0.1, np.float32(1.4), spec)
    array([0.3, 0.6], dtype=float32)
    """
    return backend_of(x).fake_quantize_learned(x, scale, zero_point, spec, grad_factor=grad_factor)


def fake_quantize_learned_backward(
    dy: Array, x: Array, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, grad_factor: float = 1.0
) -> LearnedGradients[Array]:
    """Returns the gradients of `fake_quantize_learned` with respect to `x`, `scale` and `zero_point`.

        z = round_zero_point(zero_point);   inside = qmin <= rint(x / scale) + z <= qmax
        inside     dx = dy   dscale += dy * ((q - z) - x / scale)       dzero_point += 0
        outside    dx = 0    dscale += dy * (qmin - z or qmax - z)      dzero_point += -dy * scale

    With a float format, q is the nearest value of the format, and outside the range the bound is `spec.largest`.

    `dscale` and `dzero_point` are multiplied by `grad_factor` (LSQ: `1 / sqrt(numel * largest)`), summed in float64 in
    an order that depends only on the shape, and rounded once. Non-finite elements contribute 0.

    Args:
        dy: The gradient of the result, with the shape and dtype of `x`.
        x: The data of the forward call.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Numbers, one per block. They are rounded, and may have a fraction.
        spec: The grid, and which elements share a scale.
        grad_factor: Multiplies the gradients of scale and zero point.

    >>> x, dy = np.float32([0.26, 9.0]), np.float32([1.0, 1.0])
    >>> dx, dscale, _ = fake_quantize_learned_backward(dy, x, 0.1, 0, QuantSpec(bits=4))
    >>> dx, round(float(dscale), 4)  # inside: 3 - 2.6; above: 7
    (array([1., 0.], dtype=float32), 7.4)
    """
    return backend_of(x).fake_quantize_learned_backward(dy, x, scale, zero_point, spec, grad_factor=grad_factor)


def quantize(x: Array, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, packed: bool = False) -> Array:
    """Returns the codes of `x`.

        q = clamp(rint(x / scale) + zero_point, qmin, qmax)        (numerics "onnx")

    NaN becomes `qmin` (code 0 in "half_away"). The result has the dtype `spec.storage` and the shape of `x`. With
    `packed`, it has two 4-bit or four 2-bit codes per byte, in C order, the first in the lowest bits, as in ONNX.

    Codes of a float format are bit patterns, uint8. NaN becomes the format's NaN, or its lowest value if it has none.
    With `packed`, four 6-bit codes take three bytes, the first in the lowest bits.

    Args:
        x: The data, a float array or tensor.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Integers, one per block, or one integer for all blocks.
        spec: The grid, and which elements share a scale.
        packed: Whether to pack several codes into a byte.

    >>> spec = QuantSpec(bits=4)
    >>> quantize(np.float32([-0.3, 0.05, 0.15, 9.0]), 0.1, 0, spec)
    array([-3,  0,  2,  7], dtype=int8)
    >>> quantize(np.float32([-0.3, 0.05, 0.15, 9.0]), 0.1, 0, spec, packed=True)
    array([ 13, 114], dtype=uint8)
    """
    return backend_of(x).quantize(x, scale, zero_point, spec, packed=packed)


def dequantize(
    q: Array,
    scale: Numbers,
    zero_point: Numbers,
    spec: QuantSpec,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: DType = None,
) -> Array:
    """Returns the values of the codes `q`.

        y = (q - zero_point) * scale

    With a float format, q is the value whose bit pattern the code is.

    Args:
        q: Codes as `quantize` returns them.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Integers, one per block, or one integer for all blocks.
        spec: The grid, and which elements share a scale.
        shape: The shape of the result if the codes are packed, otherwise None.
        dtype: The float dtype of the result. None means float32.

    >>> dequantize(np.int8([-3, 0, 2, 7]), 0.1, 0, QuantSpec(bits=4))
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    >>> dequantize(np.uint8([13, 114]), 0.1, 0, QuantSpec(bits=4), shape=(4,))
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    """
    return backend_of(q).dequantize(q, scale, zero_point, spec, shape=shape, dtype=dtype)


def fake_quantize_dynamic(x: Array, spec: QuantSpec, *, gradient: Gradient = "pass", eps: float = _EPS) -> Array:
    """Rounds `x` to the grid of `spec`, with the scales and zero points of its own blocks.

        lo, hi             = the range of the finite values of every block
        scale, zero_point  = choose_qparams(lo, hi, spec)
        y                  = fake_quantize(x, scale, zero_point, spec)

    This is how MX and NVFP4 are defined, and takes one pass over the data (NVFP4: two). The range of a block without
    finite values is 0 to 0.

    Args:
        x: The data, a float array or tensor.
        spec: The grid, and which elements share a scale.
        gradient: The derivative on tensors, "pass" or "clipped".
        eps: The smallest scale. Not used for block scales.

    >>> from fakequant import presets
    >>> x = np.float32([[0.1, -0.7, 3.2, 5.0], [0.1, 0.2, 0.3, 0.4]])
    >>> fake_quantize_dynamic(x, presets.mxfp4()).round(3)
    array([[ 0.   , -0.5  ,  3.   ,  4.   ],
           [ 0.094,  0.188,  0.25 ,  0.375]], dtype=float32)
    """
    return backend_of(x).fake_quantize_dynamic(x, spec, gradient=gradient, eps=eps)


def quantize_dynamic(
    x: Array, spec: QuantSpec, *, packed: bool = False, eps: float = _EPS
) -> tuple[Array, QParams[Array]]:
    """Returns the codes of `x` with the scales and zero points of its own blocks, and these.

        scale, zero_point  = choose_qparams(lo, hi, spec), where lo, hi is the range of every block
        codes              = quantize(x, scale, zero_point, spec)

    Args:
        x: The data, a float array or tensor.
        spec: The grid, and which elements share a scale.
        packed: Whether to pack several codes into a byte.
        eps: The smallest scale. Not used for block scales.

    >>> from fakequant import presets
    >>> codes, qparams = quantize_dynamic(np.float32([0.5, -0.7, 3.2, 6.0]), presets.mxfp4())
    >>> codes, qparams.scale
    (array([1, 9, 5, 7], dtype=uint8), array([1.], dtype=float32))
    """
    return backend_of(x).quantize_dynamic(x, spec, packed=packed, eps=eps)


def observe_fake_quantize(
    x: Array,
    spec: QuantSpec,
    running_min: Array,
    running_max: Array,
    *,
    update: Update = "moving_average",
    averaging_constant: float = 0.01,
    eps: float = _EPS,
    mask: MaskForm | None = None,
    gradient: Gradient = "clipped",
) -> ObservedFakeQuantize[Array]:
    """Updates a running range with `x`, chooses scale and zero point from it, and fake-quantizes.

        "moving_average"   running += averaging_constant * (observed - running)    (observed, if running is infinite)
        "min_max"          running = min or max of running and observed
        "dynamic"          running = observed                                      (0 to 0 without a finite value)

    `running_min` and `running_max` have the shape of the scales (`(1,)` or `()` per tensor). Start them at +inf and
    -inf. Non-finite values do not enter the range; the result has their number. Block scales (MX, NVFP4) need
    "dynamic", and their range is symmetric: `running_min = -running_max`.

    Args:
        x: The data, a float array or tensor.
        spec: The grid, and which elements share a scale.
        running_min: The lower ends of the ranges, float32, one per block. Updated in place.
        running_max: The upper ends of the ranges, float32, one per block. Updated in place.
        update: "moving_average", "min_max" or "dynamic".
        averaging_constant: The weight of the new range in "moving_average", from 0 to 1.
        eps: The smallest scale.
        mask: The form of the mask to return, "packed" or "bool", or None for no mask.
        gradient: The derivative on tensors, "clipped" or "pass".

    >>> lo, hi = np.full(1, np.inf, np.float32), np.full(1, -np.inf, np.float32)
    >>> spec = QuantSpec(signed=False, symmetric=False)
    >>> result = observe_fake_quantize(np.float32([-1.0, 0.5, np.nan, 1.55]), spec, lo, hi)
    >>> lo, hi, result.nonfinite
    (array([-1.], dtype=float32), array([1.55], dtype=float32), 1)
    >>> result.y
    array([-1.  ,  0.5 ,   nan,  1.55], dtype=float32)
    """
    return backend_of(x).observe_fake_quantize(
        x, spec, running_min, running_max, update=update, averaging_constant=averaging_constant, eps=eps, mask=mask,
        gradient=gradient,
    )  # fmt: skip
