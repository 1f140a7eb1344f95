"""The arithmetic of XNNPACK, the CPU backend of ExecuTorch: how floats, sums, additions and means become codes.

XNNPACK computes with int8. It multiplies floats by the reciprocal of the scale instead of dividing, and it fuses a
layer, an addition or a mean with the quantizer that follows it into one kernel. Its codes differ from those of the
reference only at ties, and by one.

A quantizer with fewer levels is a quantizer to int8 behind a hardtanh: XNNPACK ignores the limits of codes that the
file gives, and the hardtanh limits the codes instead.

The docstrings below give the formulas. They are computed in float32, in the order written, unless integers are
mentioned. They use

    clamped(v) = clip(rint(min(v, 127 - zero_point)) + zero_point, qmin, qmax)

An addition whose scales differ too much (`has_addition`) has no kernel in integers. The values of its operands are
added in float32, and the result is quantized by `from_float`.

XNNPACK takes subnormal floats for 0. The formulas do not.

The formulas were determined with ExecuTorch 1.5 on x86 with AVX-512 and VNNI. Static kernels have the same codes with
AVX2 and with SSE4, and so have dynamic grids. Results of layers with dynamic inputs have other last bits with SSE4, and
those of weights with groups with AVX2 too. Grids have at most 8 bits. Codes are integers in float32.
"""

import torch
from torch import Tensor

from fakequant._backends.torch.fused_multiply_add import fma
from fakequant._convert.golden.tracked_codes import GridOf, Joined, codes_of, plain
from fakequant._runtimes.arithmetic import Reference
from fakequant._runtimes.xnnpack.rounding import token_codes, token_qparams
from fakequant._runtimes.xnnpack.target import TOKEN_SPEC
from fakequant.spec import QuantSpec

_LOWEST, _HIGHEST = -128, 127
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
# The number of bits of the larger multiplier of an addition, without the first one.
_MULTIPLIER_BITS = 20
# The number of weights whose sum XNNPACK multiplies by the scale of their group at once.
_WEIGHTS_AT_ONCE = 16


class Xnnpack(Reference):
    """The kernels of XNNPACK for x86: convert, convolution, fully connected, add, subtract, multiply and mean."""

    def from_float(self, x: Tensor, grid: GridOf) -> Tensor:
        """clamped(x * (1 / scale)). NaN becomes the highest code.

        The codes of tokens, whose grid must be `dynamic_grid(x)`, are those of `from_tokens`.
        """
        if grid.scale.dim() > 0:
            return self.from_tokens(x)
        return _clamped(plain(x).float() * (1 / grid.scale), grid)

    def from_regrid(self, x: Tensor, x_grid: GridOf, grid: GridOf) -> Tensor:
        """clamped(((codes - x_grid.zero_point) * x_grid.scale) * (1 / scale)): `from_float` of the dequantized tensor.

        No kernel computes codes from codes of another grid.
        """
        return self.from_float((codes_of(plain(x), x_grid) - x_grid.zero_point) * x_grid.scale, grid)

    def bias_codes(self, bias: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        """rint(bias * (1 / (weight_scale * x_scale))): the int32 codes that are added to the sums of a layer.

        If the weight has one scale, `1 / (weight_scale * x_scale)` is computed in float64 and rounded to float32.
        """
        if weight_scale.dim() == 0:
            return torch.round(bias * (1 / (weight_scale.double() * x_scale.double())).float())
        return torch.round(bias * (1 / (weight_scale * x_scale)))

    def bias_in_file(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Returns the codes nearest to `codes` that a float bias can have. See `float_of_codes`."""
        return codes_of_float(float_of_codes(codes, scale), scale)

    def from_sums(self, sums: Tensor, scale: Tensor, grid: GridOf) -> Tensor:
        """clamped(sums * (scale / grid.scale)). The sums include the codes of the bias."""
        return _clamped(plain(sums).float() * (scale / grid.scale), grid)

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """clip(((a - za) * ma + (b - zb) * mb + 2^(shift - 1)) >> shift) + zero_point, in integers.

        `a` and `b` are codes, `za` and `zb` are their zero points. The multipliers are integers of at most 21 bits:

            ra, rb = a_grid.scale / grid.scale, b_grid.scale / grid.scale
            shift  = 20 - floor(log2(max(ra, rb)))
            ma, mb = rint(ra * 2^shift), rint(rb * 2^shift)
        """
        return self._sum(a, a_grid, b, b_grid, grid, sign=1)

    def from_subtraction(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """Returns what `from_addition` returns with -mb instead of mb."""
        return self._sum(a, a_grid, b, b_grid, grid, sign=-1)

    def _sum(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf, sign: int) -> Tensor:
        if has_addition(*(float(of.scale) for of in (a_grid, b_grid, grid))):
            return _weighted_sum(a, a_grid, b, b_grid, grid, sign)
        return self.from_float(plain(a).float() + sign * plain(b).float(), grid)

    def from_product(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """clamped((a - za) * (b - zb) * ((a_grid.scale * b_grid.scale) / grid.scale)), elementwise."""
        levels = (codes_of(plain(a), a_grid) - a_grid.zero_point) * (codes_of(plain(b), b_grid) - b_grid.zero_point)
        return _clamped(levels * (a_grid.scale * b_grid.scale / grid.scale), grid)

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """clip(rint(sum(codes) * k + (zero_point - (number * x_grid.zero_point) * k))), for means over (2, 3).

        The factor is k = (x_grid.scale / grid.scale) * (1 / number). The codes and zero points are those in the file,
        so 8-bit unsigned ones are 128 smaller here. Other means are computed in float32, and quantized by `from_float`.
        """
        x = plain(x)
        if axes != (2, 3) or x.dim() != 4:
            return self.from_float(x.float().mean(axes, keepdim=True), grid)
        number = torch.tensor(float(x.shape[2] * x.shape[3]))
        factor = x_grid.scale / grid.scale * (1 / number)
        sums = (codes_of(x, x_grid) - _shift_in_file(x_grid)).double().sum(axes, keepdim=True).float()
        offset = number * (x_grid.zero_point - _shift_in_file(x_grid)).float() * factor
        zero_point = (grid.zero_point - _shift_in_file(grid)).float()
        return _on(grid, torch.round(sums * factor + (zero_point - offset)) + _shift_in_file(grid))

    def from_join(self, join: Joined, grid: GridOf) -> Tensor:
        """cat(codes of the operands). All operands are on the grid of the result."""
        return join.join([part.codes(self, grid) for part in join.parts])

    # --- dynamic quantization: the grid comes from the tensor ---

    def dynamic_grid(self, x: Tensor, spec: QuantSpec, eps: float) -> GridOf:
        """Returns the grid of `x`, or of each of its tokens."""
        if spec != TOKEN_SPEC:
            return super().dynamic_grid(x, spec, eps)
        return GridOf(*self.token_qparams(x), spec)

    def token_qparams(self, x: Tensor, axes: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
        """Returns scale (float32) and zero point (int32) of each token. The axes are kept with length 1.

        The axes are (-1,) for the input of a linear layer, and (1, 2, 3) for that of a convolution. XNNPACK uses them
        even if the file asks for one scale for the whole tensor. `token_qparams` has the formula.
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

    def dynamic_grouped_value(
        self, codes: Tensor, x_scale: Tensor, zero_point: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor
    ) -> Tensor:
        """Returns the float result of a linear layer with a dynamic input and a weight scale per group of inputs.

            total  = 0 - (zero_point + 128) * offset
            total  = fma(sum((codes + 128) * weight), weight_scale, total)    for each group, from the first to the last
            result = total * x_scale + bias

        The weight scales are rounded to bfloat16. The offset is that of all weights, computed 16 inputs at a time:

            offset = offset + sum(weight) * weight_scale                      for each 16 inputs

        This is the kernel for AVX-512 with VNNI. That for AVX2 adds no 128. It has four totals, one for the inputs with
        each value of index % 8 // 2, of which only the first one starts with the offset. The result is
        fma((total0 + total1) + (total2 + total3), x_scale, bias).

        Args:
            codes: The codes of the input, of shape (tokens, inputs).
            x_scale: The scales of the tokens, of shape (tokens, 1).
            zero_point: The zero points of the tokens, of shape (tokens, 1).
            weight: The codes of the weight, of shape (outputs, inputs).
            weight_scale: The scales of the weight, of shape (outputs, groups).
            bias: The bias. Without a bias it is 0.
        """
        scales = weight_scale.bfloat16().float()
        offset = torch.zeros(len(weight))
        for part, scale in _parts(weight, scales, _WEIGHTS_AT_ONCE):
            offset = offset + part.double().sum(1).float() * scale
        total = -((zero_point + 128).float() * offset)
        groups = _parts(weight, scales, weight.shape[1] // scales.shape[1])
        levels = (codes.double() + 128).split(groups[0][0].shape[1], dim=1)
        for x, (part, scale) in zip(levels, groups, strict=True):
            total = fma(*torch.broadcast_tensors((x @ part.double().T).float(), scale, total))
        return total * x_scale + bias


def has_layer(x_scale: float, weight_scale: float, scale: float) -> bool:
    """Returns True if XNNPACK has an integer kernel for a layer with these scales of input, weight and output.

    The scale of the accumulators, which the bias shares, must not be subnormal.

    >>> has_layer(0.1, 0.1, 0.01), has_layer(0.1, 0.1, 1e-7), has_layer(0.1, 1e-38, 0.01)
    (True, False, False)
    """
    sum_scale = x_scale * weight_scale
    return sum_scale >= _SMALLEST_NORMAL and sum_scale / scale < 2**8


def has_addition(a_scale: float, b_scale: float, scale: float) -> bool:
    """Returns True if XNNPACK has an integer kernel for sums and differences of tensors with these scales.

    It shifts 32-bit sums of products with 21-bit multipliers by `shift` bits (see `Xnnpack.from_addition`), which must
    be 1 to 30.

    >>> has_addition(1.0, 1e-9, 1.0), has_addition(1e-4, 1e-4, 1.0)
    (True, False)
    """
    return 2**-10 <= max(a_scale / scale, b_scale / scale) < 2**20


def _parts(weight: Tensor, scales: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Splits a weight into parts with this number of inputs. Returns each part with the scales of its group."""
    in_group = weight.shape[1] // scales.shape[1]
    return [(part, scales[:, i * size // in_group]) for i, part in enumerate(weight.split(size, dim=1))]


def _weighted_sum(a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf, sign: int) -> Tensor:
    ratios = torch.stack([a_grid.scale / grid.scale, b_grid.scale / grid.scale]).double()
    shift = _MULTIPLIER_BITS + 1 - int(torch.frexp(ratios.max()).exponent)
    ma, mb = (int(m) for m in torch.round(ratios * 2.0**shift))
    a_levels, b_levels = (codes_of(plain(x), of).long() - of.zero_point for x, of in ((a, a_grid), (b, b_grid)))
    total = a_levels * ma + b_levels * (sign * mb) + 2 ** (shift - 1)
    return _on(grid, ((total >> shift) + grid.zero_point).float())


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


# --- biases: XNNPACK takes them as floats and quantizes them itself ---
#
#     code = rint(bias * (1 / scale)), in float32
#
# Not every code can be reached in this way: those beyond 2^22 may miss by a few units.


def float_of_codes(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns floats whose codes are `codes`, or as near to them as floats can be.

    >>> float_of_codes(torch.tensor([3]), torch.tensor([0.5]))
    tensor([1.5000])
    """
    start = (codes.double() * scale.double()).float()
    best = start
    for towards in (torch.inf, -torch.inf):
        value = start
        for _ in range(2):
            value = torch.nextafter(value, torch.full_like(value, towards))
            is_nearer = _distance(value, scale, codes) < _distance(best, scale, codes)
            best = torch.where(is_nearer, value, best)
    return best


def codes_of_float(bias: Tensor, scale: Tensor) -> Tensor:
    """Returns the codes that the runtime computes, in int32.

    It has no integer kernels for subnormal scales, whose reciprocals may be infinite. There the bias is divided.

    >>> codes_of_float(torch.tensor([1.5, 0.0]), torch.tensor([0.5, 1e-40]))
    tensor([3, 0], dtype=torch.int32)
    """
    limits = torch.iinfo(torch.int32)
    divided = torch.round(bias.double() / scale.double()).clamp(limits.min, limits.max).to(torch.int32)
    is_normal = scale >= torch.finfo(torch.float32).tiny
    return torch.where(is_normal, torch.round(bias * (1.0 / scale)).to(torch.int32), divided)


def _distance(bias: Tensor, scale: Tensor, codes: Tensor) -> Tensor:
    return (codes_of_float(bias, scale).long() - codes.long()).abs()


ARITHMETIC = Xnnpack()
