"""Kinds of layers: how the layers of a class compute with quantized tensors, and the registry of them."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from torch import nn

# By class, or by the full name of a class that need not be imported.
_KINDS: "dict[type[nn.Module] | str, type[LayerKind]]" = {}
_Kind = TypeVar("_Kind", bound="type[LayerKind]")


class LayerKind:
    """How layers of one kind compute with quantized tensors. Derive from it and register with `quantizes`.

    A kind is never instantiated. Its `forward` becomes the forward pass of prepared and converted layers, which are
    instances of the layer's own class in every other respect.
    """

    # The axis of the weight that holds the output channels.
    channel_axis: ClassVar[int] = 0
    # Whether the input holds numbers to quantize. False for indices.
    has_input: ClassVar[bool] = True
    # The attributes of the layer that hold its weight and its bias.
    weight_name: ClassVar[str] = "weight"
    bias_name: ClassVar[str] = "bias"

    @classmethod
    def unsupported_reason(cls, module: Any) -> str | None:
        """The reason why `module` cannot be quantized, or None if it can."""
        return None

    @staticmethod
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of `layer`: call `compute` and `quantize_output` here."""
        raise NotImplementedError


def quantizes(*classes: type[nn.Module] | str) -> Callable[[_Kind], _Kind]:
    """Registers a `LayerKind` for layers of these classes. The last registration of a class counts.

    Args:
        classes: Classes of layers. A class of another library can be given by its full name, such as
            "transformers.pytorch_utils.Conv1D": it is not imported.

    >>> import torch, fakequant as fq
    >>> class Scaled(nn.Linear):
    ...     def forward(self, x):
    ...         return 2 * torch.nn.functional.linear(x, self.weight, self.bias)
    >>> @quantizes(Scaled)
    ... class QuantizedScaled(LayerKind):
    ...     @staticmethod
    ...     def forward(layer, x):
    ...         y = fq.nn.compute(layer, torch.nn.functional.linear, x)
    ...         return fq.nn.quantize_output(layer, 2 * y)
    >>> fq.prepare(nn.Sequential(Scaled(4, 2)), fq.recipes.int8())[0].weight_quantizer.spec.bits
    8
    """

    def register(kind: _Kind) -> _Kind:
        for cls in classes:
            _KINDS[cls] = kind
        return kind

    return register


def find_kind(cls: type[nn.Module]) -> type[LayerKind] | None:
    """The kind of layers of class `cls`; None if there is none, or if `cls` has a forward pass that no kind knows."""
    for base in cls.__mro__:
        kind = _registered(base)
        if kind is not None:
            return kind if cls.forward is base.forward else None
    return None


def _registered(cls: type) -> "type[LayerKind] | None":
    return _KINDS.get(cls) or _KINDS.get(f"{cls.__module__}.{cls.__qualname__}")


def is_known(cls: type[nn.Module]) -> bool:
    """Whether `cls` is, or derives from, a class with a kind."""
    return any(_registered(base) is not None for base in cls.__mro__)


def load_kind(cls: type[nn.Module], module: str, name: str) -> type[LayerKind]:
    """The kind of a layer that is being unpickled. Imports `module`, which registered it when it was pickled."""
    if find_kind(cls) is None:
        with contextlib.suppress(ImportError):  # the error below says more
            importlib.import_module(module)
    kind = find_kind(cls)
    if kind is None:
        raise ImportError(
            f"A quantized {cls.__name__} is being loaded, and no kind is registered for this class.\n"
            f"It was {name} in the module {module!r}: import that module, or register a kind with "
            "@fakequant.nn.quantizes, before you load the model."
        )
    return kind
