"""Data to codes and back, packed or not. Rows of 8 codes of n bits are n bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fakequant._backends.torch.tensor_kernels import Grid, dense
from fakequant._backends.torch.triton.launch import launch
from fakequant._backends.torch.triton.rounding import (
    bits_of,
    bounds_of,
    clamp_level,
    inverse_of,
    level_of,
    levels_of,
    to_dtype,
    to_float32,
    value_of,
    value_scale,
)
from fakequant._backends.torch.triton.tiles import (
    first_row,
    is_last_program,
    last_row,
    load_scales,
    packed,
    placed,
    rows_of,
)
from fakequant.formats import FLOAT_FORMATS


@triton.jit
def codes_of_values(values, mantissa_bits, bias, smallest_normal, smallest, bits, nan_code):
    """Returns the codes of clamped values of a float format; see csrc/formats-inl.h."""
    a = tl.abs(values)
    normal = (bits_of(a) >> (23 - mantissa_bits)) - ((127 - bias) << mantissa_bits)
    subnormal = tl.div_rn(a, smallest).to(tl.int32)
    code = tl.where(a < smallest_normal, subnormal, normal)
    code += ((bits_of(values) >> 31) & 1) << (bits - 1)
    return tl.where(values == values, code, nan_code)


@triton.jit
def values_of_codes(codes, mantissa_bits, bias, smallest, bits, inf_code, nan_code):
    """Returns the values of the codes of a float format.

    `inf_code` is the magnitude of infinity. Larger ones are NaN, and so is `nan_code` with or without the sign.
    """
    magnitude = codes & ((1 << (bits - 1)) - 1)
    mantissa = magnitude & ((1 << mantissa_bits) - 1)
    exponent = magnitude >> mantissa_bits
    normal = ((exponent - bias + 127) << 23) | (mantissa << (23 - mantissa_bits))
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * smallest, normal.to(tl.float32, bitcast=True))
    value = tl.where(magnitude == inf_code, float("inf"), tl.where(magnitude > inf_code, float("nan"), value))
    value = tl.where(codes >= 1 << (bits - 1), -value, value)
    # A NaN that is also a negative zero has no sign.
    return tl.where((codes == nan_code) | (magnitude == nan_code), float("nan"), value)


# --- to codes -------------------------------------------------------------------------------------


@triton.jit
def codes_of(x, scale, zero, lo, hi, smallest_normal, spacing, mantissa_bits, bias, smallest, bits, nan_code,
             RULE: tl.constexpr):  # fmt: skip
    """Returns the codes of data as int32."""
    inverse = inverse_of(scale, RULE)
    level = level_of(x, inverse, zero, hi, smallest_normal, spacing, RULE)
    low, high = bounds_of(lo, hi, zero, RULE)
    level = clamp_level(level, low, high, RULE)
    if RULE == "float" or RULE == "float_unsigned_zero":
        return codes_of_values(level, mantissa_bits, bias, smallest_normal, smallest, bits, nan_code)
    else:
        if RULE == "onnx" or RULE == "torch_tensor" or RULE == "torch_channel":
            level = level + zero
        return tl.where(level == level, level, tl.cast(nan_code, tl.float32)).to(tl.int32)


@triton.jit
def quantize_rows(
    x_ptr, q_ptr, scale_ptr, zero_ptr, row, valid, whole, size, row_size, blocks, inner,
    lo, hi, smallest_normal, spacing, mantissa_bits, bias, smallest, bits, nan_code,
    RULE: tl.constexpr, PACKED: tl.constexpr, HAS_ZERO: tl.constexpr, SCALES: tl.constexpr, BATCHES: tl.constexpr,
):  # fmt: skip
    """Writes the codes of rows of 8 elements. PACKED is their number of bits, or 0."""
    offset = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = to_float32(tl.load(x_ptr + offset, mask=valid, other=0.0))
    scale, zero = load_scales(
        scale_ptr, zero_ptr, row, valid, whole, row_size, blocks, inner, HAS_ZERO, SCALES, BATCHES
    )  # fmt: skip
    q = codes_of(
        x, scale, zero, lo, hi, smallest_normal, spacing, mantissa_bits, bias, smallest, bits, nan_code, RULE
    )  # fmt: skip
    if PACKED == 0:
        tl.store(q_ptr + offset, q.to(q_ptr.dtype.element_ty), mask=valid)
    else:
        word = packed(tl.where(valid, q & ((1 << PACKED) - 1), 0), PACKED)[:, None]
        byte = tl.arange(0, 8)[None, :]
        at = row[:, None] * PACKED + byte
        there = whole[:, None] & (byte < PACKED) & (at < (size * PACKED + 7) // 8)
        tl.store(q_ptr + at, ((word >> (8 * byte)) & 0xFF).to(tl.uint8), mask=there)


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, zero_ptr, size, row_size, blocks, inner,
    lo, hi, smallest_normal, spacing, mantissa_bits, bias, smallest, bits, nan_code,
    RULE: tl.constexpr, PACKED: tl.constexpr, HAS_ZERO: tl.constexpr, SCALES: tl.constexpr, BATCHES: tl.constexpr,
    TAIL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = first_row(WIDE, ROWS) + tl.arange(0, ROWS)
    whole = row < size // 8
    quantize_rows(
        x_ptr, q_ptr, scale_ptr, zero_ptr, row, whole[:, None], whole, size, row_size, blocks, inner,
        lo, hi, smallest_normal, spacing, mantissa_bits, bias, smallest, bits, nan_code,
        RULE, PACKED, HAS_ZERO, SCALES, BATCHES,
    )  # fmt: skip
    if TAIL:
        if is_last_program():
            last, exists, is_row = last_row(size)
            quantize_rows(
                x_ptr, q_ptr, scale_ptr, zero_ptr, last, exists, is_row, size, row_size, blocks, inner,
                lo, hi, smallest_normal, spacing, mantissa_bits, bias, smallest, bits, nan_code,
                RULE, PACKED, HAS_ZERO, SCALES, BATCHES,
            )  # fmt: skip


def _code_constants(grid: Grid) -> tuple[int, int, float, int, int]:
    """Returns mantissa bits, bias, smallest value and bits of a float format, and the code of NaN."""
    of = FLOAT_FORMATS.get(grid.numerics)
    if of is None:
        nan_code = min(max(0, grid.qmin), grid.qmax) if grid.numerics == "half_away" else grid.qmin
        return 0, 0, 0.0, 0, nan_code
    nan_code = (1 << of.bits) - 1 if of.nan_code is None else of.nan_code
    return of.mantissa_bits, of.bias, of.smallest, of.bits, nan_code


def _quantize_into(q: Tensor, x: Tensor, grid: Grid, bits: int) -> Tensor:
    at = placed(x, grid)
    rows = rows_of(at.shape)
    levels, rule = levels_of(grid)
    zero_point = at.scale if at.zero_point is None else at.zero_point
    launch(
        quantize_kernel, rows.programs, x, q.view(_SIGNED[q.itemsize]), at.scale, zero_point, *rows.sizes, *levels,
        *_code_constants(grid), RULE=rule, PACKED=bits, HAS_ZERO=at.zero_point is not None, **rows.constants,
    )  # fmt: skip
    return q


_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def quantize(x: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Returns the codes of `x`."""
    q = torch.empty_like(x, dtype=dtype)
    return _quantize_into(q, dense(x, q), grid, 0)


def quantize_packed(x: Tensor, grid: Grid, bits: int) -> Tensor:
    """Returns the codes of `x` in C order, two or four to a byte, or four codes of 6 bits to three bytes."""
    q = torch.empty((x.numel() * bits + 7) // 8, dtype=torch.uint8, device=x.device)
    return _quantize_into(q, x.contiguous(), grid, bits)


# --- to values ------------------------------------------------------------------------------------


@triton.jit
def dequantize_rows(
    q_ptr, y_ptr, scale_ptr, zero_ptr, row, valid, whole, size, row_size, blocks, inner,
    mantissa_bits, bias, smallest, bits, inf_code, nan_code,
    RULE: tl.constexpr, PACKED: tl.constexpr, SIGNED: tl.constexpr, UNSIGNED_TYPE: tl.constexpr,
    HAS_ZERO: tl.constexpr, SCALES: tl.constexpr, BATCHES: tl.constexpr,
):  # fmt: skip
    """Writes the values of rows of 8 codes."""
    offset = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    if PACKED == 0:
        q = tl.load(q_ptr + offset, mask=valid, other=0).to(tl.int32)
        if UNSIGNED_TYPE != 0:  # loaded as integers with a sign
            q = q & ((1 << UNSIGNED_TYPE) - 1)
    else:
        bit = offset * PACKED
        byte = bit // 8
        q = tl.load(q_ptr + byte, mask=valid, other=0).to(tl.int32) & 0xFF
        if PACKED == 6:  # a code may be in two bytes
            next_byte = valid & (byte + 1 < (size * PACKED + 7) // 8)
            q = q | ((tl.load(q_ptr + byte + 1, mask=next_byte, other=0).to(tl.int32) & 0xFF) << 8)
        q = (q >> (bit % 8).to(tl.int32)) & ((1 << PACKED) - 1)
        if SIGNED:
            q = tl.where(q >= 1 << (PACKED - 1), q - (1 << PACKED), q)
    scale, zero = load_scales(
        scale_ptr, zero_ptr, row, valid, whole, row_size, blocks, inner, HAS_ZERO, SCALES, BATCHES
    )  # fmt: skip
    if RULE == "float" or RULE == "float_unsigned_zero":
        value = values_of_codes(q, mantissa_bits, bias, smallest, bits, inf_code, nan_code)
        y = value * scale
    elif RULE == "onnx" or RULE == "half_away" or RULE == "torch_tensor" or RULE == "torch_channel":
        if HAS_ZERO:
            q = q - zero.to(tl.int32)
        y = q.to(tl.float32) * scale
    else:
        y = value_of(q.to(tl.float32), value_scale(scale, inverse_of(scale, RULE), RULE), zero, RULE)
    tl.store(y_ptr + offset, to_dtype(y, y_ptr.dtype.element_ty), mask=valid)


@triton.jit
def dequantize_kernel(
    q_ptr, y_ptr, scale_ptr, zero_ptr, size, row_size, blocks, inner,
    mantissa_bits, bias, smallest, bits, inf_code, nan_code,
    RULE: tl.constexpr, PACKED: tl.constexpr, SIGNED: tl.constexpr, UNSIGNED_TYPE: tl.constexpr,
    HAS_ZERO: tl.constexpr, SCALES: tl.constexpr, BATCHES: tl.constexpr,
    TAIL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = first_row(WIDE, ROWS) + tl.arange(0, ROWS)
    whole = row < size // 8
    dequantize_rows(
        q_ptr, y_ptr, scale_ptr, zero_ptr, row, whole[:, None], whole, size, row_size, blocks, inner,
        mantissa_bits, bias, smallest, bits, inf_code, nan_code,
        RULE, PACKED, SIGNED, UNSIGNED_TYPE, HAS_ZERO, SCALES, BATCHES,
    )  # fmt: skip
    if TAIL:
        if is_last_program():
            last, exists, is_row = last_row(size)
            dequantize_rows(
                q_ptr, y_ptr, scale_ptr, zero_ptr, last, exists, is_row, size, row_size, blocks, inner,
                mantissa_bits, bias, smallest, bits, inf_code, nan_code,
                RULE, PACKED, SIGNED, UNSIGNED_TYPE, HAS_ZERO, SCALES, BATCHES,
            )  # fmt: skip


def _dequantize_into(y: Tensor, q: Tensor, grid: Grid, bits: int) -> Tensor:
    at = placed(y, grid)
    rows = rows_of(at.shape)
    mantissa_bits, bias, smallest, width, _ = _code_constants(grid)
    of = FLOAT_FORMATS.get(grid.numerics)
    inf_code = 0x7C if grid.numerics == "e5m2" else 1 << 30
    nan_code = -1 if of is None or of.nan_code is None else of.nan_code
    launch(
        dequantize_kernel, rows.programs, q.view(_SIGNED[q.itemsize]), y, at.scale,
        at.scale if at.zero_point is None else at.zero_point, *rows.sizes,
        mantissa_bits, bias, smallest, width, inf_code, nan_code,
        RULE=levels_of(grid)[1], PACKED=bits, SIGNED=grid.qmin < 0 and of is None,
        UNSIGNED_TYPE=8 * q.itemsize if q.dtype in (torch.uint8, torch.uint16) else 0,
        HAS_ZERO=at.zero_point is not None, **rows.constants,
    )  # fmt: skip
    return y


def dequantize(q: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Returns the values of the codes `q`."""
    y = torch.empty_like(q, dtype=dtype)
    return _dequantize_into(y, dense(q, y), grid, 0)


def dequantize_packed(q: Tensor, grid: Grid, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> Tensor:
    """Returns the values of the packed codes of a tensor of `shape`."""
    return _dequantize_into(torch.empty(shape, dtype=dtype, device=q.device), q.contiguous(), grid, bits)
