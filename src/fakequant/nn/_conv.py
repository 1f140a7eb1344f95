"""Quantized convolutions."""

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn._layer_kinds import AnyLayer, LayerKind, quantizes
from fakequant.nn._own_forward import OwnForwardConv
from fakequant.nn._quantized_layer import compute, quantize_output


@quantizes(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(LayerKind):
    """A convolution with quantized input and weight."""

    own_forward: ClassVar[type[LayerKind] | None] = OwnForwardConv

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor) -> Tensor:
        """Takes and returns the same as `nn.Conv2d`."""
        return quantize_output(layer, compute(layer, layer._conv_forward, input))


class _Transposed(LayerKind):
    channel_axis: ClassVar[int] = 1
    function: ClassVar[Callable[..., Tensor]]
    dimensions: ClassVar[int]

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Takes and returns the same as `nn.ConvTranspose2d`."""
        if layer.padding_mode != "zeros":
            raise ValueError(f"Only padding_mode='zeros' is supported, got {layer.padding_mode!r}.")
        kind = layer._fakequant.kind
        output_padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, kind.dimensions, layer.dilation
        )
        rest = (layer.stride, layer.padding, output_padding, layer.groups, layer.dilation)
        return quantize_output(
            layer, compute(layer, lambda x, weight, bias: kind.function(x, weight, bias, *rest), input)
        )


@quantizes(nn.ConvTranspose1d)
class ConvTranspose1d(_Transposed):
    """A transposed convolution along one axis."""

    function = staticmethod(F.conv_transpose1d)
    dimensions = 1


@quantizes(nn.ConvTranspose2d)
class ConvTranspose2d(_Transposed):
    """A transposed convolution along two axes."""

    function = staticmethod(F.conv_transpose2d)
    dimensions = 2


@quantizes(nn.ConvTranspose3d)
class ConvTranspose3d(_Transposed):
    """A transposed convolution along three axes."""

    function = staticmethod(F.conv_transpose3d)
    dimensions = 3
