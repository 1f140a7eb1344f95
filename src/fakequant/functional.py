"""The library's own functions: everything about the grid is in a `QuantSpec`.

They take NumPy arrays or torch tensors and answer in kind; on tensors the results are differentiable.

In the numerics "onnx" and "half_away" one rule holds for special values in every granularity and
dtype (docs/numerics.md): NaN stays NaN, infinities saturate, and both have gradient 0. In "torch"
they are what torch makes of them. Results are in C order, whatever the order of the input.
"""

from typing import Any, overload

import numpy as np  # noqa: F401 - for the examples

from fakequant._backends import backend_of
from fakequant._backends.checks import check_gradient as check_gradient
from fakequant._backends.kernel_types import (
    UPDATES as UPDATES,
    Gradient as Gradient,
    MaskForm as MaskForm,
    Update as Update,
)
from fakequant._backends.results import (
    Array,
    LearnedGradients as LearnedGradients,
    ObservedFakeQuantize as ObservedFakeQuantize,
)
from fakequant.qparams import EPS
from fakequant.spec import QuantSpec


@overload
def fake_quantize(
    x: Array, scale: Any, zero_point: Any, spec: QuantSpec, *, mask: None = None, gradient: Gradient = "clipped"
) -> Array: ...
@overload
def fake_quantize(
    x: Array, scale: Any, zero_point: Any, spec: QuantSpec, *, mask: MaskForm, gradient: Gradient = "clipped"
) -> tuple[Array, Array]: ...
def fake_quantize(
    x: Array,
    scale: Any,
    zero_point: Any,
    spec: QuantSpec,
    *,
    mask: MaskForm | None = None,
    gradient: Gradient = "clipped",
) -> Array | tuple[Array, Array]:
    """Rounds `x` to the grid of `spec` and returns it as floats.

        q = clamp(rint(x / scale) + zero_point, qmin, qmax)        (numerics "onnx")
        y = (q - zero_point) * scale

    With `mask`, also returns which elements were inside the range before clamping: "packed" is one
    bit per element (element 8*i + j in bit j of byte i, as `np.packbits(bitorder="little")`),
    "bool" an array like `x`. Either can be given to `fake_quantize_backward`.

    `scale` and `zero_point` have one entry per block of the spec: a number per tensor, shape
    `(channels,)` per channel, the shape of `x` with the axis divided by the group size per group.

    On a tensor, autograd sets the gradient of clipped elements to 0 and keeps one bit per element for
    it; with `gradient="pass"` all gradients pass and nothing is kept. Scale and zero point are
    constants: `fake_quantize_learned` has gradients for them.

    Args:
        x: The data, a float array or tensor.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Integers, one per block; a number stands for all blocks.
        spec: Which grid, and which elements share a scale.
        mask: None, "packed" or "bool": the form of the mask that is returned.
        gradient: "clipped" or "pass": the derivative on tensors.

    >>> spec = QuantSpec(bits=4)
    >>> x = np.float32([-0.3, 0.05, 0.15, 9.0])
    >>> y, inside = fake_quantize(x, 0.1, 0, spec, mask="bool")
    >>> y
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    >>> inside
    array([ True,  True,  True, False])
    """
    return backend_of(x).fake_quantize(x, scale, zero_point, spec, mask=mask, gradient=gradient)


def fake_quantize_backward(dy: Array, mask: Array, spec: QuantSpec) -> Array:
    """The straight-through gradient: `dy` where the element was inside the range, else 0.

        dx = mask ? dy : 0          (numerics "torch": dy * mask)

    >>> y, mask = fake_quantize(np.float32([0.2, 9.0]), 0.1, 0, QuantSpec(bits=4), mask="packed")
    >>> fake_quantize_backward(np.float32([1.5, np.inf]), mask, QuantSpec(bits=4))
    array([1.5, 0. ], dtype=float32)
    """
    return backend_of(dy).fake_quantize_backward(dy, mask, spec)


def round_zero_point(zero_point: Any, spec: QuantSpec) -> Any:
    """A learned (float) zero point as the integer that forward and backward use.

        z = clamp(rint(zero_point), qmin, qmax)

    >>> round_zero_point(np.float32([2.5, 300.0]), QuantSpec(signed=False, symmetric=False))
    array([  2, 255], dtype=int32)
    """
    return backend_of(zero_point).round_zero_point(zero_point, spec)


def fake_quantize_learned(
    x: Array, scale: Any, zero_point: Any, spec: QuantSpec, *, grad_factor: float | None = 1.0
) -> Array:
    """`fake_quantize` with a scale and a zero point that are learned; the zero point may have a fraction.

        y = fake_quantize(x, scale, round_zero_point(zero_point))

    On tensors the result can be differentiated in `x`, `scale` and `zero_point`, with the gradients of
    `fake_quantize_learned_backward`. `grad_factor` is for those only; LSQ's is `1 / sqrt(x.numel() * qmax)`.

    Args:
        x: The data, a float array or tensor.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Numbers, one per block, with or without a fraction.
        spec: Which grid, and which elements share a scale.
        grad_factor: A factor of the gradients of scale and zero point; None stands for LSQ's.

    >>> spec = QuantSpec(bits=4, symmetric=False)
    >>> fake_quantize_learned(np.float32([0.26, 9.0]), 0.1, np.float32(1.4), spec)
    array([0.3, 0.6], dtype=float32)
    """
    return backend_of(x).fake_quantize_learned(x, scale, zero_point, spec, grad_factor=grad_factor)


def fake_quantize_learned_backward(
    dy: Array, x: Array, scale: Any, zero_point: Any, spec: QuantSpec, *, grad_factor: float = 1.0
) -> LearnedGradients[Array]:
    """Gradients of `fake_quantize` with respect to `x`, `scale` and `zero_point`, in one pass.

        z = round_zero_point(zero_point);   inside = qmin <= rint(x / scale) + z <= qmax
        inside     dx = dy   dscale += dy * ((q - z) - x / scale)       dzero_point += 0
        outside    dx = 0    dscale += dy * (qmin - z or qmax - z)      dzero_point += -dy * scale

    `dscale` and `dzero_point` are multiplied by `grad_factor` (LSQ: `1 / sqrt(numel * qmax)`),
    summed in float64 in an order that depends only on the shape, and rounded once. Elements that
    are not finite contribute nothing.

    Args:
        dy: The gradient of the result, like `x`.
        x: The data of the forward call.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Numbers, one per block, with or without a fraction.
        spec: Which grid, and which elements share a scale.
        grad_factor: A factor of the gradients of scale and zero point.

    >>> x, dy = np.float32([0.26, 9.0]), np.float32([1.0, 1.0])
    >>> dx, dscale, _ = fake_quantize_learned_backward(dy, x, 0.1, 0, QuantSpec(bits=4))
    >>> dx, round(float(dscale), 4)  # inside: 3 - 2.6; above: 7
    (array([1., 0.], dtype=float32), 7.4)
    """
    return backend_of(x).fake_quantize_learned_backward(dy, x, scale, zero_point, spec, grad_factor=grad_factor)


def quantize(x: Array, scale: Any, zero_point: Any, spec: QuantSpec, *, packed: bool = False) -> Array:
    """The integer codes of `x`.

        q = clamp(rint(x / scale) + zero_point, qmin, qmax)        (numerics "onnx")

    NaN has no code: it becomes `qmin` (code 0 in "half_away"). The result has the dtype
    `spec.storage` and the shape of `x`; with `packed`, 4-bit and 2-bit codes are put two or four to
    a byte in C order, the first in the lowest bits, as ONNX stores them.

    Args:
        x: The data, a float array or tensor.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Integers, one per block; a number stands for all blocks.
        spec: Which grid, and which elements share a scale.
        packed: Whether several codes share a byte.

    >>> spec = QuantSpec(bits=4)
    >>> quantize(np.float32([-0.3, 0.05, 0.15, 9.0]), 0.1, 0, spec)
    array([-3,  0,  2,  7], dtype=int8)
    >>> quantize(np.float32([-0.3, 0.05, 0.15, 9.0]), 0.1, 0, spec, packed=True)
    array([ 13, 114], dtype=uint8)
    """
    return backend_of(x).quantize(x, scale, zero_point, spec, packed=packed)


def dequantize(
    q: Array,
    scale: Any,
    zero_point: Any,
    spec: QuantSpec,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
) -> Array:
    """The values that the codes `q` stand for.

        y = (q - zero_point) * scale

    Packed codes need the `shape` of the array they were made from. The result is float32, or `dtype`.

    Args:
        q: Codes as `quantize` returns them.
        scale: Positive numbers, one per block of `spec`.
        zero_point: Integers, one per block; a number stands for all blocks.
        spec: Which grid, and which elements share a scale.
        shape: The shape of the result, for packed codes.
        dtype: The float dtype of the result; None is float32.

    >>> dequantize(np.int8([-3, 0, 2, 7]), 0.1, 0, QuantSpec(bits=4))
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    >>> dequantize(np.uint8([13, 114]), 0.1, 0, QuantSpec(bits=4), shape=(4,))
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    """
    return backend_of(q).dequantize(q, scale, zero_point, spec, shape=shape, dtype=dtype)


def observe_fake_quantize(
    x: Array,
    spec: QuantSpec,
    running_min: Array,
    running_max: Array,
    *,
    update: Update = "moving_average",
    averaging_constant: float = 0.01,
    eps: float = EPS,
    mask: MaskForm | None = None,
    gradient: Gradient = "clipped",
) -> ObservedFakeQuantize[Array]:
    """Updates a running range with `x`, chooses scale and zero point from it, and fake-quantizes.

        "moving_average"   running += averaging_constant * (observed - running)    (from infinite: the first range)
        "min_max"          running = the extremes of running and observed
        "dynamic"          running = observed                                       (nothing finite: 0 to 0)

    `running_min` and `running_max` are float32 arrays of the shape of the scales (`(1,)` or `()` per
    tensor) and are updated in place; start them at +inf and -inf. Values that are not finite are
    left out of the range and counted.

    Args:
        x: The data, a float array or tensor.
        spec: Which grid, and which elements share a scale.
        running_min: The lower ends so far, float32, one per block; updated.
        running_max: The upper ends so far, float32, one per block; updated.
        update: "moving_average", "min_max" or "dynamic".
        averaging_constant: How far "moving_average" moves, from 0 to 1.
        eps: The smallest scale.
        mask: None, "packed" or "bool": the form of the mask that is returned.
        gradient: "clipped" or "pass": the derivative on tensors.

    >>> lo, hi = np.full(1, np.inf, np.float32), np.full(1, -np.inf, np.float32)
    >>> spec = QuantSpec(signed=False, symmetric=False)
    >>> result = observe_fake_quantize(np.float32([-1.0, 0.5, np.nan, 1.55]), spec, lo, hi)
    >>> lo, hi, result.nonfinite
    (array([-1.], dtype=float32), array([1.55], dtype=float32), 1)
    >>> result.y
    array([-1.  ,  0.5 ,   nan,  1.55], dtype=float32)
    """
    return backend_of(x).observe_fake_quantize(
        x,
        spec,
        running_min,
        running_max,
        update=update,
        averaging_constant=averaging_constant,
        eps=eps,
        mask=mask,
        gradient=gradient,
    )
