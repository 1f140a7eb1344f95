"""How observed ranges become scales and zero points; csrc/qparams.cc and block_scales.cc have the same formulas."""

from math import frexp
from typing import NamedTuple

import triton
import triton.language as tl

from fakequant._backends.torch.triton.rounding import bits_of, clamp, rint, round_to_format
from fakequant._kernels import is_ggml, is_per_block, largest_level
from fakequant.formats import FLOAT_FORMATS

# Rules that differ in a constant only.
_SAME_RULE = {"even": "floor", "even_e2m1": "floor"}


class Choice(NamedTuple):
    """The constants of a choice of scales, in the order in which kernels take them."""

    # What a range is divided by.
    levels: float
    eps: float
    # Powers of two: the exponent of the largest value, and what is added to the bits of a magnitude.
    exponent: int
    added: int
    qmin: float
    qmax: float


def choice_of(qmin: int, qmax: int, numerics: str, symmetric: bool, scale_rule: str, eps: float) -> tuple[Choice, str]:
    """Returns the constants, and the name of the rule for `choose`."""
    largest = float(largest_level(qmax, numerics))
    of = FLOAT_FORMATS.get(numerics)
    exponent = frexp(largest)[1] - 1
    mantissa_bits = exponent if of is None else of.mantissa_bits
    added = {"even": (1 << 22) >> mantissa_bits, "even_e2m1": 1 << 21}.get(scale_rule, 0)
    levels = largest
    if is_per_block(scale_rule) and of is None:
        levels = (qmax - qmin) / (2 if symmetric else 1)
    return Choice(levels, eps, exponent, added, float(qmin), float(qmax)), _SAME_RULE.get(scale_rule, scale_rule)


def keeps_both_ends(scale_rule: str) -> bool:
    """Returns False for rules to which only the largest magnitude of a block matters."""
    return is_per_block(scale_rule) or (is_ggml(scale_rule) and scale_rule not in ("q8_0", "tq2_0", "q8_0_input"))


@triton.jit
def finite_average(running, seen, constant):
    """Returns the moving average. The difference may overflow float32 although the average does not."""
    moved = running + constant * (seen - running)
    wide = running.to(tl.float64)
    wide = (wide + tl.cast(constant, tl.float64) * (seen.to(tl.float64) - wide)).to(tl.float32)
    moved = tl.where(tl.abs(moved) < float("inf"), moved, wide)
    return tl.where(tl.abs(running) == float("inf"), seen, moved)


@triton.jit
def updated_range(lo, hi, running_min, running_max, constant, UPDATE: tl.constexpr, BOTH_ENDS: tl.constexpr):
    """Returns the running range after the range `lo` to `hi`, which is inf to -inf if nothing finite was seen."""
    nothing = lo > hi
    if UPDATE == "moving_average":
        new_min = tl.where(nothing, running_min, finite_average(running_min, lo, constant))
        new_max = tl.where(nothing, running_max, finite_average(running_max, hi, constant))
        return new_min, new_max
    elif UPDATE == "min_max":
        return tl.where(lo < running_min, lo, running_min), tl.where(hi > running_max, hi, running_max)
    else:
        tl.static_assert(UPDATE == "dynamic")
        lo = tl.where(nothing, 0.0, lo)
        hi = tl.where(nothing, 0.0, hi)
        if BOTH_ENDS:
            return lo, hi
        else:
            absmax = tl.abs(tl.where(hi > -lo, hi, -lo))
            return 0.0 - absmax, absmax


@triton.jit
def rounded_scale(scale, SCALE_RULE: tl.constexpr):
    """Returns positive scales rounded to 16 bits if the rule says so, within the range of the type."""
    if SCALE_RULE == "float16":
        power = (bits_of(scale) & 0x7F800000).to(tl.float32, bitcast=True)
        above = tl.where(power < 6.103515625e-05, 6.103515625e-05, power) * 8192.0
        rounded = (scale + above) - above
        rounded = tl.where(rounded < 5.960464477539063e-08, 5.960464477539063e-08, rounded)
        return tl.where(scale >= 65504.0, 65504.0, rounded)
    elif SCALE_RULE == "bfloat16":
        bits = bits_of(scale)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        bits = tl.where(bits < 0x00010000, 0x00010000, tl.where(bits > 0x7F7F0000, 0x7F7F0000, bits))
        return bits.to(tl.float32, bitcast=True)
    else:
        return scale


@triton.jit
def tensor_factor(absmax, SCALE_RULE: tl.constexpr):
    """Returns the scale of an NVFP4 tensor, or what divides the scales of its blocks."""
    if SCALE_RULE == "e4m3fn_divided":
        smallest = 1.1754943508222875e-38
        divisor = tl.div_rn(1.0, tl.where(absmax < smallest, smallest, absmax)) * 2688.0
        return tl.where(divisor == float("inf"), 1.0, divisor)
    else:
        under = tl.div_rn(absmax, 2688.0)
        return tl.where(under == 0.0, 1.0, under)


@triton.jit
def choose(
    lo, hi, factor, levels, eps, exponent, added, qmin, qmax, SCALE_RULE: tl.constexpr, SYMMETRIC: tl.constexpr
):  # fmt: skip
    """Returns scales, and zero points as floats. `factor` is from `tensor_factor`, for NVFP4."""
    if SCALE_RULE == "q4_1":
        scale = tl.div_rn(hi - lo, 15.0)
        return tl.where(scale > 3.4028234663852886e38, 3.4028234663852886e38, scale), lo
    absmax = tl.where(hi > -lo, hi, -lo)
    absmax = tl.abs(tl.where(absmax > 0.0, absmax, 0.0))
    signed = tl.where(-lo >= hi, lo, hi)
    none = absmax * 0.0
    if SCALE_RULE == "q4_0":
        return tl.div_rn(signed, -8.0), none
    elif SCALE_RULE == "q8_0":
        return tl.div_rn(absmax, 127.0), none
    elif SCALE_RULE == "q8_k_input":
        return signed, none
    elif SCALE_RULE == "tq2_0" or SCALE_RULE == "q8_0_input":
        return absmax, none
    elif SCALE_RULE == "e4m3fn":
        wanted = clamp(tl.div_rn(tl.div_rn(absmax, 6.0), factor), 0.015625, 448.0)
        scale = round_to_format(wanted, 448.0, 0.015625, 1048576.0) * factor
        return tl.where(scale < 1.401298464324817e-45, 1.401298464324817e-45, scale), none
    elif SCALE_RULE == "e4m3fn_divided":
        wanted = tl.div_rn(absmax, 6.0) * factor
        value = round_to_format(tl.where(wanted > 448.0, 448.0, wanted), 448.0, 0.015625, 1048576.0)
        return tl.div_rn(tl.where(value == 0.0, 0.125, value), factor), none
    elif SCALE_RULE == "floor" or SCALE_RULE == "ceil" or SCALE_RULE == "rceil":
        if SCALE_RULE == "rceil":
            bits = bits_of(tl.div_rn(absmax, levels))
        else:
            bits = bits_of(absmax) + added
        field = bits >> 23
        if SCALE_RULE != "floor":
            field += ((bits & 0x7FFFFF) != 0).to(tl.int32)
        if SCALE_RULE != "rceil":
            field -= exponent
        bits = tl.where(field > 0, tl.where(field > 254, 254, field) << 23, 1 << 22)
        return bits.to(tl.float32, bitcast=True), none
    else:
        tl.static_assert(SCALE_RULE == "any" or SCALE_RULE == "float16" or SCALE_RULE == "bfloat16")
        if SYMMETRIC:
            scale = tl.div_rn(absmax, levels)
            return rounded_scale(tl.where(scale < eps, eps, scale), SCALE_RULE), none
        else:
            lo = tl.where(lo > 0.0, 0.0, lo)
            hi = tl.where(hi < 0.0, 0.0, hi)
            # The width of a range may overflow float32 although the scale does not.
            wide = ((hi.to(tl.float64) - lo.to(tl.float64)) / tl.cast(levels, tl.float64)).to(tl.float32)
            scale = tl.where(hi - lo == float("inf"), wide, tl.div_rn(hi - lo, levels))
            scale = rounded_scale(tl.where(scale < eps, eps, scale), SCALE_RULE)
            return scale, clamp(qmin - rint(tl.div_rn(lo, scale)), qmin, qmax)
