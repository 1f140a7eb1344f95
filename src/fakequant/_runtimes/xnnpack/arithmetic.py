"""The arithmetic of XNNPACK, the CPU backend of ExecuTorch: how floats, sums, additions and means become codes.

`Int8Arithmetic` has the formulas of the kernels that other runtimes have too.

A quantizer with fewer levels is a quantizer to int8 behind a hardtanh: XNNPACK ignores the limits of codes that the
file gives, and the hardtanh limits the codes instead.

An addition whose scales differ too much (`has_addition`) has no kernel in integers. The values of its operands are
added in float32, and the result is quantized by `from_float`.

XNNPACK takes subnormal floats for 0. The formulas do not.

The formulas were determined with ExecuTorch 1.5 on x86 with AVX-512 and VNNI. Static kernels have the same codes with
AVX2 and with SSE4, and so have dynamic grids. Results of layers with dynamic inputs have other last bits with SSE4, and
those of weights with groups with AVX2 too.
"""

import torch
from torch import Tensor

from fakequant._backends.torch.fused_multiply_add import fma
from fakequant._convert.golden.tracked_codes import GridOf, codes_of, plain
from fakequant._runtimes.reciprocal_arithmetic import Int8Arithmetic
from fakequant._runtimes.xnnpack.target import TOKEN_SPEC

# The number of weights whose sum XNNPACK multiplies by the scale of their group at once.
_WEIGHTS_AT_ONCE = 16


class Xnnpack(Int8Arithmetic):
    """The kernels of XNNPACK for x86: convert, convolution, fully connected, add, subtract, multiply and mean."""

    token_spec = TOKEN_SPEC

    def has_addition(self, a_scale: float, b_scale: float, scale: float) -> bool:
        return has_addition(a_scale, b_scale, scale)

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

    def from_subtraction(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """Returns what `from_addition` returns with -mb instead of mb."""
        return self._weighted_sum(a, a_grid, b, b_grid, grid, sign=-1)

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """Returns what `Int8Arithmetic` says for means over (2, 3). Others are computed in float32."""
        if axes != (2, 3) or x.dim() != 4:
            return self.from_float(plain(x).float().mean(axes, keepdim=True), grid)
        return super().from_average(x, x_grid, axes, grid)

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
