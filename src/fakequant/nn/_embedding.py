"""Quantized tables: only the weight is quantized, inputs are indices."""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn._layer_kinds import LayerKind, quantizes
from fakequant.nn._quantized_layer import quantize_output, quantized_weight


class _Table(LayerKind):
    has_input: ClassVar[bool] = False

    @classmethod
    def unsupported_reason(cls, module: Any) -> str | None:
        """`max_norm` changes the table in the forward pass, and `sparse` its gradient."""
        if module.max_norm is not None:
            return "max_norm changes the weight in the forward pass"
        return "sparse gradients are not those of a quantized weight" if module.sparse else None


@quantizes(nn.Embedding)
class Embedding(_Table):
    """Rows of a quantized table."""

    @staticmethod
    def forward(layer: Any, input: Tensor) -> Tensor:
        """As in `nn.Embedding`."""
        y = F.embedding(
            input,
            quantized_weight(layer),
            layer.padding_idx,
            None,
            layer.norm_type,
            layer.scale_grad_by_freq,
            False,
        )
        return quantize_output(layer, y)


@quantizes(nn.EmbeddingBag)
class EmbeddingBag(_Table):
    """Sums or means of rows of a quantized table."""

    @staticmethod
    def forward(
        layer: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """As in `nn.EmbeddingBag`."""
        y = F.embedding_bag(
            input, quantized_weight(layer), offsets, None, layer.norm_type, layer.scale_grad_by_freq,
            layer.mode, False, per_sample_weights, layer.include_last_offset, layer.padding_idx,
        )  # fmt: skip
        return quantize_output(layer, y)
