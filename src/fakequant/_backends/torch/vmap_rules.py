"""`vmap` rules. A batch is one more axis in front of data and scales, so the kernel is called once for all examples.

A rule takes tensors and the positions of their batch axes (None for tensors without one), and returns results and the
positions of their batch axes.
"""

from math import prod
from typing import Any, NoReturn, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from fakequant._backends.torch import formula
from fakequant._backends.torch.routes import learned_factor, ops, with_grid
from fakequant._backends.torch.tensor_kernels import Grid, Order
from fakequant._backends.torch.torch_annotations import Operator

Dims = tuple[int | None, ...]
# Results and their batch axes.
_Single: TypeAlias = tuple[Tensor, int]
_Pair: TypeAlias = tuple[tuple[Tensor, Tensor], tuple[int, int]]
_Triple: TypeAlias = tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]


class _Info(Protocol):
    """The part of torch's batch information that the rules use."""

    @property
    def batch_size(self) -> int: ...


def _front(x: Tensor, at: int | None, size: int) -> Tensor:
    """Returns `x` with its batch axis in front. A tensor without one is expanded."""
    return x.expand(size, *x.shape) if at is None else x.movedim(at, 0)


def _batched_grid(size: int, ndim: int, grid: Grid, dims: Dims) -> Grid:
    """Returns the grid for data with 1 + ndim axes. If scale or zero point is batched, both results are."""
    batched = any(at is not None for at in dims)
    result: list[Tensor | None] = []
    for p, at in zip((grid.scale, grid.zero_point), dims, strict=True):
        if not isinstance(p, Tensor):
            result.append(None)  # only zero points can be None
            continue
        per_example = prod(p.shape) // (1 if at is None else p.shape[at] or 1)
        if not batched:
            result.append(p if per_example == 1 else p.unsqueeze(0))
            continue
        p = _front(p, at, size)
        result.append(p.reshape(size, *[1] * ndim) if per_example == 1 else p)
    return grid._replace(scale=cast("Tensor", result[0]), zero_point=result[1])


def _batched(info: _Info, in_dims: Dims, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
    ndim = x.dim() - (in_dims[0] is not None)
    x = _front(x, in_dims[0], info.batch_size)
    return x, _batched_grid(info.batch_size, ndim, grid, in_dims[1:3])


def _rule_with_grid(rule: Operator, tensors: int = 1) -> Operator:
    """Returns a rule that takes the fields of a grid after some tensors. `rule` takes a `Grid` in their place."""
    return with_grid(rule, after=2 + tensors)


def _elementwise(name: str) -> Operator:
    """Returns the rule of an operator that takes x, a grid and one more argument, and returns a tensor like x."""

    def rule(info: _Info, in_dims: Dims, x: Tensor, grid: Grid, option: Any) -> _Single:
        x, grid = _batched(info, in_dims, x, grid)
        return getattr(ops, name)(x, *grid, option), 0

    return _rule_with_grid(rule)


def _masked(info: _Info, in_dims: Dims, x: Tensor, grid: Grid, packed: bool) -> _Pair:
    x, grid = _batched(info, in_dims, x, grid)
    length = x.shape[1:].numel()
    # The packed masks of two examples must not share a byte. If they would, use one byte per element.
    packed = packed and length % 8 == 0 and x.is_contiguous()
    y, mask = ops.fake_quantize_masked(x, *grid, packed)
    return (y, mask.reshape(info.batch_size, length // 8) if packed else mask), (0, 0)


def _mask_backward(info: _Info, in_dims: Dims, dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> _Single:
    size = info.batch_size
    dy = _front(dy, in_dims[0], size)
    shape = dy.shape[1:]
    if mask.dtype == torch.bool:
        return ops.mask_backward(dy, _front(mask, in_dims[1], size), None, multiply), 0
    if shape.numel() % 8 == 0:
        order = None if order is None else (0, *(axis + 1 for axis in order))
        return ops.mask_backward(dy, _front(mask, in_dims[1], size).reshape(-1), order, multiply), 0
    mask = formula.unpack_bits(mask if in_dims[1] is None else mask.movedim(in_dims[1], 0), shape, order)
    return ops.mask_backward(dy, mask.expand(size, *shape), None, multiply), 0


def _learned_backward(
    info: _Info, in_dims: Dims, dy: Tensor, x: Tensor, grid: Grid, grad_factor: float | None
) -> _Triple:
    size, scale = info.batch_size, cast("Tensor", grid.scale)
    if grad_factor is None:  # LSQ's factor depends on the number of elements of one example
        example = x if in_dims[1] is None else x.select(in_dims[1], 0)
        grad_factor = learned_factor(None, example, grid.qmax, grid.numerics)
    blocks = scale.shape if in_dims[2] is None else scale.movedim(in_dims[2], 0).shape[1:]
    # Every example has its own sums, so every example needs its own scales.
    ndim = x.dim() - (in_dims[1] is not None)
    grid = _batched_grid(size, ndim, grid._replace(scale=_front(scale, in_dims[2], size)), (0, in_dims[3]))
    dy, x = _front(dy, in_dims[0], size), _front(x, in_dims[1], size)
    dx, dscale, dzero = ops.learned_backward(dy, x, *grid, grad_factor)
    return (dx, dscale.reshape(size, *blocks), dzero.reshape(size, *blocks)), (0, 0, 0)


def _whole_bytes(elements: int, bits: int) -> int:
    if elements * bits % 8:
        raise NotImplementedError(
            f"vmap over packed codes needs whole bytes per example, got {elements} codes of {bits} bits.\n"
            "Use codes that are not packed."
        )
    return elements * bits // 8


def _quantize_packed(info: _Info, in_dims: Dims, x: Tensor, grid: Grid, bits: int) -> _Single:
    x, grid = _batched(info, in_dims, x, grid)
    length = _whole_bytes(x.shape[1:].numel(), bits)
    return ops.quantize_packed(x, *grid, bits).reshape(info.batch_size, length), 0


def _dequantize_packed(
    info: _Info, in_dims: Dims, q: Tensor, grid: Grid, shape: list[int], bits: int, dtype: torch.dtype
) -> _Single:
    _whole_bytes(prod(shape), bits)
    q = _front(q, in_dims[0], info.batch_size).reshape(-1)
    grid = _batched_grid(info.batch_size, len(shape), grid, in_dims[1:3])
    return ops.dequantize_packed(q, *grid, (info.batch_size, *shape), bits, dtype), 0


def _min_max(info: _Info, in_dims: Dims, x: Tensor, blocks: list[int]) -> _Triple:
    x = _front(x, in_dims[0], info.batch_size)
    wanted = (info.batch_size, *([1] * (x.dim() - 1) if prod(blocks) == 1 else blocks))
    lo, hi, counts = ops.min_max(x, wanted)
    shape = (info.batch_size, *blocks)
    return (lo.reshape(shape), hi.reshape(shape), counts.reshape(3, *shape)), (0, 0, 1)


def _choose_qparams(info: _Info, in_dims: Dims, lo: Tensor, hi: Tensor, *rest: Any) -> _Pair:
    lo, hi = (_front(v, at, info.batch_size) for v, at in zip((lo, hi), in_dims[:2], strict=True))
    *_, scale_rule, _ = rest
    if scale_rule not in ("e4m3fn", "e4m3fn_divided"):
        return ops.choose_qparams(lo, hi, *rest), (0, 0)
    # All blocks of an example together have one more scale.
    examples = [ops.choose_qparams(low, high, *rest) for low, high in zip(lo, hi, strict=True)]
    scales, zero_points = zip(*examples, strict=True)
    return (torch.stack(scales), torch.stack(zero_points)), (0, 0)


def _observe(info: _Info, in_dims: Dims, *_: Any) -> NoReturn:
    raise NotImplementedError(
        "vmap over `observe_fake_quantize` is not defined: the examples would share one running range.\n"
        "Use `min_max`, `choose_qparams` and `fake_quantize`, which can be batched."
    )


RULES: dict[str, Operator] = {
    "fake_quantize": _elementwise("fake_quantize"),
    "fake_quantize_masked": _rule_with_grid(_masked),
    "mask_backward": _mask_backward,
    "fake_quantize_learned": _elementwise("fake_quantize_learned"),
    "learned_backward": _rule_with_grid(_learned_backward, tensors=2),
    "quantize": _elementwise("quantize"),
    "quantize_packed": _rule_with_grid(_quantize_packed),
    "dequantize": _elementwise("dequantize"),
    "dequantize_packed": _rule_with_grid(_dequantize_packed),
    "min_max": _min_max,
    "choose_qparams": _choose_qparams,
    "observe_fake_quantize": _observe,
    "observe_into": _observe,
}
