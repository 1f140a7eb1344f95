"""The rounding rules in Triton, in float32; csrc/numerics-inl.h, formats-inl.h and ggml-inl.h have the same formulas.

A *level* is what is clamped: the code minus the zero point, or the code itself if the rule adds the zero point before
it rounds.

The rules use additions and comparisons that Triton's interpreter computes like a GPU, so that tests without a GPU run
the code that GPUs run. The interpreter does not have `libdevice.rint`, and rounds bfloat16 wrongly.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fakequant._backends.torch.tensor_kernels import Grid
from fakequant._kernels import is_ggml
from fakequant.formats import FLOAT_FORMATS


class Levels(NamedTuple):
    """The constants of a grid, in the order in which kernels take them. Unused ones are 0."""

    # The ends of the range: codes, or values of a float format.
    lo: float
    hi: float
    # Of a float format: its smallest normal value, and the factor from a power of two to what rounds to its mantissa.
    smallest_normal: float = 0.0
    spacing: float = 0.0


def levels_of(grid: Grid) -> tuple[Levels, str]:
    """Returns the constants of a grid, and the name of its rule for the functions below."""
    of = FLOAT_FORMATS.get(grid.numerics)
    if of is None:
        return Levels(float(grid.qmin), float(grid.qmax)), grid.numerics
    levels = Levels(-of.largest, of.largest, of.smallest_normal, 2.0 ** (23 - of.mantissa_bits))
    return levels, "float" if of.has_negative_zero else "float_unsigned_zero"


def has_offset(numerics: str) -> bool:
    """Returns True for the rules of ggml, whose zero points are floats in steps of data and not codes."""
    return is_ggml(numerics)


# --- numbers --------------------------------------------------------------------------------------


@triton.jit
def bits_of(v):
    """Returns the bits of float32 numbers as int32."""
    return v.to(tl.int32, bitcast=True)


@triton.jit
def with_sign_of(magnitude, v):
    """Returns `magnitude`, which is not negative, with the signs of `v`."""
    return (bits_of(magnitude) | (bits_of(v) & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def rint(v):
    """Rounds to integers, ties to even: adding 2^23 leaves no bits for a fraction. NaN and infinities stay."""
    a = tl.abs(v)
    return with_sign_of(tl.where(a < 8388608.0, (a + 8388608.0) - 8388608.0, a), v)


@triton.jit
def floor(v):
    """Rounds down to integers. Not `tl.floor`, which flushes subnormal numbers to zero on a GPU."""
    nearest = rint(v)
    return tl.where(nearest > v, nearest - 1.0, nearest)


@triton.jit
def round_half_away(v):
    """Rounds to integers, ties away from zero."""
    a = tl.abs(v)
    whole = floor(a)
    return with_sign_of(tl.where(a - whole >= 0.5, whole + 1.0, whole), v)


@triton.jit
def clamp(v, lo, hi):
    """Clamps to [lo, hi]. NaN stays NaN."""
    return tl.where(v < lo, lo, tl.where(v > hi, hi, v))


@triton.jit
def round_to_format(t, largest, smallest_normal, spacing):
    """Rounds to a float format that goes on beyond its largest value; see csrc/formats-inl.h."""
    a = tl.abs(t)
    a = tl.where(a > 2.0 * largest, 2.0 * largest, a)
    power = (bits_of(a) & 0x7F800000).to(tl.float32, bitcast=True)
    big = tl.where(power < smallest_normal, smallest_normal, power) * spacing
    return with_sign_of((a + big) - big, t)


@triton.jit
def as_float16(v):
    """Rounds to float16, at most its largest value, and returns float32."""
    return clamp(v, -65504.0, 65504.0).to(tl.float16).to(tl.float32)


@triton.jit
def to_float32(v):
    """Converts loaded elements to float32, which is exact."""
    if v.dtype == tl.bfloat16:  # of which the interpreter changes subnormal numbers
        return (v.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(tl.float32)


@triton.jit
def to_dtype(v, dtype: tl.constexpr):
    """Converts float32 to the dtype of a result, rounded once."""
    if dtype == tl.bfloat16:
        bits = bits_of(v)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(v == v, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return v.to(dtype)


# --- rules ----------------------------------------------------------------------------------------


@triton.jit
def inverse_of(scale, RULE: tl.constexpr):
    """Returns what data are multiplied by, for rules that multiply, or divided by."""
    if RULE == "torch_tensor" or RULE == "torch_channel":
        return tl.div_rn(1.0, scale)
    elif RULE == "q4_k" or RULE == "q6_k":
        return tl.where(scale == 0.0, 3.4028234663852886e38, scale)
    elif RULE == "q8_0_input":
        return clamp(tl.div_rn(127.0, scale), -3.4028234663852886e38, 3.4028234663852886e38)
    elif RULE == "q8_k_input":
        return clamp(tl.div_rn(-127.0, scale), -3.4028234663852886e38, 3.4028234663852886e38)
    elif RULE == "q4_0" or RULE == "q4_1" or RULE == "q8_0" or RULE == "tq2_0":
        return clamp(tl.div_rn(1.0, scale), -3.4028234663852886e38, 3.4028234663852886e38)
    else:
        return scale


@triton.jit
def steps_of(x, inverse, zero, RULE: tl.constexpr):
    """Returns the distance from code 0, before it is rounded, for the rules of ggml."""
    t = x
    if RULE == "q4_1" or RULE == "q4_k":
        t = x - zero
    if RULE == "q4_k" or RULE == "q6_k":
        return tl.div_rn(t, inverse)
    else:
        return t * inverse


@triton.jit
def level_of(x, inverse, zero, hi, smallest_normal, spacing, RULE: tl.constexpr):
    """Returns levels before clamping, without -0.0 where they are integers. `inverse` is from `inverse_of`."""
    if RULE == "onnx":
        return rint(tl.div_rn(x, inverse)) + 0.0
    elif RULE == "half_away":
        return round_half_away(tl.div_rn(x, inverse) + zero) + 0.0
    elif RULE == "float":
        return round_to_format(tl.div_rn(x, inverse), hi, smallest_normal, spacing)
    elif RULE == "float_unsigned_zero":
        return round_to_format(tl.div_rn(x, inverse), hi, smallest_normal, spacing) + 0.0
    elif RULE == "torch_tensor":
        return rint(x * inverse) + 0.0
    elif RULE == "torch_channel":
        level = rint(x * inverse) + 0.0
        # What does not fit into int64 becomes the lowest code, like NaN.
        return tl.where(tl.abs(level) < 9223372036854775808.0, level, float("nan"))
    elif RULE == "q4_0":
        return floor(steps_of(x, inverse, zero, RULE) + 8.5) - 8.0 + 0.0
    elif RULE == "q4_1":
        return floor(steps_of(x, inverse, zero, RULE) + 0.5) + 0.0
    elif RULE == "q8_0" or RULE == "tq2_0":
        return round_half_away(steps_of(x, inverse, zero, RULE)) + 0.0
    else:
        tl.static_assert(RULE == "q8_0_input" or RULE == "q8_k_input" or RULE == "q4_k" or RULE == "q6_k")
        return rint(steps_of(x, inverse, zero, RULE)) + 0.0


@triton.jit
def bounds_of(lo, hi, zero, RULE: tl.constexpr):
    """Returns the ends of the range of levels."""
    if RULE == "onnx" or RULE == "torch_tensor" or RULE == "torch_channel":
        return lo - zero, hi - zero
    else:
        return lo, hi


@triton.jit
def clamp_level(level, lo, hi, RULE: tl.constexpr):
    """Clamps levels. NaN becomes the lowest one in torch's rules, and stays NaN in all others."""
    if RULE == "torch_tensor" or RULE == "torch_channel":
        return clamp(tl.where(level == level, level, lo), lo, hi)
    else:
        return clamp(level, lo, hi)


@triton.jit
def value_scale(scale, inverse, RULE: tl.constexpr):
    """Returns what levels are multiplied by."""
    if RULE == "q8_0_input":
        return as_float16(tl.div_rn(scale, 127.0))
    elif RULE == "q8_k_input":
        return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, inverse))
    elif RULE == "q4_0" or RULE == "q4_1" or RULE == "q8_0" or RULE == "tq2_0":
        return as_float16(scale)
    else:
        return scale


@triton.jit
def value_of(level, scale, zero, RULE: tl.constexpr):
    """Returns the values of clamped levels. `scale` is from `value_scale`."""
    if RULE == "half_away":
        return (level - zero) * scale
    elif RULE == "q4_1":
        return level * scale + as_float16(zero)
    elif RULE == "q4_k":
        return level * scale + zero
    else:
        return level * scale
