"""Functions on the quantizers of a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._quantized_layer import QuantizedLayer, input_grids_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._quantizer_state import SWITCHES
from fakequant.spec import QuantSpec


def named_quantizers(model: nn.Module) -> Iterator[tuple[str, Quantizer]]:
    """Yields the path and the module of every quantizer in a model.

    >>> from fakequant import nn as fqnn, presets
    >>> model = nn.Sequential(nn.Linear(4, 4), fqnn.FakeQuantize(presets.uint8()))
    >>> [path for path, _ in named_quantizers(model)]
    ['1']
    """
    for path, module in model.named_modules():
        if isinstance(module, Quantizer):
            yield path, module


def has_scale(quantizer: Quantizer) -> bool:
    """Returns True if a quantizer can quantize: it has a scale, or computes one from each tensor.

    >>> from fakequant import nn as fqnn, presets
    >>> has_scale(fqnn.FakeQuantize(presets.uint8()))
    False
    """
    if quantizer.is_dynamic:
        return True
    try:
        quantizer.qparams()
    except RuntimeError:
        return False
    return True


def name_quantizers(model: nn.Module) -> None:
    """Sets the `path` of every quantizer in a model. Error messages quote it.

    >>> from fakequant import nn as fqnn, presets
    >>> model = nn.Sequential(nn.Linear(4, 4), fqnn.FakeQuantize(presets.uint8()))
    >>> name_quantizers(model)
    >>> model[1].path
    '1'
    """
    for path, module in named_quantizers(model):
        module.path = path


def switch_quantizers(
    model: nn.Module, *, observing: bool | None = None, quantizing: bool | None = None, frozen: bool | None = None
) -> None:
    """Sets the switches of every quantizer in a model. A switch that is None is not changed.

    `observing=True` skips quantizers whose learned scale is initialized, since observing would overwrite it.

    Args:
        model: The model.
        observing: Whether quantizers observe tensors in training mode.
        quantizing: Whether they quantize tensors.
        frozen: Whether their scales and zero points are constant.

    >>> from fakequant import nn as fqnn, presets
    >>> model = nn.Sequential(nn.Linear(4, 4), fqnn.FakeQuantize(presets.uint8()))
    >>> switch_quantizers(model, frozen=True)
    >>> model[1]
    FakeQuantize(uint8, per tensor; observing, quantizing, frozen; MovingAverage(constant=0.01))
    """
    for _, module in named_quantizers(model):
        for name, on in zip(SWITCHES, (observing, quantizing, frozen), strict=True):
            if on is None or (name == "observing" and on and module.is_initialized):
                continue
            setattr(module, name, on)


@contextmanager
def in_float(model: nn.Module) -> Iterator[None]:
    """Context in which quantizers return their inputs and observe nothing."""
    switches = [(quantizer, quantizer.observing, quantizer.quantizing) for _, quantizer in named_quantizers(model)]
    try:
        for quantizer, observing, _ in switches:
            quantizer.quantizing = False
            if observing:
                quantizer.observing = False
        yield
    finally:
        for quantizer, observing, quantizing in switches:
            quantizer.quantizing = quantizing
            if observing and not quantizer.observing:
                quantizer.observing = True


def weight_quantizers(model: nn.Module) -> set[Quantizer]:
    """Returns the quantizers of the weights of all layers."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    return {layer.weight_quantizer for layer in layers if layer.weight_quantizer is not None}


def unreached_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Returns the layers whose input has no scale, by path. In a calibrated model, no data has reached them."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            grids = [grid for grid in input_grids_of(module) if isinstance(grid, Quantizer)]
            if grids and not any(map(has_scale, grids)):
                found[path] = module
    return found


@torch.no_grad()
def change_spec(quantizer: Quantizer, spec: QuantSpec) -> None:
    """Gives a quantizer another spec with the same number of scales, and resets it.

    Parameters and buffers remain the same tensors, so an optimizer that holds them stays valid.

    >>> quantizer = FakeQuantize(QuantSpec(bits=2))
    >>> change_spec(quantizer, QuantSpec(bits=8))
    >>> quantizer
    FakeQuantize(int8, per tensor; observing, quantizing; MovingAverage(constant=0.01))
    """
    before = quantizer.spec
    kept = ("signed", "symmetric", "axis", "group_size", "group_rows", "format", "scale_format")
    if any(getattr(before, name) != getattr(spec, name) for name in kept):
        raise ValueError(
            f"The spec of a quantizer cannot change from ({before}) to ({spec}): formats, sign, symmetry and axes must "
            "stay."
        )
    quantizer.spec = spec
    if isinstance(quantizer, FakeQuantize):
        quantizer._set_observer(quantizer.observer)
    elif isinstance(quantizer, LearnedFakeQuantize):
        quantizer._set_start()
    quantizer.reset_parameters()


def param_groups(model: nn.Module, **scale_options: Any) -> list[dict[str, Any]]:
    """Returns the parameters of `model` in two groups: all others, and the step sizes and offsets of quantizers.

    The second group has no weight decay, which would pull scales towards 0. `scale_options` are its other
    options, e.g. a learning rate. A group without parameters is left out.

    >>> import torch
    >>> from fakequant import QuantSpec
    >>> model = nn.Sequential(nn.Linear(4, 4), LearnedFakeQuantize(QuantSpec()))
    >>> optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3), lr=1e-2)
    >>> [(g["weight_decay"], g["lr"], len(g["params"])) for g in optimizer.param_groups]
    [(0.01, 0.01, 2), (0.0, 0.001, 1)]
    """
    scales = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, LearnedFakeQuantize)
        for parameter in module.parameters(recurse=False)
    }
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if id(p) not in scales]},
        {"params": [p for p in parameters if id(p) in scales], "weight_decay": 0.0, **scale_options},
    ]
    return [group for group in groups if group["params"]]
