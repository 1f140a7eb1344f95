"""Records: the one attribute, `_fakequant`, that fakequant adds to modules of a user's model.

`fakequant._prepare.attach` lists everything else that is added, and removes it again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeAlias

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fakequant.nn._call_quantizers import Calls
from fakequant.nn._expert_groups import Groups
from fakequant.nn._layer_kinds import AnyLayer, LayerKind, find_kind

NAME = "_fakequant"
# Computes the result of a layer from its input, weight and bias.
Operator: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# The quantized weight and the bias of a layer, for several calls.
Operands: TypeAlias = tuple[Tensor, Tensor | None]


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

        Args:
            layer: The layer of this record.
            operator: A function of input, weight and bias.
            input: The input.
            operands: What the method of this name returned, or None.
            weight: The weight to quantize, or None for the layer's own. A layer with codes ignores it.
        """
        raise NotImplementedError

    def compute_rows(self, layer: AnyLayer, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
        """Returns `operator` of each input with its part of weight and bias, cut into equal parts along axis 0."""
        raise NotImplementedError

    def compute_groups(self, layer: AnyLayer, input: Tensor, groups: Groups) -> Tensor:
        """Returns the products of the rows of `input`, each with the part of the weight that `groups` says."""
        return self.compute(layer, groups.linear, input)

    def quantize_input(self, layer: AnyLayer, x: Tensor) -> Tensor:
        """Returns `x` on the grid of the layer's input."""
        raise NotImplementedError

    def quantized_weight(self, layer: AnyLayer) -> Tensor:
        """Returns the weight on its grid."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "kind"}

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


def find_record(module: nn.Module) -> Record | None:
    """Returns the record of a module, or None if it has none.

    >>> find_record(nn.Linear(2, 2)) is None
    True
    """
    found = module.__dict__.get(NAME)
    return found if isinstance(found, Record) else None
