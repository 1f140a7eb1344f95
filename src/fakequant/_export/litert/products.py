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
from fakequant._export.litert.moves import transposed
from fakequant._export.litert.operations import Operations, no_operator, shape_of

aten = torch.ops.aten


def matmul(t: Operations, node: Node, a: Value, b: Value) -> Value:
    if len(a.shape) == 1 or len(b.shape) == 1:
        raise no_operator(node, "a product with a vector")
    return _product(t, a, b, shape_of(node))


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
    return t.binary("ADD", ("Add", {}), product, bias if beta == 1 else times(t, bias, beta))


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
    if isinstance(mask, Constant) and mask.value.dtype == torch.bool:
        mask = Constant(torch.zeros(mask.value.shape).masked_fill(~mask.value, float("-inf")))
    elif mask is not None and not isinstance(mask, Constant) and t.builder.known(mask).tensor.dtype == "bool":
        kept = Constant(torch.zeros(())), Constant(torch.tensor(float("-inf")))
        mask = selected(t, mask, *kept)
    weights = weights if mask is None else t.binary("ADD", ("Add", {}), weights, mask)
    return _product(t, softmax(t, node, weights, -1), value, shape_of(node))


# By the operator of torch.
PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.matmul.default: matmul,
    aten.bmm.default: matmul,
    aten.mm.default: matmul,
    aten.addmm.default: addmm,
    aten.scaled_dot_product_attention.default: attention,
}
