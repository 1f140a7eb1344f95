"""The native kernels on CPU tensors, without autograd.

The kernels run on the memory of a dense tensor, whatever the order of its axes. Other tensors are copied first. Results
have the strides of `torch.empty_like(x)`.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fakequant import _kernels, _native
from fakequant._backends import checks
from fakequant._backends.blocks import KernelShape, memory_order, order_of_result
from fakequant._backends.torch import compiled_nodes, ggml_formula
from fakequant._backends.torch.tensor_blocks import place
from fakequant._kernels import (
    CODE_TYPES,
    DTYPES,
    NUMERICS,
    OFFSET_RULES,
    PACKED_CODE_TYPES,
    SCALE_RULES,
    SIGNED_RULES,
    UPDATES,
    has_wide_scale,
    is_own,
    is_per_block,
    zero_point_dtype,
)
from fakequant.formats import GGML_TYPES, SUPER_BLOCKS

KERNEL_DTYPES = {getattr(torch, name): number for name, number in DTYPES.items()}
_ZERO_KINDS = {torch.int32: _kernels.ZERO_I32, torch.int64: _kernels.ZERO_I64, torch.float32: _kernels.ZERO_F32}
_GGML_NUMERICS = {NUMERICS[name] for name in GGML_TYPES}
_CODE_TYPES = {getattr(torch, name): number for name, number in CODE_TYPES.items()}
Order = tuple[int, ...] | None


def dtype_name(dtype: torch.dtype) -> str:
    """Returns NumPy's name for a dtype.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def zero_dtype(scale_rule: str) -> torch.dtype:
    """Returns the dtype of zero points: int32, or float32 for the offsets of ggml."""
    dtype: torch.dtype = getattr(torch, zero_point_dtype(scale_rule))
    return dtype


class Grid(NamedTuple):
    """Scale, zero point and range. The first two are numbers, or tensors of blocks as in `tensor_blocks`."""

    scale: "Tensor | float"
    zero_point: "Tensor | int | None"  # None means 0
    qmin: int
    qmax: int
    numerics: str


def dense(x: Tensor, like: Tensor) -> Tensor:
    """Returns `x`, or a copy of it, with the memory layout of `like`, which is dense."""
    if x.stride() == like.stride() or (x.is_contiguous() and like.is_contiguous()):
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


class _Parameters(NamedTuple):
    """A grid in the form that the kernels take."""

    shape: KernelShape
    numerics: int
    scale: Tensor
    scale_is_f64: bool
    zero_point: Tensor | None
    zero_kind: int
    qmin: int
    qmax: int

    def check(self) -> None:
        """Raises ValueError unless scales are finite and positive, and zero points within the range."""
        if self.numerics in _GGML_NUMERICS:
            for value in (self.scale, self.zero_point):
                if value is not None and not value.isfinite().all():
                    checks.refuse_ggml_scale(value[~value.isfinite()][0].item())
            return
        _check_scale(self.scale, self.scale_is_f64)
        if self.zero_point is not None:
            _check_zero_point(self.zero_point, self.zero_kind, self.qmin, self.qmax)

    def arguments(self) -> tuple[KernelShape, int, int, bool, int | None, int, int, int]:
        """Returns the arguments of the kernels, with addresses instead of tensors, which must stay alive meanwhile."""
        zero_address = None if self.zero_point is None else self.zero_point.data_ptr()
        return (
            self.shape, self.numerics, self.scale.data_ptr(), self.scale_is_f64, zero_address, self.zero_kind,
            self.qmin, self.qmax,
        )  # fmt: skip


def scale_dtype(dtype: torch.dtype, numerics: str) -> torch.dtype:
    """Returns the dtype of scales for data of `dtype`."""
    return torch.float64 if has_wide_scale(dtype == torch.float64, numerics) else torch.float32


def _parameters(x: Tensor, grid: Grid) -> _Parameters:
    """Returns scale and zero point in the memory order of `x`, which is dense."""
    scale, zero_point = grid.scale, grid.zero_point
    assert isinstance(scale, Tensor)
    blocks = () if scale.numel() == 1 and x.numel() else tuple(scale.shape)
    shape, order, expand = place(tuple(x.shape), x.stride(), blocks)
    numerics = NUMERICS[grid.numerics]
    scale = in_order(scale, scale_dtype(x.dtype, grid.numerics), order, expand)
    zero_kind = _kernels.ZERO_NONE
    if isinstance(zero_point, Tensor):
        if grid.numerics == "torch_channel" and zero_point.is_floating_point():
            half = zero_point.dtype == torch.float16
            numerics = _kernels.TORCH_CHANNEL_HALF if half else _kernels.TORCH_CHANNEL_FLOAT
            zero_point = zero_point.float()
        elif zero_point.dtype == torch.int64 and -(2**31) <= grid.qmin <= grid.qmax < 2**31:
            # The kernels are slow for 64-bit zero points. Clamping changes only zero points that are not codes.
            zero_point = zero_point.clamp(-(2**31), 2**31 - 1).to(torch.int32)
        zero_kind = _ZERO_KINDS[zero_point.dtype]
        zero_point = in_order(zero_point, zero_point.dtype, order, expand)
    elif zero_point:
        zero_kind = _kernels.ZERO_I64
        zero_point = torch.full((scale.numel(),), zero_point, dtype=torch.int64, device="cpu")
    else:
        zero_point = None
    return _Parameters(
        shape, numerics, scale, scale.dtype == torch.float64, zero_point, zero_kind, grid.qmin, grid.qmax
    )


def _checked(x: Tensor, grid: Grid) -> _Parameters:
    """Returns the same after checking the values, unless torch's rules apply: torch's operators accept any scale."""
    parameters = _parameters(x, grid)
    if is_own(grid.numerics):
        parameters.check()
    return parameters


def in_order(values: Tensor, dtype: torch.dtype, order: Order, expand: tuple[int, ...] | None) -> Tensor:
    values = values.detach().to(dtype)
    if values.dim():
        for axis, length in enumerate(expand or ()):
            values = values.repeat_interleave(length // values.shape[axis], axis)
        if order is not None and values.numel() > 1:
            values = values.permute(order)
    return values.contiguous()


def check_values(x: Tensor, grid: Grid) -> None:
    """Raises ValueError unless scales are finite and positive, and zero points within the range."""
    _parameters(x, grid).check()


def _check_scale(scale: Tensor, is_f64: bool) -> None:
    bad = _native.first_invalid_scale(scale.data_ptr(), is_f64, scale.numel())
    if bad >= 0:
        checks.refuse_scale(scale.flatten()[bad].item(), dtype_name(scale.dtype))


def _check_zero_point(zero_point: Tensor, kind: int, qmin: int, qmax: int) -> None:
    bad = _native.first_outside(zero_point.data_ptr(), kind, zero_point.numel(), qmin, qmax)
    if bad >= 0:
        checks.refuse_zero_point(int(zero_point.flatten()[bad]), qmin, qmax)


def checked_scale(scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """Returns a copy of the scale after checking it and integer zero points, like the kernels."""
    checked = scale.detach().clone(memory_format=torch.contiguous_format)
    _check_scale(checked, checked.dtype == torch.float64)
    if zero_point is not None:
        _check_zero_point(zero_point.detach().contiguous(), _ZERO_KINDS[zero_point.dtype], qmin, qmax)
    return checked


def empty_mask(y: Tensor, kind: int) -> tuple[Tensor | None, int | None]:
    """Returns an uninitialized mask for `y` and its address, or None for both if `kind` is MASK_NONE."""
    if kind == _kernels.MASK_NONE:
        return None, None
    if kind == _kernels.MASK_PACKED:
        mask = torch.empty((y.numel() + 7) // 8, dtype=torch.uint8, device="cpu")
    else:
        mask = torch.empty_like(y, dtype=torch.bool)
    return mask, mask.data_ptr()


def fake_quantize(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor | None]:
    """Returns the fake-quantized values, and a mask unless `mask_kind` is MASK_NONE.

    The mask is packed in the memory order of the result, or bytes like the result.
    """
    y = torch.empty_like(x)
    mask, mask_address = empty_mask(y, mask_kind)
    size = x.numel()
    if size == 0:
        return y, mask
    if not x.is_contiguous():
        x = dense(x, y)
    dtype = KERNEL_DTYPES[x.dtype]
    if isinstance(grid.scale, float):
        assert isinstance(grid.zero_point, int)
        _native.fake_quantize_scalar(
            x.data_ptr(), y.data_ptr(), mask_address, mask_kind, dtype, size, NUMERICS[grid.numerics],
            grid.scale, grid.zero_point, grid.qmin, grid.qmax,
        )  # fmt: skip
        return y, mask
    p = _checked(x, grid)
    _native.fake_quantize(x.data_ptr(), y.data_ptr(), mask_address, mask_kind, dtype, *p.arguments())
    return y, mask


def order_of(x: Tensor) -> Order:
    """Returns the order of axes in the memory of `torch.empty_like(x)`, or None for C order."""
    if x.is_contiguous():
        return None
    return memory_order(tuple(x.shape), torch.empty_like(x, device="meta").stride())


def mask_backward(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """Returns `dy` where the mask is set, otherwise 0. See `gradients.masked` for the arguments."""
    dx = empty_gradient(dy, mask, order)
    if dy.numel() == 0:
        return dx
    if mask.dtype == torch.bool:
        kind, target, mask = _kernels.MASK_BYTES, dx, dense(mask, dx)
    else:
        kind, target = _kernels.MASK_PACKED, dx if dy.is_contiguous() and order is None else in_bit_order(dx, order)
    source = dense(dy, target)
    _native.mask_backward(
        source.data_ptr(), mask.data_ptr(), kind, target.data_ptr(), KERNEL_DTYPES[dy.dtype], dy.numel(), multiply
    )
    return dx if target is dx else dx.copy_(target)


def in_bit_order(dx: Tensor, order: Order) -> Tensor:
    """Returns `dx` if its memory has the order of the mask's bits, otherwise a new tensor that has it."""
    ordered = empty_in_order(dx, order)
    return dx if ordered.stride() == dx.stride() else ordered


def empty_gradient(dy: Tensor, mask: Tensor, order: Order) -> Tensor:
    """Returns an uninitialized gradient with the strides of `dy * mask`."""
    # torch converts a bool mask to floats first, which may change its strides.
    converted = mask.dtype == torch.bool
    mask = torch.empty_like(mask, device="meta") if converted else empty_in_order(dy.to("meta"), order)
    for layout in (torch.contiguous_format, torch.channels_last)[: 2 if dy.dim() == 4 else 1]:
        if dy.is_contiguous(memory_format=layout) and mask.is_contiguous(memory_format=layout):
            return torch.empty_like(dy, memory_format=layout)
    if dy.stride() == mask.stride() and dy.stride() == torch.empty_like(dy, device="meta").stride():
        return torch.empty_like(dy)
    return _like_product(dy, mask.stride())


def _like_product(dy: Tensor, other: tuple[int, ...]) -> Tensor:
    shape = tuple(dy.shape)
    return torch.empty_permuted(shape, order_of_result(shape, dy.stride(), other), dtype=dy.dtype, device=dy.device)


def empty_in_order(x: Tensor, order: Order) -> Tensor:
    """Returns an uninitialized tensor like `x` with its axes in the given order in memory."""
    if order is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)


def learned_backward(dy: Tensor, x: Tensor, grid: Grid, grad_factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx, dscale and dzero_point. The last two have the shape and dtype of the scale."""
    dx = torch.empty_like(x)
    assert isinstance(grid.scale, Tensor)
    if x.numel() == 0:
        return dx, torch.zeros_like(grid.scale), torch.zeros_like(grid.scale)
    x, dy = dense(x, dx), dense(dy, dx)
    p = _checked(x, grid)
    sums = torch.empty((2, p.scale.numel()), dtype=torch.float64, device="cpu")
    dtype = KERNEL_DTYPES[x.dtype]
    _native.learned_backward(
        dy.data_ptr(), x.data_ptr(), dx.data_ptr(), dtype, dtype, *p.arguments(), grad_factor,
        sums[0].data_ptr(), sums[1].data_ptr(),
    )  # fmt: skip
    dscale, dzero_point = (by_block(s, x, grid.scale).to(grid.scale.dtype, copy=True) for s in sums)
    return dx, dscale, dzero_point


def by_block(values: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """Sums one value per kernel block to the shape of the scales `like`. The inverse of `in_order`."""
    if like.numel() == 1:
        return values.reshape(like.shape)
    _, order, expand = place(tuple(x.shape), x.stride(), tuple(like.shape))
    shape = expand or tuple(like.shape)
    values = from_order(values, shape, order)
    if expand is not None:
        pairs = [n for blocks, total in zip(like.shape, shape, strict=True) for n in (blocks, total // blocks)]
        values = values.reshape(pairs).sum(list(range(1, len(pairs), 2)))
    return values.reshape(like.shape)


def quantize(x: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Returns the codes of `x`."""
    q = torch.empty_like(x, dtype=dtype)
    if x.numel() == 0:
        return q
    x = dense(x, q)
    return _quantize_into(q, x, grid, _CODE_TYPES[dtype])


def quantize_packed(x: Tensor, grid: Grid, bits: int) -> Tensor:
    """Returns the codes of `x` in C order, two or four to a byte."""
    q = torch.empty((x.numel() * bits + 7) // 8, dtype=torch.uint8, device="cpu")
    if x.numel() == 0:
        return q
    return _quantize_into(q, x.contiguous(), grid, PACKED_CODE_TYPES[bits, grid.qmin < 0])


def _quantize_into(q: Tensor, x: Tensor, grid: Grid, code: int) -> Tensor:
    p = _checked(x, grid)
    _native.quantize(x.data_ptr(), q.data_ptr(), KERNEL_DTYPES[x.dtype], code, *p.arguments())
    return q


def dequantize(q: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Returns the values of the codes `q`."""
    y = _empty(q.shape, dtype) if q.is_contiguous() else torch.empty_like(q, dtype=dtype)
    if q.numel():
        _dequantize_into(y, dense(q, y), grid, _CODE_TYPES[q.dtype])
    return y


def dequantize_packed(q: Tensor, grid: Grid, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> Tensor:
    """Returns the values of the packed codes of a tensor of `shape`."""
    y = _empty(shape, dtype)
    if prod(shape):
        _dequantize_into(y, q.contiguous(), grid, PACKED_CODE_TYPES[bits, grid.qmin < 0])
    return y


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns contiguous memory. The saved codes of a step are restored one after the other into the same."""
    if dtype == torch.float32 and compiled_nodes.compiled is not None:
        return compiled_nodes.compiled.empty_floats(shape)
    return torch.empty(shape, dtype=dtype, device="cpu")


def _dequantize_into(y: Tensor, q: Tensor, grid: Grid, code: int) -> None:
    p = _checked(y, grid)
    _native.dequantize(q.data_ptr(), y.data_ptr(), KERNEL_DTYPES[y.dtype], code, *p.arguments())


def observable(x: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, KernelShape, Order]:
    """Returns `x` in a layout whose blocks need no expanding, with the kernels' shape and the order of axes.

    Blocks cannot be expanded here, because then a block would be observed in parts.
    """
    if not x.is_contiguous():
        x = dense(x, torch.empty_like(x))
    shape, order, expand = place(tuple(x.shape), x.stride(), blocks)
    if expand is not None:
        x = x.contiguous()
        shape, order, expand = place(tuple(x.shape), x.stride(), blocks)
    if expand is not None:
        raise NotImplementedError(f"Blocks {blocks} of a tensor of shape {tuple(x.shape)} cannot be observed.")
    return x, shape, order


def min_max(x: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the lowest and highest finite value of every block, and the numbers of NaN, +inf and -inf."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.numel() == 0:
        lo = torch.full(blocks, torch.inf, dtype=dtype, device="cpu")
        return lo, -lo, torch.zeros((3, *blocks), dtype=torch.int64, device="cpu")
    x, shape, order = observable(x, blocks)
    count = prod(blocks)
    lo = torch.empty(count, dtype=torch.float64, device="cpu")
    hi = torch.empty(count, dtype=torch.float64, device="cpu")
    counts = torch.empty((3, count), dtype=torch.int64, device="cpu")
    _native.min_max(x.data_ptr(), KERNEL_DTYPES[x.dtype], shape, lo.data_ptr(), hi.data_ptr(), counts.data_ptr())
    lo, hi = (from_order(v.to(dtype), blocks, order) for v in (lo, hi))
    if order is None:
        return lo, hi, counts.view(3, *blocks)
    return lo, hi, torch.stack([from_order(c, blocks, order) for c in counts])


def histogram(x: Tensor, inverse_width: Tensor, bins: int) -> Tensor:
    """Returns the histogram of the finite values of every block; see csrc/histogram.cc."""
    x, shape, order = observable(x, tuple(inverse_width.shape))
    counts = torch.zeros((inverse_width.numel(), bins), dtype=torch.int64, device="cpu")
    inverse = in_order(inverse_width, torch.float32, order, None)
    if x.numel():
        _native.histogram(x.data_ptr(), shape, inverse.data_ptr(), bins // 2, counts.data_ptr())
    if order is None or inverse_width.numel() == 1:
        return counts
    places = from_order(torch.arange(len(counts), device="cpu"), tuple(inverse_width.shape), order)
    return counts[places.flatten()]


def from_order(values: Tensor, blocks: tuple[int, ...], order: Order) -> Tensor:
    if order is None or values.numel() == 1:
        return values.reshape(blocks)
    back = [order.index(a) for a in range(len(order))]
    return values.reshape([blocks[a] for a in order]).permute(back).contiguous()


def choose_qparams(
    lo: Tensor, hi: Tensor, qmin: int, qmax: int, numerics: str, symmetric: bool, scale_rule: str, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns scale and zero point of every range. See `fakequant.choose_qparams` for the formulas."""
    lo, hi = (v.to(torch.float32).contiguous() for v in (lo, hi))
    ordered = (lo <= hi) & lo.isfinite() & hi.isfinite()
    if not ordered.all():
        bad = int(ordered.flatten().int().argmin())
        checks.refuse_range(lo.flatten()[bad].item(), hi.flatten()[bad].item(), bad if lo.numel() > 1 else None)
    scale = torch.empty(lo.shape, dtype=torch.float32, device="cpu")
    zero_point = torch.empty(lo.shape, dtype=zero_dtype(scale_rule), device="cpu")
    if lo.numel():
        _native.choose_qparams(
            lo.data_ptr(), hi.data_ptr(), lo.numel(), NUMERICS[numerics], qmin, qmax, symmetric,
            SCALE_RULES[scale_rule], eps, scale.data_ptr(), zero_point.data_ptr(),
        )  # fmt: skip
    return scale, zero_point


class Observation(NamedTuple):
    """How an observed range changes the running range."""

    update: str  # "moving_average", "min_max" or "dynamic"
    averaging_constant: float = 1.0
    scale_rule: str = "any"


class ObserverOptions(NamedTuple):
    """The arguments after the running range in the schema of `observe_fake_quantize`."""

    qmin: int
    qmax: int
    numerics: str
    symmetric: bool
    scale_rule: str
    update: str
    averaging_constant: float
    eps: float
    # Whether the gradient is clipped, for which a packed mask is returned.
    clipped: bool

    @property
    def how(self) -> Observation:
        """How the running range changes."""
        return Observation(self.update, self.averaging_constant, self.scale_rule)

    @property
    def mask_kind(self) -> int:
        """The kernels' number for the form of the mask."""
        return _kernels.MASK_PACKED if self.clipped else _kernels.MASK_NONE


class Observed(NamedTuple):
    """The result of `observe_fake_quantize`."""

    y: Tensor
    mask: Tensor | None
    scale: Tensor
    zero_point: Tensor
    nonfinite: Tensor  # the number of non-finite values


def observe_fake_quantize(x: Tensor, running_min: Tensor, running_max: Tensor, options: ObserverOptions) -> Observed:
    """Updates the running range in place, chooses scales and fake-quantizes, in one call of the kernel."""
    blocks = tuple(running_min.shape)
    placed = x if x.is_contiguous() else dense(x, torch.empty_like(x))
    if options.scale_rule in SUPER_BLOCKS and not placed.is_contiguous():  # whose blocks must be neighbours in memory
        return _observe_in_steps(x, running_min, running_max, options)
    shape, order, expand = place(tuple(x.shape), placed.stride(), () if running_min.numel() == 1 else blocks)
    if x.numel() == 0 or expand is not None:
        return _observe_in_steps(x, running_min, running_max, options)
    y = torch.empty_like(x)
    mask, mask_address = empty_mask(y, options.mask_kind)
    state = [in_order(v, torch.float32, order, None) for v in (running_min, running_max)]
    scale = torch.empty(running_min.numel(), dtype=torch.float32, device="cpu")
    zero_point = torch.empty(running_min.numel(), dtype=zero_dtype(options.scale_rule), device="cpu")
    *nonfinite, unseen = _native.observe_fake_quantize(
        placed.data_ptr(), y.data_ptr(), mask_address, options.mask_kind, KERNEL_DTYPES[x.dtype], shape,
        NUMERICS[options.numerics], options.qmin, options.qmax, _kernels.RANGE_OWN, UPDATES[options.update], True, True,
        options.symmetric, SCALE_RULES[options.scale_rule], options.averaging_constant, options.eps,
        state[0].data_ptr(), state[1].data_ptr(), scale.data_ptr(), zero_point.data_ptr(),
    )  # fmt: skip
    if unseen:
        checks.refuse_unseen(unseen, running_min.numel())
    for running, updated in zip((running_min, running_max), state, strict=True):
        if updated.data_ptr() != running.data_ptr():
            running.copy_(from_order(updated, blocks, order))
    scale, zero_point = from_order(scale, blocks, order), from_order(zero_point, blocks, order)
    return Observed(y, mask, scale, zero_point, torch.tensor(sum(nonfinite), device="cpu"))


def _observe_in_steps(x: Tensor, running_min: Tensor, running_max: Tensor, options: ObserverOptions) -> Observed:
    """Does the same as `observe_fake_quantize` in separate steps, for layouts in which blocks have to be expanded."""
    lo, hi, counts = min_max(x, tuple(running_min.shape))
    if options.scale_rule in SIGNED_RULES:
        lo, hi = ggml_formula.range_to_largest(lo, hi, x)
    new_min, new_max = updated_range(running_min, running_max, lo, hi, options.how)
    unseen = int((~(new_min <= new_max)).sum())
    if unseen:
        checks.refuse_unseen(unseen, running_min.numel())
    running_min.copy_(new_min)
    running_max.copy_(new_max)
    qmin, qmax, numerics, symmetric, scale_rule, *_ = options
    scale, zero_point = choose_qparams(
        running_min, running_max, qmin, qmax, numerics, symmetric, scale_rule, options.eps
    )
    y, mask = fake_quantize(x, Grid(scale, zero_point, qmin, qmax, numerics), options.mask_kind)
    return Observed(y, mask, scale, zero_point, counts.sum())


def _f32(value: float) -> float:
    """Returns `value` rounded to float32, as in the kernels."""
    return float(np.float32(value))


def updated_range(
    running_min: Tensor, running_max: Tensor, lo: Tensor, hi: Tensor, how: Observation
) -> tuple[Tensor, Tensor]:
    """Returns the running range after observing the range `lo` to `hi`.

    A block without finite values (lo > hi) keeps its running range. With "dynamic" its range becomes 0 to 0. For block
    scales, the range becomes -absmax to absmax.
    """
    limit = torch.finfo(torch.float32).max
    nothing = lo > hi
    # Ranges are float32, and a float64 may lie beyond it.
    lo, hi = (seen.clamp(-limit, limit).float() for seen in (lo, hi))
    if how.update == "dynamic":
        lo, hi = lo.masked_fill(nothing, 0), hi.masked_fill(nothing, 0)
        if is_per_block(how.scale_rule) or how.scale_rule in (*OFFSET_RULES, *SIGNED_RULES):
            return lo, hi
        absmax = torch.maximum(-lo, hi).abs()  # all that matters for block scales; not -0.0
        return 0 - absmax, absmax
    if how.update == "min_max":
        return running_min.minimum(lo.masked_fill(nothing, torch.inf)), running_max.maximum(
            hi.masked_fill(nothing, -torch.inf)
        )

    def average(running: Tensor, seen: Tensor) -> Tensor:
        moved = running + how.averaging_constant * (seen - running)
        # The difference may overflow float32 although the average does not.
        wide = (running.double() + _f32(how.averaging_constant) * (seen.double() - running.double())).float()
        moved = torch.where(moved.isfinite(), moved, wide)
        return torch.where(nothing, running, torch.where(running.isinf(), seen, moved))

    return average(running_min, lo), average(running_max, hi)
