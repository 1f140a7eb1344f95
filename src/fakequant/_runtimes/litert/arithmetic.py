"""The arithmetic of the kernels that LiteRT runs: XNNPACK's by default, and its own.

Its own kernels multiply integers by a float that is an integer times a power of two (`_Multipliers`), and most round
twice: first to a power of two, then to a code. So where the exact result is near the middle between two codes, they may
be one code off, and the larger the multiplier, the more of them are. They exist twice: optimized, and plain as a
reference. XNNPACK has no kernels for 16 bits.

The golden model rounds exactly like them, with one exception: the optimized kernels that convert floats, and those that
add codes of 16 bits, compute the last elements of a tensor, fewer than 16, as the plain ones do. Which elements these
are depends on the order of the axes in the file, and codes differ at ties only.
`tests/runtimes/test_litert_kernels.py` holds the formulas against the runtime, on x86.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fakequant._convert.golden.tracked_codes import Accumulated, GridOf, codes_of, plain
from fakequant._runtimes.litert.rounding import away
from fakequant._runtimes.litert.target import TOKEN_SPEC
from fakequant._runtimes.reciprocal_arithmetic import Int8Arithmetic, has_layer

_INT32 = 2**31
# Layers of 16 bits whose sums can be this large have sums, and a bias, of 64 bits.
LARGEST_SUM = float(_INT32)
# How far the operands of an addition are shifted to the left, by the number of bits of codes.
_SHIFTS = {8: 20, 16: 15}
# The optimized kernels compute this number of outputs at a time, and the rest one by one, which rounds otherwise.
_OUTPUTS_AT_A_TIME = 8


class Xnnpack(Int8Arithmetic):
    """The kernels of XNNPACK: convert, convolution, fully connected, add, multiply and mean.

    Where there is none for the scales of an addition, a product or a mean, the file computes it in float.
    """

    token_spec = TOKEN_SPEC
    # Whether DEQUANTIZE computes (code - zero_point) * scale, and not code * scale - zero_point * scale.
    has_exact_floats = True

    def has_layer(self, x_scale: float, weight_scale: Tensor, scale: float, largest: float) -> bool:
        """Returns True if there is a kernel for a layer with these scales of input, weights and output.

        `largest` is the largest magnitude that a sum can have.
        """
        return all(has_layer(x_scale, one, scale) for one in weight_scale.flatten().tolist())

    def has_addition(self, a_scale: float, b_scale: float, scale: float) -> bool:
        return all(2**-10 <= one / scale < 2**8 for one in (a_scale, b_scale))

    def has_product(self, a_scale: float, b_scale: float, scale: float) -> bool:
        return 2**-16 <= a_scale * b_scale / scale < 2**8

    def has_average(self, x_scale: float, scale: float, largest: float = 0.0) -> bool:
        """Returns True if there is a kernel for a mean. `largest` is as in `has_layer`."""
        return 2**-8 <= x_scale / scale < 2**8

    def from_layer(self, layer: Accumulated, grid: GridOf) -> Tensor:
        return super().from_layer(layer, grid) if _are_int8(layer.grid_in) else self._in_float(layer, grid)

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        if not _are_int8(a_grid, b_grid):
            return self.from_float(plain(a).float() + plain(b).float(), grid)
        return super().from_addition(a, a_grid, b, b_grid, grid)

    def from_product(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        if not _are_int8(a_grid, b_grid):
            return self.from_float(plain(a).float() * plain(b).float(), grid)
        return super().from_product(a, a_grid, b, b_grid, grid)

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        if not _are_int8(x_grid):
            return self.from_float(plain(x).float().mean(axes, keepdim=True), grid)
        return super().from_average(x, x_grid, axes, grid)

    def _in_float(self, layer: Accumulated, grid: GridOf) -> Tensor:
        return self.from_float(plain(layer.sums).float() * layer.scale, grid)


class FixedPoint(Xnnpack):
    """LiteRT's own kernels, for codes of 8 and of 16 bits. Operands and result of a kernel have the same number."""

    rounds_twice = True

    def __init__(self, *, is_optimized: bool) -> None:
        self._is_optimized = is_optimized
        self.has_exact_floats = not is_optimized

    def has_layer(self, x_scale: float, weight_scale: Tensor, scale: float, largest: float) -> bool:
        # The multiplication starts with a shift to the left if the multiplier is larger than 1.
        return 4 * largest * x_scale * float(weight_scale.max()) < _INT32 * scale

    def has_addition(self, a_scale: float, b_scale: float, scale: float) -> bool:
        return bool(2 * max(a_scale, b_scale) < 2.0 ** _SHIFTS[16] * scale)

    def has_product(self, a_scale: float, b_scale: float, scale: float) -> bool:
        return a_scale * b_scale < scale

    def has_average(self, x_scale: float, scale: float, largest: float = 0.0) -> bool:
        return largest < _INT32 and super().has_average(x_scale, scale)

    def from_float(self, x: Tensor, grid: GridOf) -> Tensor:
        """clip(rint(x * (1 / scale)) + zero_point) if optimized, otherwise clip(round(x / scale) + zero_point).

        `round` rounds ties away from zero. NaN and numbers beyond 32 bits become -2^31 before the zero point is added,
        which may overflow.
        """
        x = plain(x).float()
        steps = torch.round(x * (1 / grid.scale)) if self._is_optimized else away(x / grid.scale)
        levels = torch.where(steps.abs() < _INT32, steps, -float(_INT32)).long() + grid.zero_point
        return _on(grid, torch.remainder(levels + _INT32, 2 * _INT32) - _INT32)

    def from_layer(self, layer: Accumulated, grid: GridOf) -> Tensor:
        """clip(multiplied(sums) + zero_point). The multiplier is x_scale * weight_scale / scale, in float64.

        Linear layers of the reference, and those of 16 bits, multiply by this number and round ties away from zero.
        """
        if layer.grid_in is None or layer.weight_scale is None or not _have_one_width(layer.grid_in, grid):
            return self._in_float(layer, grid)
        scales = float(layer.grid_in.scale), layer.weight_scale, float(grid.scale)
        if len(layer.layer._fakequant.weight_shape) == 5 or not self.has_layer(*scales, layer.largest or 0.0):
            return self._in_float(layer, grid)
        sums, real = plain(layer.sums).long(), layer.grid_in.scale.double() * layer.weight_scale.double() / grid.scale
        is_wide, kind = _bits(grid) == 16, _kind_of(layer)
        has_groups = kind.is_grouped and not kind.is_transposed and (is_wide or not kind.is_depthwise)
        if kind.is_linear and (is_wide or not self._is_optimized):
            return _on(grid, away(sums.double() * real).long() + grid.zero_point)
        by = _Multipliers.of(real)
        if is_wide and (layer.largest or 0.0) >= LARGEST_SUM:
            codes = by.shortened(sums)
        elif not self._is_optimized or has_groups:
            codes = by.twice(sums)
        elif kind.is_transposed or kind.is_depthwise:
            codes = torch.where(_are_at_a_time(layer, kind), by.twice_upwards(sums), by.twice(sums))
        else:
            codes = by.twice_upwards(sums)
        return _on(grid, codes + grid.zero_point)

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """clip(multiplied(multiplied((a - za) << n) + multiplied((b - zb) << n)) + zero_point).

        `n` is 20 for 8 bits and 15 for 16. The multipliers of `a` and `b` are a_scale / m and b_scale / m, where m is
        twice the larger scale; that of the sum is m / (scale * 2^n).
        """
        scales = [float(of.scale) for of in (a_grid, b_grid, grid)]
        if not _have_one_width(a_grid, b_grid, grid) or not self.has_addition(*scales):
            return self.from_float(plain(a).float() + plain(b).float(), grid)
        shift, twice_larger = _SHIFTS[_bits(grid)], 2 * torch.maximum(a_grid.scale, b_grid.scale)
        by = [_Multipliers.of(of.scale.double() / twice_larger.double()) for of in (a_grid, b_grid)]
        levels = [_levels(x, of) << shift for x, of in ((a, a_grid), (b, b_grid))]
        is_vector = self._is_optimized and _bits(grid) == 16 and _shape(a) == _shape(b)
        one, other = (m.once(x) if is_vector else m.twice(x) for m, x in zip(by, levels, strict=True))
        total = _Multipliers.of(twice_larger.double() / (2**shift * grid.scale).double())
        return _on(grid, total.twice(one + other) + grid.zero_point)

    def from_product(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """clip(multiplied((a - za) * (b - zb)) + zero_point). The multiplier is a_scale * b_scale / scale."""
        scales = [float(of.scale) for of in (a_grid, b_grid, grid)]
        if not _have_one_width(a_grid, b_grid, grid) or not self.has_product(*scales):
            return self.from_float(plain(a).float() * plain(b).float(), grid)
        by = _Multipliers.of((a_grid.scale * b_grid.scale / grid.scale).double())
        return _on(grid, by.twice(_levels(a, a_grid) * _levels(b, b_grid)) + grid.zero_point)

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """clip(multiplied(sum(x - zx)) + zero_point).

        The multiplier is x_scale / scale, as an integer of 31 bits, divided by the number of elements and rounded down.
        """
        number = prod(x.shape[axis] for axis in axes)
        scales = float(x_grid.scale), float(grid.scale)
        if not _have_one_width(x_grid, grid) or not self.has_average(*scales, number * 2.0 ** _bits(grid)):
            return self.from_float(plain(x).float().mean(axes, keepdim=True), grid)
        levels = _levels(x, x_grid)
        by = _Multipliers.of(x_grid.scale.double() / grid.scale.double())
        shift = min(number.bit_length() - 1, 32, 31 + int(by.shift))
        by = _Multipliers((by.number << shift) // number, by.shift - shift)
        return _on(grid, by.twice(levels.sum(axes, keepdim=True)) + grid.zero_point)


class _Multipliers(NamedTuple):
    """Floats as number * 2^(shift - 31). The numbers have 31 bits. What multiplies by them rounds to an integer."""

    number: Tensor
    shift: Tensor

    @classmethod
    def of(cls, real: Tensor) -> "_Multipliers":
        mantissa, shift = torch.frexp(real)
        number, shift = torch.floor(mantissa * _INT32 + 0.5).long(), shift.long()
        shift = torch.where(number == _INT32, shift + 1, shift)
        number = torch.where(number == _INT32, _INT32 // 2, number)
        is_tiny = shift < -31
        return cls(torch.where(is_tiny, 0, number), torch.where(is_tiny, 0, shift))

    def once(self, x: Tensor) -> Tensor:
        """Returns the product, rounded to nearest, ties upwards."""
        return (x * self.number + (1 << (30 - self.shift))) >> (31 - self.shift)

    def twice(self, x: Tensor) -> Tensor:
        """Returns the product, rounded first to a multiple of 2^shift, ties upwards, then ties away from zero."""
        high, right = self._high(x), (-self.shift).clamp(min=0)
        mask = (1 << right) - 1
        return (high >> right) + ((high & mask) > (mask >> 1) + (high < 0).long())

    def twice_upwards(self, x: Tensor) -> Tensor:
        """Returns the product, rounded first to a multiple of 2^shift, then again, ties upwards."""
        right = (-self.shift).clamp(min=0)
        return (self._high(x) + ((1 << right) >> 1)) >> right

    def shortened(self, x: Tensor) -> Tensor:
        """Returns the product with the number rounded to 15 bits, ties upwards."""
        number = torch.where(self.number < 0x7FFF0000, (self.number + (1 << 15)) >> 16, 0x7FFF)
        return (x * number + (1 << (14 - self.shift))) >> (15 - self.shift)

    def _high(self, x: Tensor) -> Tensor:
        return ((x << self.shift.clamp(min=0)) * self.number + (1 << 30)) >> 31


class _Kind(NamedTuple):
    """What the choice of a layer's kernel depends on."""

    is_linear: bool
    is_transposed: bool
    is_grouped: bool
    is_depthwise: bool


def _kind_of(layer: Accumulated) -> _Kind:
    module = layer.layer
    shape, groups = module._fakequant.weight_shape, getattr(module, "groups", 1)
    is_linear, is_transposed = len(shape) == 2, module._fakequant.kind.channel_axis == 1
    is_depthwise = groups > 1 and shape[1] == 1 and not is_transposed
    return _Kind(is_linear, is_transposed and not is_linear, groups > 1 and not is_linear, is_depthwise)


def _are_at_a_time(layer: Accumulated, kind: _Kind) -> Tensor:
    """Returns which outputs of a convolution the optimized kernel computes several at a time."""
    spatial = len(layer.layer._fakequant.weight_shape) - 2
    number = layer.sums.shape[-1 - spatial]
    # The groups of a transposed convolution are computed one by one.
    together = number // layer.layer.groups if kind.is_transposed else number
    places = torch.arange(number) % together
    return (places < together // _OUTPUTS_AT_A_TIME * _OUTPUTS_AT_A_TIME).reshape(-1, *[1] * spatial)


def _bits(grid: GridOf) -> int:
    """Returns the number of bits in which a file stores codes."""
    return 8 if grid.spec.bits <= 8 else 16


def _are_int8(*grids: GridOf | None) -> bool:
    return all(grid is None or _bits(grid) == 8 for grid in grids)


def _have_one_width(*grids: GridOf) -> bool:
    return len({_bits(grid) for grid in grids}) == 1 and all(grid.scale.dim() == 0 for grid in grids)


def _levels(x: Tensor, grid: GridOf) -> Tensor:
    return (codes_of(plain(x), grid) - grid.zero_point).long()


def _shape(x: Tensor) -> list[int]:
    """Returns the shape without axes of length 1 in front."""
    shape = list(x.shape)
    while shape and shape[0] == 1:
        shape.pop(0)
    return shape


def _on(grid: GridOf, codes: Tensor) -> Tensor:
    return codes.clamp(grid.spec.qmin, grid.spec.qmax).float()


ARITHMETIC = Xnnpack()
KERNELS = {"builtin": FixedPoint(is_optimized=True), "reference": FixedPoint(is_optimized=False)}
