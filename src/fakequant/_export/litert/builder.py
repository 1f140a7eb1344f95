"""`Builder`: adds operators to a graph for values of torch, in whatever order of axes is at hand.

A value of the traced model is one of

    Constant     a tensor of torch that does not depend on inputs
    Known        a tensor of the file, and the order of its axes: convolutions of LiteRT have the channels last
    Pending      the result of an operation that was not added yet: as floats, or as codes of the grid that reads it

Tensors are transposed only where an operator needs another order of axes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from fakequant._convert.golden.tracked_codes import GridOf
from fakequant._export.litert.graph import AnyLength, Graph, Order, Tensor
from fakequant._runtimes.arithmetic import find_arithmetic
from fakequant._runtimes.litert.arithmetic import Xnnpack
from fakequant._runtimes.reciprocal_rounding import reciprocal_code
from fakequant._runtimes.target import Target
from fakequant.spec import QuantSpec

# Whether a bound of an activation is so near to the middle between two codes that kernels may differ.
_NEAR_TIE = 1e-3


@dataclasses.dataclass(frozen=True)
class Grid:
    """A grid with one scale. Its codes have at most this number of bits, 8 or 16."""

    scale: float
    zero_point: int
    low: int
    high: int
    bits: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Grid":
        """Returns the grid of a tensor of codes, with all codes that its type has."""
        bits = 8 * np.dtype(tensor.dtype).itemsize
        return cls(scale_of(tensor), tensor.zero_point, *_ends(bits), bits)

    @property
    def whole(self) -> "Grid":
        """The grid with all codes that its type has."""
        low, high = _ends(self.bits)
        return dataclasses.replace(self, low=low, high=high)

    @property
    def spec(self) -> QuantSpec:
        """The spec of all codes of the type."""
        return QuantSpec(bits=self.bits, signed=True, symmetric=False)

    def code(self, value: float) -> int:
        """Returns the code of a number."""
        return min(max(reciprocal_code(value, self.scale, self.zero_point), self.low), self.high)

    def limited(self, low: float | None, high: float | None) -> "Grid":
        """Returns the grid without the codes of numbers below `low` and above `high`."""
        highest = self.high if high is None else self.code(high)
        return dataclasses.replace(self, low=self.low if low is None else min(self.code(low), highest), high=highest)

    def activation(self) -> str | None:
        """Returns the activation that limits codes in this way, or None if there is none."""
        lowest, highest = _ends(self.bits)
        if (self.low, self.high) == (lowest, highest):
            return "NONE"
        if self.low != max(self.zero_point, lowest):
            return None
        if self.high == highest:
            return "RELU"
        six = 6.0 / self.scale
        is_clear = abs(six - np.floor(six) - 0.5) > _NEAR_TIE
        return "RELU6" if is_clear and self.high == min(round(six) + self.zero_point, highest) else None


def _ends(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


@dataclasses.dataclass(eq=False)
class Constant:
    """A tensor of torch that does not depend on inputs.

    Its rows along axes of any length are the same: `value` has one of them.
    """

    value: torch.Tensor
    # The shape, if there are such axes.
    long_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape) if self.long_shape is None else self.long_shape


@dataclasses.dataclass(eq=False)
class Known:
    """A tensor of the file."""

    tensor: Tensor
    order: Order

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of torch's tensor."""
        return tuple(self.tensor.shape[self.order.index(axis)] for axis in range(len(self.order)))

    def axis(self, axis: int) -> int:
        """Returns which axis of the file's tensor an axis of torch's is."""
        return self.order.index(axis % len(self.order))

    def like(self, tensor: Tensor) -> "Known":
        return Known(tensor, self.order)


class Pending:
    """The result of an operation that was not added yet. It is added at most once as floats, and once per grid."""

    def __init__(
        self, shape: tuple[int, ...], floats: Callable[[], Known], codes: Callable[[Grid], Known | None] | None = None
    ) -> None:
        self.shape, self._make_floats, self._make_codes = shape, floats, codes
        self._floats: Known | None = None
        self._codes: dict[Grid, Known | None] = {}

    def floats(self) -> Known:
        if self._floats is None:
            self._floats = self._make_floats()
        return self._floats

    def codes(self, grid: Grid) -> Known | None:
        """Returns the codes, or None if there is no kernel that computes them."""
        if grid not in self._codes:
            self._codes[grid] = None if self._make_codes is None else self._make_codes(grid)
        return self._codes[grid]


Value: TypeAlias = Constant | Known | Pending


def scale_of(tensor: Tensor) -> float:
    """Returns the scale of a tensor of activations."""
    return float(np.asarray(tensor.scale).reshape(-1)[0])


def identity(rank: int) -> Order:
    return tuple(range(rank))


class Builder:
    """Adds operators to a graph, for the kernels of a target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.graph = Graph()
        self._arranged: dict[tuple[int, Order], Known] = {}
        self._floats: dict[int, Known] = {}
        self._on_grids: dict[tuple[int, Grid], Known] = {}
        # Tensors must live as long as their numbers are keys.
        self._kept: list[Tensor] = []

    def kernels(self, grid: Grid) -> Xnnpack:
        """Returns the kernels that compute codes of a grid."""
        found = find_arithmetic(self.target.arithmetic_of(grid.spec))
        assert isinstance(found, Xnnpack)
        return found

    def operands_of(self, grid: Grid, *values: Value) -> list[Known] | None:
        """Returns the codes of values if all are on grids of the width of `grid`, otherwise None."""
        found = [one for one in map(self.codes_of, values) if one is not None]
        fits = len(found) == len(values) and all(Grid.of(one.tensor).bits == grid.bits for one in found)
        return found if fits else None

    # --- values as tensors

    def known(self, value: Value) -> Known:
        """Returns a value as a tensor: as codes if it is on a grid."""
        if isinstance(value, Known):
            return value
        return value.floats() if isinstance(value, Pending) else self.constant(value)

    def constant(self, value: Constant, order: Order | None = None) -> Known:
        data = value.value.detach().cpu()
        order = identity(data.dim()) if order is None else order
        array = data.permute(order).contiguous().numpy()
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        if value.long_shape is not None:
            return Known(Tensor(tuple(value.shape[axis] for axis in order), array.dtype.name, data=array), order)
        return Known(self.graph.constant(array, array.dtype.name), order)

    def floats(self, value: Value) -> Known:
        """Returns a value as floats."""
        found = self.known(value)
        if not found.tensor.is_codes:
            return found
        key = id(found.tensor)
        if key not in self._floats:
            self._kept.append(found.tensor)
            self._floats[key] = found.like(self._dequantized(found.tensor))
        return found.like(self._floats[key].tensor)

    def _dequantized(self, codes: Tensor) -> Tensor:
        """Returns (codes - zero point) * scale."""
        grid, floats = Grid.of(codes), Tensor(codes.shape, "float32")
        if self.kernels(grid).has_exact_floats or grid.zero_point == 0:
            return self.graph.add("DEQUANTIZE", [codes], [floats])
        made = self.graph.add("CAST", [codes], [floats], ("Cast", {}))
        for code, name, number in (("SUB", "Sub", grid.zero_point), ("MUL", "Mul", grid.scale)):
            inputs, outputs = [made, self.graph.constant(number, "float32")], [Tensor(codes.shape, "float32")]
            made = self.graph.add(code, inputs, outputs, (name, {}), is_conversion=True)
        return made

    def codes_of(self, value: Value) -> Known | None:
        """Returns the codes of a value that is on a grid, or None."""
        return value if isinstance(value, Known) and value.tensor.is_codes else None

    def on_grid(self, value: Value, grid: Grid) -> Known:
        """Returns the codes of a value on a grid."""
        if isinstance(value, Pending):
            found = value.codes(grid)
            if found is not None:
                return found
        if isinstance(value, Constant):
            tensor = codes_tensor(value.shape, grid)
            of = GridOf(torch.tensor(grid.scale), torch.tensor(grid.zero_point), grid.spec)
            codes = self.kernels(grid).from_float(value.value.detach(), of).clamp(grid.low, grid.high)
            tensor.data = codes.numpy().astype(tensor.dtype)
            return Known(tensor, identity(len(value.shape)))
        found = self.known(value)
        key = (id(found.tensor), grid)
        if key not in self._on_grids:
            self._kept.append(found.tensor)
            self._on_grids[key] = self._quantized(found, grid)
        return found.like(self._on_grids[key].tensor)

    def _quantized(self, found: Known, grid: Grid) -> Known:
        if found.tensor.is_codes:
            if Grid.of(found.tensor) == dataclasses.replace(grid.whole, scale=float(np.float32(grid.scale))):
                return found.like(self.limited(found.tensor, grid))
            found = self.floats(found)
        made = self.graph.add("QUANTIZE", [found.tensor], [codes_tensor(found.tensor.shape, grid)], ("Quantize", {}))
        return found.like(self.limited(made, grid))

    def limited(self, codes: Tensor, grid: Grid) -> Tensor:
        """Returns codes within the limits of a grid."""
        for code, limit, usual in (("MAXIMUM", grid.low, grid.whole.low), ("MINIMUM", grid.high, grid.whole.high)):
            if limit != usual:
                bound = codes_tensor((1,) * len(codes.shape), grid)
                bound.data = np.full(bound.shape, limit, bound.dtype)
                codes = self.graph.add(code, [codes, bound], [codes_tensor(codes.shape, grid)], ("MaximumMinimum", {}))
        return codes

    def result(self, grid: Grid, shape: Sequence[int]) -> tuple[Tensor, str, Callable[[Tensor], Tensor]]:
        """Returns a new tensor for the codes of a kernel, its activation, and what limits the codes afterwards."""
        activation = grid.activation()
        if activation is not None:
            return codes_tensor(shape, grid), activation, lambda codes: codes
        return codes_tensor(shape, grid), "NONE", lambda codes: self.limited(codes, grid)

    # --- orders of axes

    def arranged(self, found: Known, order: Order) -> Known:
        """Returns a tensor with another order of axes."""
        if found.order == order:
            return found
        old, shape = found.tensor, found.shape
        permutation = tuple(found.order.index(axis) for axis in order)
        key = (id(old), permutation)
        if key not in self._arranged:
            self._kept.append(old)
            new_shape = tuple(shape[axis] for axis in order)
            long = [axis for axis in order if is_long(shape[axis])]
            if old.data is not None:
                made = dataclasses.replace(old, data=np.ascontiguousarray(old.data.transpose(permutation)))
                made.shape = new_shape
            elif long == [axis for axis in found.order if is_long(shape[axis])]:
                made = self.reshaped(old, new_shape)
            else:
                made = self.graph.add(
                    "TRANSPOSE",
                    [old, self.graph.constant(permutation, "int32")],
                    [self.moved(old, new_shape)],
                    ("Transpose", {}),
                )
            self._arranged[key] = Known(made, order)
        return Known(self._arranged[key].tensor, order)

    def in_order(self, value: Value) -> Tensor:
        """Returns a value with the axes in torch's order."""
        if isinstance(value, Constant):
            return self.constant(value).tensor
        found = self.known(value)
        return self.arranged(found, identity(len(found.order))).tensor

    def with_last(self, found: Known, axis: int) -> Known:
        """Returns a tensor whose last axis is a given one of torch's tensor."""
        axis %= len(found.order)
        if found.order[-1] == axis:
            return found
        rest = [one for one in found.order if one != axis]
        return self.arranged(found, (*rest, axis))

    def reshaped(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns a tensor with another shape."""
        if tuple(tensor.shape) == tuple(shape):
            return tensor
        if tensor.data is not None and tensor.axis == 0 and (tensor.scale is None or np.size(tensor.scale) == 1):
            made = dataclasses.replace(tensor, data=tensor.data.reshape(stored_shape(shape)))
            made.shape = tuple(shape)
            return made
        target = [-1 if isinstance(length, AnyLength) else length for length in shape]
        if target.count(-1) > 1:
            raise NotImplementedError("two axes of a reshaped tensor have any length")
        sizes = self.graph.constant(target, "int32")
        options = ("Reshape", {"newShape": np.array(target, np.int32)})
        return self.graph.add("RESHAPE", [tensor, sizes], [self.moved(tensor, shape)], options)

    def sliced(self, tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Returns a part of a tensor."""
        sizes = [-1 if isinstance(length, AnyLength) else length for length in shape]
        constants = [self.graph.constant(some, "int32") for some in (start, sizes)]
        return self.graph.add("SLICE", [tensor, *constants], [self.moved(tensor, shape)], ("Slice", {}))

    @staticmethod
    def moved(tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns a new tensor of the same kind, for elements of a tensor."""
        return Tensor(tuple(shape), tensor.dtype, scale=tensor.scale, zero_point=tensor.zero_point)

    def moving(self, value: Value, shape: tuple[int, ...], move: Callable[[Known], Known]) -> Value:
        """Returns a value whose elements were moved or selected. Codes are moved as codes."""
        if isinstance(value, Pending):
            pending = value

            def codes(grid: Grid) -> Known | None:
                found = pending.codes(grid)
                return None if found is None else move(found)

            return Pending(shape, lambda: move(pending.floats()), codes)
        return move(self.known(value))


def is_long(length: int) -> bool:
    """Returns True for an axis that may have several elements."""
    return isinstance(length, AnyLength) or length != 1


def stored_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape in which a constant is stored: one row along axes of any length."""
    return tuple(1 if isinstance(length, AnyLength) else length for length in shape)


def codes_tensor(shape: Sequence[int], grid: Grid) -> Tensor:
    return Tensor(tuple(shape), f"int{grid.bits}", scale=np.array([grid.scale], np.float32), zero_point=grid.zero_point)


Options: TypeAlias = tuple[str, dict[str, Any]]
