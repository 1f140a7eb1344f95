"""Layer kinds: how the layers of a class compute with quantized tensors, and the registry of kinds."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeVar

from torch import Tensor, nn

# A layer of the class for which a kind is registered. A prepared or converted layer is also a `QuantizedLayer`. Python
# has no type for an instance of two classes, of which one is chosen at run time.
AnyLayer: TypeAlias = Any

# By class, or by the full name of a class that need not be imported.
_KINDS: "dict[type[nn.Module] | str, type[LayerKind]]" = {}
# By a function that tells whether a class has the kind, for classes without a common base or a list of names.
_RECOGNIZED: "list[tuple[Callable[[type], bool], type[LayerKind]]]" = []
_Kind = TypeVar("_Kind", bound="type[LayerKind]")


class LayerKind:
    """How layers of one kind compute with quantized tensors. Derive from it and register with `register_layer_kind`.

    A kind is never instantiated. Its `forward` becomes the forward pass of prepared and converted layers. In every
    other respect they remain instances of their original class.
    """

    # The axis of the weight that holds the output channels.
    channel_axis: ClassVar[int] = 0
    # Whether the input can be quantized. False for indices.
    has_input: ClassVar[bool] = True
    # Whether `forward` multiplies by `linear`, `transposed_linear` or torch's `_conv_forward`, whose sums can be exact.
    can_sum_exactly: ClassVar[bool] = False
    # The attributes of the layer that hold its weight and its bias.
    weight_name: ClassVar[str] = "weight"
    bias_name: ClassVar[str] = "bias"
    # The kind of classes that derive from a class of this kind and override its forward pass. None if they have none.
    own_forward: "ClassVar[type[LayerKind] | None]" = None
    # Whether `forward` runs the forward pass of the layer's class, which may change the input and the weight.
    runs_float_forward: ClassVar[bool] = False

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Returns the reason why `module` cannot be quantized, or None if it can."""
        return None

    @classmethod
    def read_weight(cls, layer: AnyLayer) -> Tensor:
        """Returns the weight of a float or prepared layer by which its input is multiplied, before it is quantized.

        Override it if `forward` passes a weight of its own to `compute`.
        """
        weight: Tensor = getattr(layer, cls.weight_name)
        return weight

    @classmethod
    def changes_input(cls, layer: AnyLayer) -> bool:
        """Returns True if `forward` changes its input before it passes it to `compute`."""
        return False

    @staticmethod
    def forward(layer: AnyLayer, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of `layer`, with its arguments and results. Call `compute` and `quantize_output` here."""
        raise NotImplementedError


def register_layer_kind(*classes: type[nn.Module] | str) -> Callable[[_Kind], _Kind]:
    """Registers a `LayerKind` for layers of these classes. A later registration replaces an earlier one.

    Args:
        classes: Classes of layers. A class can also be given by its full name, such as
            "transformers.pytorch_utils.Conv1D", so that its package need not be installed.

    >>> import torch, fakequant as fq
    >>> class Scaled(nn.Linear):
    ...     def forward(self, x):
    ...         return 2 * torch.nn.functional.linear(x, self.weight, self.bias)
    >>> @register_layer_kind(Scaled)
    ... class QuantizedScaled(LayerKind):
    ...     @staticmethod
    ...     def forward(layer, x):
    ...         y = fq.nn.compute(layer, torch.nn.functional.linear, x)
    ...         return fq.nn.quantize_output(layer, 2 * y)
    >>> fq.prepare(nn.Sequential(Scaled(4, 2)), fq.recipes.int8_dynamic())[0].weight_quantizer.spec.bits
    8
    """

    def register(kind: _Kind) -> _Kind:
        for cls in classes:
            _KINDS[cls] = kind
        return kind

    return register


def find_kind(cls: type[nn.Module]) -> type[LayerKind] | None:
    """Returns the kind of layers of class `cls`, or None if there is none.

    The kind of a class that overrides the forward pass of a registered class is the `own_forward` of that class's kind,
    unless the class is registered too.
    """
    for base in cls.__mro__:
        kind = _registered_kind(base)
        if kind is not None:
            assert issubclass(base, nn.Module)
            return kind if cls.forward is base.forward else kind.own_forward
    return None


def register_layer_kind_if(is_such_class: Callable[[type], bool], kind: "type[LayerKind]") -> None:
    """Registers a kind for all classes for which a function returns True, and that are not registered themselves."""
    _RECOGNIZED.append((is_such_class, kind))


def _registered_kind(cls: type) -> "type[LayerKind] | None":
    named = _KINDS.get(cls) or _KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
    return named or next((kind for is_such_class, kind in _RECOGNIZED if is_such_class(cls)), None)


def is_known(cls: type[nn.Module]) -> bool:
    """Returns True if `cls` has a kind or derives from a class that has one."""
    return any(_registered_kind(base) is not None for base in cls.__mro__)


def load_kind(cls: type[nn.Module], module: str, name: str) -> type[LayerKind]:
    """Returns the kind of a layer that is being unpickled.

    The kind had this `name` in this `module` when the layer was pickled. The module is imported if necessary.
    """
    if _loadable_kind(cls, name) is None:
        with contextlib.suppress(ImportError):  # the error below is more helpful
            importlib.import_module(module)
    kind = _loadable_kind(cls, name)
    if kind is None:
        raise ImportError(
            f"A quantized {cls.__name__} is being loaded, and no kind is registered for this class.\n"
            f"It was {name} in the module {module!r}: import that module, or register a kind with "
            "@fakequant.nn.register_layer_kind, before you load the model."
        )
    return kind


def _loadable_kind(cls: type[nn.Module], name: str) -> type[LayerKind] | None:
    kind = find_kind(cls)
    # The kind of classes that are not registered does not replace one that was registered.
    return None if kind is not None and kind.runs_float_forward and kind.__qualname__ != name else kind
