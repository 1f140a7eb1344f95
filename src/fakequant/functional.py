"""The library's own functions: everything about the grid is in a `QuantSpec`.

They take NumPy arrays or torch tensors and answer in kind; on tensors the results are differentiable.

In the numerics "onnx" and "half_away" one rule holds for special values in every granularity and
dtype (docs/numerics.md): NaN stays NaN, infinities saturate, and both have gradient 0. In "torch"
they are what torch makes of them. Results are in C order, whatever the order of the input.
"""

from math import prod
from typing import Any, Generic, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike

from fakequant import _kernels
from fakequant._backends import Array, is_tensor, own_on_tensors
from fakequant._backends.blocks import blocks_of
from fakequant._backends.numpy.array_grid import check_scalars, check_spec, kernel_numerics, resolve, scale_dtype
from fakequant._backends.numpy.float_arrays import KERNEL_DTYPES, as_float_array
from fakequant._kernels import _native
from fakequant.qparams import EPS, check_eps
from fakequant.spec import QuantSpec

MaskForm = Literal["packed", "bool"]
# What autograd makes of a tensor: 0 outside the range, or everything passed through.
Gradient = Literal["clipped", "pass"]
# How a range that is seen changes the running one.
Update = Literal["average", "widest", "latest"]
UPDATES: dict[str, int] = {
    "average": _kernels.RANGE_AVERAGE,
    "widest": _kernels.RANGE_WIDEST,
    "latest": _kernels.RANGE_LATEST,
}


class LearnedGradients(NamedTuple, Generic[Array]):
    """Gradients of fake quantization with a learned scale and zero point."""

    dx: Array
    dscale: Array
    dzero_point: Array


def check_gradient(gradient: object, mask: object = None) -> bool:
    """Whether the gradient is clipped. A mask only makes sense if it is."""
    if gradient == "clipped":
        return True
    if gradient != "pass":
        raise ValueError(f'`gradient` must be "clipped" or "pass", got {gradient!r}.')
    if mask is not None:
        raise ValueError('`mask` says which gradients are clipped, so it needs gradient="clipped", got "pass".')
    return False


def check_update(update: object, averaging_constant: float) -> None:
    """One of the three ways, and a constant between standing still and jumping."""
    if update not in UPDATES:
        raise ValueError(f"`update` must be one of {', '.join(UPDATES)}, got {update!r}.")
    if not 0 <= averaging_constant <= 1:
        raise ValueError(f"`averaging_constant` must be between 0 and 1, got {averaging_constant}.")


def _empty_mask(form: MaskForm | None, shape: tuple[int, ...]) -> tuple[np.ndarray | None, int]:
    if form is None:
        return None, _kernels.MASK_NONE
    if form == "packed":
        return np.empty((prod(shape) + 7) // 8, np.uint8), _kernels.MASK_PACKED
    if form == "bool":
        return np.empty(shape, np.bool_), _kernels.MASK_BYTES
    raise ValueError(f'`mask` must be None, "packed" or "bool", got {form!r}.')


@overload
def fake_quantize(
    x: Array, scale: Any, zero_point: Any, spec: QuantSpec, *, mask: None = None, gradient: Gradient = "clipped"
) -> Array: ...
@overload
def fake_quantize(
    x: Array, scale: Any, zero_point: Any, spec: QuantSpec, *, mask: MaskForm, gradient: Gradient = "clipped"
) -> tuple[Array, Array]: ...
def fake_quantize(x, scale, zero_point, spec, *, mask=None, gradient="clipped"):
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

    >>> spec = QuantSpec(bits=4)
    >>> x = np.float32([-0.3, 0.05, 0.15, 9.0])
    >>> y, inside = fake_quantize(x, 0.1, 0, spec, mask="bool")
    >>> y
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    >>> inside
    array([ True,  True,  True, False])
    """
    if is_tensor(x):
        return own_on_tensors().fake_quantize(x, scale, zero_point, spec, mask=mask, gradient=gradient)
    x, dtype = as_float_array(x)
    check_spec(spec)
    check_gradient(gradient, mask)
    bits, kind = _empty_mask(mask, x.shape)
    x = np.asarray(x, order="C")
    if spec.axis is None and isinstance(scale, float) and type(zero_point) is int:
        # Two numbers need no arrays: this is most of the cost of a call on a few elements.
        check_scalars(scale, zero_point, dtype, spec)
        y = np.empty(x.shape, x.dtype)
        _native.fake_quantize_scalar(
            x, y, bits, kind, dtype, x.size, kernel_numerics(spec), scale, zero_point, spec.qmin, spec.qmax, False
        )
    else:
        grid = resolve(x.shape, dtype, scale, zero_point, spec)
        y = np.empty(x.shape, x.dtype)
        _native.fake_quantize(
            x, y, bits, kind, dtype, grid.shape, grid.numerics, grid.scale, grid.scale_is_f64,
            grid.zero_point, grid.zero_kind, grid.qmin, grid.qmax, False,
        )  # fmt: skip
    return y if mask is None else (y, bits)


def fake_quantize_backward(dy: Array, mask: Array, spec: QuantSpec) -> Array:
    """The straight-through gradient: `dy` where the element was inside the range, else 0.

        dx = mask ? dy : 0          (numerics "torch": dy * mask)

    >>> y, mask = fake_quantize(np.float32([0.2, 9.0]), 0.1, 0, QuantSpec(bits=4), mask="packed")
    >>> fake_quantize_backward(np.float32([1.5, np.inf]), mask, QuantSpec(bits=4))
    array([1.5, 0. ], dtype=float32)
    """
    if is_tensor(dy):
        return own_on_tensors().fake_quantize_backward(dy, mask, spec)
    dy, dtype = as_float_array(dy, "dy")
    check_spec(spec)
    kind = _mask_kind(mask, dy.shape)
    dy = np.asarray(dy, order="C")
    dx = np.empty(dy.shape, dy.dtype)
    mask = np.asarray(mask, order="C")
    _native.mask_backward(dy, mask, kind, dx, dtype, dy.size, spec.numerics == "torch")
    return dx


def _mask_kind(mask: object, shape: tuple[int, ...]) -> int:
    if isinstance(mask, np.ndarray):
        if mask.dtype == np.bool_ and mask.shape == shape:
            return _kernels.MASK_BYTES
        if mask.dtype == np.uint8 and mask.shape == ((prod(shape) + 7) // 8,):
            return _kernels.MASK_PACKED
        received = f"{mask.dtype} of shape {mask.shape}"
    else:
        received = type(mask).__name__
    raise ValueError(
        f"`mask` must be the one `fake_quantize` returned for an array of shape {shape}: bool of that shape, "
        f"or packed uint8 of shape {((prod(shape) + 7) // 8,)}; got {received}."
    )


def round_zero_point(zero_point: Any, spec: QuantSpec) -> Any:
    """A learned (float) zero point as the integer that forward and backward use.

        z = clamp(rint(zero_point), qmin, qmax)

    >>> round_zero_point(np.float32([2.5, 300.0]), QuantSpec(signed=False, symmetric=False))
    array([  2, 255], dtype=int32)
    """
    if is_tensor(zero_point):
        return own_on_tensors().round_zero_point(zero_point, spec)
    check_spec(spec, "zero_point, spec")
    z = np.asarray(zero_point)
    if np.isnan(z).any():
        raise ValueError("`zero_point` must not be NaN.")
    return np.clip(np.rint(z.astype(np.float64)), spec.qmin, spec.qmax).astype(np.int32)


def fake_quantize_learned(
    x: Array, scale: Any, zero_point: Any, spec: QuantSpec, *, grad_factor: float | None = 1.0
) -> Array:
    """`fake_quantize` with a scale and a zero point that are learned; the zero point may have a fraction.

        y = fake_quantize(x, scale, round_zero_point(zero_point))

    On tensors the result can be differentiated in `x`, `scale` and `zero_point`, with the gradients of
    `fake_quantize_learned_backward`. `grad_factor` is for those only; None
    stands for LSQ's `1 / sqrt(x.numel() * qmax)`.

    >>> spec = QuantSpec(bits=4, symmetric=False)
    >>> fake_quantize_learned(np.float32([0.26, 9.0]), 0.1, np.float32(1.4), spec)
    array([0.3, 0.6], dtype=float32)
    """
    if is_tensor(x):
        return own_on_tensors().fake_quantize_learned(x, scale, zero_point, spec, grad_factor=grad_factor)
    if grad_factor is not None:
        float(grad_factor)
    return fake_quantize(x, scale, round_zero_point(zero_point, spec), spec)


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

    >>> x, dy = np.float32([0.26, 9.0]), np.float32([1.0, 1.0])
    >>> dx, dscale, _ = fake_quantize_learned_backward(dy, x, 0.1, 0, QuantSpec(bits=4))
    >>> dx, round(float(dscale), 4)  # inside: 3 - 2.6; above: 7
    (array([1., 0.], dtype=float32), 7.4)
    """
    if is_tensor(x):
        return own_on_tensors().fake_quantize_learned_backward(dy, x, scale, zero_point, spec, grad_factor=grad_factor)
    x, dtype = as_float_array(x)
    dy, dy_dtype = as_float_array(dy, "dy")
    if dy.shape != x.shape or dy_dtype != dtype:
        raise ValueError(f"`dy` must have the shape and dtype of `x`, {x.shape} {x.dtype}, got {dy.shape} {dy.dtype}.")
    grid = resolve(x.shape, dtype, scale, _learned_zero_point(zero_point, spec), spec)
    x, dy = np.asarray(x, order="C"), np.asarray(dy, order="C")
    dx = np.empty(x.shape, x.dtype)
    sums = np.empty((2, prod(grid.parameters)), np.float64)
    _native.learned_backward(
        dy, x, dx, dtype, dtype, grid.shape, grid.numerics, grid.scale, grid.scale_is_f64, grid.zero_point,
        grid.zero_kind, grid.qmin, grid.qmax, float(grad_factor), sums[0], sums[1],
    )  # fmt: skip
    with np.errstate(over="ignore"):  # a sum beyond float32 is infinite
        dscale, dzero_point = sums.reshape(2, *grid.parameters).astype(scale_dtype(dtype, spec))
    return LearnedGradients(dx, np.asarray(dscale), np.asarray(dzero_point))


def _learned_zero_point(zero_point: ArrayLike, spec: QuantSpec) -> np.ndarray:
    rounded = round_zero_point(zero_point, spec)
    if spec.numerics == "torch" and spec.axis is None and not spec.symmetric:
        # torch's per-tensor backward rounds by trunc(z + 0.5), its forward half to even.
        z = (np.asarray(zero_point, np.float32) + np.float32(0.5)).astype(np.float64)
        return np.trunc(np.clip(z, spec.qmin, spec.qmax)).astype(np.int32)
    return rounded


_CODE_TYPES = {
    "int8": _kernels.I8,
    "uint8": _kernels.U8,
    "int16": _kernels.I16,
    "uint16": _kernels.U16,
    "int32": _kernels.I32,
    "uint32": _kernels.U32,
}
_PACKED_CODE_TYPES = {
    (4, True): _kernels.I4X2,
    (4, False): _kernels.U4X2,
    (2, True): _kernels.I2X4,
    (2, False): _kernels.U2X4,
}


def _packed_code_type(spec: QuantSpec) -> int:
    code = _PACKED_CODE_TYPES.get((spec.bits, spec.signed))
    if code is None:
        raise ValueError(f"Only 4-bit and 2-bit codes can be packed, got a spec of {spec.bits} bits.")
    return code


def quantize(x: Array, scale: Any, zero_point: Any, spec: QuantSpec, *, packed: bool = False) -> Array:
    """The integer codes of `x`.

        q = clamp(rint(x / scale) + zero_point, qmin, qmax)        (numerics "onnx")

    NaN has no code: it becomes `qmin` (code 0 in "half_away"). The result has the dtype
    `spec.storage` and the shape of `x`; with `packed`, 4-bit and 2-bit codes are put two or four to
    a byte in C order, the first in the lowest bits, as ONNX stores them.

    >>> spec = QuantSpec(bits=4)
    >>> quantize(np.float32([-0.3, 0.05, 0.15, 9.0]), 0.1, 0, spec)
    array([-3,  0,  2,  7], dtype=int8)
    >>> quantize(np.float32([-0.3, 0.05, 0.15, 9.0]), 0.1, 0, spec, packed=True)
    array([ 13, 114], dtype=uint8)
    """
    if is_tensor(x):
        return own_on_tensors().quantize(x, scale, zero_point, spec, packed=packed)
    x, dtype = as_float_array(x)
    grid = resolve(x.shape, dtype, scale, zero_point, spec)
    if packed:
        code = _packed_code_type(spec)
        q = np.empty((x.size * spec.bits + 7) // 8, np.uint8)
    else:
        code = _CODE_TYPES[spec.storage]
        q = np.empty(x.shape, spec.storage)
    _native.quantize(
        np.asarray(x, order="C"), q, dtype, code, grid.shape, grid.numerics, grid.scale, grid.scale_is_f64,
        grid.zero_point, grid.zero_kind, grid.qmin, grid.qmax,
    )  # fmt: skip
    return q


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

    >>> dequantize(np.int8([-3, 0, 2, 7]), 0.1, 0, QuantSpec(bits=4))
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    >>> dequantize(np.uint8([13, 114]), 0.1, 0, QuantSpec(bits=4), shape=(4,))
    array([-0.3,  0. ,  0.2,  0.7], dtype=float32)
    """
    if is_tensor(q):
        return own_on_tensors().dequantize(q, scale, zero_point, spec, shape=shape, dtype=dtype)
    check_spec(spec)
    dtype = np.dtype(np.float32 if dtype is None else dtype)
    kernel_dtype = KERNEL_DTYPES.get(dtype)
    if kernel_dtype is None:
        raise TypeError(f"`dtype` must be float32, float64, bfloat16 or float16, got {dtype}.")
    q = np.asarray(q)
    packed_shape = shape
    wanted = np.dtype(np.uint8 if shape is not None else spec.storage)
    if q.dtype != wanted:
        raise TypeError(
            f"`q` must hold {wanted} codes for this spec, got {q.dtype}.\n"
            "Packed codes need `shape`, the shape of the array they were made from."
        )
    if shape is None:
        shape, code = q.shape, _CODE_TYPES[spec.storage]
    else:
        shape, code = tuple(shape), _packed_code_type(spec)
        packed = ((prod(shape) * spec.bits + 7) // 8,)
        if q.shape != packed:
            raise ValueError(
                f"Packed {spec.bits}-bit codes of an array of shape {shape} are uint8 of shape {packed}, "
                f"got shape {q.shape}."
            )
    grid = resolve(shape, kernel_dtype, scale, zero_point, spec)
    if spec.numerics == "torch" and spec.axis is None and kernel_dtype == _kernels.F64:
        # Per tensor, torch multiplies in float32 even for float64.
        return dequantize(q, scale, zero_point, spec, shape=packed_shape).astype(dtype)
    y = np.empty(shape, dtype)
    _native.dequantize(
        np.asarray(q, order="C"), y, kernel_dtype, code, grid.shape, grid.scale, grid.scale_is_f64,
        grid.zero_point, grid.zero_kind, grid.qmin, grid.qmax,
    )  # fmt: skip
    return y


class ObservedFakeQuantize(NamedTuple, Generic[Array]):
    """What `observe_fake_quantize` returns."""

    y: Array
    mask: Array | None
    scale: Array
    zero_point: Array
    # How many elements of x were not finite: a number, for tensors as a tensor.
    nonfinite: Any


def observe_fake_quantize(
    x: Array,
    spec: QuantSpec,
    running_min: Array,
    running_max: Array,
    *,
    update: Update = "average",
    averaging_constant: float = 0.01,
    eps: float = EPS,
    mask: MaskForm | None = None,
    gradient: Gradient = "clipped",
) -> ObservedFakeQuantize[Array]:
    """Updates a running range with `x`, chooses scale and zero point from it, and fake-quantizes.

        "average"   running += averaging_constant * (observed - running)        (infinite: takes the first value)
        "widest"    running = the extremes of running and observed
        "latest"    running = observed                                          (nothing finite: 0 to 0)

    `running_min` and `running_max` are float32 arrays of the shape of the scales (`(1,)` or `()` per
    tensor) and are updated in place; start them at +inf and -inf. Values that are not finite are
    left out of the range and counted.

    >>> lo, hi = np.full(1, np.inf, np.float32), np.full(1, -np.inf, np.float32)
    >>> spec = QuantSpec(signed=False, symmetric=False)
    >>> result = observe_fake_quantize(np.float32([-1.0, 0.5, np.nan, 1.55]), spec, lo, hi)
    >>> lo, hi, result.nonfinite
    (array([-1.], dtype=float32), array([1.55], dtype=float32), 1)
    >>> result.y
    array([-1.  ,  0.5 ,   nan,  1.55], dtype=float32)
    """
    if is_tensor(x):
        return own_on_tensors().observe_fake_quantize(
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
    x, dtype = as_float_array(x)
    check_spec(spec)
    check_eps(eps)
    check_gradient(gradient, mask)
    check_update(update, averaging_constant)
    blocks = blocks_of(x.shape, spec)
    count = prod(blocks.parameters)
    for name, running in (("running_min", running_min), ("running_max", running_max)):
        if not isinstance(running, np.ndarray) or running.dtype != np.float32 or running.size != count:
            raise ValueError(
                f"`{name}` must be a float32 array with one entry per block, shape {blocks.parameters or (1,)}, got "
                + (f"{running.dtype} of shape {running.shape}." if isinstance(running, np.ndarray) else f"{running!r}.")
            )
        if not running.flags.c_contiguous or not running.flags.writeable:
            raise ValueError(f"`{name}` is updated in place and must be contiguous and writeable.")
    bits, kind = _empty_mask(mask, x.shape)
    x = np.asarray(x, order="C")
    y = np.empty(x.shape, x.dtype)
    scale = np.empty(blocks.parameters, np.float32)
    zero_point = np.empty(blocks.parameters, np.int32)
    nan, posinf, neginf, unseen = _native.observe_fake_quantize(
        x, y, bits, kind, dtype, blocks.kernel, kernel_numerics(spec), spec.qmin, spec.qmax, _kernels.RANGE_OWN,
        UPDATES[update], True, True, spec.symmetric, float(averaging_constant), float(eps), running_min, running_max,
        scale, zero_point,
    )  # fmt: skip
    if unseen:
        raise ValueError(
            f"{unseen} of {count} blocks have not seen a finite value, so there is no range to choose a scale from.\n"
            "Observe data before quantizing."
        )
    return ObservedFakeQuantize(y, bits, scale, zero_point, nan + posinf + neginf)
