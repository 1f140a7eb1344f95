"""The record: the one attribute, `_fakequant`, that fakequant adds to modules of a user's model.

`fakequant._prepare.attach` lists everything else that is added, and takes it away again.
"""

import dataclasses
from typing import Any, ClassVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from fakequant.nn._layer_kinds import LayerKind, find_kind

NAME = "_fakequant"


@dataclasses.dataclass(eq=False, kw_only=True)
class Record:
    """What any module may have. Copies of a module have copies of it."""

    # The class that the module had before it was given another one.
    float_class: type[nn.Module] | None = None
    # The hooks that were added to the module.
    hooks: list[RemovableHandle] = dataclasses.field(default_factory=list)
    # Of a module whose result is quantized by a hook: True.
    has_output_hook: bool = False
    # Of an `nn.TransformerEncoder`: `use_nested_tensor` as it was.
    nested: bool | None = None
    # Of the module that was given to `prepare`: what was done, a `Preparation`.
    preparation: Any = None
    # Of the module that `convert` returned: what was done, a `Conversion`.
    conversion: Any = None

    def is_empty(self) -> bool:
        """Whether nothing is recorded."""
        rest = (self.float_class, self.nested, self.preparation, self.conversion)
        return not self.hooks and all(value is None for value in rest)


@dataclasses.dataclass(eq=False, kw_only=True)
class LayerRecord(Record):
    """What prepared and converted layers have. The kind is looked up again when a record is copied."""

    # The base of the layer's class: `QuantizedLayer`, or a class derived from it.
    base: ClassVar[Any]

    kind: type[LayerKind]
    float_class: type[nn.Module]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "kind"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, kind=find_kind(state["float_class"]))


def find_record(module: nn.Module) -> Record | None:
    """The record of a module; None if it has none.

    >>> find_record(nn.Linear(2, 2)) is None
    True
    """
    found = module.__dict__.get(NAME)
    return found if isinstance(found, Record) else None
