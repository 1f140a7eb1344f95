"""`F.scaled_dot_product_attention` as two products of matrices, with quantized attention weights between them.

    scores  = (query key^T) * scale + mask
    weights = quantize(softmax(scores))
    y       = weights value

torch computes all of it in one operator, which has no place for a quantizer.
"""

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor


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

    The other arguments are those of `F.scaled_dot_product_attention`.

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
