"""Forms of functions that exporters have no translation for, or one that runtimes refuse.

While `FunctionForms` is active, these calls run other functions that return the same:

    scaled_dot_product_attention    of other than four axes: with four
    adaptive_max_pool               a max pool. Windows of different lengths are gathered with elements repeated
    embedding_bag                   of bags of one length: an embedding, and a reduction of each bag
    pad                             circular: a concatenation with the ends. Some runtimes and opsets before 19 have no
                                    such padding, and others would fill a tensor as long as the longest batch
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FunctionForms(TorchFunctionMode):
    """A mode in which functions have other forms."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = _FORMS.get(func)
        result = NotImplemented if form is None else form(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *more: Any, **named: Any
) -> Any:
    axes = query.dim()
    if axes == 4 or axes < 2 or key.dim() != axes or value.dim() != axes:
        return NotImplemented
    lead = query.shape[:-3]
    if axes < 4:
        query, key, value = (_with_four_axes(x) for x in (query, key, value))
        attn_mask = _with_four_axes(attn_mask) if attn_mask is not None and attn_mask.dim() > 2 else attn_mask
    elif key.shape[:-3] == lead and value.shape[:-3] == lead and (attn_mask is None or attn_mask.dim() == 2):
        query, key, value = (x.flatten(0, -4) for x in (query, key, value))
    else:
        return NotImplemented
    y = F.scaled_dot_product_attention(query, key, value, attn_mask, *more, **named)
    if axes > 4:
        return y.unflatten(0, lead)
    return y.squeeze(1) if axes == 3 else y.squeeze(0).squeeze(0)


def _with_four_axes(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 3 else x.unsqueeze(0).unsqueeze(0)


def _adaptive_max_pool(rank: int) -> Callable[..., Any]:
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]

    def pooled(input: Tensor, output_size: int | Sequence[int | None], return_indices: bool = False) -> Any:
        lengths = input.shape[-rank:]
        given = [output_size] * rank if isinstance(output_size, int) else list(output_size)
        if return_indices or len(given) != rank or not all(isinstance(n, int) and n > 0 for n in lengths):
            return NotImplemented
        sizes = []
        for axis, (length, wanted) in enumerate(zip(lengths, given, strict=True), start=-rank):
            number = length if wanted is None else wanted
            if number < 1:
                return NotImplemented
            windows = [range(i * length // number, -(-(i + 1) * length // number)) for i in range(number)]
            size = max(map(len, windows))
            # An element that is repeated does not change the largest one.
            indices = [min(window.start + i, window.stop - 1) for window in windows for i in range(size)]
            if indices != list(range(length)):
                input = input.index_select(axis, torch.tensor(indices, device=input.device))
            sizes.append(size)
        return pool(input, sizes)

    return pooled


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    has_bags = input.dim() == 2 and isinstance(input.shape[1], int) and input.shape[1] > 0
    if not has_bags or max_norm is not None or padding_idx is not None:
        return NotImplemented
    elements = F.embedding(input, weight)
    if per_sample_weights is not None:
        elements = elements * per_sample_weights.unsqueeze(-1)
    return elements.amax(1) if mode == "max" else elements.sum(1) if mode == "sum" else elements.mean(1)


def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode != "circular" or not all(isinstance(n, int) for n in pad):
        return NotImplemented
    for axis, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), start=1):
        if before < 0 or after < 0:  # elements are removed first
            start, end = max(-before, 0), max(-after, 0)
            input = input.narrow(-axis, start, input.shape[-axis] - start - end)
        parts = [input.narrow(-axis, input.shape[-axis] - before, before)] if before > 0 else []
        parts += [input, *([input.narrow(-axis, 0, after)] if after > 0 else [])]
        input = torch.cat(parts, -axis) if len(parts) > 1 else input
    return input


# By every name that a call may be seen under: a function of torch.nn.functional may call another one.
_FORMS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.embedding_bag: _embedding_bag,
    F.pad: _pad,
}
for _rank in (1, 2, 3):
    for _name in (f"adaptive_max_pool{_rank}d", f"_adaptive_max_pool{_rank}d"):
        _FORMS[getattr(F, _name)] = _adaptive_max_pool(_rank)
