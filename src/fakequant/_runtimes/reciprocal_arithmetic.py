"""`Int8Arithmetic`: of kernels that compute with int8 and multiply by the reciprocal of a scale.

They multiply floats by the reciprocal of the scale instead of dividing, and they fuse a layer, an addition or a mean
with the quantizer that follows it into one kernel. Their codes differ from those of the reference only at ties, and by
one.

The docstrings below give the formulas. They are computed in float32, in the order written, unless integers are
mentioned. They use

    clamped(v) = clip(rint(min(v, 127 - zero_point)) + zero_point, qmin, qmax)

Codes are integers in float32, and grids have at most 8 bits.
"""

import torch
from torch import Tensor

from fakequant._backends.torch.fused_multiply_add import fma
from fakequant._convert.golden.tracked_codes import Clamped, GridOf, Joined, codes_of, plain
from fakequant._runtimes.arithmetic import Reference
from fakequant._runtimes.reciprocal_rounding import reciprocal_code, token_codes, token_qparams
from fakequant.spec import QuantSpec

_LOWEST, _HIGHEST = -128, 127
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
# The number of bits of the larger multiplier of an addition, without the first one.
_MULTIPLIER_BITS = 20


class Int8Arithmetic(Reference):
    """Kernels that convert floats, for convolutions, linear layers, additions, products and means."""

    # The grid of tokens whose scales the kernels compute.
    token_spec: QuantSpec

    def has_addition(self, a_scale: float, b_scale: float, scale: float) -> bool:
        """Returns True if there is a kernel for sums of tensors with these scales."""
        raise NotImplementedError

    def has_product(self, a_scale: float, b_scale: float, scale: float) -> bool:
        """Returns True if there is a kernel for products of elements of tensors with these scales."""
        return True

    def has_average(self, x_scale: float, scale: float) -> bool:
        """Returns True if there is a kernel for means of a tensor with these scales."""
        return True

    def from_float(self, x: Tensor, grid: GridOf) -> Tensor:
        """clamped(x * (1 / scale)). NaN becomes the highest code.

        The codes of tokens, whose grid must be `dynamic_grid(x)`, are those of `from_tokens`.
        """
        if grid.scale.dim() > 0:
            return self.from_tokens(x)
        return _clamped(plain(x).float() * (1 / grid.scale), grid)

    def from_sums(self, sums: Tensor, scale: Tensor, grid: GridOf) -> Tensor:
        """clamped(sums * (scale / grid.scale)). The sums include the codes of the bias."""
        return _clamped(plain(sums).float() * (scale / grid.scale), grid)

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """clip(((a - za) * ma + (b - zb) * mb + 2^(shift - 1)) >> shift) + zero_point, in integers.

        `a` and `b` are codes, `za` and `zb` are their zero points. The multipliers are integers of at most 21 bits:

            ra, rb = a_grid.scale / grid.scale, b_grid.scale / grid.scale
            shift  = 20 - floor(log2(max(ra, rb)))
            ma, mb = rint(ra * 2^shift), rint(rb * 2^shift)

        Where there is no kernel for the scales (`has_addition`), the floats are added.
        """
        return self._weighted_sum(a, a_grid, b, b_grid, grid, sign=1)

    def _weighted_sum(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf, sign: int) -> Tensor:
        if not self.has_addition(*(float(of.scale) for of in (a_grid, b_grid, grid))):
            return self.from_float(plain(a).float() + sign * plain(b).float(), grid)
        ratios = torch.stack([a_grid.scale / grid.scale, b_grid.scale / grid.scale]).double()
        shift = _MULTIPLIER_BITS + 1 - int(torch.frexp(ratios.max()).exponent)
        ma, mb = (int(m) for m in torch.round(ratios * 2.0**shift))
        a_levels, b_levels = (codes_of(plain(x), of).long() - of.zero_point for x, of in ((a, a_grid), (b, b_grid)))
        total = a_levels * ma + b_levels * (sign * mb) + 2 ** (shift - 1)
        return _on(grid, ((total >> shift) + grid.zero_point).float())

    def from_product(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """clamped((a - za) * (b - zb) * ((a_grid.scale * b_grid.scale) / grid.scale)), elementwise.

        Where there is no kernel for the scales (`has_product`), the floats are multiplied.
        """
        if not self.has_product(*(float(of.scale) for of in (a_grid, b_grid, grid))):
            return self.from_float(plain(a).float() * plain(b).float(), grid)
        levels = (codes_of(plain(a), a_grid) - a_grid.zero_point) * (codes_of(plain(b), b_grid) - b_grid.zero_point)
        return _clamped(levels * (a_grid.scale * b_grid.scale / grid.scale), grid)

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """clip(rint(sum(codes) * k + (zero_point - (number * x_grid.zero_point) * k))).

        The factor is k = (x_grid.scale / grid.scale) * (1 / number). The codes and zero points are those in the file,
        so 8-bit unsigned ones are 128 smaller here.

        Where there is no kernel for the scales (`has_average`), the floats are averaged.
        """
        x = plain(x)
        if not self.has_average(float(x_grid.scale), float(grid.scale)):
            return self.from_float(x.float().mean(axes, keepdim=True), grid)
        number = torch.tensor(1.0)
        for axis in axes:
            number = number * x.shape[axis]
        factor = x_grid.scale / grid.scale * (1 / number)
        sums = (codes_of(x, x_grid) - _shift_in_file(x_grid)).double().sum(axes, keepdim=True).float()
        offset = number * (x_grid.zero_point - _shift_in_file(x_grid)).float() * factor
        zero_point = (grid.zero_point - _shift_in_file(grid)).float()
        return _on(grid, torch.round(sums * factor + (zero_point - offset)) + _shift_in_file(grid))

    def from_join(self, join: Joined, grid: GridOf) -> Tensor:
        """cat(codes of the operands). All operands are on the grid of the result."""
        return join.join([part.codes(self, grid) for part in join.parts])

    def from_clamp(self, clamp: Clamped, grid: GridOf) -> Tensor:
        """clip(codes, code of low, code of high). Where the scales are those of tokens, floats are limited."""
        if grid.scale.dim() > 0:
            return super().from_clamp(clamp, grid)
        low, high = (
            end if limit is None else reciprocal_code(limit, grid.scale, grid.zero_point)
            for limit, end in ((clamp.low, grid.spec.qmin), (clamp.high, grid.spec.qmax))
        )
        return clamp.of.codes(self, grid).clamp(low, high).clamp(grid.spec.qmin, grid.spec.qmax)

    # --- dynamic quantization: the grid comes from the tensor ---

    def dynamic_grid(self, x: Tensor, spec: QuantSpec, eps: float) -> GridOf:
        """Returns the grid of `x`, or of each of its tokens."""
        if spec != self.token_spec:
            return super().dynamic_grid(x, spec, eps)
        return GridOf(*self.token_qparams(x), spec)

    def token_qparams(self, x: Tensor, axes: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
        """Returns scale (float32) and zero point (int32) of each token. The axes are kept with length 1.

        The axes are (-1,) for the input of a linear layer, and (1, 2, 3) for that of a convolution. The kernels use
        them even if the file asks for one scale for the whole tensor. `token_qparams` has the formula.
        """
        scale, zero_point, _ = token_qparams(plain(x).float(), axes)
        return scale, zero_point.int()

    def from_tokens(self, x: Tensor, axes: tuple[int, ...] = (-1,)) -> Tensor:
        """clip(rint(x * k) + zero_point), with `k` and the zero point as in `token_qparams`."""
        return token_codes(plain(x).float(), axes)

    def dynamic_value(self, sums: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor) -> Tensor:
        """fma(sums * x_scale, weight_scale, bias): the float result of a layer with a dynamic input.

        The sums are those of the products of (code - zero point) and weights. Without a bias it is 0.
        """
        return fma(*torch.broadcast_tensors(plain(sums).float() * x_scale, weight_scale, bias))


def has_layer(x_scale: float, weight_scale: float, scale: float) -> bool:
    """Returns True if there is an integer kernel for a layer with these scales of input, weight and output.

    The scale of the accumulators, which the bias shares, must not be subnormal.

    >>> has_layer(0.1, 0.1, 0.01), has_layer(0.1, 0.1, 1e-7), has_layer(0.1, 1e-38, 0.01)
    (True, False, False)
    """
    sum_scale = x_scale * weight_scale
    return sum_scale >= _SMALLEST_NORMAL and sum_scale / scale < 2**8


def _clamped(levels: Tensor, grid: GridOf) -> Tensor:
    """Returns clamped(levels) as the module's docstring defines it."""
    zero_point = grid.zero_point - _shift_in_file(grid)
    low, high = (_LOWEST - zero_point).float(), (_HIGHEST - zero_point).float()
    levels = torch.where(levels.isnan(), high, levels)
    return _on(grid, torch.round(torch.minimum(torch.maximum(levels, low), high)) + grid.zero_point)


def _shift_in_file(grid: GridOf) -> int:
    """Returns by how much the codes in the file are smaller: unsigned 8-bit codes are stored as int8."""
    return 128 if grid.spec.qmax > _HIGHEST else 0


def _on(grid: GridOf, codes: Tensor) -> Tensor:
    return codes.clamp(grid.spec.qmin, grid.spec.qmax)
