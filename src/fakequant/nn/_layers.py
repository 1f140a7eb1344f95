"""Kinds of layers with one weight: linear layers, convolutions and embeddings."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn._layer_kinds import AnyLayer, LayerKind, register_layer_kind
from fakequant.nn._own_forward import OwnForwardConv, OwnForwardLinear
from fakequant.nn._quantized_layer import compute, quantize_output, quantized_weight
from fakequant.nn._saved_codes import linear, transposed_linear


def reason_against_matrix(module: AnyLayer) -> str | None:
    """Returns why a module cannot be a linear layer, or None if its `weight` is a matrix.

    >>> reason_against_matrix(nn.Conv1d(1, 1, 1))
    'the `weight` of Conv1d is not a matrix'
    """
    if isinstance(module, nn.Linear):  # not read: reading a parametrized weight can change its state
        return None
    if getattr(getattr(module, "weight", None), "ndim", None) == 2:
        return None
    return f"the `weight` of {type(module).__name__} is not a matrix"


@register_layer_kind(nn.Linear, "transformers.models.falcon.modeling_falcon.FalconLinear")
class Linear(LayerKind):
    """A layer that computes y = x w^T + b, with x and w quantized, such as `nn.Linear`.

    `weight` has the shape (outputs, inputs), and `bias` has the shape (outputs,), is None or is absent.

    >>> import fakequant as fq
    >>> kind = fq.nn.register_layer_kind("package.module.Dense")(Linear)
    """

    can_sum_exactly: ClassVar[bool] = True
    own_forward: ClassVar[type[LayerKind] | None] = OwnForwardLinear

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Returns why `module` is not supported, or None if it is."""
        return reason_against_matrix(module)

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor) -> Tensor:
        """Takes and returns the same as `nn.Linear`."""
        return quantize_output(layer, layer._fakequant.compute(layer, linear, input))


@register_layer_kind("transformers.pytorch_utils.Conv1D")
class TransposedLinear(LayerKind):
    """A layer that computes y = x w + b, with x and w quantized.

    `weight` has the shape (inputs, outputs), and `bias` has the shape (outputs,), is None or is absent.

    >>> import fakequant as fq
    >>> kind = fq.nn.register_layer_kind("package.module.Conv1D")(TransposedLinear)
    """

    channel_axis: ClassVar[int] = 1
    can_sum_exactly: ClassVar[bool] = True

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Returns why `module` is not supported, or None if it is."""
        return reason_against_matrix(module)

    @staticmethod
    def forward(layer: AnyLayer, x: Tensor) -> Tensor:
        """Takes and returns a tensor with features on the last axis."""
        return quantize_output(layer, compute(layer, transposed_linear, x))


@register_layer_kind(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(LayerKind):
    """A convolution with quantized input and weight."""

    can_sum_exactly: ClassVar[bool] = True
    own_forward: ClassVar[type[LayerKind] | None] = OwnForwardConv

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor) -> Tensor:
        """Takes and returns the same as `nn.Conv2d`."""
        return quantize_output(layer, compute(layer, layer._conv_forward, input))


# By the number of axes along which a kernel moves.
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@register_layer_kind(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTranspose(LayerKind):
    """A transposed convolution with quantized input and weight."""

    channel_axis: ClassVar[int] = 1

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Takes and returns the same as `nn.ConvTranspose2d`."""
        if layer.padding_mode != "zeros":
            raise ValueError(f"Only padding_mode='zeros' is supported, got {layer.padding_mode!r}.")
        dimensions = len(layer.kernel_size)
        output_padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, dimensions, layer.dilation
        )

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _TRANSPOSED[dimensions](
                x, weight, bias, layer.stride, layer.padding, output_padding, layer.groups, layer.dilation
            )

        return quantize_output(layer, compute(layer, convolve, input))


class _Table(LayerKind):
    has_input: ClassVar[bool] = False

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Rejects `max_norm`, which changes the weight in the forward pass, and sparse gradients."""
        if module.max_norm is not None:
            return "max_norm changes the weight in the forward pass"
        return "sparse gradients are not supported" if module.sparse else None


@register_layer_kind(nn.Embedding)
class Embedding(_Table):
    """`nn.Embedding` with a quantized weight."""

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor) -> Tensor:
        """Takes and returns the same as `nn.Embedding`."""
        weight = quantized_weight(layer)
        y = F.embedding(input, weight, layer.padding_idx, None, layer.norm_type, layer.scale_grad_by_freq, False)
        return quantize_output(layer, y)


@register_layer_kind(
    "transformers.models.gemma2.modeling_gemma2.Gemma2TextScaledWordEmbedding",
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding",
)
class ScaledEmbedding(Embedding):
    """An `nn.Embedding` of Gemma models, whose rows are multiplied by a constant, with a quantized weight."""

    @staticmethod
    def forward(layer: AnyLayer, input_ids: Tensor) -> Tensor:
        """Takes and returns the same as the embedding of the model."""
        weight = quantized_weight(layer)
        y = F.embedding(input_ids, weight, layer.padding_idx, None, layer.norm_type, layer.scale_grad_by_freq, False)
        return quantize_output(layer, y * layer.embed_scale.to(weight.dtype))


@register_layer_kind(nn.EmbeddingBag)
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
