"""Quantized embeddings. Only the weight is quantized: inputs are indices."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn._layer_kinds import AnyLayer, LayerKind, quantizes
from fakequant.nn._quantized_layer import quantize_output, quantized_weight


class _Table(LayerKind):
    has_input: ClassVar[bool] = False

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Rejects `max_norm`, which changes the weight in the forward pass, and sparse gradients."""
        if module.max_norm is not None:
            return "max_norm changes the weight in the forward pass"
        return "sparse gradients are not supported" if module.sparse else None


@quantizes(nn.Embedding)
class Embedding(_Table):
    """`nn.Embedding` with a quantized weight."""

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor) -> Tensor:
        """Takes and returns the same as `nn.Embedding`."""
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
    """`nn.EmbeddingBag` with a quantized weight."""

    @staticmethod
    def forward(
        layer: AnyLayer, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Takes and returns the same as `nn.EmbeddingBag`."""
        y = F.embedding_bag(
            input, quantized_weight(layer), offsets, None, layer.norm_type, layer.scale_grad_by_freq,
            layer.mode, False, per_sample_weights, layer.include_last_offset, layer.padding_idx,
        )  # fmt: skip
        return quantize_output(layer, y)
