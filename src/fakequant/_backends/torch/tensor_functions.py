"""The library's own functions on tensors. `fakequant.functional` and `fakequant.qparams` document them.

A tensor that is plain CPU memory goes directly to the kernels. Other tensors (on another device, fake, or under a
transform or compiler) go through `torch.ops.fakequant`, with the same results.
"""

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends import checks, scale_codes
from fakequant._backends.blocks import blocks_of, short_blocks
from fakequant._backends.torch import compiled_nodes, formula, ggml_formula, gradients, tensor_kernels
from fakequant._backends.torch.plain_memory import is_direct
from fakequant._backends.torch.routes import learned_factor, ops, round_forward
from fakequant._backends.torch.tensor_checks import block_shape, check_data, check_device, filled, make_grid
from fakequant._backends.torch.tensor_kernels import (
    KERNEL_DTYPES,
    Grid,
    Observation,
    Observed,
    ObserverOptions,
    dtype_name,
)
from fakequant._backends.torch.torch_annotations import broadcast_tensors, is_tracing
from fakequant._backends.types import (
    EncodedScales,
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
from fakequant._kernels import NUMERICS, SIGNED_RULES, has_wide_scale, numerics_name, scale_rule_name
from fakequant.spec import QuantSpec

# Block scales have no smallest value.
_NO_EPS = 1.0


def _compiled_fake_quantize_learned(
    x: Unchecked, scale: Numbers, zero_point: Numbers, spec: QuantSpec, grad_factor: float | None
) -> Tensor | None:
    """Runs `fake_quantize_learned`, or returns None for arguments that the compiled function does not handle."""
    if compiled_nodes.compiled is None or torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return None
    if type(zero_point) is int and zero_point == 0 and spec.qmin <= 0:
        zero_point = None
    elif spec.symmetric:
        return None
    if spec.group_size is not None:
        return None
    name, axis = numerics_name(spec), spec.axis
    return compiled_nodes.compiled.fake_quantize_learned(
        x, scale, zero_point, spec.qmin, spec.qmax, name, NUMERICS[name],
        axis + x.dim() if axis is not None and axis < 0 else axis, False,
        float(learned_factor(grad_factor, x, spec.qmax, name)),
    )  # fmt: skip


def as_data(x: Unchecked, name: str = "x") -> Tensor:
    """Returns `x`. Raises TypeError or NotImplementedError unless it is a strided tensor of floats."""
    check_data(x, name)
    data: Tensor = x
    return data


def as_float32_array(x: Unchecked, name: str) -> np.ndarray:
    """Returns the values of `x`, rounded to float32, as an array."""
    values: Tensor = x
    return values.detach().resolve_neg().float().cpu().numpy()


def copy(x: Tensor, name: str) -> Tensor:
    """Returns a copy of `x`, through which gradients flow."""
    return x.clone()


def overwrite(y: Tensor, where: Tensor, value: float) -> None:
    """Writes `value` into the elements of `y` where `where` is True. Does not change the gradient of `y`."""
    y.detach().masked_fill_(where, value)


def zero_outside(dy: Tensor, x: Tensor, lo: np.float32, hi: np.float32) -> Tensor:
    """Returns `dy`, with 0 where `x` is less than `lo` or greater than `hi`."""
    wide = x if x.dtype == torch.float64 else x.float()  # otherwise the bounds would be rounded to 16 bits
    return dy.where(~((wide < float(lo)) | (wide > float(hi))), 0)


def fake_quantize(
    x: Tensor, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, gradient: Gradient = "clipped"
) -> Tensor:
    """See `fakequant.fake_quantize`."""
    checks.check_spec(spec)
    clipped = checks.check_gradient(gradient)
    y = compiled_nodes.fake_quantize(x, scale, zero_point, spec, clipped)
    if y is not None:
        return y
    grid, direct = _checked_grid(x, scale, zero_point, spec)
    if not direct:
        return ops.fake_quantize(x, *grid, clipped)
    return gradients.clipped(x, grid) if clipped else gradients.pass_through(x, grid)


def fake_quantize_and_mask(
    x: Tensor, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, mask: MaskForm, gradient: Gradient = "clipped"
) -> tuple[Tensor, Tensor]:
    """See `fakequant.fake_quantize`."""
    checks.check_spec(spec)
    checks.check_gradient(gradient, mask)
    grid, direct = _checked_grid(x, scale, zero_point, spec)
    kind = checks.mask_kind(mask)
    if direct:
        y, bits = gradients.clipped_and_mask(x, grid, kind)
    else:
        y, bits = ops.fake_quantize_masked(x, *grid, kind == _kernels.MASK_PACKED)
        if kind == _kernels.MASK_PACKED and bits.dtype == torch.bool:
            return y, formula.pack_bits(bits, None)  # vmap returns bools if an example does not fill whole bytes
    return y, _in_c_order(bits, x)


def _checked_grid(x: Tensor, scale: Numbers, zero_point: Numbers, spec: QuantSpec) -> tuple[Grid, bool]:
    """Returns the grid, and whether a kernel may be called on `x`."""
    check_data(x)
    gradients.refuse_gradient("fake_quantize", scale=scale, zero_point=zero_point)
    direct = is_direct(x)
    if not (direct and spec.axis is None and type(scale) is float and type(zero_point) is int):
        return make_grid(x, scale, zero_point, spec), direct
    checks.check_scale_number(scale, has_wide_scale(x.dtype == torch.float64, spec.numerics))
    checks.check_zero_point_number(zero_point, spec)
    return Grid(scale, zero_point, spec.qmin, spec.qmax, numerics_name(spec)), direct


def _observed_mask(bits: Tensor, x: Tensor, kind: int) -> Tensor | None:
    """Returns the packed mask `bits` in the form `kind`, or None if no mask was requested."""
    if kind == _kernels.MASK_NONE:
        return None
    return (
        formula.unpack_bits(bits, x.shape, tensor_kernels.order_of(x))
        if kind == _kernels.MASK_BYTES
        else _in_c_order(bits, x)
    )


def _in_c_order(mask: Tensor, x: Tensor) -> Tensor:
    """Returns a mask of `x` with packed bits in C order instead of the order of the memory of `x`."""
    order = tensor_kernels.order_of(x)
    if mask.dtype == torch.bool or order is None:
        return mask
    return formula.pack_bits(formula.unpack_bits(mask, x.shape, order), None)


def fake_quantize_backward(dy: Tensor, mask: Tensor, spec: QuantSpec) -> Tensor:
    """See `fakequant.fake_quantize_backward`."""
    check_data(dy, "dy")
    checks.check_spec(spec)
    _check_mask(mask, dy)
    multiply = spec.numerics == "torch"
    if is_direct(dy):
        return gradients.masked(dy, mask, None, multiply)
    return ops.mask_backward(dy, mask, None, multiply)


def _check_mask(mask: object, dy: Tensor) -> None:
    if not isinstance(mask, Tensor):
        checks.refuse_mask(tuple(dy.shape), type(mask).__name__, "tensor")
    check_device(dy, "mask", mask)
    kind = checks.check_mask(tuple(dy.shape), dtype_name(mask.dtype), tuple(mask.shape), "tensor")
    if kind == _kernels.MASK_PACKED and not mask.is_contiguous():
        checks.refuse_mask(tuple(dy.shape), f"a packed mask with stride {mask.stride(0)}", "tensor")


def fake_quantize_learned(
    x: Tensor, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, grad_factor: float | None = 1.0
) -> Tensor:
    """See `fakequant.fake_quantize_learned`."""
    checks.check_spec(spec)
    checks.check_learned(spec)
    y = _compiled_fake_quantize_learned(x, scale, zero_point, spec, grad_factor)
    if y is not None:
        return y
    check_data(x)
    if short_blocks(tuple(x.shape), spec):
        own_factor = learned_factor(grad_factor, x, spec.qmax, numerics_name(spec))
        y = fake_quantize_learned(filled(x, spec), scale, zero_point, spec, grad_factor=own_factor)
        return _cut(y, x.shape)
    grid = make_grid(x, scale, zero_point, spec, learned=True)
    factor = None if grad_factor is None else float(grad_factor)
    return gradients.learned(x, grid, factor) if is_direct(x) else ops.fake_quantize_learned(x, *grid, factor)


def fake_quantize_learned_backward(
    dy: Tensor, x: Tensor, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, grad_factor: float = 1.0
) -> LearnedGradients[Tensor]:
    """See `fakequant.fake_quantize_learned_backward`."""
    checks.check_spec(spec)
    checks.check_learned(spec)
    check_data(x)
    check_data(dy, "dy")
    check_device(x, "dy", dy)
    checks.check_same(tuple(x.shape), dtype_name(x.dtype), tuple(dy.shape), dtype_name(dy.dtype))
    if short_blocks(tuple(x.shape), spec):
        found = fake_quantize_learned_backward(
            filled(dy, spec), filled(x, spec), scale, zero_point, spec, grad_factor=grad_factor
        )
        return found._replace(dx=_cut(found.dx, x.shape))
    grid = make_grid(x, scale, zero_point, spec, learned=True)
    factor = float(grad_factor)
    if is_direct(x):
        dx, dscale, dzero_point = gradients.learned_gradients(dy, x, grid, factor)
    else:
        dx, dscale, dzero_point = ops.learned_backward(dy, x, *grid, factor)
    shape = blocks_of(tuple(x.shape), spec).parameters
    return LearnedGradients(dx, dscale.reshape(shape), dzero_point.reshape(shape))


def _cut(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    return y[tuple(slice(n) for n in shape)]


def round_zero_point(zero_point: Tensor, spec: QuantSpec) -> Tensor:
    """See `fakequant.round_zero_point`."""
    checks.check_spec(spec, "zero_point, spec")
    return zero_point.float() if spec.has_offset else round_forward(zero_point, spec.qmin, spec.qmax)


def quantize(x: Tensor, scale: Numbers, zero_point: Numbers, spec: QuantSpec, *, packed: bool = False) -> Tensor:
    """See `fakequant.quantize`."""
    check_data(x)
    checks.check_spec(spec)
    gradients.refuse_gradient("quantize", scale=scale, zero_point=zero_point)
    grid = make_grid(x, scale, zero_point, spec)
    if packed:
        checks.packed_code_type(spec)
        return (
            tensor_kernels.quantize_packed(x, grid, spec.bits)
            if is_direct(x)
            else ops.quantize_packed(x, *grid, spec.bits)
        )
    dtype = getattr(torch, spec.storage)
    return tensor_kernels.quantize(x, grid, dtype) if is_direct(x) else ops.quantize(x, *grid, dtype)


def dequantize(
    q: Tensor,
    scale: Numbers,
    zero_point: Numbers,
    spec: QuantSpec,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See `fakequant.dequantize`."""
    checks.check_spec(spec)
    gradients.refuse_gradient("dequantize", scale=scale, zero_point=zero_point)
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in KERNEL_DTYPES:
        checks.refuse_result_dtype(dtype_name(dtype))
    if spec.numerics == "torch" and spec.axis is None and dtype == torch.float64:
        # Per tensor, torch multiplies in float32 even for float64.
        return dequantize(q, scale, zero_point, spec, shape=shape).to(dtype)
    shape = None if shape is None else tuple(shape)
    checks.check_codes(dtype_name(q.dtype), tuple(q.shape), shape, spec, "tensor")
    if shape is None:
        grid = make_grid(torch.empty_like(q, dtype=dtype), scale, zero_point, spec)
        return tensor_kernels.dequantize(q, grid, dtype) if is_direct(q) else ops.dequantize(q, *grid, dtype)
    grid = make_grid(q.new_empty(shape, dtype=dtype), scale, zero_point, spec)
    if is_direct(q):
        return tensor_kernels.dequantize_packed(q, grid, shape, spec.bits, dtype)
    return ops.dequantize_packed(q, *grid, shape, spec.bits, dtype)


def min_max(x: Tensor, spec: QuantSpec | None = None) -> Range[Tensor]:
    """See `fakequant.min_max`."""
    check_data(x)
    spec = QuantSpec() if spec is None else spec
    checks.check_spec(spec, "x, spec")
    x = x.detach()
    if short_blocks(tuple(x.shape), spec):
        return _joined_ranges(x, spec)
    blocks = block_shape(tuple(x.shape), spec)
    if is_tracing():
        blocks = tuple(int(n) for n in blocks)  # torch.jit.trace has tensors for sizes
    lo, hi, counts = tensor_kernels.min_max(x, blocks) if is_direct(x) else ops.min_max(x, blocks)
    if spec.ggml_type in SIGNED_RULES:
        lo, hi = ggml_formula.range_to_largest(lo, hi, x)
    shape = blocks_of(tuple(x.shape), spec).parameters
    return Range(*(v.reshape(shape) for v in (lo, hi, *counts)))


def _joined_ranges(x: Tensor, spec: QuantSpec) -> Range[Tensor]:
    """Returns the ranges of the whole blocks and of the shorter last ones."""
    axis, size = short_blocks(tuple(x.shape), spec)[0]
    ranges = [min_max(part, spec) for part in _whole_and_rest(x, axis, size)]
    return Range(*(torch.cat(pair, axis) for pair in zip(*ranges, strict=True)))


def _whole_and_rest(x: Tensor, axis: int, size: int) -> tuple[Tensor, ...]:
    """Returns `x` in two parts: the whole blocks along an axis, and the shorter last one."""
    length = x.shape[axis]
    return x.tensor_split([length - length % size], axis)


def choose_qparams(lo: Numbers, hi: Numbers, spec: QuantSpec, *, eps: float) -> QParams[Tensor]:
    """See `fakequant.choose_qparams`."""
    checks.check_spec(spec, "lo, hi, spec")
    tensor = lo if isinstance(lo, Tensor) else hi
    low, high = (torch.as_tensor(v, dtype=torch.float32, device=tensor.device).detach() for v in (lo, hi))
    low, high = broadcast_tensors(low, high)
    checks.check_eps(eps)
    run: Callable[..., tuple[Tensor, Tensor]] = (
        tensor_kernels.choose_qparams if is_direct(tensor) else ops.choose_qparams
    )
    rule = scale_rule_name(spec)
    return QParams(*run(low, high, spec.qmin, spec.qmax, numerics_name(spec), spec.symmetric, rule, eps))


def encode_scales(scale: Tensor, spec: QuantSpec) -> EncodedScales[Tensor]:
    """See `fakequant.encode_scales`."""
    checks.check_spec(spec, "scale, spec")
    scale_codes.check_dtype("scale", "float32", dtype_name(scale.dtype))
    codes, factor = scale_codes.encode_scales(scale.detach().cpu().numpy(), spec)
    found = None if factor is None else torch.tensor(factor, device=scale.device)
    return EncodedScales(torch.from_numpy(codes).to(scale.device), found)


def decode_scales(codes: Tensor, tensor_scale: Numbers | None, spec: QuantSpec) -> Tensor:
    """See `fakequant.decode_scales`."""
    checks.check_spec(spec, "codes, tensor_scale, spec")
    scale_codes.check_dtype("codes", "uint8", dtype_name(codes.dtype))
    factor = None if tensor_scale is None else np.float32(float(torch.as_tensor(tensor_scale)))
    return torch.from_numpy(scale_codes.decode_scales(codes.detach().cpu().numpy(), factor, spec)).to(codes.device)


def observe_fake_quantize(
    x: Tensor,
    spec: QuantSpec,
    running_min: Tensor,
    running_max: Tensor,
    *,
    update: Update,
    averaging_constant: float,
    eps: float,
    mask: MaskForm | None = None,
    gradient: Gradient = "clipped",
) -> ObservedFakeQuantize[Tensor]:
    """See `fakequant.observe_fake_quantize`."""
    check_data(x)
    checks.check_spec(spec)
    checks.check_eps(eps)
    clipped = checks.check_gradient(gradient, mask)
    checks.check_update(update, averaging_constant, spec)
    kind = checks.mask_kind(mask)
    shape = tuple(x.shape)
    parameters = blocks_of(shape, spec).parameters
    running = []
    for name, value in (("running_min", running_min), ("running_max", running_max)):
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.numel() != prod(parameters):
            is_tensor = isinstance(value, Tensor)
            received = f"{dtype_name(value.dtype)} of shape {tuple(value.shape)}" if is_tensor else repr(value)
            checks.refuse_running(name, parameters, received, "tensor")
        check_device(x, name, value)
        if any(step == 0 and n > 1 for step, n in zip(value.stride(), value.shape, strict=True)):
            raise ValueError(f"`{name}` is updated in place, but its elements share memory: pass `{name}.clone()`.")
        running.append(value if prod(parameters) == 1 else value.view(block_shape(shape, spec)))
    if short_blocks(shape, spec):
        if spec.has_block_scales:
            return _observe_short_blocks(x, spec, running_min, running_max, mask, gradient)
        lo, hi = running
        return _observe_in_parts(x, spec, lo, hi, update, averaging_constant, eps, mask, gradient)
    options = ObserverOptions(
        spec.qmin, spec.qmax, numerics_name(spec), spec.symmetric, scale_rule_name(spec), update,
        float(averaging_constant), float(eps), clipped and (mask is not None or gradients.is_differentiating(x)),
    )  # fmt: skip
    if is_direct(x):
        result = gradients.observe(x, running[0], running[1], options)
    else:
        result = Observed(*ops.observe_fake_quantize(x, *running, *options))
    y, bits, scale, zero_point, nonfinite = result
    return ObservedFakeQuantize(
        y,
        None if bits is None else _observed_mask(bits, x, kind),
        scale.reshape(parameters),
        zero_point.reshape(parameters),
        nonfinite,
    )


def observe_into(
    x: Tensor,
    spec: QuantSpec,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    nonfinite: Tensor,
    *,
    update: Update,
    averaging_constant: float,
    eps: float,
    gradient: Gradient,
) -> Tensor:
    """Does what `observe_fake_quantize` does with the buffers of a quantizer, which are changed in place.

    `state` is the running minimum and maximum, scale and zero point. The number of non-finite values is added to
    `nonfinite`. Blocks must have one length.
    """
    check_device(x, "running_min", state[0])
    blocks = block_shape(tuple(x.shape), spec)
    options = ObserverOptions(
        spec.qmin, spec.qmax, numerics_name(spec), spec.symmetric, scale_rule_name(spec), update,
        averaging_constant, eps, gradient == "clipped" and gradients.is_differentiating(x),
    )  # fmt: skip
    y: Tensor = ops.observe_into(x, *(value.view(blocks) for value in state), nonfinite, *options)[0]
    return y


def fake_quantize_dynamic(x: Tensor, spec: QuantSpec, *, gradient: Gradient = "pass", eps: float) -> Tensor:
    """See `fakequant.fake_quantize_dynamic`."""
    checks.check_spec(spec, "x, spec")
    check_data(x)
    if is_direct(x) and not torch.compiler.is_compiling():
        running = torch.empty((2, *blocks_of(tuple(x.shape), spec).parameters), device=x.device)
        return observe_fake_quantize(
            x, spec, running[0], running[1], update="dynamic", averaging_constant=0.0, eps=eps, gradient=gradient
        ).y
    scale, zero_point = _dynamic_qparams(x, spec, eps)
    return fake_quantize(x, scale, 0 if spec.symmetric else zero_point, spec, gradient=gradient)


def quantize_dynamic(x: Tensor, spec: QuantSpec, *, packed: bool = False, eps: float) -> tuple[Tensor, QParams[Tensor]]:
    """See `fakequant.quantize_dynamic`."""
    checks.check_spec(spec, "x, spec")
    qparams = _dynamic_qparams(x, spec, eps)
    return quantize(x, *qparams, spec, packed=packed), qparams


def _dynamic_qparams(x: Tensor, spec: QuantSpec, eps: float) -> QParams[Tensor]:
    """Returns scale and zero point of the blocks of `x`. The range of a block without finite values is 0 to 0."""
    seen = min_max(x, spec)
    how = Observation("dynamic", scale_rule=scale_rule_name(spec))
    lo, hi = tensor_kernels.updated_range(seen.min, seen.max, seen.min, seen.max, how)
    return choose_qparams(lo, hi, spec, eps=eps)


def _observe_short_blocks(
    x: Tensor, spec: QuantSpec, running_min: Tensor, running_max: Tensor, mask: MaskForm | None, gradient: Gradient
) -> ObservedFakeQuantize[Tensor]:
    """Does the same as `observe_fake_quantize` in separate steps, for data whose last blocks are shorter."""
    seen = min_max(x, spec)
    how = Observation("dynamic", scale_rule=scale_rule_name(spec))
    lo, hi = tensor_kernels.updated_range(seen.min, seen.max, seen.min, seen.max, how)
    running_min.copy_(lo.reshape(running_min.shape))
    running_max.copy_(hi.reshape(running_max.shape))
    scale, zero_point = choose_qparams(lo, hi, spec, eps=_NO_EPS)
    nonfinite = seen.nan.sum() + seen.posinf.sum() + seen.neginf.sum()
    if mask is None:
        y, bits = fake_quantize(x, scale, 0, spec, gradient=gradient), None
    else:
        y, bits = fake_quantize_and_mask(x, scale, 0, spec, mask=mask, gradient=gradient)
    return ObservedFakeQuantize(y, bits, scale, zero_point, nonfinite)


def _observe_in_parts(
    x: Tensor,
    spec: QuantSpec,
    running_min: Tensor,
    running_max: Tensor,
    update: Update,
    averaging_constant: float,
    eps: float,
    mask: MaskForm | None,
    gradient: Gradient,
) -> ObservedFakeQuantize[Tensor]:
    """Does the same as `observe_fake_quantize` for the whole blocks and for the shorter last ones."""
    axis, size = short_blocks(tuple(x.shape), spec)[0]
    whole = x.shape[axis] // size
    running = [[part.clone() for part in r.split([whole, 1], axis)] for r in (running_min, running_max)]
    parts = [
        observe_fake_quantize(
            part, spec, lo, hi, update=update, averaging_constant=averaging_constant, eps=eps,
            mask=None if mask is None else "bool", gradient=gradient,
        )
        for part, lo, hi in zip(_whole_and_rest(x, axis, size), *running, strict=True)
    ]  # fmt: skip
    for target, new in zip((running_min, running_max), running, strict=True):
        target.copy_(torch.cat(new, axis))
    masks = [part.mask for part in parts if part.mask is not None]
    bits = torch.cat(masks, axis) if masks else None
    if bits is not None and checks.mask_kind(mask) == _kernels.MASK_PACKED:
        bits = formula.pack_bits(bits, None)
    y, scale, zero_point = (torch.cat([getattr(p, name) for p in parts], axis) for name in ("y", "scale", "zero_point"))
    return ObservedFakeQuantize(y, bits, scale, zero_point, torch.as_tensor(sum(p.nonfinite for p in parts)))
