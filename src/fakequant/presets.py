"""The common specs by name.

    weights        int8   int4   int2     symmetric; only int8 has a narrow range, fewer bits need every code
    activations    uint8  uint4  int16    per tensor; int8_per_token for dynamic ranges
    both           fp8_e4m3  fp8_e5m2                     one float32 scale per tensor, or per channel with `axis`;
                                                          fp8_e4m3 also per group or per block of rows
                   mxfp8  mxfp6  mxfp4  mxint8  nvfp4     block scales, one per 32 elements (NVFP4: 16)
    GGUF files     q4_0  q4_1  q8_0  tq2_0  q4_k  q6_k    weights as ggml stores them
                   q8_0_input  q8_k_input                 inputs as ggml's matmuls round them

Each function returns a plain `QuantSpec`. Use `dataclasses.replace(int8(), bits=6)` to derive another.
"""

import dataclasses
from typing import Literal

from fakequant.formats import GGML_TYPES, Format, GgmlRule, ScaleRule
from fakequant.spec import QuantSpec

__all__ = [
    "fp8_e4m3", "fp8_e5m2", "int2", "int4", "int8", "int8_per_token", "int16", "mxfp4", "mxfp6", "mxfp8", "mxint8",
    "nvfp4", "q4_0", "q4_1", "q4_k", "q6_k", "q8_0", "q8_0_input", "q8_k_input", "tq2_0", "uint4", "uint8",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def int8(*, group_size: int | None = None, axis: int | None = None) -> QuantSpec:
    """Returns the spec of 8-bit weights: symmetric, per channel of axis 0, codes -127 to 127.

    Without -128 every code can change its sign, so a batch norm with a negative factor can be folded. With
    `group_size`, there is one scale per group along the last axis. `axis` selects another axis.

    >>> int8().qmin, int8().qmax, int8().granularity
    (-127, 127, 'channel')
    """
    return _weights(8, group_size, axis, narrow_range=True)


def int4(*, group_size: int | None = 32, axis: int | None = None) -> QuantSpec:
    """Returns the spec of 4-bit weights: symmetric, per group of 32 along the last axis, codes -8 to 7.

    With `group_size=None`, there is one scale per channel of axis 0.

    >>> int4(group_size=64).group_size, int4(group_size=None).granularity
    (64, 'channel')
    """
    return _weights(4, group_size, axis, narrow_range=False)


def int2(*, group_size: int | None = 32, axis: int | None = None) -> QuantSpec:
    """Returns the spec of 2-bit weights: symmetric, per group of 32 along the last axis, codes -2 to 1.

    >>> int2().levels
    4
    """
    return _weights(2, group_size, axis, narrow_range=False)


def uint8() -> QuantSpec:
    """Returns the spec of 8-bit activations: affine, per tensor, codes 0 to 255.

    >>> uint8().qmin, uint8().qmax, uint8().symmetric
    (0, 255, False)
    """
    return QuantSpec(bits=8, signed=False, symmetric=False)


def uint4() -> QuantSpec:
    """Returns the spec of 4-bit activations: affine, per tensor, codes 0 to 15.

    >>> uint4().levels
    16
    """
    return QuantSpec(bits=4, signed=False, symmetric=False)


def int16() -> QuantSpec:
    """Returns the spec of 16-bit activations: symmetric, per tensor.

    >>> int16().qmax
    32767
    """
    return QuantSpec(bits=16)


def int8_per_token() -> QuantSpec:
    """Returns the spec of dynamic 8-bit activations: symmetric, one scale per token.

    >>> int8_per_token().granularity
    'token'
    """
    return QuantSpec(bits=8).per_token()


def fp8_e4m3(*, axis: int | None = None, group_size: int | None = None, group_rows: int | None = None) -> QuantSpec:
    """Returns the spec of FP8 with more precision: e4m3fn, up to 448, one scale per tensor or per channel of `axis`.

    With `group_size`, there is one scale per group along the last axis. With `group_rows` too, there is one per block
    of that many rows, as in DeepSeek's models.

    >>> fp8_e4m3().largest, fp8_e4m3(axis=0).granularity
    (448.0, 'channel')
    >>> print(fp8_e4m3(group_size=128, group_rows=128))
    e4m3fn, per block of 128 x 128 on axis -1
    """
    if axis is None and group_size is not None:
        axis = -1
    return QuantSpec(format="e4m3fn", axis=axis, group_size=group_size, group_rows=group_rows)


def fp8_e5m2(*, axis: int | None = None) -> QuantSpec:
    """Returns the spec of FP8 with more range: e5m2, up to 57344, one scale per tensor or per channel of `axis`.

    >>> fp8_e5m2().largest
    57344.0
    """
    return QuantSpec(format="e5m2", axis=axis)


def mxfp8(*, format: Format = "e4m3fn", axis: int = -1, scale_rule: ScaleRule = "floor") -> QuantSpec:
    """Returns the spec of MXFP8: FP8 in blocks of 32 along `axis`, each with a power of two as scale.

    >>> print(mxfp8())
    e4m3fn, per group of 32 on axis -1, scales e8m0 (floor)
    """
    return _mx(format, ("e4m3fn", "e5m2"), axis, scale_rule)


def mxfp6(*, format: Format = "e2m3", axis: int = -1, scale_rule: ScaleRule = "floor") -> QuantSpec:
    """Returns the spec of MXFP6: e2m3 or e3m2 in blocks of 32 along `axis`, each with a power of two as scale.

    >>> mxfp6().bits, mxfp6(format="e3m2").largest
    (6, 28.0)
    """
    return _mx(format, ("e2m3", "e3m2"), axis, scale_rule)


def mxfp4(*, axis: int = -1, scale_rule: ScaleRule = "floor") -> QuantSpec:
    """Returns the spec of MXFP4: e2m1 in blocks of 32 along `axis`, each with a power of two as scale.

    >>> mxfp4().bits, mxfp4().group_size
    (4, 32)
    """
    return _mx("e2m1", ("e2m1",), axis, scale_rule)


def mxint8(*, axis: int = -1, scale_rule: ScaleRule = "floor") -> QuantSpec:
    """Returns the spec of MXINT8: codes -127 to 127 in blocks of 32 along `axis`, each with a power of two as scale.

    >>> mxint8().qmin, mxint8().scale_format
    (-127, 'e8m0')
    """
    return QuantSpec(narrow_range=True, axis=axis, group_size=32, scale_format="e8m0", scale_rule=scale_rule)


def nvfp4(*, axis: int = -1, scale_rule: Literal["floor", "divided"] = "floor") -> QuantSpec:
    """Returns the spec of NVFP4: e2m1 in blocks of 16 along `axis`, with FP8 scales under one float32 scale.

    With `scale_rule="divided"` FP8 scales are divided by a float32 number, as in compressed-tensors. The values of both
    differ in the last bit of float32.

    >>> print(nvfp4())
    e2m1, per group of 16 on axis -1, scales e4m3fn
    """
    return QuantSpec(format="e2m1", axis=axis, group_size=16, scale_format="e4m3fn", scale_rule=scale_rule)


def q4_0(*, axis: int = -1) -> QuantSpec:
    """Returns the spec of ggml's Q4_0 weights: codes -8 to 7 in blocks of 32, each with a float16 scale of either sign.

    The value of largest magnitude has the code -8. Codes are found with the float32 scale, values with the float16 one.
    The specs of ggml follow the tensor, and need an axis whose length is a multiple of the block.

    >>> print(q4_0())
    int4, per group of 32 on axis -1, scales float16 (q4_0)
    """
    return _ggml("q4_0", axis)


def q4_1(*, axis: int = -1) -> QuantSpec:
    """Returns the spec of ggml's Q4_1 weights: codes 0 to 15 in blocks of 32, each with a float16 scale and offset.

    The offset, the lowest value of the block, is in the place of the zero point.

    >>> q4_1().has_offset
    True
    """
    return _ggml("q4_1", axis)


def q8_0(*, axis: int = -1) -> QuantSpec:
    """Returns the spec of ggml's Q8_0 weights: codes -127 to 127 in blocks of 32, each with a float16 scale.

    >>> q8_0().qmin, q8_0().group_size
    (-127, 32)
    """
    return _ggml("q8_0", axis)


def tq2_0(*, axis: int = -1) -> QuantSpec:
    """Returns the spec of ggml's TQ2_0 weights: codes -1, 0 and 1 in blocks of 256, each with a float16 scale.

    >>> tq2_0().levels, tq2_0().group_size
    (3, 256)
    """
    return _ggml("tq2_0", axis)


def q4_k() -> QuantSpec:
    """Returns the spec of ggml's Q4_K weights: codes 0 to 15 in blocks of 32 along the last axis, each with an offset.

    Eight blocks are a super-block, whose scales and offsets are 6-bit integers times two float16 numbers. The codes for
    given scales and the values of codes are exactly ggml's. The scales are not: ours follow the range of each block,
    while ggml's own quantizer searches for better ones. `load_grids` keeps those of a file.

    >>> q4_k().group_size, q4_k().has_offset
    (32, True)
    """
    return _ggml("q4_k", -1)


def q6_k() -> QuantSpec:
    """Returns the spec of ggml's Q6_K weights: codes -32 to 31 in blocks of 16 along the last axis.

    Sixteen blocks are a super-block, whose scales are 8-bit integers times one float16 number. What is exact is said at
    `q4_k`.

    >>> q6_k().qmin, q6_k().group_size
    (-32, 16)
    """
    return _ggml("q6_k", -1)


def q8_0_input(*, axis: int = -1) -> QuantSpec:
    """Returns the spec of the inputs of ggml's matmuls: as Q8_0, but rounded as its x86 kernels do.

    >>> q8_0_input().ggml_type
    'q8_0_input'
    """
    return _ggml("q8_0_input", axis)


def q8_k_input(*, axis: int = -1) -> QuantSpec:
    """Returns the spec of the inputs of matmuls with TQ2_0, Q4_K and Q6_K weights: blocks of 256 with float32 scales.

    >>> q8_k_input().group_size
    256
    """
    return _ggml("q8_k_input", axis)


def _ggml(rule: GgmlRule, axis: int) -> QuantSpec:
    ggml = GGML_TYPES[rule]
    return QuantSpec(**dataclasses.asdict(ggml), symmetric=ggml.signed, axis=axis, scale_rule=rule)


def _mx(format: Format, allowed: tuple[Format, ...], axis: int, scale_rule: ScaleRule) -> QuantSpec:
    if format not in allowed:
        raise ValueError(f"`format` must be {' or '.join(allowed)} here, got {format!r}.")
    return QuantSpec(format=format, axis=axis, group_size=32, scale_format="e8m0", scale_rule=scale_rule)


def _weights(bits: int, group_size: int | None, axis: int | None, *, narrow_range: bool) -> QuantSpec:
    if axis is None:
        axis = 0 if group_size is None else -1
    return QuantSpec(bits=bits, narrow_range=narrow_range, axis=axis, group_size=group_size)
