"""`FlowGraph`: which modules and functions a forward pass called, in order, and on whose results.

The graph only describes a model. It is never run, and never replaces the model. There are two ways to get one:
`record_flow` runs the model on an example, and `trace_flow` traces it with torch.fx, without data.
"""

import dataclasses
from collections import Counter
from typing import Any, Literal, NamedTuple

from torch import nn

from fakequant.nn._function_calls import call_key
from fakequant.nn._function_names import function_name
from fakequant.nn._quantized_layer import is_layer

Kind = Literal["module", "function", "parameter", "input"]


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a module or a function, or a value that no call computed.

    Attributes:
        kind: "module", "function", "parameter" (of the model), or "input" for anything else.
        path: The path of the module or the parameter. Of a function: the path of the module whose code calls it.
        function: The function that was called, or the name of the method (torch.fx); None unless `kind` is "function".
        number: The number of this call among the calls of functions of the same name in one call of the module.
        inputs: The calls whose results are operands, in the order of the arguments.
        users: The calls that have this one among their inputs.
        in_place: Whether the call changes its first input.
        shape: The shape of the first result; None if the model was traced without data.
        input_shapes: The shapes of the operands, likewise.
        returned_by: Paths of modules that returned the result of this call as theirs, the innermost first. Modules that
            are called several times are left out.
        turn: The number of the call of the module at `path`, in which a function was called or which this is. None if
            the module is called once.
        results: The number of tensors that the call returned.
        caller: For a function that was called with the weight of a layer: the path of the module whose code calls
            it, and the key of the call. `kind` is then "module", and `path` is that of the layer.
    """

    kind: Kind
    path: str
    function: Any = None
    number: int = 0
    inputs: "list[Call]" = dataclasses.field(default_factory=list)
    users: "list[Call]" = dataclasses.field(default_factory=list)
    in_place: bool = False
    shape: tuple[int, ...] | None = None
    input_shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    returned_by: list[str] = dataclasses.field(default_factory=list)
    turn: int | None = None
    results: int = 1
    caller: tuple[str, str] | None = None

    @property
    def function_name(self) -> str:
        """The name of the function. All spellings of one operation have the same."""
        return "" if self.function is None else function_name(self.function)

    @property
    def key(self) -> str:
        """The name of the function and the number of the call."""
        return call_key(self.function, self.number)

    def __str__(self) -> str:
        name = f"{self.function_name} {self.number}"
        return self.path if self.kind != "function" else f"{self.path}: {name}" if self.path else name


class Repeated(NamedTuple):
    """How often a module is called, and the path of the innermost module in which all these calls take place."""

    number: int
    scope: str


@dataclasses.dataclass
class FlowGraph:
    """The calls of one forward pass, in order."""

    calls: list[Call]
    # The calls whose results the model returned or stored, so that they are visible outside.
    results: list[Call] = dataclasses.field(default_factory=list)
    # How often the code of a module calls each function in one call of the module, by path. Empty if it was traced.
    counts: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    # The modules that the code of a module calls, by path. Empty if it was traced.
    callees: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    # The modules that are called several times, by path.
    repeated: dict[str, Repeated] = dataclasses.field(default_factory=dict)

    def modules(self) -> list[Call]:
        """Returns the calls of modules, in order."""
        return [call for call in self.calls if call.kind == "module"]

    def count(self) -> Counter[str]:
        """Returns how often every module was called, by path."""
        return Counter(call.path for call in self.modules())


def is_leaf(module: nn.Module) -> bool:
    """Returns True if a graph has one call for `module`, and not the calls that its code makes.

    This can run the code of the module. Call it before the model is recorded or traced.
    """
    if is_layer(module):
        return True
    has_children = next(module.children(), None) is not None
    return not has_children and module.__module__.startswith(("torch.nn", "torch.ao.nn"))
