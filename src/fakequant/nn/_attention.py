"""Quantized attention."""

from collections.abc import Callable
from math import sqrt
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant.nn._layer_kinds import AnyLayer, LayerKind, register_layer_kind
from fakequant.nn._quantized_layer import compute, compute_rows, quantize_output
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._saved_codes import linear


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    quantize: Callable[[Tensor], Tensor],
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns the attention of queries to keys, with the result of `quantize` as attention weights.

    The other arguments are the same as in `F.scaled_dot_product_attention`.

    >>> q, k, v = torch.ones(1, 2, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4)
    >>> scaled_dot_product_attention(q, k, v, quantize=torch.round)
    tensor([[[0., 0., 0., 0.],
             [0., 0., 0., 0.]]])
    """
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        attn_mask = allowed if attn_mask is None else attn_mask
    if attn_mask is not None:
        blocked = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
        scores = scores.masked_fill(blocked, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        # A query that may not attend to anything gets zeros.
        weights = torch.softmax(scores, -1).masked_fill(blocked.all(-1, keepdim=True), 0)
    else:
        weights = torch.softmax(scores, -1)
    weights = quantize(weights)
    return (F.dropout(weights, dropout_p) if dropout_p > 0 else weights) @ value


@register_layer_kind(nn.MultiheadAttention)
class MultiheadAttention(LayerKind):
    """Multi-head attention with quantized inputs, projections and weights.

    The output projection is the layer `out_proj`, which is quantized like any other layer. `projection_quantizer`
    quantizes the projected queries, keys and values, which are multiplied with each other, and `attention_quantizer`
    the attention weights.
    """

    can_sum_exactly: ClassVar[bool] = True
    weight_name: ClassVar[str] = "in_proj_weight"
    bias_name: ClassVar[str] = "in_proj_bias"

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Rejects options that are rarely used: `kdim`, `vdim`, `add_bias_kv` and `add_zero_attn`."""
        if not module._qkv_same_embed_dim:
            return "keys or values have another size than queries (kdim, vdim)"
        if module.bias_k is not None or module.add_zero_attn:
            return "add_bias_kv and add_zero_attn are not supported"
        return None

    @staticmethod
    def forward(
        layer: AnyLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Takes and returns the same as `nn.MultiheadAttention`."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        q, k, v = _project(layer, query, key, value)
        if not batched:
            q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        elif not layer.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        heads = (layer.num_heads, layer.head_dim)
        q, k, v = (torch.unflatten(t, -1, heads).transpose(1, 2) for t in (q, k, v))
        mask = _joined_mask(attn_mask, key_padding_mask, q, k)
        dropout = layer.dropout if layer.training else 0.0
        weights, quantizer = None, layer.attention_quantizer
        if need_weights:
            scores = q @ k.transpose(-2, -1) * sqrt(1.0 / layer.head_dim)
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights if quantizer is None else quantizer(weights), dropout)
            y = weights @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        elif quantizer is None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        else:
            y = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, quantize=quantizer)
        y = y.transpose(1, 2).flatten(-2)
        if not batched:
            y, weights = y.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not layer.batch_first:
            y = y.transpose(0, 1)
        return quantize_output(layer, layer.out_proj(y)), weights


def _project(layer: AnyLayer, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Returns the projected queries, keys and values on the grid of `projection_quantizer`."""
    if key is query and value is query:
        return list(_quantize_projection(layer, compute(layer, linear, query)).chunk(3, dim=-1))
    return [_quantize_projection(layer, y) for y in compute_rows(layer, linear, [query, key, value])]


def _quantize_projection(layer: AnyLayer, x: Tensor) -> Tensor:
    quantizer: Quantizer | None = layer.projection_quantizer
    return x if quantizer is None else quantizer(x)


def _joined_mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns both masks as one float mask to add to the scores, which have axes (batch, head, query, key)."""
    (batch, heads, queries), keys = q.shape[:3], k.shape[2]
    masks = []
    allowed: tuple[tuple[int, ...], ...]
    if attn_mask is not None:
        allowed = ((queries, keys), (batch * heads, queries, keys))
        mask = _float_mask("attn_mask", attn_mask, allowed, q)
        masks.append(mask.reshape(batch, heads, queries, keys) if mask.dim() == 3 else mask)
    if padding is not None:
        allowed = ((batch, keys), (keys,)) if batch == 1 else ((batch, keys),)
        masks.append(_float_mask("key_padding_mask", padding, allowed, q).reshape(batch, 1, 1, keys))
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _float_mask(name: str, mask: Tensor, allowed: tuple[tuple[int, ...], ...], q: Tensor) -> Tensor:
    """Returns a checked mask as floats to add to the scores: -inf where a bool mask is True."""
    if tuple(mask.shape) not in allowed:
        raise RuntimeError(f"`{name}` must have shape {' or '.join(map(str, allowed))}, got {tuple(mask.shape)}.")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise RuntimeError(f"`{name}` must be bool or floating point, got {dtype_name(mask.dtype)}.")
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
    return mask.to(q.dtype)
