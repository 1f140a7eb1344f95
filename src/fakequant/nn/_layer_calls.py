"""Calls of `F.linear` and of convolutions that a quantized layer computes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fakequant.nn._deployed_bias import bias_to_add
from fakequant.nn._function_names import TorchFunction
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._linear_function import linear
from fakequant.nn._quantized_layer import compute, quantize_output, quantized_weight

# Functions that multiply an input by a weight, by name. Their arguments begin with input, weight and bias.
PRODUCTS: dict[TorchFunction, str] = {
    F.linear: "F.linear", F.conv1d: "F.conv1d", F.conv2d: "F.conv2d", F.conv3d: "F.conv3d",
}  # fmt: skip


class Arguments(NamedTuple):
    """The arguments of one of the functions `PRODUCTS`."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    # Further arguments, by position and by name.
    rest: tuple[Any, ...]
    named: dict[str, Any]


def split_arguments(args: Any, kwargs: Any) -> Arguments:
    """Returns the arguments of one of the functions `PRODUCTS`, however they were passed.

    >>> import torch
    >>> split_arguments((torch.ones(1), torch.ones(2)), {"bias": None, "stride": 2}).named
    {'stride': 2}
    """
    named = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    return Arguments(named.pop("input"), named.pop("weight"), named.pop("bias", None), args[3:], named)


def compute_product(layer: AnyLayer, function: TorchFunction, given: Arguments) -> Tensor:
    """Returns `function` of the given input and weight, quantized as in `layer`, and of the layer's bias.

    Args:
        layer: A prepared or converted layer.
        function: One of `PRODUCTS`.
        given: The arguments of the function. A layer with codes uses these instead of the given weight.
    """
    rest, named = given.rest, given.named
    if function is F.linear:
        return compute(layer, linear, given.input, given.weight)
    return compute(layer, lambda x, weight, bias: function(x, weight, bias, *rest, **named), given.input, given.weight)


def with_quantized_weights(layers: Sequence[AnyLayer], arguments: Any) -> Any:
    """Returns the arguments of a function, with the weights of prepared layers among them quantized.

    Their biases become those that the layers add. Weight and bias of a converted layer are such already.
    """
    for layer in layers:
        if getattr(layer, "weight_quantizer", None) is None:
            continue
        kind, weight = layer._fakequant.kind, quantized_weight(layer)
        bias = getattr(layer, kind.bias_name, None)
        arguments = _replaced(arguments, getattr(layer, kind.weight_name), weight)
        if bias is not None:
            arguments = _replaced(arguments, bias, bias_to_add(layer, weight, weight))
    return arguments


def _replaced(value: Any, old: Tensor, new: Tensor | None) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_replaced(part, old, new) for part in value])
    if isinstance(value, dict):
        return {name: _replaced(part, old, new) for name, part in value.items()}
    return new if value is old else value


def compute_call(layer: AnyLayer, function: TorchFunction, args: Any, kwargs: Any) -> Tensor:
    """Returns the result of a call, in the code of another module, with the weight of `layer`.

    Input, weight and result are quantized as in the layer. A bias that does not belong to the layer is added in float.

    Args:
        layer: The prepared or converted layer to which the weight belongs.
        function: One of `PRODUCTS`.
        args: The arguments of the function.
        kwargs: The keyword arguments of the function.
    """
    given = split_arguments(args, kwargs)
    if layer._fakequant.calls is not None:  # the layer itself is not called, so that its hook does not count
        layer._fakequant.calls.next()
    y = compute_product(layer, function, given)
    if given.bias is not None and getattr(layer, layer._fakequant.kind.bias_name, None) is None:
        y = y + given.bias.reshape(-1, *[1] * (given.weight.dim() - 2))
    return quantize_output(layer, y)
