"""Finds the arguments of a layer that are quantized, and their grids."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fakequant._backends.torch.grid_values import step_of_each
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._diagnosis.watching import Args, Kwargs
from fakequant._train.health import qparams_at_hand
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._quantized_layer import QuantizedLayer, input_grid_of as grid_of_layer
from fakequant.nn._quantizer import Quantizer


def changed_inputs(
    layer: nn.Module, args: Args, kwargs: Kwargs, change: Callable[[Tensor], Tensor]
) -> tuple[Args, Kwargs]:
    """Returns the arguments with `change` applied once to each tensor that the layer quantizes.

    >>> import torch
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


def inputs_of(layer: nn.Module, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the tensors that the layer quantizes, each once."""
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    changed_inputs(layer, args, kwargs, keep)
    return found


def input_grid_of(layer: nn.Module) -> Quantizer | Grid | None:
    """Returns the quantizer of a layer's input: its own, or that of the module that produces the input."""
    return grid_of_layer(layer) if isinstance(layer, QuantizedLayer) else None


def is_on(quantizer: Quantizer | Grid) -> bool:
    """Returns True if the quantizer is switched on."""
    return isinstance(quantizer, Grid) or quantizer.quantizing


def qparams_for(quantizer: Quantizer | Grid, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scale and zero point with which `x` is quantized."""
    if isinstance(quantizer, Grid) and quantizer.scale is not None and quantizer.zero_point is not None:
        return quantizer.scale, quantizer.zero_point
    if isinstance(quantizer, Grid) or (isinstance(quantizer, FakeQuantize) and quantizer.is_dynamic):
        return qparams_at_hand(quantizer, x)
    return quantizer.qparams()


def step_of(quantizer: Quantizer | Grid, scale: Tensor, x: Tensor) -> Tensor:
    """Returns the distance between neighbouring values of the grid at each element of `x`."""
    return step_of_each(scale, x, quantizer.spec)
