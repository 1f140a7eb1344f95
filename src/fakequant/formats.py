"""Number formats of a grid: what every float format can represent.

    format      bits   largest   smallest normal   smallest subnormal   infinity   NaN
    e4m3fn      8      448       2^-6              2^-9                 no         yes
    e5m2        8      57344     2^-14             2^-16                yes        yes
    e4m3fnuz    8      240       2^-7              2^-10                no         yes, and no -0
    e5m2fnuz    8      57344     2^-15             2^-17                no         yes, and no -0
    e2m3        6      7.5       1                 2^-3                 no         no
    e3m2        6      28        2^-2              2^-4                 no         no
    e2m1        4      6         1                 2^-1                 no         no

A name says how many exponent and mantissa bits there are. "fn" stands for finite values and NaN only, "uz" for an
unsigned zero.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np

Format = Literal["int", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m3", "e3m2", "e2m1"]
ScaleFormat = Literal["float32", "e8m0", "e4m3fn", "float16", "bfloat16"]
GgmlRule = Literal["q4_0", "q4_1", "q8_0", "tq2_0", "q8_0_input", "q8_k_input", "q4_k", "q6_k"]
ScaleRule = Literal["floor", "ceil", "even", "rceil", "divided", "even_e2m1", GgmlRule]


@dataclasses.dataclass(frozen=True, slots=True)
class FloatFormat:
    """A float format of few bits: a sign, an exponent and a mantissa.

    >>> FLOAT_FORMATS["e4m3fn"].bits, FLOAT_FORMATS["e4m3fn"].largest
    (8, 448.0)
    """

    # Its name, as in `QuantSpec.format`.
    name: Format
    # The number of bits of the exponent.
    exponent_bits: int
    # The number of bits of the mantissa.
    mantissa_bits: int
    # What is added to the exponent of a value to get the exponent of its code.
    bias: int
    # The largest finite value.
    largest: float
    # The code of NaN, or None if there is no NaN.
    nan_code: int | None
    # Whether there is a negative zero.
    has_negative_zero: bool = True

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with a full mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def values(self) -> np.ndarray:
        """Returns the value of every code from 0 to `2**bits - 1`, float32.

        >>> FLOAT_FORMATS["e2m1"].values()[:8]
        array([0. , 0.5, 1. , 1.5, 2. , 3. , 4. , 6. ], dtype=float32)
        """
        return _values(self).copy()

    def grid(self) -> np.ndarray:
        """Returns the finite values in ascending order, each once, float32.

        >>> FLOAT_FORMATS["e2m1"].grid().size
        15
        """
        return _grid(self).copy()


# Computed once per format; `values` and `grid` return copies.
@functools.cache
def _values(of: FloatFormat) -> np.ndarray:
    codes = np.arange(1 << of.bits)
    magnitude = codes & (1 << (of.bits - 1)) - 1
    exponent, mantissa = magnitude >> of.mantissa_bits, magnitude & (1 << of.mantissa_bits) - 1
    steps = np.where(exponent == 0, mantissa, mantissa + (1 << of.mantissa_bits)).astype(np.float32)
    powers = np.maximum(exponent, 1) - of.bias - of.mantissa_bits
    values: np.ndarray = np.ldexp(steps, powers).astype(np.float32)
    values[codes >= 1 << (of.bits - 1)] *= -1
    finite = np.abs(values) <= of.largest
    if of.name == "e5m2":
        values[(magnitude == 0x7C)] = np.where(codes[magnitude == 0x7C] < 0x80, np.inf, -np.inf)
        finite |= np.isinf(values)
    values[~finite] = np.nan
    if not of.has_negative_zero:
        values[1 << (of.bits - 1)] = np.nan
    return values


@functools.cache
def _grid(of: FloatFormat) -> np.ndarray:
    values = _values(of)
    return np.unique(values[np.isfinite(values)])


FLOAT_FORMATS: dict[str, FloatFormat] = {
    f.name: f
    for f in (
        FloatFormat("e4m3fn", 4, 3, 7, 448.0, 0x7F),
        FloatFormat("e5m2", 5, 2, 15, 57344.0, 0x7F),
        FloatFormat("e4m3fnuz", 4, 3, 8, 240.0, 0x80, has_negative_zero=False),
        FloatFormat("e5m2fnuz", 5, 2, 16, 57344.0, 0x80, has_negative_zero=False),
        FloatFormat("e2m3", 2, 3, 1, 7.5, None),
        FloatFormat("e3m2", 3, 2, 3, 28.0, None),
        FloatFormat("e2m1", 2, 1, 1, 6.0, None),
    )
}
FORMATS: tuple[Format, ...] = ("int", *(f.name for f in FLOAT_FORMATS.values()))
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("float32", "e8m0", "e4m3fn", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True)
class GgmlType:
    """The grid of a block type of ggml, as GGUF files have it.

    >>> GGML_TYPES["q4_0"].bits, GGML_TYPES["q4_0"].group_size
    (4, 32)
    """

    bits: int
    # Whether codes have a sign. Otherwise they start at 0, the code of the block's lowest value.
    signed: bool
    narrow_range: bool
    group_size: int
    scale_format: ScaleFormat


# By the rule that chooses scales. Those of inputs are how its x86 kernels round the inputs of matmuls.
GGML_TYPES: dict[str, GgmlType] = {
    "q4_0": GgmlType(4, True, False, 32, "float16"),
    "q4_1": GgmlType(4, False, False, 32, "float16"),
    "q8_0": GgmlType(8, True, True, 32, "float16"),
    "tq2_0": GgmlType(2, True, True, 256, "float16"),
    "q8_0_input": GgmlType(8, True, True, 32, "float16"),
    "q8_k_input": GgmlType(8, True, True, 256, "float32"),
    "q4_k": GgmlType(4, False, False, 32, "float16"),
    "q6_k": GgmlType(6, True, False, 16, "float16"),
}
# The K-quants, in which the scales of a super-block of 256 neighbours are small integers times one float16. How many
# blocks a super-block has.
SUPER_BLOCKS = {"q4_k": 8, "q6_k": 16}
SCALE_RULES: tuple[ScaleRule, ...] = (
    "floor", "ceil", "even", "rceil", "divided", "even_e2m1", "q4_0", "q4_1", "q8_0", "tq2_0", "q8_0_input",
    "q8_k_input", "q4_k", "q6_k",
)  # fmt: skip
