"""`vmap` rules. A batch is one more axis in front of data and scales, so the kernel is called once for all examples.

A rule takes tensors and the positions of their batch axes (None for tensors without one), and returns results and the
positions of their batch axes.
"""

from math import prod
from typing import Any, NoReturn, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from fakequant._backends.torch import formula, routes
from fakequant._backends.torch.operator_calls import ops
from fakequant._backends.torch.tensor_kernels import Order
from fakequant._backends.torch.torch_annotations import Operator

Dims = tuple[int | None, ...]
_Grid: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
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


def _parameters(
    size: int, ndim: int, tensors: tuple[Tensor, Tensor | None], dims: Dims
) -> tuple[Tensor, Tensor | None]:
    """Returns scale and zero point for data with 1 + ndim axes. If one of them is batched, both results are."""
    batched = any(at is not None for at in dims)
    result: list[Tensor | None] = []
    for p, at in zip(tensors, dims, strict=True):
        if p is None:
            result.append(None)
            continue
        per_example = prod(p.shape) // (1 if at is None else p.shape[at] or 1)
        if not batched:
            result.append(p if per_example == 1 else p.unsqueeze(0))
            continue
        p = _front(p, at, size)
        result.append(p.reshape(size, *[1] * ndim) if per_example == 1 else p)
    return cast("tuple[Tensor, Tensor | None]", tuple(result))  # only zero points can be None


def _grid(info: _Info, in_dims: Dims, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> _Grid:
    ndim = x.dim() - (in_dims[0] is not None)
    x = _front(x, in_dims[0], info.batch_size)
    return x, *_parameters(info.batch_size, ndim, (scale, zero_point), in_dims[1:3])


def _elementwise(name: str) -> Operator:
    """Returns the rule of an operator that takes (x, scale, zero_point, ...) and returns a tensor like x."""

    def rule(info: _Info, in_dims: Dims, x: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: Any) -> _Single:
        return getattr(ops, name)(*_grid(info, in_dims, x, scale, zero_point), *rest), 0

    return rule


def _masked(info: _Info, in_dims: Dims, x: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: Any) -> _Pair:
    *range_and_numerics, packed = rest
    x, scale, zero_point = _grid(info, in_dims, x, scale, zero_point)
    length = x.shape[1:].numel()
    # The packed masks of two examples must not share a byte. If they would, use one byte per element.
    packed = packed and length % 8 == 0 and x.is_contiguous()
    y, mask = ops.fake_quantize_masked(x, scale, zero_point, *range_and_numerics, packed)
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
    info: _Info, in_dims: Dims, dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: Any
) -> _Triple:
    size = info.batch_size
    *range_and_numerics, grad_factor = rest
    if grad_factor is None:  # LSQ's factor depends on the number of elements of one example
        example = x if in_dims[1] is None else x.select(in_dims[1], 0)
        grad_factor = routes.learned_factor(None, example, *range_and_numerics[1:])
    blocks = scale.shape if in_dims[2] is None else scale.movedim(in_dims[2], 0).shape[1:]
    # Every example has its own sums, so every example needs its own scales.
    scale = _front(scale, in_dims[2], size)
    ndim = x.dim() - (in_dims[1] is not None)
    scale, zero_point = _parameters(size, ndim, (scale, zero_point), (0, in_dims[3]))
    dy, x = _front(dy, in_dims[0], size), _front(x, in_dims[1], size)
    dx, dscale, dzero = ops.learned_backward(dy, x, scale, zero_point, *range_and_numerics, grad_factor)
    return (dx, dscale.reshape(size, *blocks), dzero.reshape(size, *blocks)), (0, 0, 0)


def _whole_bytes(elements: int, bits: int) -> int:
    if elements * bits % 8:
        raise NotImplementedError(
            f"vmap over packed codes needs whole bytes per example, got {elements} codes of {bits} bits.\n"
            "Use codes that are not packed."
        )
    return elements * bits // 8


def _quantize_packed(
    info: _Info, in_dims: Dims, x: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: Any
) -> _Single:
    x, scale, zero_point = _grid(info, in_dims, x, scale, zero_point)
    length = _whole_bytes(x.shape[1:].numel(), rest[-1])
    return ops.quantize_packed(x, scale, zero_point, *rest).reshape(info.batch_size, length), 0


def _dequantize_packed(
    info: _Info, in_dims: Dims, q: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: Any
) -> _Single:
    *range_and_numerics, shape, bits, dtype = rest
    _whole_bytes(prod(shape), bits)
    q = _front(q, in_dims[0], info.batch_size).reshape(-1)
    scale, zero_point = _parameters(info.batch_size, len(shape), (scale, zero_point), in_dims[1:3])
    shape = (info.batch_size, *shape)
    return ops.dequantize_packed(q, scale, zero_point, *range_and_numerics, shape, bits, dtype), 0


def _min_max(info: _Info, in_dims: Dims, x: Tensor, blocks: list[int]) -> _Triple:
    x = _front(x, in_dims[0], info.batch_size)
    wanted = (info.batch_size, *([1] * (x.dim() - 1) if prod(blocks) == 1 else blocks))
    lo, hi, counts = ops.min_max(x, wanted)
    shape = (info.batch_size, *blocks)
    return (lo.reshape(shape), hi.reshape(shape), counts.reshape(3, *shape)), (0, 0, 1)


def _choose_qparams(info: _Info, in_dims: Dims, lo: Tensor, hi: Tensor, *rest: Any) -> _Pair:
    lo, hi = (_front(v, at, info.batch_size) for v, at in zip((lo, hi), in_dims[:2], strict=True))
    *_, scale_rule, _ = rest
    if scale_rule != "e4m3fn":
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
    "fake_quantize_masked": _masked,
    "mask_backward": _mask_backward,
    "fake_quantize_learned": _elementwise("fake_quantize_learned"),
    "learned_backward": _learned_backward,
    "quantize": _elementwise("quantize"),
    "quantize_packed": _quantize_packed,
    "dequantize": _elementwise("dequantize"),
    "dequantize_packed": _dequantize_packed,
    "min_max": _min_max,
    "choose_qparams": _choose_qparams,
    "observe_fake_quantize": _observe,
}
