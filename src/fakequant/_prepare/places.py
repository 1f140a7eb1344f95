"""Places: where the result of a call can be quantized.

    the output of a module      of the called module, or of a module that returns the result of a function
    a call of a function        in the code of a module, see `fakequant.nn._function_calls`

The result of an operation that only moves or selects elements is on the grid of its operand, so that is quantized.
"""

import dataclasses

from torch import nn

from fakequant._moves import SELECTING_NAMES, TRACED_MODULES, TRACED_NAMES
from fakequant._prepare.flow_graph import Call
from fakequant.nn._function_calls import CHILD
from fakequant.nn._function_names import functions_named


@dataclasses.dataclass(frozen=True)
class Place:
    """The output of the module at `path`, or, if there is a key, the result of a function that its code calls.

    If the module is called several times, each of its calls has places of its own. `turn` is the number of the call.
    """

    path: str
    key: str | None = None
    turn: int | None = None

    @classmethod
    def of(cls, call: Call) -> "Place":
        """Returns where the result of a call of a module or a function arises."""
        return cls(call.path, call.key if call.kind == "function" else None, call.turn)

    def __str__(self) -> str:
        name = "output" if self.key is None else f"{CHILD}.{self.key}"
        return ".".join(part for part in (self.path, name, "" if self.turn is None else str(self.turn)) if part)


def find_place(model: nn.Module, call: Call) -> Place | None:
    """Returns where the result of a call can be quantized, or None if it cannot be."""
    passed = None
    while True:
        own = [Place(path) for path in call.returned_by if path and not _is_container(model.get_submodule(path))]
        if call.kind == "module":
            if not isinstance(model.get_submodule(call.path), nn.Identity):
                # A module that is called once need not count its calls.
                return own[0] if own and call.turn is not None else Place.of(call)
            passed = passed or Place.of(call)
        if own:
            return own[0]
        is_function = call.kind == "function"
        moves = call.kind == "module" or (is_function and call.function_name in TRACED_NAMES | SELECTING_NAMES)
        if not moves:
            return passed or (Place.of(call) if is_function and can_be_watched(model, call) else None)
        if not call.inputs or any(user.in_place for user in call.inputs[0].users):
            return passed
        call = call.inputs[0]


def places_before(model: nn.Module, call: Call) -> list[Place]:
    """Returns where the operand of a call with one operand may have been quantized, the nearest first.

    The elements were only moved between these places. The last one is where they were computed, if that is known.
    """
    found: list[Place] = []
    while call.inputs:
        source = call.inputs[0]
        if any(user.in_place and user.inputs[0] is source for user in source.users):
            break
        found += [Place(path) for path in reversed(source.returned_by) if path]
        if source.kind not in ("module", "function"):
            break
        found.append(Place.of(source))
        moves = (
            source.function_name in TRACED_NAMES
            if source.kind == "function"
            else isinstance(model.get_submodule(source.path), TRACED_MODULES)
        )
        if not moves:
            break
        call = source
    return found


def _is_container(module: nn.Module) -> bool:
    """Returns True for modules that would call a quantizer that is added to them as if it were one of their layers."""
    return isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def can_be_watched(model: nn.Module, call: Call) -> bool:
    """Returns True if the result of a function can be replaced by a quantized one while the module's code runs."""
    if call.shape is None or call.results != 1 or call.function not in functions_named(call.function_name):
        return False  # the model was traced, or the function is unknown
    if isinstance(model.get_submodule(call.path), nn.modules.batchnorm._BatchNorm):
        return False  # it changes its class when it is frozen or folded
    return not call.in_place  # the code may ignore the result, and read the tensor that was changed
