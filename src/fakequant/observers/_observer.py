"""What an observer is: the answer to one question about the tensors it is shown. What range?"""

import abc
import dataclasses
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fakequant._backends.torch.process_ranks import ALONE, Ranks
from fakequant._backends.torch.tensor_kernels import Observation, updated_range
from fakequant.functional import Update
from fakequant.qparams import min_max
from fakequant.spec import QuantSpec, shortened

# The tensors an observer keeps, by name. Their shapes never change.
State = dict[str, Tensor]
_KINDS: "dict[str, type[Observer]]" = {}


class InKernel(NamedTuple):
    """How the fused kernel updates a range: a rule, and the weight of the latest tensor for `"moving_average"`."""

    update: Update
    constant: float = 1.0


@dataclasses.dataclass(frozen=True)
class Observer(abc.ABC):
    """What range do the values of a tensor have, block by block?

    An observer is a description: it compares, hashes, prints and goes to JSON. What it has seen is in
    a state, a dict of tensors that `init` makes, `update` changes in place, and `range` reads. It knows
    nothing of bits and scales, except that a search asks the spec what its grid would do.

    Values that are not finite are never learned from, only counted.
    """

    # The range is always that of the tensor at hand, in evaluation too: there is nothing to remember.
    dynamic: ClassVar[bool] = False
    # The range is searched for, which takes longer than looking it up: it is done when a scale is needed.
    searches: ClassVar[bool] = False
    # There is a range before anything was seen.
    needs_data: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__name__.startswith("_"):
            return
        known = _KINDS.get(cls.__name__)
        if known is not None and known.__module__.startswith("fakequant.") and known.__module__ != cls.__module__:
            raise TypeError(f"There is an observer called {cls.__name__} in {known.__module__}; choose another name.")
        _KINDS[cls.__name__] = cls

    @abc.abstractmethod
    def init(self, blocks: tuple[int, ...], device: Any = None) -> State:
        """The state before anything was seen, for a range per block."""

    @abc.abstractmethod
    def update(self, state: State, x: Tensor, spec: QuantSpec, ranks: Ranks = ALONE) -> Tensor:
        """Changes `state` by what is in `x`, and in that of the other ranks; how many values here were not finite."""

    @abc.abstractmethod
    def range(self, state: State, spec: QuantSpec) -> tuple[Tensor, Tensor]:
        """The lowest and highest value of every block; +inf and -inf where nothing was seen."""

    @property
    def _in_kernel(self) -> "InKernel | None":
        """How the fused kernel observes in the same way; None: it cannot, and `update` and `range` are called."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """The kind and its settings: numbers and strings only."""
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}


def number(name: str, value: object) -> float:
    """A setting that is a number, as a float.

    >>> number("constant", 1)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    return float(value)


def from_dict(fields: Mapping[str, Any]) -> Observer:
    """The observer that `to_dict` described.

    >>> from fakequant.observers import MovingAverage
    >>> from_dict({"kind": "MovingAverage", "constant": 0.1}) == MovingAverage(0.1)
    True
    """
    if not isinstance(fields, Mapping):
        raise TypeError(f"An observer is read from a dict with its `kind` and settings, got {shortened(repr(fields))}.")
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


def no_range(blocks: tuple[int, ...], device: Any) -> State:
    """The running range of nothing."""
    lo = torch.full(blocks, torch.inf, dtype=torch.float32, device=device)
    return {"running_min": lo, "running_max": -lo}


class _Running(Observer):
    """Follows the ends of the range, in the way the fused kernel can."""

    @property
    @abc.abstractmethod
    def _in_kernel(self) -> InKernel:
        """What `update` does, for the kernel."""

    def init(self, blocks: tuple[int, ...], device: Any = None) -> State:
        """+inf and -inf."""
        return no_range(blocks, device)

    def update(self, state: State, x: Tensor, spec: QuantSpec, ranks: Ranks = ALONE) -> Tensor:
        """The ends move by those of `x`."""
        seen = min_max(x, spec)
        lo, hi = seen.min, seen.max
        if spec.granularity != "token":  # tokens are the rank's own
            lo, hi = ranks.range(lo, hi)
        new = updated_range(
            state["running_min"], state["running_max"], lo, hi, Observation(*self._in_kernel, 0.0, False)
        )
        for name, value in zip(("running_min", "running_max"), new, strict=True):
            state[name].copy_(value)
        return (seen.nan + seen.posinf + seen.neginf).sum()

    def range(self, state: State, spec: QuantSpec) -> tuple[Tensor, Tensor]:
        """The ends."""
        return state["running_min"], state["running_max"]
