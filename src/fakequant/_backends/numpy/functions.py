"""The library's own functions on NumPy arrays. `fakequant.functional` and `fakequant.qparams` document them."""

from math import prod

import numpy as np

from fakequant import _kernels, _native
from fakequant._backends import checks
from fakequant._backends.blocks import blocks_of, short_blocks
from fakequant._backends.numpy.arguments import (
    KERNEL_DTYPES,
    as_float_array,
    check_numbers,
    dtype_name,
    kernel_numerics,
    parameter_dtype,
    resolve,
    scale_dtype,
)
from fakequant._backends.scale_codes import decode_scales as decode_scales, encode_scales as encode_scales
from fakequant._backends.types import (
    DType,
    Gradient,
    LearnedGradients,
    MaskForm,
    Numbers,
    ObservedFakeQuantize,
    QParams,
    Range,
    Unchecked,
    Update,
)
from fakequant._kernels import CODE_TYPES, SCALE_RULES, SIGNED_RULES, UPDATES, scale_rule_name, zero_point_dtype
from fakequant.spec import QuantSpec

_FLOAT32 = np.dtype(np.float32)


def as_data(x: Unchecked, name: str = "x") -> np.ndarray:
    """Returns `x` as an array. Raises TypeError if its dtype has no kernel."""
    return as_float_array(x, name)[0]


def as_float32_array(x: Unchecked, name: str) -> np.ndarray:
    """Returns `x` rounded to float32. Raises TypeError if its dtype has no kernel."""
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite
        return as_data(x, name).astype(np.float32)


def copy(x: Unchecked, name: str) -> np.ndarray:
    """Returns a copy of `x`. Raises TypeError if its dtype has no kernel."""
    return np.array(as_data(x, name))


def overwrite(y: np.ndarray, where: np.ndarray, value: float) -> None:
    """Writes `value` into the elements of `y` where `where` is True."""
    y[where] = value


def zero_outside(dy: np.ndarray, x: np.ndarray, lo: np.float32, hi: np.float32) -> np.ndarray:
    """Returns `dy`, with 0 where `x` is less than `lo` or greater than `hi`."""
    return np.where((x < lo) | (x > hi), np.zeros((), dy.dtype), dy)


def _empty_mask(form: MaskForm | None, shape: tuple[int, ...]) -> tuple[np.ndarray | None, int]:
    kind = checks.mask_kind(form)
    if kind == _kernels.MASK_NONE:
        return None, kind
    if kind == _kernels.MASK_PACKED:
        return np.empty(checks.packed_mask_shape(shape), np.uint8), kind
    return np.empty(shape, np.bool_), kind


def fake_quantize(
    x: Unchecked, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, gradient: Gradient = "clipped"
) -> np.ndarray:
    """See `fakequant.fake_quantize`."""
    return _fake_quantize(x, scale, zero_point, spec, None, gradient)[0]


def fake_quantize_and_mask(
    x: Unchecked, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, mask: MaskForm, gradient: Gradient
) -> tuple[np.ndarray, np.ndarray]:
    """See `fakequant.fake_quantize`."""
    y, bits = _fake_quantize(x, scale, zero_point, spec, mask, gradient)
    assert bits is not None
    return y, bits


def _fake_quantize(
    x: Unchecked, scale: Numbers, zero_point: Numbers, spec: QuantSpec, mask: MaskForm | None, gradient: Gradient
) -> tuple[np.ndarray, np.ndarray | None]:
    x, dtype = as_float_array(x)
    checks.check_spec(spec)
    checks.check_gradient(gradient, mask)
    bits, kind = _empty_mask(mask, x.shape)
    x = np.asarray(x, order="C")
    if spec.axis is None and isinstance(scale, float) and type(zero_point) is int:
        # Making arrays of the two numbers would be most of the cost of a call on a few elements.
        check_numbers(scale, zero_point, dtype, spec)
        y = np.empty(x.shape, x.dtype)
        _native.fake_quantize_scalar(
            x, y, bits, kind, dtype, x.size, kernel_numerics(spec), scale, zero_point, spec.qmin, spec.qmax
        )
    else:
        grid = resolve(x.shape, dtype, scale, zero_point, spec)
        y = np.empty(x.shape, x.dtype)
        _native.fake_quantize(x, y, bits, kind, dtype, *grid)
    return y, bits


def fake_quantize_backward(dy: Unchecked, mask: Unchecked, spec: QuantSpec) -> np.ndarray:
    """See `fakequant.fake_quantize_backward`."""
    dy, dtype = as_float_array(dy, "dy")
    checks.check_spec(spec)
    if not isinstance(mask, np.ndarray):
        checks.refuse_mask(dy.shape, type(mask).__name__, "array")
    kind = checks.check_mask(dy.shape, dtype_name(mask.dtype), mask.shape, "array")
    dy = np.asarray(dy, order="C")
    dx = np.empty(dy.shape, dy.dtype)
    mask = np.asarray(mask, order="C")
    _native.mask_backward(dy, mask, kind, dx, dtype, dy.size, spec.numerics == "torch")
    return dx


def round_zero_point(zero_point: Numbers, spec: QuantSpec) -> np.ndarray:
    """See `fakequant.round_zero_point`."""
    checks.check_spec(spec, "zero_point, spec")
    z = np.asarray(zero_point)
    if np.isnan(z).any():
        checks.refuse_nan_zero_point()
    if spec.has_offset:
        return z.astype(np.float32)
    return np.clip(np.rint(z.astype(np.float64)), spec.qmin, spec.qmax).astype(np.int32)


def _round_backward(zero_point: Numbers, spec: QuantSpec) -> np.ndarray:
    """Returns the zero point of the backward. torch's per-tensor rule truncates `zero_point + 0.5` there."""
    rounded = round_zero_point(zero_point, spec)
    if spec.numerics == "torch" and spec.axis is None and not spec.symmetric:
        shifted = (np.asarray(zero_point, np.float32) + np.float32(0.5)).astype(np.float64)
        return np.trunc(np.clip(shifted, spec.qmin, spec.qmax)).astype(np.int32)
    return rounded


def fake_quantize_learned(
    x: Unchecked, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, grad_factor: float | None = 1.0
) -> np.ndarray:
    """See `fakequant.fake_quantize_learned`."""
    checks.check_spec(spec)
    checks.check_learned(spec)
    if grad_factor is not None:
        float(grad_factor)
    return fake_quantize(x, scale, round_zero_point(zero_point, spec), spec)


def fake_quantize_learned_backward(
    dy: Unchecked, x: Unchecked, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, grad_factor: float = 1.0
) -> LearnedGradients[np.ndarray]:
    """See `fakequant.fake_quantize_learned_backward`."""
    x, dtype = as_float_array(x)
    dy, _ = as_float_array(dy, "dy")
    checks.check_same(x.shape, dtype_name(x.dtype), dy.shape, dtype_name(dy.dtype))
    checks.check_spec(spec)
    checks.check_learned(spec)
    if short_blocks(x.shape, spec):
        missing = [(0, 0)] * x.ndim
        for axis, size in short_blocks(x.shape, spec):
            missing[axis] = (0, -x.shape[axis] % size)
        found = fake_quantize_learned_backward(
            np.pad(dy, missing), np.pad(x, missing), scale, zero_point, spec, grad_factor=grad_factor
        )
        return found._replace(dx=found.dx[tuple(map(slice, x.shape))])
    grid = resolve(x.shape, dtype, scale, _round_backward(zero_point, spec), spec)
    x, dy = np.asarray(x, order="C"), np.asarray(dy, order="C")
    dx = np.empty(x.shape, x.dtype)
    parameters = blocks_of(x.shape, spec).parameters
    sums = np.empty((2, prod(parameters)), np.float64)
    _native.learned_backward(dy, x, dx, dtype, dtype, *grid, float(grad_factor), sums[0], sums[1])
    with np.errstate(over="ignore"):  # a sum beyond float32 becomes infinite
        dscale, dzero_point = sums.reshape(2, *parameters).astype(scale_dtype(dtype, spec))
    return LearnedGradients(dx, np.asarray(dscale), np.asarray(dzero_point))


def quantize(x: Unchecked, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, packed: bool = False) -> np.ndarray:
    """See `fakequant.quantize`."""
    x, dtype = as_float_array(x)
    grid = resolve(x.shape, dtype, scale, zero_point, spec)
    if packed:
        code = checks.packed_code_type(spec)
        q = np.empty(checks.packed_code_shape(x.shape, spec.bits), np.uint8)
    else:
        code = CODE_TYPES[spec.storage]
        q = np.empty(x.shape, spec.storage)
    _native.quantize(np.asarray(x, order="C"), q, dtype, code, *grid)
    return q


def dequantize(
    q: Unchecked,
    scale: Numbers,
    zero_point: Numbers,
    spec: QuantSpec,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: DType = None,
) -> np.ndarray:
    """See `fakequant.dequantize`."""
    checks.check_spec(spec)
    dtype = _FLOAT32 if dtype is None else np.dtype(dtype)
    kernel_dtype = KERNEL_DTYPES.get(dtype)
    if kernel_dtype is None:
        checks.refuse_result_dtype(dtype)
    q = np.asarray(q)
    shape = None if shape is None else tuple(shape)
    checks.check_codes(dtype_name(q.dtype), q.shape, shape, spec, "array")
    y_shape, code = (q.shape, CODE_TYPES[spec.storage]) if shape is None else (shape, checks.packed_code_type(spec))
    grid = resolve(y_shape, kernel_dtype, scale, zero_point, spec)
    if spec.numerics == "torch" and spec.axis is None and kernel_dtype == _kernels.F64:
        # Per tensor, torch multiplies in float32 even for float64.
        return dequantize(q, scale, zero_point, spec, shape=shape).astype(dtype)
    y = np.empty(y_shape, dtype)
    _native.dequantize(np.asarray(q, order="C"), y, kernel_dtype, code, *grid)
    return y


def observe_fake_quantize(
    x: Unchecked,
    spec: QuantSpec,
    running_min: Unchecked,
    running_max: Unchecked,
    *,
    update: Update,
    averaging_constant: float,
    eps: float,
    mask: MaskForm | None = None,
    gradient: Gradient = "clipped",
) -> ObservedFakeQuantize[np.ndarray]:
    """See `fakequant.observe_fake_quantize`."""
    x, dtype = as_float_array(x)
    checks.check_spec(spec)
    checks.check_eps(eps)
    checks.check_gradient(gradient, mask)
    checks.check_update(update, averaging_constant, spec)
    blocks = blocks_of(x.shape, spec)
    count = prod(blocks.parameters)
    for name, running in (("running_min", running_min), ("running_max", running_max)):
        if not isinstance(running, np.ndarray):
            checks.refuse_running(name, blocks.parameters, repr(running), "array")
        if running.dtype != np.float32 or running.size != count:
            checks.refuse_running(name, blocks.parameters, f"{running.dtype} of shape {running.shape}", "array")
        if not running.flags.c_contiguous or not running.flags.writeable:
            raise ValueError(f"`{name}` is updated in place and must be contiguous and writeable.")
    if short_blocks(x.shape, spec):
        if spec.has_block_scales:
            return _observe_short_blocks(x, spec, running_min, running_max, mask)
        return _observe_in_parts(x, spec, running_min, running_max, mask, update, averaging_constant, eps)
    bits, kind = _empty_mask(mask, x.shape)
    x = np.asarray(x, order="C")
    y = np.empty(x.shape, x.dtype)
    scale = np.empty(blocks.parameters, np.float32)
    zero_point = np.empty(blocks.parameters, zero_point_dtype(scale_rule_name(spec)))
    nan, posinf, neginf, unseen = _native.observe_fake_quantize(
        x, y, bits, kind, dtype, blocks.kernel, kernel_numerics(spec), spec.qmin, spec.qmax, _kernels.RANGE_OWN,
        UPDATES[update], True, True, spec.symmetric, SCALE_RULES[scale_rule_name(spec)], float(averaging_constant),
        float(eps), running_min, running_max, scale, zero_point,
    )  # fmt: skip
    if unseen:
        checks.refuse_unseen(unseen, count)
    return ObservedFakeQuantize(y, bits, scale, zero_point, nan + posinf + neginf)


def fake_quantize_dynamic(x: Unchecked, spec: QuantSpec, *, gradient: Gradient = "pass", eps: float) -> np.ndarray:
    """See `fakequant.fake_quantize_dynamic`."""
    checks.check_spec(spec, "x, spec")
    lo, hi = np.empty((2, *blocks_of(np.shape(x), spec).parameters), np.float32)
    return observe_fake_quantize(
        x, spec, np.asarray(lo), np.asarray(hi), update="dynamic", averaging_constant=0.0, eps=eps, gradient=gradient
    ).y


def quantize_dynamic(
    x: Unchecked, spec: QuantSpec, *, packed: bool = False, eps: float
) -> tuple[np.ndarray, QParams[np.ndarray]]:
    """See `fakequant.quantize_dynamic`."""
    seen = min_max(x, spec)
    qparams = choose_qparams(*_dynamic_range(seen), spec, eps=eps)
    return quantize(x, *qparams, spec, packed=packed), qparams


def _dynamic_range(seen: Range[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of ranges within float32, 0 to 0 without a finite value."""
    limit, nothing = np.finfo(np.float32).max, seen.min > seen.max
    lo, hi = (np.where(nothing, 0, end).clip(-limit, limit) for end in (seen.min, seen.max))
    return lo, hi


def _observe_short_blocks(
    x: np.ndarray, spec: QuantSpec, running_min: np.ndarray, running_max: np.ndarray, mask: MaskForm | None
) -> ObservedFakeQuantize[np.ndarray]:
    """Does the same as `observe_fake_quantize` in separate steps, for data whose last blocks are shorter."""
    seen = min_max(x, spec)
    lo, hi = _dynamic_range(seen)
    running_max[...] = np.abs(np.maximum(-lo, hi)).reshape(running_max.shape)
    running_min[...] = 0 - running_max
    scale, zero_point = choose_qparams(running_min, running_max, spec, eps=1.0)  # eps is ignored for block scales
    scale, zero_point = scale.reshape(seen.min.shape), zero_point.reshape(seen.min.shape)
    y, bits = _fake_quantize(x, scale, 0, spec, mask, "clipped")
    return ObservedFakeQuantize(y, bits, scale, zero_point, int(seen.nan.sum() + seen.posinf.sum() + seen.neginf.sum()))


def _observe_in_parts(
    x: np.ndarray,
    spec: QuantSpec,
    running_min: np.ndarray,
    running_max: np.ndarray,
    mask: MaskForm | None,
    update: Update,
    averaging_constant: float,
    eps: float,
) -> ObservedFakeQuantize[np.ndarray]:
    """Does the same as `observe_fake_quantize` for the whole blocks and for the shorter last ones."""
    axis, size = short_blocks(x.shape, spec)[0]
    shape = blocks_of(x.shape, spec).parameters
    at = [x.shape[axis] // size]
    running = [[part.copy() for part in np.split(r.reshape(shape), at, axis)] for r in (running_min, running_max)]
    parts = [
        observe_fake_quantize(
            part, spec, lo, hi, update=update, averaging_constant=averaging_constant, eps=eps,
            mask=None if mask is None else "bool",
        )
        for part, lo, hi in zip(_whole_and_rest(x, axis, size), *running, strict=True)
    ]  # fmt: skip
    for target, new in zip((running_min, running_max), running, strict=True):
        target[...] = np.concatenate(new, axis).reshape(target.shape)
    y, scale, zero_point = (
        np.concatenate([getattr(part, name) for part in parts], axis) for name in ("y", "scale", "zero_point")
    )
    bits = None if mask is None else np.concatenate([part.mask for part in parts], axis)
    if bits is not None and checks.mask_kind(mask) == _kernels.MASK_PACKED:
        bits = np.packbits(bits, bitorder="little")
    return ObservedFakeQuantize(y, bits, scale, zero_point, sum(part.nonfinite for part in parts))


def min_max(x: Unchecked, spec: QuantSpec | None = None) -> Range[np.ndarray]:
    """See `fakequant.min_max`."""
    x, dtype = as_float_array(x)
    spec = QuantSpec() if spec is None else spec
    checks.check_spec(spec, "x, spec")
    blocks = blocks_of(x.shape, spec)
    if short_blocks(x.shape, spec):
        return _joined_ranges(x, spec)
    count = prod(blocks.parameters)
    limits = np.empty((2, count), np.float64)
    counts = np.empty((3, count), np.int64)
    _native.min_max(np.asarray(x, order="C"), dtype, blocks.kernel, limits[0], limits[1], counts)
    lo, hi = limits.astype(parameter_dtype(dtype)).reshape(2, *blocks.parameters)
    if spec.ggml_type in SIGNED_RULES:
        lo, hi = _range_to_largest(lo, hi, x, spec)
    return Range(lo, hi, *(c.reshape(blocks.parameters) for c in counts))


def _range_to_largest(lo: np.ndarray, hi: np.ndarray, x: np.ndarray, spec: QuantSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns ranges from 0 to the first value with the largest magnitude. Blocks without finite values keep theirs."""
    assert spec.axis is not None
    assert spec.group_size is not None
    axis = spec.axis % x.ndim
    is_negative, nothing = -lo >= hi, lo > hi
    tied = (-lo == hi) & ~nothing
    if tied.any():
        blocks = x.reshape(*x.shape[:axis], lo.shape[axis], spec.group_size, *x.shape[axis + 1 :])
        data = np.moveaxis(blocks, axis + 1, -1)[tied].astype(lo.dtype)
        first = (np.abs(data) == hi[tied][:, None]).argmax(-1)
        is_negative[tied] = data[np.arange(len(data)), first] < 0
    return np.where(nothing | is_negative, lo, 0), np.where(nothing | ~is_negative, hi, 0)


def _joined_ranges(x: np.ndarray, spec: QuantSpec) -> Range[np.ndarray]:
    """Returns the ranges of the whole blocks and of the shorter last ones."""
    axis, size = short_blocks(x.shape, spec)[0]
    ranges = [min_max(part, spec) for part in _whole_and_rest(x, axis, size)]
    return Range(*(np.concatenate(pair, axis=axis) for pair in zip(*ranges, strict=True)))


def _whole_and_rest(x: np.ndarray, axis: int, size: int) -> list[np.ndarray]:
    """Returns `x` in two parts: the whole blocks along an axis, and the shorter last one."""
    length = x.shape[axis]
    return np.split(x, [length - length % size], axis=axis)


def choose_qparams(lo: Numbers, hi: Numbers, spec: QuantSpec, *, eps: float) -> QParams[np.ndarray]:
    """See `fakequant.choose_qparams`."""
    checks.check_spec(spec, "lo, hi, spec")
    shape = np.broadcast_shapes(np.shape(lo), np.shape(hi))
    if np.iscomplexobj(lo) or np.iscomplexobj(hi):
        raise TypeError("`lo` and `hi` must be real numbers, got complex ones.")
    low, high = (np.array(np.broadcast_to(v, shape), np.float32, order="C") for v in (lo, hi))
    ordered = (low <= high) & np.isfinite(low) & np.isfinite(high)
    if not ordered.all():
        bad = int(np.argmin(ordered))
        checks.refuse_range(low.flat[bad], high.flat[bad], bad if low.size > 1 else None)
    checks.check_eps(eps)
    scale, zero_point = np.empty(shape, np.float32), np.empty(shape, zero_point_dtype(scale_rule_name(spec)))
    _native.choose_qparams(
        low, high, low.size, kernel_numerics(spec), spec.qmin, spec.qmax, spec.symmetric,
        SCALE_RULES[scale_rule_name(spec)], float(eps), scale, zero_point,
    )  # fmt: skip
    return QParams(scale, zero_point)
