"""What fakequant changes in the modules of a user's model: a record in the attribute `_fakequant`, and the class.

`fakequant._prepare.attach` lists everything else that is added, and removes it again.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fakequant.nn._call_quantizers import Calls
from fakequant.nn._layer_kinds import AnyLayer, LayerKind, find_kind

if TYPE_CHECKING:
    from fakequant._backends.torch.grouped_linear import Groups

NAME = "_fakequant"
# A buffer of prepared layers with a 2-D weight and a batch norm that `convert` may fold: 1 if the input had more than
# two axes when last observed. The batch norm then normalizes another axis than the layer's channels.
TOKENS = "fakequant_tokens"
# A buffer of layers that multiply their input; see `_input_factors.py`.
FACTORS = "fakequant_factors"
# Computes the result of a layer from its input, weight and bias.
Operator: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Operands(NamedTuple):
    """The quantized weight and the bias of a layer, for several calls."""

    weight: Tensor
    bias: Tensor | None
    # A `KeptWeight`, if sums are exact. (Its module imports those that import this one.)
    kept: Any = None


@dataclasses.dataclass(eq=False, kw_only=True)
class Record:
    """The record of any module. Copying a module copies its record."""

    # The class of the module before it was changed.
    float_class: type[nn.Module] | None = None
    # The hooks that were added to the module.
    hooks: list[RemovableHandle] = dataclasses.field(default_factory=list)
    # Whether a hook quantizes the result of the module.
    has_output_hook: bool = False
    # The class of the module before it was given `function_quantizers`.
    calling_class: type[nn.Module] | None = None
    # The original `use_nested_tensor` of an `nn.TransformerEncoder`.
    nested: bool | None = None
    # The name and the position of the argument that is the cache, of attention whose keys and values are quantized.
    cache: tuple[str, int] | None = None
    # The calls of a module with `CallQuantizers`.
    calls: Calls | None = None
    # The calls of other modules that all take place while this module runs.
    counted: list[Calls] = dataclasses.field(default_factory=list)
    # The `Preparation`, on the module that was passed to `prepare`. (Its package imports this one.)
    preparation: Any = None
    # The `Conversion`, on the module that `convert` returned. (Its package imports this one.)
    conversion: Any = None

    def is_empty(self) -> bool:
        """Returns True if nothing is recorded."""
        rest = (self.float_class, self.calling_class, self.nested, self.preparation, self.conversion)
        return not self.hooks and all(value is None for value in rest)


@dataclasses.dataclass(eq=False, kw_only=True)
class LayerRecord(Record):
    """The record of a prepared or converted layer. Copying or unpickling it looks up the kind again."""

    # The base of the layer's class: `QuantizedLayer`, or a class derived from it.
    base: ClassVar[Any]

    kind: type[LayerKind]
    float_class: type[nn.Module]

    def operands(self, layer: AnyLayer) -> Operands | None:
        """Returns what several calls of `compute` can share, or None if they share nothing."""
        return None

    def compute(
        self,
        layer: AnyLayer,
        operator: Operator,
        input: Tensor,
        operands: Operands | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Returns `operator` of the quantized input, the quantized weight and the bias.

        `operands` are what the method of this name returned. `weight` is quantized instead of the layer's own, except
        by a layer with codes.
        """
        raise NotImplementedError

    def compute_rows(self, layer: AnyLayer, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
        """Returns `operator` of each input with its part of weight and bias, cut into equal parts along axis 0."""
        raise NotImplementedError

    def compute_groups(self, layer: AnyLayer, input: Tensor, groups: "Groups") -> Tensor:
        """Returns the products of the rows of `input`, each with the part of the weight that `groups` says."""
        raise NotImplementedError

    def quantize_input(self, layer: AnyLayer, x: Tensor) -> Tensor:
        """Returns `x` on the grid of the layer's input."""
        raise NotImplementedError

    def quantized_weight(self, layer: AnyLayer) -> Tensor:
        """Returns the weight on its grid."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("kind", "keeper", "_noted")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, kind=find_kind(state["float_class"]))


class RecordedLayer(Protocol):
    """A prepared or converted layer."""

    @property
    def _fakequant(self) -> LayerRecord: ...


def float_class_of(module: nn.Module) -> type[nn.Module]:
    """Returns the class of a module, or the one that it had before it was changed.

    >>> float_class_of(nn.Linear(2, 2)).__name__
    'Linear'
    """
    record = find_record(module)
    return type(module) if record is None or record.float_class is None else record.float_class


def has_tokens(layer: nn.Module) -> bool:
    """Returns True if the input of a prepared layer had more than two axes when last observed; see `TOKENS`.

    >>> has_tokens(nn.Linear(2, 2))
    False
    """
    noted = layer._buffers.get(TOKENS)
    return noted is not None and bool(noted)


def find_record(module: nn.Module) -> Record | None:
    """Returns the record of a module, or None if it has none.

    >>> find_record(nn.Linear(2, 2)) is None
    True
    """
    found = module.__dict__.get(NAME)
    return found if isinstance(found, Record) else None


class DerivedModule(nn.Module):
    """The base of modules whose class was derived from their own class at run time, by `derived_class`.

    Pickle cannot find such a class by its name. It stores how the class is made instead.
    """

    # A function of a module, and arguments with which it returns this class.
    _made_by: ClassVar[tuple[Any, ...]]

    if TYPE_CHECKING:

        def __getstate__(self) -> dict[str, Any]:
            """Returns the attributes to pickle."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, self._made_by, self.__getstate__()


_Derived = TypeVar("_Derived", bound=DerivedModule)
_CLASSES: dict[tuple[Any, ...], type[Any]] = {}


def derived_class(
    base: type[_Derived], cls: type[nn.Module], name: str, made_by: tuple[Any, ...], *, kind: Any = None, **members: Any
) -> type[_Derived]:
    """Returns the class that is derived from `base` and from a class of modules. It is made once.

    Args:
        base: What the class has in common with the classes that are derived from other classes of modules.
        cls: The class of a module of the model.
        name: The name of the new class.
        made_by: A function that can be pickled, and arguments with which it returns the new class.
        kind: The layer kind, if there can be several classes with the same `base` and `cls`.
        members: The attributes and methods of the new class.
    """
    key = (base, cls, kind)
    if key not in _CLASSES:
        _CLASSES[key] = type(name, (base, cls), {**members, "_made_by": made_by})
    return _CLASSES[key]


def _rebuild(make: Callable[..., type[nn.Module]], *args: Any) -> nn.Module:
    made = make(*args)
    return made.__new__(made)
