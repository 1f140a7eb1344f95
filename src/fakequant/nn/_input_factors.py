"""A multiplication of a layer's input before it is quantized, which `ptq.smooth` inserts.

    y = layer(x * factors)        one factor per input channel; the layer's weight is divided by it

The factors are a buffer of the layer, and a forward pre-hook multiplies. Hooks that are added later, and all code of
the layer, see the product. Without quantizers, the result is the same as before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._records import FACTORS, LayerRecord, find_record


def changed_inputs(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with `change` applied once to each tensor that the layer quantizes.

    >>> changed_inputs(nn.Linear(2, 2), (torch.ones(2),), {}, torch.neg)
    ((tensor([-1., -1.]),), {})
    """
    names = ("query", "key", "value") if isinstance(layer, nn.MultiheadAttention) else ("input",)
    done: dict[int, Tensor] = {}

    def once(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if id(x) not in done:
            done[id(x)] = change(x)
        return done[id(x)]

    positional = (*map(once, args[: len(names)]), *args[len(names) :])
    return positional, {name: once(x) if name in names else x for name, x in kwargs.items()}


def has_factors(module: nn.Module) -> bool:
    """Returns True if a layer multiplies its input."""
    return FACTORS in module._buffers


def scaled(layer: nn.Module, x: Tensor) -> Tensor:
    """Returns an input of a layer times its factors, or unchanged if it has none."""
    factors = layer._buffers.get(FACTORS)
    return x if factors is None else x * factors.to(x.dtype)


def scale_input(layer: Any, args: Any, kwargs: Any) -> Any:
    """The forward pre-hook of a layer with factors."""
    if isinstance(layer, nn.MultiheadAttention):
        return changed_inputs(layer, args, kwargs, lambda x: scaled(layer, x))
    if args:
        return (scaled(layer, args[0]), *args[1:]), kwargs
    return args, {name: scaled(layer, x) if name == "input" else x for name, x in kwargs.items()}


def attach_factors(layer: AnyLayer) -> None:
    """Makes a prepared or converted layer multiply its input, by 1 at first. Its weight is still a parameter."""
    weight: Tensor = layer._parameters[layer._fakequant.kind.weight_name]
    # In a shape that broadcasts with the input and with the weight, whose inputs are on axis 1.
    shape = (weight.shape[1], *[1] * (weight.dim() - 2))
    layer.register_buffer(FACTORS, torch.ones(shape, dtype=torch.float32, device=weight.device))
    layer._fakequant.hooks.append(layer.register_forward_pre_hook(scale_input, with_kwargs=True))


def remove_factors(layer: AnyLayer) -> None:
    """Undoes `attach_factors`, and changes no weight."""
    del layer._buffers[FACTORS]
    record = find_record(layer)
    assert isinstance(record, LayerRecord)
    for handle in list(record.hooks):
        if layer._forward_pre_hooks.get(handle.id) is scale_input:
            handle.remove()
            record.hooks.remove(handle)


@torch.no_grad()
def merge_factors(layer: AnyLayer) -> None:
    """Multiplies the weight by the factors instead of the input: exactly, if these are powers of two."""
    weight = layer._parameters[layer._fakequant.kind.weight_name]
    weight.mul_(layer._buffers[FACTORS].to(weight.dtype))
    remove_factors(layer)
