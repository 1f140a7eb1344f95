"""Rounding to float formats and the choice of block scales, in torch operations. Part of `formula`.

The bits of floats are read by `view`, never by logarithms, which are not exact.
"""

from math import frexp

import torch
from torch import Tensor

from fakequant._kernels import largest_level
from fakequant.formats import FLOAT_FORMATS, FloatFormat

# By compute dtype: the integer dtype of the same size, the mantissa bits, the bias.
_LAYOUTS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


def divided(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Returns a / b. With a number, torch multiplies by a reciprocal on GPUs, which is rounded twice."""
    if not isinstance(a, Tensor):
        assert isinstance(b, Tensor)
        return torch.full_like(b, a) / b
    return a / (b if isinstance(b, Tensor) else torch.full_like(a, b))


def round_to_format(t: Tensor, to: FloatFormat) -> Tensor:
    """Returns the nearest values of a format that goes on beyond its largest value, half to even.

    Adding a power of two makes the addition round to the spacing of the format; csrc/formats-inl.h has the formula.
    """
    integer, mantissa_bits, _ = _LAYOUTS[t.dtype]
    a = t.abs().clamp(max=2 * to.largest)
    exponent = a.view(integer) >> mantissa_bits << mantissa_bits
    power = exponent.view(t.dtype)
    big = power.clamp(min=to.smallest_normal) * 2.0 ** (mantissa_bits - to.mantissa_bits)
    rounded = torch.copysign((a + big) - big, t)
    return rounded if to.has_negative_zero else torch.where(rounded == 0, 0.0, rounded)


def codes_of_values(values: Tensor, to: FloatFormat) -> Tensor:
    """Returns the codes of clamped values of a format, as integers of the size of their dtype."""
    integer, mantissa_bits, bias = _LAYOUTS[values.dtype]
    a = values.abs()
    normal = (a.view(integer) >> (mantissa_bits - to.mantissa_bits)) - (bias - to.bias << to.mantissa_bits)
    subnormal = (a / to.smallest).to(integer)
    code = torch.where(a < to.smallest_normal, subnormal, normal)
    code = code + torch.where(values.signbit(), 1 << (to.bits - 1), 0).to(integer)
    nan_code = (1 << to.bits) - 1 if to.nan_code is None else to.nan_code
    return torch.where(values.isnan(), nan_code, code)


def values_of_codes(codes: Tensor, of: FloatFormat) -> Tensor:
    """Returns the values of the codes of a format, float32."""
    return torch.from_numpy(of.values()).to(codes.device)[codes.to(torch.int64)]


def block_scales(absmax: Tensor, qmax: int, numerics: str, scale_rule: str) -> Tensor:
    """Returns the scales of blocks with these largest magnitudes. See `fakequant.choose_qparams` for the formulas.

    `absmax` has the blocks of one tensor, in float32.
    """
    if scale_rule == "e4m3fn_divided":
        everywhere = (absmax.max() if absmax.numel() else absmax.sum()).clamp(min=torch.finfo(torch.float32).tiny)
        divisor = everywhere.reciprocal() * 2688.0
        divisor = torch.where(divisor.isinf(), 1.0, divisor)
        value = round_to_format((divided(absmax, 6.0) * divisor).clamp(max=448.0), FLOAT_FORMATS["e4m3fn"])
        return torch.where(value == 0, 0.125, value) / divisor
    if scale_rule == "e4m3fn":
        under = divided(absmax.max() if absmax.numel() else absmax.sum(), 2688.0)
        under = torch.where(under == 0, 1.0, under)
        wanted = (divided(absmax, 6.0) / under).clamp(2.0**-6, 448.0)
        return (round_to_format(wanted, FLOAT_FORMATS["e4m3fn"]) * under).clamp(min=2.0**-149)
    largest = largest_level(qmax, numerics)
    exponent = frexp(largest)[1] - 1
    mantissa_bits = FLOAT_FORMATS[numerics].mantissa_bits if numerics in FLOAT_FORMATS else exponent
    bits = (divided(absmax, largest) if scale_rule == "rceil" else absmax).view(torch.int32)
    if scale_rule in ("even", "even_e2m1"):
        bits = bits + ((1 << 22) >> (mantissa_bits if scale_rule == "even" else 1))
    field = bits >> 23
    if scale_rule in ("ceil", "rceil"):
        field = field + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    if scale_rule != "rceil":
        field = field - exponent
    return torch.where(field > 0, field.clamp(max=254) << 23, 1 << 22).to(torch.int32).view(torch.float32)
