"""The library's own functions on tensors. `fakequant.functional` and `fakequant.qparams` come here.

A tensor that is ordinary CPU memory goes straight to the kernels. Everything else (another device, a
fake tensor, a transform, a compiler) goes through `torch.ops.fakequant`, with the same results.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.blocks import blocks_of
from fakequant._backends.numpy.array_grid import check_scalars, check_spec, kernel_numerics as kernel_number
from fakequant._backends.torch import compiled_nodes, formula, gradients, tensor_kernels
from fakequant._backends.torch.operator_calls import ops
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.tensor_checks import block_shape, check_data, check_device, kernel_numerics, make_grid
from fakequant._backends.torch.tensor_kernels import KERNEL_DTYPES, Grid
from fakequant.functional import (
    Gradient,
    LearnedGradients,
    MaskForm,
    ObservedFakeQuantize,
    Update,
    check_gradient,
    check_update,
)
from fakequant.qparams import QParams, Range, check_eps
from fakequant.spec import QuantSpec

_MASK_KINDS = {"packed": _kernels.MASK_PACKED, "bool": _kernels.MASK_BYTES}


def _is_direct(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and is_eager(x)


def _refuse_gradient(value: Any, name: str, function: str) -> None:
    if gradients.has_derivative(value):
        raise RuntimeError(
            f"`{name}` requires a gradient, but `{function}` does not differentiate it.\n"
            f"Use `fake_quantize_learned`, or pass `{name}.detach()`."
        )


def _from_front(axis: int | None, x: Tensor) -> int | None:
    """An axis that is not there stays one that is not there."""
    return axis + x.dim() if axis is not None and axis < 0 else axis


def fake_quantize(
    x: Tensor,
    scale: Any,
    zero_point: Any,
    spec: QuantSpec,
    *,
    mask: MaskForm | None = None,
    gradient: Gradient = "clipped",
) -> Any:
    """See `fakequant.fake_quantize`."""
    check_spec(spec)
    clipped = check_gradient(gradient, mask)
    if mask is None and spec.group_size is None:
        low, high = spec.qmin, spec.qmax
        zeros = (0, 0) if spec.symmetric else (low, high)
        axis = _from_front(spec.axis, x)
        y = compiled_nodes.fake_quantize(
            x, scale, zero_point, low, high, kernel_number(spec), axis, zeros=zeros, clipped=clipped
        )
        if y is not None:
            return y
    check_data(x)
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        _refuse_gradient(value, name, "fake_quantize")
    direct = _is_direct(x)
    if direct and spec.axis is None and type(scale) is float and type(zero_point) is int:
        check_scalars(scale, zero_point, KERNEL_DTYPES[x.dtype], spec)
        grid = Grid(scale, zero_point, spec.qmin, spec.qmax, kernel_numerics(spec))
    else:
        grid = make_grid(x, scale, zero_point, spec)
    if mask is not None:
        return _with_mask(x, grid, _mask_kind(mask), direct)
    if not direct:
        return ops.fake_quantize(x, *grid, clipped)
    return gradients.clipped(x, grid) if clipped else gradients.pass_through(x, grid)


def _mask_kind(mask: Any) -> int:
    if mask not in _MASK_KINDS:
        raise ValueError(f'`mask` must be None, "packed" or "bool", got {mask!r}.')
    return _MASK_KINDS[mask]


def _with_mask(x: Tensor, grid: Grid, kind: int, direct: bool) -> tuple[Tensor, Tensor]:
    if direct:
        y, bits = gradients.clipped_and_mask(x, grid, kind)
    else:
        y, bits = ops.fake_quantize_masked(x, *grid, kind == _kernels.MASK_PACKED)
        if kind == _kernels.MASK_PACKED and bits.dtype == torch.bool:
            return y, formula.pack_bits(bits, None)  # under vmap, where examples do not end at whole bytes
    return y, _in_c_order(bits, x)


def _observed_mask(bits: Tensor, x: Tensor, kind: int) -> Tensor | None:
    """The mask in the form that was asked for; an operator that keeps none returns an empty one."""
    if kind == _kernels.MASK_NONE:
        return None
    return (
        formula.unpack_bits(bits, x.shape, tensor_kernels.order_of(x))
        if kind == _kernels.MASK_BYTES
        else _in_c_order(bits, x)
    )


def _in_c_order(mask: Tensor, x: Tensor) -> Tensor:
    """A packed mask of `x`, whose bits are in the order of its memory, with the order of its indices."""
    order = tensor_kernels.order_of(x)
    if mask.dtype == torch.bool or order is None:
        return mask
    return formula.pack_bits(formula.unpack_bits(mask, x.shape, order), None)


def fake_quantize_backward(dy: Tensor, mask: Tensor, spec: QuantSpec) -> Tensor:
    """See `fakequant.fake_quantize_backward`."""
    check_data(dy, "dy")
    check_spec(spec)
    _check_mask(mask, dy)
    multiply = spec.numerics == "torch"
    if _is_direct(dy):
        return gradients.masked(dy, mask, None, multiply)
    return ops.mask_backward(dy, mask, None, multiply)


def _check_mask(mask: Any, dy: Tensor) -> None:
    packed = ((dy.numel() + 7) // 8,)
    if isinstance(mask, Tensor):
        check_device(dy, "mask", mask)
        if mask.dtype == torch.bool and mask.shape == dy.shape:
            return
        if mask.dtype == torch.uint8 and tuple(mask.shape) == packed and mask.is_contiguous():
            return
        received = f"{str(mask.dtype)[6:]} of shape {tuple(mask.shape)}"
    else:
        received = type(mask).__name__
    raise ValueError(
        f"`mask` must be the one `fake_quantize` returned for a tensor of shape {tuple(dy.shape)}: bool of that shape, "
        f"or packed uint8 of shape {packed}; got {received}."
    )


def fake_quantize_learned(
    x: Tensor, scale: Any, zero_point: Any, spec: QuantSpec, *, grad_factor: float | None = 1.0
) -> Tensor:
    """See `fakequant.fake_quantize_learned`."""
    check_spec(spec)
    if spec.group_size is None:
        z = None if type(zero_point) is int and zero_point == 0 and spec.qmin <= 0 else zero_point
        axis = _from_front(spec.axis, x)
        if z is None or not spec.symmetric:
            numerics, factor = kernel_numerics(spec), grad_factor
            if factor is None and isinstance(x, Tensor) and not torch.compiler.is_compiling():
                factor = gradients.resolve_factor(None, x, spec.qmax)
            y = compiled_nodes.fake_quantize_learned(
                x, scale, z, spec.qmin, spec.qmax, numerics, axis, grad_factor=factor
            )
            if y is not None:
                return y
    check_data(x)
    grid = make_grid(x, scale, zero_point, spec, learned=True)
    run = gradients.learned if _is_direct(x) else ops.fake_quantize_learned
    return run(x, *grid, None if grad_factor is None else float(grad_factor))


def fake_quantize_learned_backward(
    dy: Tensor, x: Tensor, scale: Any, zero_point: Any, spec: QuantSpec, *, grad_factor: float = 1.0
) -> LearnedGradients:
    """See `fakequant.fake_quantize_learned_backward`."""
    check_spec(spec)
    check_data(x)
    check_data(dy, "dy")
    check_device(x, "dy", dy)
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise ValueError(
            f"`dy` must have the shape and dtype of `x`, {tuple(x.shape)} {str(x.dtype)[6:]}, "
            f"got {tuple(dy.shape)} {str(dy.dtype)[6:]}."
        )
    grid = make_grid(x, scale, zero_point, spec, learned=True)
    arguments: tuple[Any, ...] = (dy, x, *grid, float(grad_factor))
    run = gradients.learned_gradients if _is_direct(x) else ops.learned_backward
    dx, dscale, dzero_point = run(*arguments)
    shape = blocks_of(tuple(x.shape), spec).parameters
    return LearnedGradients(dx, dscale.reshape(shape), dzero_point.reshape(shape))


def round_zero_point(zero_point: Tensor, spec: QuantSpec) -> Tensor:
    """See `fakequant.round_zero_point`."""
    check_spec(spec, "zero_point, spec")
    if not torch.compiler.is_compiling() and zero_point.device.type == "cpu" and zero_point.isnan().any():
        raise ValueError("`zero_point` must not be NaN.")
    # Not in float32, where the end of a wide range may be rounded to a number outside it.
    wide = zero_point.detach().to(formula.wide_dtype(zero_point))
    return wide.round().clamp(spec.qmin, spec.qmax).to(torch.int32)


def quantize(x: Tensor, scale: Any, zero_point: Any, spec: QuantSpec, *, packed: bool = False) -> Tensor:
    """See `fakequant.quantize`."""
    check_data(x)
    check_spec(spec)
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        _refuse_gradient(value, name, "quantize")
    grid = make_grid(x, scale, zero_point, spec)
    if packed:
        _check_packable(spec)
        return (
            tensor_kernels.quantize_packed(x, grid, spec.bits)
            if _is_direct(x)
            else ops.quantize_packed(x, *grid, spec.bits)
        )
    dtype = getattr(torch, spec.storage)
    return tensor_kernels.quantize(x, grid, dtype) if _is_direct(x) else ops.quantize(x, *grid, dtype)


def _check_packable(spec: QuantSpec) -> None:
    if spec.bits not in (2, 4):
        raise ValueError(f"Only 4-bit and 2-bit codes can be packed, got a spec of {spec.bits} bits.")


def dequantize(
    q: Tensor,
    scale: Any,
    zero_point: Any,
    spec: QuantSpec,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See `fakequant.dequantize`."""
    check_spec(spec)
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        _refuse_gradient(value, name, "dequantize")
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in KERNEL_DTYPES:
        raise TypeError(f"`dtype` must be float32, float64, bfloat16 or float16, got {dtype}.")
    if spec.numerics == "torch" and spec.axis is None and dtype == torch.float64:
        # Per tensor, torch multiplies in float32 even for float64.
        return dequantize(q, scale, zero_point, spec, shape=shape).to(dtype)
    wanted = torch.uint8 if shape is not None else getattr(torch, spec.storage)
    if q.dtype != wanted:
        raise TypeError(
            f"`q` must hold {str(wanted)[6:]} codes for this spec, got {str(q.dtype)[6:]}.\n"
            "Packed codes need `shape`, the shape of the tensor they were made from."
        )
    if shape is None:
        grid = make_grid(torch.empty_like(q, dtype=dtype), scale, zero_point, spec)
        return tensor_kernels.dequantize(q, grid, dtype) if _is_direct(q) else ops.dequantize(q, *grid, dtype)
    _check_packable(spec)
    shape = tuple(shape)
    if tuple(q.shape) != ((prod(shape) * spec.bits + 7) // 8,):
        raise ValueError(
            f"Packed {spec.bits}-bit codes of a tensor of shape {shape} are uint8 of shape "
            f"{((prod(shape) * spec.bits + 7) // 8,)}, got shape {tuple(q.shape)}."
        )
    grid = make_grid(q.new_empty(shape, dtype=dtype), scale, zero_point, spec)
    if _is_direct(q):
        return tensor_kernels.dequantize_packed(q, grid, shape, spec.bits, dtype)
    return ops.dequantize_packed(q, *grid, shape, spec.bits, dtype)


def min_max(x: Tensor, spec: QuantSpec | None = None) -> Range:
    """See `fakequant.min_max`."""
    check_data(x)
    spec = QuantSpec() if spec is None else spec
    check_spec(spec, "x, spec")
    x = x.detach()
    blocks = block_shape(tuple(x.shape), spec)
    if torch.jit.is_tracing():
        blocks = tuple(int(n) for n in blocks)  # sizes are tensors there
    lo, hi, counts = tensor_kernels.min_max(x, blocks) if _is_direct(x) else ops.min_max(x, blocks)
    shape = blocks_of(tuple(x.shape), spec).parameters
    return Range(*(v.reshape(shape) for v in (lo, hi, *counts)))


def choose_qparams(lo: Any, hi: Any, spec: QuantSpec, *, eps: float) -> QParams:
    """See `fakequant.choose_qparams`."""
    tensor = lo if isinstance(lo, Tensor) else hi
    low, high = (torch.as_tensor(v, dtype=torch.float32, device=tensor.device).detach() for v in (lo, hi))
    low, high = torch.broadcast_tensors(low, high)
    check_eps(eps)
    run = tensor_kernels.choose_qparams if _is_direct(tensor) else ops.choose_qparams
    return QParams(*run(low, high, spec.qmin, spec.qmax, spec.symmetric, eps))


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
) -> ObservedFakeQuantize:
    """See `fakequant.observe_fake_quantize`."""
    check_data(x)
    check_spec(spec)
    check_eps(eps)
    clipped = check_gradient(gradient, mask)
    check_update(update, averaging_constant)
    kind = _kernels.MASK_NONE if mask is None else _mask_kind(mask)
    shape = tuple(x.shape)
    parameters = blocks_of(shape, spec).parameters
    running = []
    for name, value in (("running_min", running_min), ("running_max", running_max)):
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.numel() != prod(parameters):
            received = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"`{name}` must be a float32 tensor with one entry per block, shape {parameters or (1,)}, "
                f"got {received}."
            )
        check_device(x, name, value)
        if any(step == 0 and n > 1 for step, n in zip(value.stride(), value.shape, strict=True)):
            raise ValueError(f"`{name}` is updated in place, but its elements share memory: pass `{name}.clone()`.")
        running.append(value if prod(parameters) == 1 else value.view(block_shape(shape, spec)))
    options = (
        spec.qmin, spec.qmax, kernel_numerics(spec), spec.symmetric, update, float(averaging_constant), float(eps),
        clipped and (mask is not None or gradients.is_differentiating(x)),
    )  # fmt: skip
    if _is_direct(x):
        result = gradients.observe(x, running[0], running[1], options)
    else:
        result = ops.observe_fake_quantize(x, *running, *options)
    y, bits, scale, zero_point, nonfinite = result
    return ObservedFakeQuantize(
        y,
        None if bits is None else _observed_mask(bits, x, kind),
        scale.reshape(parameters),
        zero_point.reshape(parameters),
        nonfinite,
    )
