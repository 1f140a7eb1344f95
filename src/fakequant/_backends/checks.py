"""Argument checks: one exception type and one message per mistake, for every array library.

`check_*` raises if an argument is wrong, `refuse_*` always raises. The functions take shapes, names of dtypes and
values. `kind` is the word for the data in the message, "array" or "tensor". Functions with torch's names have torch's
errors instead.
"""

from math import prod
from typing import NoReturn

from fakequant import _kernels
from fakequant._backends.blocks import blocks_of
from fakequant._backends.types import Array, Range
from fakequant._kernels import DTYPES, MASK_KINDS, PACKED_CODE_TYPES, UPDATES
from fakequant.spec import QuantSpec

Shape = tuple[int, ...]

# Positive numbers up to ZERO_IN_F32 round to 0 in float32. Numbers from INF_IN_F32 round to infinity.
ZERO_IN_F32 = 2.0**-150
INF_IN_F32 = 2.0**128 - 2.0**103
# The smallest scale unless another is given.
EPS = 2.0**-23

_FLOATS = f"{', '.join(list(DTYPES)[:-1])} or {list(DTYPES)[-1]}"
_CONVERSIONS = {"array": "astype(np.float32)", "tensor": "float()"}


def _a(kind: str) -> str:
    return f"an {kind}" if kind == "array" else f"a {kind}"


# --- spec and options -----------------------------------------------------------------------------


def check_spec(spec: object, order: str = "the array, then scale, zero_point, spec") -> None:
    """Raises TypeError if `spec` is not a QuantSpec. The message reminds of the `order` of the arguments."""
    if not isinstance(spec, QuantSpec):
        raise TypeError(
            f"`spec` must be a QuantSpec, got {spec!r}.\nThe order of arguments is {order}.\n"
            "Use e.g. QuantSpec(bits=8) or fakequant.presets.uint8()."
        )


def check_gradient(gradient: object, mask: object = None) -> bool:
    """Returns True for "clipped" and False for "pass". Raises ValueError otherwise, or for "pass" with a mask."""
    if gradient == "clipped":
        return True
    if gradient != "pass":
        raise ValueError(f'`gradient` must be "clipped" or "pass", got {gradient!r}.')
    if mask is not None:
        raise ValueError('`mask` says which gradients are clipped, so it needs gradient="clipped", got "pass".')
    return False


def check_update(update: object, averaging_constant: float, spec: QuantSpec) -> None:
    """Raises ValueError if `update` is unknown or does not fit, or the averaging constant is not between 0 and 1."""
    if update not in UPDATES:
        raise ValueError(f"`update` must be one of {', '.join(UPDATES)}, got {update!r}.")
    if spec.has_block_scales and update != "dynamic":
        raise ValueError(
            f'`update` must be "dynamic" for scales of the format {spec.scale_format!r}, got {update!r}.\n'
            "Their scales follow every tensor. Use scale_format='float32' for scales that are calibrated."
        )
    if not 0 <= averaging_constant <= 1:
        raise ValueError(f"`averaging_constant` must be between 0 and 1, got {averaging_constant}.")


def check_eps(eps: float) -> None:
    """Raises ValueError if `eps`, the smallest scale, is not finite and positive in float32."""
    if not ZERO_IN_F32 < eps < INF_IN_F32:
        raise ValueError(f"`eps` must be finite and greater than 0 in float32, got {eps}.")


def mask_kind(form: str | None) -> int:
    """Returns the kernels' number for a form of mask. None means no mask."""
    if form is None:
        return _kernels.MASK_NONE
    if form not in MASK_KINDS:
        raise ValueError(f'`mask` must be None, "packed" or "bool", got {form!r}.')
    return MASK_KINDS[form]


# --- data -----------------------------------------------------------------------------------------


def refuse_data_dtype(name: str, dtype: str, kind: str) -> NoReturn:
    """Raises TypeError for data whose dtype has no kernel."""
    raise TypeError(
        f"`{name}` must be {_a(kind)} of {_FLOATS}, got {dtype}.\nConvert it first, e.g. `{name}.{_CONVERSIONS[kind]}`."
    )


def refuse_result_dtype(dtype: object) -> NoReturn:
    """Raises TypeError for a result dtype that has no kernel."""
    raise TypeError(f"`dtype` must be {_FLOATS}, got {dtype}.")


def check_same(shape: Shape, dtype: str, dy_shape: Shape, dy_dtype: str) -> None:
    """Raises ValueError if the gradient `dy` does not have the shape and dtype of the data."""
    if dy_shape != shape or dy_dtype != dtype:
        raise ValueError(f"`dy` must have the shape and dtype of `x`, {shape} {dtype}, got {dy_shape} {dy_dtype}.")


def packed_mask_shape(shape: Shape) -> Shape:
    """Returns the shape of a packed mask for data of `shape`."""
    return ((prod(shape) + 7) // 8,)


def check_mask(shape: Shape, dtype: str, mask_shape: Shape, kind: str) -> int:
    """Returns the kernels' number for a mask. Raises ValueError if it does not fit the data."""
    if dtype == "bool" and mask_shape == shape:
        return _kernels.MASK_BYTES
    if dtype == "uint8" and mask_shape == packed_mask_shape(shape):
        return _kernels.MASK_PACKED
    refuse_mask(shape, f"{dtype} of shape {mask_shape}", kind)


def refuse_mask(shape: Shape, received: str, kind: str) -> NoReturn:
    """Raises ValueError for a mask that does not fit data of `shape`."""
    raise ValueError(
        f"`mask` must be the one `fake_quantize` returned for {_a(kind)} of shape {shape}: bool of that shape, "
        f"or packed uint8 of shape {packed_mask_shape(shape)}; got {received}."
    )


# --- scale and zero point -------------------------------------------------------------------------


def refuse_scale_type(name: str, received: str, kind: str) -> NoReturn:
    """Raises TypeError for a scale that is not made of real numbers."""
    raise TypeError(f"`{name}` must be a real number or {_a(kind)} of real numbers, got {received}.")


def refuse_zero_point_type(received: str) -> NoReturn:
    """Raises TypeError for zero points that are not integers."""
    raise TypeError(
        f"`zero_point` must hold integers, got {received}.\n"
        "Round a learned zero point first, `round_zero_point(zero_point, spec)`, or use `fake_quantize_learned`."
    )


def check_parameter_shape(name: str, given: Shape, shape: Shape, spec: QuantSpec, kind: str) -> None:
    """Raises ValueError if a scale or zero point does not have one entry per block.

    `given` is the shape of the scale or zero point, `shape` the shape of the data.
    """
    wanted = blocks_of(shape, spec).parameters
    if given == wanted:  # not `in`, which torch.compile cannot trace for symbolic sizes
        return
    if spec.axis is None:
        if given == (1,):
            return
    elif spec.granularity == "token":
        axis = spec.axis % len(wanted)
        if given == wanted[:axis] + wanted[axis + 1 :]:
            return
    raise ValueError(
        f"`{name}` must {'be an int or ' if name == 'zero_point' else ''}have shape {wanted} for {_a(kind)} of shape "
        f"{shape} quantized per {spec.granularity}{f' on axis {spec.axis}' if spec.axis is not None else ''}, "
        f"got shape {given}."
    )


def check_scale_number(scale: float, is_f64: bool) -> None:
    """Raises ValueError if a scale is not finite and positive after rounding to float64 or float32."""
    low, high = (0.0, float("inf")) if is_f64 else (ZERO_IN_F32, INF_IN_F32)
    if not low < scale < high:
        if not is_f64:
            scale = 0.0 if 0 <= scale <= ZERO_IN_F32 else float("inf") if scale >= INF_IN_F32 else scale
        refuse_scale(scale, "float64" if is_f64 else "float32")


def refuse_scale(scale: object, dtype: str, where: str = "") -> NoReturn:
    """Raises ValueError for a scale that is not finite and positive. `where` names its index among several."""
    raise ValueError(
        f"`scale` must be finite and greater than 0 in {dtype}, got {scale}{where}.\n"
        "Observe finite data first: `choose_qparams` never returns such a scale."
    )


def refuse_ggml_scale(scale: object) -> NoReturn:
    """Raises ValueError for a scale or an offset of a block of ggml that is not finite."""
    raise ValueError(
        f"Scales and offsets of ggml's block types must be finite, got {scale}.\n"
        "Observe finite data first: `choose_qparams` never returns such a scale."
    )


def check_learned(spec: QuantSpec) -> None:
    """Raises ValueError for a spec whose scales cannot be learned."""
    if spec.ggml_type is not None and not spec.has_learnable_scales:
        raise ValueError(
            f"The scales of inputs in ggml follow every tensor; they cannot be learned, got {spec}.\n"
            "Use `fake_quantize_dynamic`, or a spec with float32 scales."
        )


def check_zero_point_number(zero_point: int, spec: QuantSpec) -> None:
    """Raises ValueError if the spec does not allow the zero point. 0 is always allowed."""
    if zero_point != 0 and (spec.symmetric or not spec.qmin <= zero_point <= spec.qmax):
        refuse_zero_point(zero_point, spec.qmin, spec.qmax, symmetric=spec.symmetric)


def refuse_zero_point(bad: int, qmin: int, qmax: int, *, symmetric: bool = False) -> NoReturn:
    """Raises ValueError for a zero point outside the range, or other than 0 in a symmetric spec."""
    raise ValueError(
        f"`zero_point` must be 0 for a symmetric spec, got {bad}.\nUse QuantSpec(symmetric=False) for other values."
        if symmetric
        else f"`zero_point` must be between {qmin} and {qmax} (the spec's range), got {bad}."
    )


def refuse_nan_zero_point() -> NoReturn:
    """Raises ValueError for a learned zero point that is NaN."""
    raise ValueError("`zero_point` must not be NaN.")


# --- codes ----------------------------------------------------------------------------------------


def can_be_packed(spec: QuantSpec) -> bool:
    """Returns True if codes of `spec` can be packed: integers of 2 or 4 bits, floats of 4 or 6.

    >>> can_be_packed(QuantSpec(bits=4)), can_be_packed(QuantSpec(bits=6)), can_be_packed(QuantSpec(format="e3m2"))
    (True, False, True)
    """
    return spec.bits in (2, 4) or (spec.bits == 6 and spec.format != "int")


def packed_code_type(spec: QuantSpec) -> int:
    """Returns the kernels' number for packed codes of `spec`. Raises ValueError if they cannot be packed."""
    if not can_be_packed(spec):
        raise ValueError(
            "Only 4-bit and 2-bit integers, 6-bit and 4-bit floats can be packed, "
            f"got {spec.bits} bits of the format {spec.format!r}."
        )
    return PACKED_CODE_TYPES[spec.bits, spec.qmin < 0]


def packed_code_shape(shape: Shape, bits: int) -> Shape:
    """Returns the shape of the packed codes of data of `shape`."""
    return ((prod(shape) * bits + 7) // 8,)


def check_codes(dtype: str, q_shape: Shape, shape: Shape | None, spec: QuantSpec, kind: str) -> None:
    """Raises TypeError if codes do not have the dtype of the spec, ValueError if packed codes have a wrong shape.

    `shape` is the shape of the data if the codes are packed, otherwise None.
    """
    wanted = "uint8" if shape is not None else spec.storage
    if dtype != wanted:
        raise TypeError(
            f"`q` must hold {wanted} codes for this spec, got {dtype}.\n"
            f"Packed codes need `shape`, the shape of the {kind} they were made from."
        )
    if shape is None:
        return
    packed_code_type(spec)
    packed = packed_code_shape(shape, spec.bits)
    if q_shape != packed:
        raise ValueError(
            f"Packed {spec.bits}-bit codes of {_a(kind)} of shape {shape} are uint8 of shape {packed}, "
            f"got shape {q_shape}."
        )


# --- ranges ---------------------------------------------------------------------------------------


def both_ends(seen: Range[Array], hi: object, spec: object) -> tuple[Array, Array, object]:
    """Returns lo, hi and spec of a call with a range, after which the spec may stand in the place of `hi`."""
    if hi is not None and spec is not None:
        raise TypeError("A Range has both ends, so `hi` is left out: choose_qparams(range, spec).")
    return seen.min, seen.max, hi if spec is None else spec


def refuse_range(lo: object, hi: object, index: int | None) -> NoReturn:
    """Raises ValueError for a range that is not finite with lo <= hi. `index` is its position among several."""
    raise ValueError(
        f"`lo` and `hi` must be finite with lo <= hi, got lo={lo}, hi={hi}"
        f"{f' at index {index}' if index is not None else ''}.\n"
        "An observer that has seen nothing finite has no range: observe data first."
    )


def refuse_running(name: str, parameters: Shape, received: str, kind: str) -> NoReturn:
    """Raises ValueError for a running range that is not float32 with one entry per block."""
    raise ValueError(
        f"`{name}` must be a float32 {kind} with one entry per block, shape {parameters or (1,)}, got {received}."
    )


def refuse_unseen(unseen: int, count: int) -> NoReturn:
    """Raises ValueError for blocks that have no range yet."""
    raise ValueError(
        f"{unseen} of {count} blocks have not seen a finite value, so there is no range to choose a scale from.\n"
        "Observe data before quantizing."
    )
