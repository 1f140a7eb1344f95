"""The input and output channels of a layer's weight, whatever the kind of the layer."""

import torch
from torch import Tensor, nn

from fakequant.nn._attention import MultiheadAttention
from fakequant.nn._layer_kinds import AnyLayer, LayerKind
from fakequant.nn._layers import Conv, ConvTranspose, Linear, TransposedLinear
from fakequant.nn._own_forward import OwnForward, OwnForwardConv, OwnForwardLinear
from fakequant.nn._quantized_layer import kind_of

_TRANSPOSED = (TransposedLinear, ConvTranspose)
_LINEAR = (Linear, TransposedLinear, OwnForwardLinear, MultiheadAttention)
_KNOWN = (*_LINEAR, *_TRANSPOSED, Conv, OwnForwardConv)


def reason_against_layer(layer: nn.Module) -> str | None:
    """Returns why the channels of a layer cannot be scaled, or None if they can."""
    kind = kind_of(layer)
    if kind is None or not issubclass(kind, _KNOWN):
        return f"the input channels of {type(layer).__name__} are not known"
    weight, bias = layer._parameters.get(kind.weight_name), getattr(layer, kind.bias_name, None)
    if weight is None or (bias is not None and layer._parameters.get(kind.bias_name) is not bias):
        return "its weight or bias is not a parameter of its own"
    if issubclass(kind, OwnForward):
        if kind.changes_input(layer):
            return "its code changes its input"
        if not torch.equal(kind.read_weight(layer), weight.detach()):
            return "its code computes the weight"
    return None


def channel_axis(layer: nn.Module, dims: int) -> int:
    """Returns the axis of a layer's input, or of its result, that holds the channels.

    >>> channel_axis(nn.Linear(2, 2), 3), channel_axis(nn.Conv2d(1, 1, 1), 4)
    (2, 1)
    """
    if issubclass(_kind(layer), _LINEAR):
        return dims - 1
    return dims - (_weight(layer).dim() - 2) - 1


def per_channel(layer: nn.Module, factors: Tensor, x: Tensor) -> Tensor:
    """Returns factors in a shape that broadcasts with `x`, the input or the output of a layer, along its channels."""
    axis = channel_axis(layer, x.dim())
    return factors.to(x).reshape([-1 if a == axis else 1 for a in range(x.dim())])


def by_channel(layer: nn.Module, weight: Tensor | None = None) -> Tensor:
    """Returns a view of the weight, or of a tensor of its shape, with axes (groups, outputs, inputs, the kernel).

    Outputs and inputs are counted per group.

    >>> by_channel(nn.Conv1d(4, 6, 3, groups=2)).shape
    torch.Size([2, 3, 2, 3])
    """
    weight = _weight(layer) if weight is None else weight
    parts: Tensor = weight.unflatten(0, (getattr(layer, "groups", 1), -1))
    return parts.transpose(1, 2) if issubclass(_kind(layer), _TRANSPOSED) else parts


def input_ranges(layer: nn.Module) -> Tensor:
    """Returns the largest magnitude of the weights of each input channel.

    >>> layer = nn.Linear(2, 1)
    >>> with torch.no_grad():
    ...     _ = layer.weight.copy_(torch.tensor([[-3.0, 2.0]]))
    >>> input_ranges(layer)
    tensor([3., 2.])
    """
    view = by_channel(layer).detach().abs()
    return view.amax([axis for axis in range(view.dim()) if axis not in (0, 2)]).flatten()


def output_ranges(layer: nn.Module) -> Tensor:
    """Returns the largest magnitude of the weights of each output channel."""
    return by_channel(layer).detach().abs().flatten(2).amax(2).flatten()


def scale_inputs(layer: nn.Module, factors: Tensor, weight: Tensor | None = None) -> None:
    """Multiplies the weights of every input channel by a factor, in place."""
    view = by_channel(layer, weight)
    view.mul_(factors.to(view).reshape(view.shape[0], 1, -1, *[1] * (view.dim() - 3)))


def scale_outputs(layer: AnyLayer, factors: Tensor) -> None:
    """Multiplies the weights and the bias of every output channel by a factor, in place."""
    view = by_channel(layer)
    view.mul_(factors.to(view).reshape(view.shape[0], -1, *[1] * (view.dim() - 2)))
    bias: Tensor | None = getattr(layer, _kind(layer).bias_name, None)
    if bias is not None:
        bias.mul_(factors.to(bias))


def parameters_of(layer: nn.Module) -> list[nn.Parameter]:
    """Returns the weight and the bias of a layer, if they are the layer's own parameters."""
    kind = _kind(layer)
    own = (layer._parameters.get(kind.weight_name), layer._parameters.get(kind.bias_name))
    return [parameter for parameter in own if parameter is not None]


def number_of_outputs(layer: nn.Module) -> int:
    """Returns the number of output channels."""
    view = by_channel(layer)
    return view.shape[0] * view.shape[1]


def number_of_inputs(layer: nn.Module) -> int:
    """Returns the number of input channels."""
    view = by_channel(layer)
    return view.shape[0] * view.shape[2]


def _kind(layer: nn.Module) -> type[LayerKind]:
    kind = kind_of(layer)
    assert kind is not None
    return kind


def _weight(layer: nn.Module) -> Tensor:
    weight: Tensor = getattr(layer, _kind(layer).weight_name)
    return weight
