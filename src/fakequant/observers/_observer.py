"""`Observer`: the base of all observers."""

import abc
import dataclasses
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.types import Device

from fakequant._util.text import shortened
from fakequant.functional import Update
from fakequant.observers._ranks import ALONE, Ranks
from fakequant.spec import QuantSpec

# The tensors of an observer, by name. Their shapes never change.
State = dict[str, Tensor]
_KINDS: "dict[str, type[Observer]]" = {}


class InKernel(NamedTuple):
    """How the fused kernel updates a range."""

    update: Update
    # The weight of the latest tensor in a moving average.
    constant: float = 1.0


@dataclasses.dataclass(frozen=True)
class Observer(abc.ABC):
    """Decides on the range of a tensor, block by block.

    An observer only has settings: it can be compared, hashed, printed and written as JSON. Everything it has seen is
    in a state, a dict of tensors. `init` makes the state, `update` changes it in place, and `range` reads it. Bits
    and scales do not matter to an observer, unless it searches for the range with the least error on a grid.

    Values that are not finite are counted, but do not change the range.
    """

    # Whether the range always follows the current tensor, in evaluation too.
    dynamic: ClassVar[bool] = False
    # Whether `range` is an expensive search. It is called only when a scale is needed.
    searches: ClassVar[bool] = False
    # Whether data must be seen before there is a range.
    needs_data: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__name__.startswith("_"):
            return
        known = _KINDS.get(cls.__name__)
        if known is not None and known.__module__.startswith("fakequant.") and known.__module__ != cls.__module__:
            raise TypeError(
                f"There is already an observer called {cls.__name__} in {known.__module__}; choose another name."
            )
        _KINDS[cls.__name__] = cls

    @abc.abstractmethod
    def init(self, blocks: tuple[int, ...], device: Device = None) -> State:
        """Returns the state before anything was seen.

        Args:
            blocks: The shape of the range: one entry per scale.
            device: The device of the state.
        """

    @abc.abstractmethod
    def update(self, state: State, x: Tensor, spec: QuantSpec, ranks: Ranks = ALONE) -> Tensor:
        """Updates `state` with a tensor. Returns the number of values of `x` that are not finite.

        Args:
            state: The state, changed in place.
            x: The tensor.
            spec: The grid. Its granularity says which elements share a range.
            ranks: The processes whose tensors count as one.
        """

    @abc.abstractmethod
    def range(self, state: State, spec: QuantSpec) -> tuple[Tensor, Tensor]:
        """Returns the lower and upper end of the range of every block: +inf and -inf where nothing was seen."""

    @property
    def _in_kernel(self) -> "InKernel | None":
        """The equivalent rule of the fused kernel, or None, in which case `update` and `range` are called."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns the name of the class and the settings. All values are numbers or strings."""
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}


def number(name: str, value: object) -> float:
    """Returns a setting as a float. Raises TypeError if it is not a number.

    >>> number("constant", 1)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    return float(value)


def from_dict(fields: Mapping[str, Any]) -> Observer:
    """Returns the observer that `to_dict` has written.

    >>> from fakequant.observers import MovingAverage
    >>> from_dict({"kind": "MovingAverage", "constant": 0.1}) == MovingAverage(0.1)
    True
    """
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"`fields` must be a dict with the `kind` and settings of an observer, got {shortened(repr(fields))}."
        )
    settings = dict(fields)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(sorted(_KINDS))}, got {shortened(repr(kind))}.")
    names = [field.name for field in dataclasses.fields(_KINDS[kind])]
    for name in settings:
        if name not in names:
            raise ValueError(f"{kind} has no setting {shortened(repr(name))}; it has {', '.join(names) or 'none'}.")
    missing = [
        field.name
        for field in dataclasses.fields(_KINDS[kind])
        if field.default is dataclasses.MISSING and field.name not in settings
    ]
    if missing:
        raise ValueError(f"{kind} needs the setting {missing[0]!r}.")
    return _KINDS[kind](**settings)


def no_range(blocks: tuple[int, ...], device: Device) -> State:
    """Returns the running range before anything was seen: +inf to -inf."""
    lo = torch.full(blocks, torch.inf, dtype=torch.float32, device=device)
    return {"running_min": lo, "running_max": -lo}


class _RangeKeeper(Observer):
    """The base of observers whose state is the range itself."""

    def init(self, blocks: tuple[int, ...], device: Device = None) -> State:
        """Returns an empty range, +inf to -inf."""
        return no_range(blocks, device)

    def range(self, state: State, spec: QuantSpec) -> tuple[Tensor, Tensor]:
        """Returns the running range."""
        return state["running_min"], state["running_max"]
