"""Products of two activations, and attention, which is made of them."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from fakequant._export.litert.activations import softmax
from fakequant._export.litert.builder import Constant, Known, Value, identity
from fakequant._export.litert.elementwise import selected, times
from fakequant._export.litert.graph import Tensor
from fakequant._export.litert.moves import reshaped, transposed
from fakequant._export.litert.operations import Operations, no_operator, shape_of
from fakequant._export.litert.reductions import reduced

aten = torch.ops.aten
# The number that is added to masked weights where a row may have no others. -inf would make its softmax NaN.
_LOWEST = torch.finfo(torch.float32).min / 2


def matmul(t: Operations, node: Node, a: Value, b: Value) -> Value:
    shape = [*shape_of(node)]
    if len(b.shape) == 1:  # a column
        b, shape = reshaped(t, b, (*b.shape, 1)), [*shape, 1]
    if len(a.shape) == 1:  # a row
        a, shape = reshaped(t, a, (1, *a.shape)), [*shape[:-1], 1, shape[-1]]
    return reshaped(t, _product(t, a, b, shape), shape_of(node))


def _product(t: Operations, a: Value, b: Value, shape: Sequence[int]) -> Known:
    operands, flips = [], []
    rank = max(len(a.shape), len(b.shape))
    for value in (a, b):
        found = t.builder.floats(value)
        found = t.widened(found, rank)
        swapped = (*identity(rank - 2), rank - 1, rank - 2)
        flips.append(found.order == swapped)
        operands.append(t.builder.arranged(found, swapped if flips[-1] else identity(rank)).tensor)
    made = Tensor(tuple(shape), "float32")
    options = ("BatchMatMul", {"adjX": flips[0], "adjY": flips[1]})
    inputs = a.shape[-1]
    products = prod(shape) * inputs
    why = "products of two activations are not quantized for this target"
    return Known(
        t.graph.add("BATCH_MATMUL", operands, [made], options, products=products, why_float=why), identity(rank)
    )


def addmm(t: Operations, node: Node, bias: Value, a: Value, b: Any, beta: float = 1, alpha: float = 1) -> Value:
    product: Value = _product(t, a, b, shape_of(node))
    product = product if alpha == 1 else t.with_number("MUL", product, alpha)
    return t.binary("ADD", ("Add", {}), product, times(t, node, bias, beta))


def attention(
    t: Operations, node: Node, query: Value, key: Value, value: Value, mask: Any = None, dropout: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
) -> Value:  # fmt: skip
    if enable_gqa:
        raise no_operator(node, "attention with enable_gqa")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    rows, columns = query.shape[-2], key.shape[-2]
    weights: Value = t.with_number("MUL", query, factor)
    weights = _product(t, weights, transposed(t, key), (*query.shape[:-1], columns))
    if is_causal:
        mask = Constant(torch.ones(int(rows), int(columns), dtype=torch.bool).tril())
    added, rows_kept = (None, None) if mask is None else _mask(t, mask, -1)
    weights = weights if added is None else t.binary("ADD", ("Add", {}), weights, added)
    made = _product(t, softmax(t, node, weights, -1), value, shape_of(node))
    return made if rows_kept is None else t.binary("MUL", ("Mul", {}), made, rows_kept)


def _mask(t: Operations, mask: Value, axis: int) -> tuple[Value, Value | None]:
    """Returns what a mask adds to weights, and 0 for rows in which everything is masked, else 1. None for all 1.

    A mask is False or -inf where weights are masked.
    """
    if isinstance(mask, Constant):
        added = mask.value
        if added.dtype == torch.bool:
            added = torch.zeros(added.shape).masked_fill(~added, float("-inf"))
        kept = (added > float("-inf")).any(axis, keepdim=True)
        return (Constant(added), None) if kept.all() else (Constant(added.clamp(_LOWEST)), Constant(kept.float()))
    found = t.builder.floats(mask)
    if found.tensor.dtype == "bool":
        limited, is_kept = selected(t, found, Constant(torch.zeros(())), Constant(torch.tensor(_LOWEST))), found
    else:
        limited = t.with_number("MAXIMUM", found, _LOWEST)
        lowest = Constant(torch.tensor(float("-inf")))
        is_kept = t.binary("GREATER", ("Greater", {}), found, lowest, dtype="bool")
    return limited, t.cast(reduced(t, is_kept, "REDUCE_ANY", [axis]), torch.float32)


def safe_softmax(t: Operations, node: Node, x: Value, axis: int, *_: Any) -> Value:
    """A softmax that is 0 in rows of -inf."""
    limited, rows_kept = _mask(t, x, axis)
    assert rows_kept is not None
    return t.binary("MUL", ("Mul", {}), softmax(t, node, limited, axis), rows_kept)


# By the operator of torch.
PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.matmul.default: matmul,
    aten.bmm.default: matmul,
    aten.mm.default: matmul,
    aten.addmm.default: addmm,
    aten.mv.default: matmul,
    aten.dot.default: matmul,
    aten.scaled_dot_product_attention.default: attention,
    aten._safe_softmax.default: safe_softmax,
}
