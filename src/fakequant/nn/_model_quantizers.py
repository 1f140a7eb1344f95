"""Functions on all quantizers of a model."""

from collections.abc import Iterator

from torch import nn

from fakequant.nn._quantizer import Quantizer
from fakequant.nn._switches import SWITCHES


def quantizers(model: nn.Module) -> Iterator[tuple[str, Quantizer]]:
    """Yields the path and the module of every quantizer in a model.

    >>> from fakequant import nn as fqnn, presets
    >>> model = nn.Sequential(nn.Linear(4, 4), fqnn.FakeQuantize(presets.uint8()))
    >>> [path for path, _ in quantizers(model)]
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
    for path, module in quantizers(model):
        module.path = path


def switch_quantizers(
    model: nn.Module,
    *,
    observing: bool | None = None,
    quantizing: bool | None = None,
    frozen: bool | None = None,
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
    for _, module in quantizers(model):
        for name, on in zip(SWITCHES, (observing, quantizing, frozen), strict=True):
            if on is None or (name == "observing" and on and module.is_initialized):
                continue
            setattr(module, name, on)
