"""Float tensors of the golden model that know from which integers they were computed.

The golden model must produce the same codes as a runtime. A runtime passes codes from layer to layer. Where a quantizer
follows a layer, it turns the layer's sums of products directly into codes and never computes the floats in between.
These codes cannot be computed from the floats exactly: at a tie they may differ by one.

The golden model however runs the user's code between its layers, which expects floats. Therefore its layers and
quantizers return a `TrackedTensor`: a float tensor with an additional attribute `origin`, which describes the integers
that the float was computed from. The user's code sees the float. The next quantizer asks the origin for codes:

    step          float value            origin of the result
    layer         sums * scale           Accumulated(sums, scale)
    ReLU          max(value, 0)          Rectified(Accumulated(sums, scale))
    quantizer     codes = origin.codes(arithmetic, grid)
                        = max(arithmetic.from_layer(sums, scale, grid), grid.zero_point)

These are all kinds of origins:

    OnGrid         (code - zero_point) * scale      the output of a quantizer
    Accumulated    sum * scale                      the output of a layer: sums of products of codes
    Added          a + b                            a and b are on grids
    LayerAdded     sum * scale + b                  b is on a grid
    Multiplied     a * b, element by element        a and b are on grids
    Averaged       mean of a over some axes         a is on a grid
    Pooled         means of windows of a            a is on a grid
    Rectified      max(a, 0)                        a has an origin that is not a grid
    Clamped        min(max(a, low), high)           a has an origin that is not a grid
    Moved          elements of a, in other places   a has an origin that is not a grid
    Joined         elements of several tensors      at least one of them has an origin; others are Floats

Torch calls `TrackedTensor.__torch_function__` for every function of a tracked tensor. It computes the ordinary result,
and a rule in `_RULES` determines the origin of the result. A function without a rule returns an ordinary tensor, which
the next quantizer quantizes as a runtime quantizes floats.

An origin refers to other tensors. If one of them was changed in place after the origin was made, the origin is wrong.
This is detected by torch's version numbers of tensors: `origin_of` then returns None.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant._backends.blocks import blocks_of
from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.formula import onnx_steps
from fakequant._backends.torch.grid_values import positions, values_at
from fakequant._backends.torch.torch_private import pytree
from fakequant._moves import MOVES_OF_CODES, MOVES_OF_VALUES, SAME_VALUES, TorchFunction, named
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class GridOf:
    """The grid of one tensor: its spec, scale (float32) and zero point (int32).

    Scale and zero point are scalars, or broadcast with the tensor if it has a scale per token.
    """

    scale: Tensor
    zero_point: Tensor
    spec: QuantSpec


class Arithmetic(Protocol):
    """How a runtime computes codes. All methods return codes on `grid`, as integers in float32."""

    # Whether kernels round sums more than once, so that codes may be one step off where no tie is.
    rounds_twice: bool

    def from_float(self, x: Tensor, grid: GridOf) -> Tensor:
        """Returns the codes of a tensor of which only the floats are known."""

    def dynamic_grid(self, x: Tensor, spec: QuantSpec, eps: float) -> GridOf:
        """Returns a grid that is computed from `x`. Scales per token broadcast with `x`."""

    def from_layer(self, layer: "Accumulated", grid: GridOf) -> Tensor:
        """Returns the codes of the output of a layer."""

    def from_layer_addition(self, layer: "Accumulated", b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """Returns the codes of the sum of a layer's output and `b`, which is on its grid."""

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """Returns the codes of `a + b`. Both operands are on their grids."""

    def from_product(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """Returns the codes of `a * b`, element by element. Both operands are on their grids."""

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """Returns the codes of the mean of `x`, which is on its grid, over `axes`. The axes are kept with length 1."""

    def from_join(self, join: "Joined", grid: GridOf) -> Tensor:
        """Returns the codes of a concatenation."""

    def from_pool(self, x: Tensor, x_grid: GridOf, windows: "Windows", grid: GridOf) -> Tensor:
        """Returns the codes of the means of windows of `x`, which is on its grid."""

    def from_clamp(self, clamp: "Clamped", grid: GridOf) -> Tensor:
        """Returns the codes of a tensor whose elements were limited."""

    def bias_in_file(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Returns the codes of a bias that a file has, which may differ from `codes` if it stores floats."""


# --- origins --------------------------------------------------------------------------------------


class Origin(Protocol):
    """How a float tensor was computed from integers."""

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        """Returns the codes of the tensor on `grid`, as integers in float32."""


@dataclasses.dataclass(frozen=True)
class OnGrid:
    """The tensor is on a grid."""

    value: Tensor
    grid: GridOf
    # The version of `value` when this object was made. It tells whether `value` was changed in place since.
    version: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", _version(self.value))

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_float(self.value, grid)


@dataclasses.dataclass(frozen=True)
class Floats:
    """Only the floats of the tensor are known. It is a part of a tensor of which more is known."""

    value: Tensor
    # As in `OnGrid`.
    version: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", _version(self.value))

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_float(self.value, grid)


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """The tensor is `sums * scale`, the output of a layer."""

    # Exact sums of products and of the bias, in a float type that is wide enough.
    sums: Tensor
    # Broadcasts with `sums`.
    scale: Tensor
    # The layer, the codes and the grid of its input, and the scale of its weight, which broadcasts with `sums`. The
    # layer is an `IntegerLayer`, whose module imports this one. None for products of two activations.
    layer: Any = None
    codes_in: Tensor | None = None
    grid_in: GridOf | None = None
    weight_scale: Tensor | None = None
    # The part of the sums that is the bias. Broadcasts with `sums`.
    bias: Tensor | None = None
    # For linear layers, the sums of the weights that each output is computed with, in the scale of `sums`.
    weight_sums: Tensor | None = None
    # The largest magnitude that a sum of this layer can have.
    largest: float | None = None

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_layer(self, grid)


@dataclasses.dataclass(frozen=True)
class Added:
    """The tensor is the sum of two tensors that are on grids. `a` has the shape of the sum."""

    a: OnGrid
    b: OnGrid

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_addition(self.a.value, self.a.grid, self.b.value, self.b.grid, grid)


@dataclasses.dataclass(frozen=True)
class LayerAdded:
    """The tensor is the sum of a layer's output and a tensor of the same shape that is on a grid."""

    layer: Accumulated
    b: OnGrid

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_layer_addition(self.layer, self.b.value, self.b.grid, grid)


@dataclasses.dataclass(frozen=True)
class Multiplied:
    """The tensor is the product of two tensors that are on grids, element by element."""

    a: OnGrid
    b: OnGrid

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_product(self.a.value, self.a.grid, self.b.value, self.b.grid, grid)


class Windows(NamedTuple):
    """The windows of an average pool, with one entry per spatial axis."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    # Whether padded zeros count as elements of a window.
    counts_padding: bool


@dataclasses.dataclass(frozen=True)
class Pooled:
    """The tensor is the average pool of a tensor that is on a grid."""

    x: OnGrid
    windows: Windows

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_pool(self.x.value, self.x.grid, self.windows, grid)


@dataclasses.dataclass(frozen=True)
class Averaged:
    """The tensor is the mean over some axes of a tensor that is on a grid."""

    x: OnGrid
    axes: tuple[int, ...]
    keepdim: bool

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        q = arithmetic.from_average(self.x.value, self.x.grid, self.axes, grid)
        return q if self.keepdim else q.squeeze(self.axes)


@dataclasses.dataclass(frozen=True)
class Moved:
    """The tensor consists of elements of another tensor, moved or selected, for example by a max pool."""

    of: Origin
    move: Callable[[Tensor], Tensor]

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        """Returns the codes of the other tensor with the same move applied."""
        return self.move(self.of.codes(arithmetic, grid))


@dataclasses.dataclass(frozen=True)
class Joined:
    """The tensor is the concatenation of others."""

    value: Tensor
    parts: tuple[Origin, ...]
    join: Callable[[list[Tensor]], Tensor]

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_join(self, grid)


@dataclasses.dataclass(frozen=True)
class Rectified:
    """The tensor is the ReLU of another tensor."""

    of: Origin

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        """Returns the codes of the other tensor, but at least the zero point, which is the code of 0."""
        return torch.maximum(self.of.codes(arithmetic, grid), grid.zero_point)


@dataclasses.dataclass(frozen=True)
class Clamped:
    """The tensor is another tensor, limited to a range by two numbers. Either may be missing."""

    value: Floats
    of: Origin
    low: float | None
    high: float | None

    def codes(self, arithmetic: Arithmetic, grid: GridOf) -> Tensor:
        return arithmetic.from_clamp(self, grid)


def was_moved(origin: Origin | None) -> bool:
    """Returns True if elements were moved since they were computed, also before a ReLU or a clamp."""
    while isinstance(origin, (Rectified, Clamped)):
        origin = origin.of
    return isinstance(origin, (Moved, Joined))


def quantized(x: Tensor, grid: GridOf) -> Tensor:
    """Returns the codes of any tensor on `grid` by the rule of ONNX, as integers in float32."""
    x = plain(x).float()
    blocks = blocks_of(tuple(x.shape), grid.spec).parameters
    codes = tensor_functions.quantize(x, grid.scale.reshape(blocks), grid.zero_point.reshape(blocks), grid.spec)
    return codes.float()


def codes_of(x: Tensor, grid: GridOf) -> Tensor:
    """Returns the codes of a tensor that is already on `grid`, as integers in float32.

    The codes of a float format are positions, see `grid_values`.
    """
    if grid.spec.format != "int":
        return positions(x, grid.scale, grid.spec)
    return onnx_steps(x, grid.scale) + grid.zero_point


def dequantized(codes: Tensor, grid: GridOf) -> Tensor:
    """Returns the values of codes that `codes_of` returned, as a tracked tensor if they are integers."""
    if grid.spec.format != "int":
        return values_at(codes, grid.spec) * grid.scale
    return on_grid((codes - grid.zero_point) * grid.scale, grid)


# --- tracked tensors ------------------------------------------------------------------------------


class TrackedTensor(torch.Tensor):
    """A float tensor with an origin. Use `origin_of` to read the origin, because it may be outdated."""

    # None if an operation without a rule has changed the tensor in place.
    origin: Origin | None
    # The version of this tensor when its origin was set.
    version: int

    @classmethod
    def __torch_function__(cls, func: TorchFunction, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if kwargs.get("out") is not None:
            # This increases the version of the `out` tensor, which makes its origin outdated.
            return func(*_with_plain_tensors(args), **_with_plain_tensors(kwargs))
        changed = args[0] if args and isinstance(args[0], TrackedTensor) and _is_in_place(func, kwargs) else None
        if changed is not None:
            changed.origin = origin_of(changed)
        if changed is not None and isinstance(changed.origin, OnGrid):
            # The origin's value shares memory with `changed`, which is overwritten. The old value may be an operand in
            # the origin of the result, as in `x += y`.
            changed.origin = OnGrid(changed.origin.value.clone(), changed.origin.grid)
        plain_args = _with_plain_tensors(args)
        result = func(*plain_args, **_with_plain_tensors(kwargs))
        if changed is not None:
            changed.version = _version(changed)  # so that the rule can still read the old origin
        rule = _RULES.get(func, _no_origin)
        if changed is None and type(result) in (tuple, list):  # e.g. from chunk, or a max pool that returns indices
            return type(result)(_tracked(rule, _Call(func, args, plain_args, kwargs, part)) for part in result)
        result = _tracked(rule, _Call(func, args, plain_args, kwargs, result))
        if changed is not None:
            changed.origin, changed.version = origin_of(result), _version(changed)
        return result


def _is_in_place(func: TorchFunction, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _IN_PLACE or bool(kwargs.get("inplace"))


_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"}


def track(value: Tensor, origin: Origin) -> TrackedTensor:
    """Returns `value` as a tracked tensor with this origin. They share memory."""
    made = value.as_subclass(TrackedTensor)
    made.origin, made.version = origin, _version(value)
    return made


def on_grid(value: Tensor, grid: GridOf) -> TrackedTensor:
    """Returns `value`, which must be on `grid`, as a tracked tensor."""
    return track(value, OnGrid(value, grid))


def plain(value: Tensor) -> Tensor:
    """Returns a tensor without its origin. They share memory."""
    return value.as_subclass(Tensor) if isinstance(value, TrackedTensor) else value


def origin_of(value: object) -> Origin | None:
    """Returns the origin of a tensor.

    Returns None if `value` is not a tracked tensor, or if it, or a tensor in its origin, was changed in place.
    """
    if not isinstance(value, TrackedTensor) or value.version != _version(value):
        return None
    return value.origin if value.origin is not None and _is_current(value.origin) else None


def _version(value: Tensor) -> int:
    """Returns how often the memory of a tensor was changed, also through views of it."""
    return 0 if value.is_inference() else value._version


def _is_current(origin: Origin) -> bool:
    """Returns True if no tensor in the origin was changed in place."""
    match origin:
        case OnGrid() | Floats():
            return origin.version == _version(origin.value)
        case Added() | Multiplied():
            return _is_current(origin.a) and _is_current(origin.b)
        case LayerAdded():
            return _is_current(origin.b)
        case Averaged() | Pooled():
            return _is_current(origin.x)
        case Moved() | Rectified():
            return _is_current(origin.of)
        case Clamped():
            return _is_current(origin.value) and _is_current(origin.of)
        case Joined():
            return all(map(_is_current, origin.parts))
    return True  # the user's code cannot reach the sums in `Accumulated`


def _with_plain_tensors(value: Any) -> Any:
    """Returns arguments of a function with ordinary tensors instead of tracked ones."""
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, (tuple, list)):
        parts = [_with_plain_tensors(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {k: _with_plain_tensors(v) for k, v in value.items()}
    return value


# --- rules: the origin of a function's result, or None if it has none -----------------------------


class _Call(NamedTuple):
    """A call of a function of torch with a tracked tensor."""

    func: TorchFunction
    args: tuple[Any, ...]
    # `args` with ordinary tensors instead of tracked ones.
    plain_args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # What the function returned for the ordinary tensors, or one element of it if it returned a tuple or a list.
    result: Any


_Rule: TypeAlias = Callable[[_Call], Origin | None]


def _tracked(rule: _Rule, call: _Call) -> Any:
    """Returns the result of a call, with the origin that the rule gives it."""
    if not isinstance(call.result, Tensor) or not call.result.is_floating_point():
        return call.result
    origin = rule(call)
    if isinstance(origin, Accumulated):
        return track(origin.sums.float() * origin.scale, origin)
    return call.result if origin is None else track(call.result, origin)


def _no_origin(call: _Call) -> Origin | None:
    return None


def _selected(call: _Call) -> Origin | None:
    """For functions before which runtimes dequantize sums. Only tensors on a grid keep their origin."""
    origin = origin_of(call.args[0])
    if not isinstance(origin, OnGrid) or origin.grid.scale.dim() > 0:  # scales per token would have to move too
        return None
    return OnGrid(call.result, origin.grid)


def _moved(call: _Call) -> Origin | None:
    """For functions that runtimes apply to codes: they quantize sums before the move."""
    origin = origin_of(call.args[0])
    if origin is None or isinstance(origin, OnGrid):
        return _selected(call)
    func, others, kwargs = call.func, call.plain_args[1:], call.kwargs
    # The codes must be contiguous for `view`, even if the user's code made the float contiguous before it.
    return Moved(origin, lambda codes: _without_indices(func(codes.contiguous(), *others, **kwargs)))


def _without_indices(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Returns the first element of what a max pool with indices returns."""
    return result[0] if isinstance(result, tuple) else result


def _rectified(call: _Call) -> Origin | None:
    origin = origin_of(call.args[0])
    if isinstance(origin, OnGrid):
        return OnGrid(call.result, origin.grid)
    return None if origin is None else Rectified(origin)


# The names and the defaults of the limits of functions that clamp.
_LIMITS: dict[TorchFunction, tuple[tuple[str, str], tuple[float | None, float | None]]] = {
    **dict.fromkeys(named("relu6"), (("", ""), (0.0, 6.0))),
    **dict.fromkeys(named("hardtanh", "hardtanh_"), (("min_val", "max_val"), (-1.0, 1.0))),
    **dict.fromkeys(named("clamp", "clip", "clamp_", "clip_"), (("min", "max"), (None, None))),
    **dict.fromkeys(named("clamp_min", "clamp_min_"), (("min", ""), (None, None))),
    **dict.fromkeys(named("clamp_max", "clamp_max_"), (("", "max"), (None, None))),
}


def _clamped(call: _Call) -> Origin | None:
    origin = origin_of(call.args[0])
    if origin is None or isinstance(origin, OnGrid):
        return None
    names, limits = _LIMITS[call.func]
    wanted = [name for name in names if name]
    given = dict(zip(wanted, call.plain_args[1:], strict=False)) | call.kwargs
    low, high = (given.get(name, limit) for name, limit in zip(names, limits, strict=True))
    if not all(limit is None or isinstance(limit, int | float) for limit in (low, high)):
        return None
    return Clamped(Floats(call.result), origin, low, high)


def _same(call: _Call) -> Origin | None:
    origin = origin_of(call.args[0])
    return OnGrid(call.result, origin.grid) if isinstance(origin, OnGrid) else origin


# Functions whose parameter `training` has the default False. All other dropouts have the default True.
_NOT_IN_TRAINING = {F.alpha_dropout, F.feature_alpha_dropout}


def _dropped(call: _Call) -> Origin | None:
    default = call.func not in _NOT_IN_TRAINING
    given = call.args[2] if len(call.args) > 2 else default
    training = call.kwargs.get("training", call.kwargs.get("train", given))
    return None if training else _same(call)


def _added(call: _Call) -> Origin | None:
    origins = [origin_of(x) for x in call.args]
    if len(origins) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    if None in origins:
        return None
    match origins:
        # The kernels take the operand that is repeated, if there is one, as the second. If it is the first, they may
        # or may not swap them: that depends on the layout in which a runtime keeps tensors.
        case OnGrid() as a, OnGrid() as b if a.value.shape == call.result.shape:
            return Added(a, b)
    if call.args[0].shape != call.args[1].shape:
        return None
    match origins:
        case (Accumulated() as layer, OnGrid() as b) | (OnGrid() as b, Accumulated() as layer):
            return LayerAdded(layer, b)
    return None


def _added_from_the_right(call: _Call) -> Origin | None:
    """For `__radd__`, whose arguments are in reverse order. The order of operands matters for rounding."""
    return _added(call._replace(args=call.args[::-1], plain_args=call.plain_args[::-1]))


def _joined(call: _Call) -> Origin | None:
    """For concatenations. Some runtimes quantize the operands, others the result."""
    func, others, kwargs = call.func, call.args[1:], dict(call.kwargs)
    operands = call.args[0] if call.args else kwargs.pop("tensors")
    origins = [origin_of(x) for x in operands]
    if all(origin is None for origin in origins):
        return None
    parts = [Floats(plain(x)) if origin is None else origin for x, origin in zip(operands, origins, strict=True)]
    return Joined(call.result, tuple(parts), lambda codes: func(codes, *others, **kwargs))


def _product_of_elements(call: _Call) -> Origin | None:
    match [origin_of(x) for x in call.args]:
        case OnGrid() as a, OnGrid() as b if a.grid.scale.dim() == b.grid.scale.dim() == 0:
            return Multiplied(a, b)
    return None


def _pooled(call: _Call) -> Origin | None:
    """For `avg_pool1d`, `avg_pool2d` and `avg_pool3d`, whose arguments have the same names and order."""
    origin, rank = origin_of(call.args[0]), _AVERAGE_POOLS[call.func]
    if not isinstance(origin, OnGrid) or origin.grid.scale.dim() > 0 or origin.value.dim() != rank + 2:
        return None
    names = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    if given.get("ceil_mode") or given.get("divisor_override") is not None:
        return None
    size = _per_axis(given["kernel_size"], rank)
    stride = size if given.get("stride") in (None, (), []) else _per_axis(given["stride"], rank)
    padding = _per_axis(given.get("padding", 0), rank)
    return Pooled(origin, Windows(size, stride, padding, bool(given.get("count_include_pad", True))))


def _per_axis(value: Any, rank: int) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * rank if len(numbers) == 1 else numbers


# The average pools, and the number of their spatial axes.
_AVERAGE_POOLS: dict[TorchFunction, int] = {pool: rank for rank in (1, 2, 3) for pool in named(f"avg_pool{rank}d")}


def _averaged(call: _Call) -> Origin | None:
    args, kwargs = call.args, call.kwargs
    origin, x = origin_of(args[0]), call.plain_args[0]
    if not isinstance(origin, OnGrid) or origin.grid.scale.dim() > 0:
        return None
    if call.func is F.adaptive_avg_pool2d:
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


# All integers up to this limit are exact in float32, and so are sums of integers that stay below it.
EXACT_IN_FLOAT32 = 2**24


def _multiplied(call: _Call) -> Origin | None:
    """For products of two tensors that are on grids. Integer kernels sum products of codes without rounding."""
    origins = [origin_of(x) for x in call.args[:2]]
    if len(origins) < 2 or not all(isinstance(x, OnGrid) and x.grid.scale.dim() == 0 for x in origins):
        return None
    a, b = (x for x in origins if isinstance(x, OnGrid))
    levels = [onnx_steps(x.value, x.grid.scale) for x in (a, b)]
    largest = a.value.shape[-1] * a.grid.spec.levels * b.grid.spec.levels
    dtype = torch.float32 if largest < EXACT_IN_FLOAT32 else torch.float64
    return Accumulated(call.func(*(x.to(dtype) for x in levels)), a.grid.scale * b.grid.scale)


_RULES: dict[TorchFunction, _Rule] = {
    **dict.fromkeys(MOVES_OF_VALUES, _selected),
    **dict.fromkeys(MOVES_OF_CODES, _moved),
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_), _rectified),
    **dict.fromkeys(_LIMITS, _clamped),
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
    **dict.fromkeys(named("cat", "concat", "concatenate", "stack"), _joined),
    **dict.fromkeys(
        (torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.mul_),
        _product_of_elements,
    ),
    **dict.fromkeys((torch.mean, Tensor.mean, F.adaptive_avg_pool2d), _averaged),
    **dict.fromkeys(_AVERAGE_POOLS, _pooled),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _multiplied),
}  # fmt: skip


# --- results of a model ---------------------------------------------------------------------------


def stripped(result: Any) -> Any:
    """Returns the result of a model with ordinary tensors, so that callers do not keep the sums alive."""
    return pytree.tree_map(_stripped_leaf, result)


def _stripped_leaf(value: Any) -> Any:
    """Handles one leaf of the result.

    Torch's pytree treats dataclasses and subclasses of list and dict as leaves. Their elements are stripped here.
    """
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
            object.__setattr__(made, name, stripped(getattr(value, name)))  # works for frozen dataclasses too
    return made
