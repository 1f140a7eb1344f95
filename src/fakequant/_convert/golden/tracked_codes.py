"""Floats in a converted model that remember the integers they stand for.

Between two layers a converted model passes floats, so that the model's own code runs as it is. A runtime
passes integers, and where a quantizer follows a layer it never computes the float at all: it goes from the
sum of products straight to the next code. A `TrackedTensor` tensor is such a float together with what the runtime
has in its place, its origin. A quantizer asks the origin for codes; other code sees an ordinary tensor.

    OnGrid         (q - zero_point) * scale    what a quantizer returned
    Accumulated    sum * scale                 what a layer returned: a sum of products of codes
    Added          a + b                       both on grids
    Averaged       mean of a over some axes    a on a grid

Operations that only move or select elements keep a grid, and so does a ReLU: it is the same on codes. Of sums, only
moves that the exporter passes a quantizer through keep the origin: behind others a runtime has floats.
Everything else gives a tensor without one.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant._backends.blocks import blocks_of
from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.torch_private import pytree
from fakequant._moves import MOVES_OF_CODES, MOVES_OF_VALUES, SAME_VALUES, named
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class GridOf:
    """Scale (float32) and zero point (int32) of a tensor that has one of each."""

    scale: Tensor
    zero_point: Tensor
    spec: QuantSpec


class Arithmetic(Protocol):
    """How a runtime comes to codes on a grid. Codes are integers in float32."""

    def from_sums(self, sums: Tensor, scale: Tensor, grid: GridOf) -> Tensor:
        """Of `sums * scale`."""

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """Of `a + b`, which are on grids."""

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """Of the mean of `x`, which is on a grid, with its axes kept."""


class Origin(Protocol):
    """Where a value comes from."""

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        """The codes of the value on a grid, as integers in float32."""


@dataclasses.dataclass(frozen=True)
class OnGrid:
    """The value is on a grid."""

    value: Tensor
    grid: GridOf
    # Of the value's memory: who computes with it later must know whether it was changed.
    version: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", _version(self.value))

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        """By the rule of ONNX."""
        return quantized(self.value, grid)


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """Exact sums, in floats that are wide enough, and their scale; the two broadcast.

    `layer` computed them from `codes` of its input, with a zero point, for those who want to know more.
    """

    sums: Tensor
    scale: Tensor
    layer: Any = None
    codes_in: Tensor | None = None
    zero_point_in: Tensor | None = None

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_sums(self.sums, self.scale, grid)


@dataclasses.dataclass(frozen=True)
class Added:
    """The sum of two tensors on grids."""

    a: OnGrid
    b: OnGrid

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_addition(self.a.value, self.a.grid, self.b.value, self.b.grid, grid)


@dataclasses.dataclass(frozen=True)
class Averaged:
    """The mean over some axes of a tensor on a grid."""

    x: OnGrid
    axes: tuple[int, ...]
    keepdim: bool

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        q = arithmetic.from_average(self.x.value, self.x.grid, self.axes, grid)
        return q if self.keepdim else q.squeeze(self.axes)


@dataclasses.dataclass(frozen=True)
class Moved:
    """Elements of something else: in other places, or the largest of some."""

    of: Origin
    move: Callable[[Tensor], Tensor]

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        """The codes of the source, with the move applied."""
        return self.move(self.of.codes(arithmetic, grid))


@dataclasses.dataclass(frozen=True)
class Rectified:
    """A ReLU of something else: the code of 0 is the zero point."""

    of: Origin

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        """The codes of the source, none below the zero point."""
        return torch.maximum(self.of.codes(arithmetic, grid), grid.zero_point)


def quantized(x: Tensor, grid: GridOf) -> Tensor:
    """The codes of `x` by the rule of ONNX, as integers in float32."""
    x = plain(x).float()
    blocks = blocks_of(tuple(x.shape), grid.spec).parameters
    codes = tensor_functions.quantize(x, grid.scale.reshape(blocks), grid.zero_point.reshape(blocks), grid.spec)
    return codes.float()


def codes_of(x: Tensor, grid: GridOf) -> Tensor:
    """The codes of what is on the grid."""
    return torch.round(x / grid.scale) + grid.zero_point


class TrackedTensor(torch.Tensor):
    """A float tensor with an origin; None if it was changed in a way that is not known."""

    origin: Origin | None
    version: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if kwargs.get("out") is not None:
            return func(*_without(args), **_without(kwargs))  # what it was is seen by its version
        changed = args[0] if args and isinstance(args[0], TrackedTensor) and _is_in_place(func, kwargs) else None
        if changed is not None:
            changed.origin = origin_of(changed)
        if changed is not None and isinstance(changed.origin, OnGrid):
            # What it was is an operand of what it becomes.
            changed.origin = OnGrid(changed.origin.value.clone(), changed.origin.grid)
        plain_args = _without(args)
        result = func(*plain_args, **_without(kwargs))
        if changed is not None:
            changed.version = _version(changed)  # its origin is asked for once more
        rule = _RULES.get(func, _forgotten)
        if changed is None and type(result) in (tuple, list):  # pieces, or the largest and where they were
            return type(result)(_followed(rule, func, args, plain_args, kwargs, part) for part in result)
        result = _followed(rule, func, args, plain_args, kwargs, result)
        if changed is not None:
            changed.origin, changed.version = origin_of(result), _version(changed)
        return result


def _is_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _IN_PLACE or bool(kwargs.get("inplace"))


_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"}


def track(value: Tensor, origin: Origin) -> TrackedTensor:
    """`value` with an origin."""
    made = value.as_subclass(TrackedTensor)
    made.origin, made.version = origin, _version(value)
    return made


def _version(value: Tensor) -> int:
    """How often the memory of a tensor was changed; also through other names for it."""
    return 0 if value.is_inference() else value._version


def on_grid(value: Tensor, grid: GridOf) -> TrackedTensor:
    """`value`, which is on a grid."""
    return track(value, OnGrid(value, grid))


def origin_of(value: Any) -> Origin | None:
    """The origin of a tensor, if it has one and both are what they were."""
    if not isinstance(value, TrackedTensor) or value.version != _version(value):
        return None
    return value.origin if value.origin is not None and _holds(value.origin) else None


def _holds(origin: Any) -> bool:
    """Whether the tensors that a value was computed from are what they were."""
    match origin:
        case OnGrid():
            return origin.version == _version(origin.value)
        case Added():
            return _holds(origin.a) and _holds(origin.b)
        case Averaged():
            return _holds(origin.x)
        case Moved() | Rectified():
            return _holds(origin.of)
    return True  # sums are not shared with other tensors


def plain(value: Tensor) -> Tensor:
    """The tensor without its origin."""
    return value.as_subclass(Tensor) if isinstance(value, TrackedTensor) else value


def _without(value: Any) -> Any:
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, (tuple, list)):
        parts = [_without(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {k: _without(v) for k, v in value.items()}
    return value


# --- what an operation makes of an origin; None: nothing is known any more ---------------------------


def _followed(rule: Callable[..., Any], func: Any, args: Any, plain_args: Any, kwargs: Any, result: Any) -> Any:
    """A result with the origin it has by a rule, if it has one."""
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return result
    origin = rule(func, args, plain_args, kwargs, result)
    return result if origin is None else track(result, origin)


def _forgotten(func: Any, args: Any, plain_args: Any, kwargs: Any, result: Tensor) -> Origin | None:
    return None


def _selected(func: Any, args: Any, plain_args: Any, kwargs: Any, result: Tensor) -> Origin | None:
    """Elements of what is on a grid. Codes of sums are not known: a runtime has made floats of them by then."""
    origin = origin_of(args[0])
    if not isinstance(origin, OnGrid) or origin.grid.scale.dim() > 0:  # tokens have scales of their own
        return None
    return OnGrid(result, origin.grid)


def _moved(func: Any, args: Any, plain_args: Any, kwargs: Any, result: Tensor) -> Origin | None:
    """The same where the exporter repeats a quantizer before the move: sums become codes first, and then move."""
    origin = origin_of(args[0])
    if origin is None or isinstance(origin, OnGrid):
        return _selected(func, args, plain_args, kwargs, result)
    # In memory of its own: a view of codes may be asked for where the model made the value contiguous first.
    return Moved(origin, lambda codes: _first(func(codes.contiguous(), *plain_args[1:], **kwargs)))


def _first(result: Any) -> Tensor:
    """Without the places that the largest elements were in."""
    return result[0] if isinstance(result, tuple) else result


def _rectified(func: Any, args: Any, plain_args: Any, kwargs: Any, result: Tensor) -> Origin | None:
    origin = origin_of(args[0])
    if isinstance(origin, OnGrid):
        return OnGrid(result, origin.grid)
    return None if origin is None else Rectified(origin)


def _same(func: Any, args: Any, plain_args: Any, kwargs: Any, result: Tensor) -> Origin | None:
    origin = origin_of(args[0])
    return OnGrid(result, origin.grid) if isinstance(origin, OnGrid) else origin


# In torch's signatures; all others are in training unless told.
_NOT_IN_TRAINING = {F.alpha_dropout, F.feature_alpha_dropout}


def _dropped(func: Any, args: Any, plain_args: Any, kwargs: Any, result: Tensor) -> Origin | None:
    given = args[2] if len(args) > 2 else func not in _NOT_IN_TRAINING
    training = kwargs.get("training", kwargs.get("train", given))
    return None if training else _same(func, args, plain_args, kwargs, result)


def _added(func: Any, args: Any, plain_args: Any, kwargs: Any, result: Tensor) -> Origin | None:
    origins = [origin_of(x) for x in args]
    if len(origins) != 2 or kwargs.get("alpha", 1) != 1:
        return None
    a, b = origins
    if not (isinstance(a, OnGrid) and isinstance(b, OnGrid)) or a.value.shape != b.value.shape:
        return None
    return Added(a, b)


def _added_from_the_right(func: Any, args: Any, plain_args: Any, kwargs: Any, result: Tensor) -> Origin | None:
    return _added(func, args[::-1], plain_args[::-1], kwargs, result)


def _averaged(func: Any, args: Any, plain_args: Any, kwargs: Any, result: Tensor) -> Origin | None:
    origin, x = origin_of(args[0]), plain_args[0]
    if not isinstance(origin, OnGrid) or origin.grid.scale.dim() > 0:
        return None
    if func is F.adaptive_avg_pool2d:
        size = args[1] if len(args) > 1 else kwargs["output_size"]
        return Averaged(origin, (x.dim() - 2, x.dim() - 1), True) if size in (1, (1, 1), [1, 1]) else None
    axes = args[1] if len(args) > 1 else kwargs.get("dim")
    if axes is None or kwargs.get("dtype") is not None:
        return None
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    if not axes:
        return None
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    return Averaged(origin, tuple(sorted(axis % x.dim() for axis in axes)), keepdim)


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(MOVES_OF_VALUES, _selected),
    **dict.fromkeys(MOVES_OF_CODES, _moved),
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_), _rectified),
    **dict.fromkeys(named(*SAME_VALUES), _same),
    **dict.fromkeys(
        named(
            "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
            "feature_alpha_dropout",
        ),
        _dropped,
    ),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__iadd__, Tensor.add_), _added),
    Tensor.__radd__: _added_from_the_right,
    **dict.fromkeys((torch.mean, Tensor.mean, F.adaptive_avg_pool2d), _averaged),
}  # fmt: skip


def stripped(result: Any) -> Any:
    """The result of a model with ordinary tensors in it, so that callers do not hold on to the sums."""
    return pytree.tree_map(_stripped_leaf, result)


def _stripped_leaf(value: Any) -> Any:
    """Also of classes that torch does not look into: records, and kinds of lists and dicts of the model's own."""
    if isinstance(value, Tensor):
        return plain(value)
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not is_record and not isinstance(value, (dict, list)):
        return value
    made = copy.copy(value)
    if isinstance(value, dict):
        for key, part in value.items():
            made[key] = stripped(part)
    elif isinstance(value, list):
        made[:] = [stripped(part) for part in value]
    if is_record:
        for name in (field.name for field in dataclasses.fields(value) if hasattr(value, field.name)):
            object.__setattr__(made, name, stripped(getattr(value, name)))  # it may be frozen
    return made
