"""The super-blocks of K-quants: bytes from and to codes and integer scales. Each has 256 codes along a row.

    type    bytes  contents
    Q4_K    144    d; dmin; 12 bytes with 8 scales and 8 offsets of 6 bits; 4 * 32 bytes, byte i with codes i and i + 32
    Q6_K    210    128 bytes with the low 4 bits of codes, 64 with the high 2 bits; 16 scales, signed bytes; d

d and dmin are float16.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]  # of the dtype that the comment says
_FOUR, _SIX, _FIFTEEN = np.uint8(4), np.uint8(6), np.uint8(15)
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


class SuperBlocks(NamedTuple):
    """The parts of super-blocks, one row for each."""

    # Codes, uint8.
    codes: Array
    # float16, one column.
    d: Array
    dmin: Array | None
    # Integers: uint8 in Q4_K, int8 in Q6_K.
    scales: Array
    offsets: Array | None


def pack_super_blocks(blocks: SuperBlocks) -> Array:
    """Returns the bytes of super-blocks, uint8: Q4_K if there are offsets, otherwise Q6_K."""
    codes, d, dmin, scales, offsets = blocks
    if dmin is None or offsets is None:
        quarters = codes.reshape(-1, 2, 4, 32)
        low = quarters[:, :, :2] & _FIFTEEN | (quarters[:, :, 2:] & _FIFTEEN) << _FOUR
        high = np.bitwise_or.reduce(quarters >> _FOUR << _SHIFTS, axis=2)
        return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), _bytes(scales), _bytes(d)], -1)
    first = scales[:, :4] | scales[:, 4:] >> _FOUR << _SIX
    second = offsets[:, :4] | offsets[:, 4:] >> _FOUR << _SIX
    third = scales[:, 4:] & _FIFTEEN | (offsets[:, 4:] & _FIFTEEN) << _FOUR
    pairs = codes.reshape(-1, 4, 2, 32)
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << _FOUR).reshape(-1, 128)
    return np.concatenate([_bytes(d), _bytes(dmin), first, second, third, packed], -1)


def unpack_q4_k(data: Array) -> SuperBlocks:
    """Returns the parts of rows of 144 bytes."""
    first, second, third = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = np.concatenate([first & np.uint8(63), third & _FIFTEEN | first >> _SIX << _FOUR], -1)
    offsets = np.concatenate([second & np.uint8(63), third >> _FOUR | second >> _SIX << _FOUR], -1)
    packed = data[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([packed & _FIFTEEN, packed >> _FOUR], 2).reshape(-1, 256)
    return SuperBlocks(codes, _numbers(data[:, :2], np.float16), _numbers(data[:, 2:4], np.float16), scales, offsets)


def unpack_q6_k(data: Array) -> SuperBlocks:
    """Returns the parts of rows of 210 bytes."""
    low, high = data[:, :128].reshape(-1, 2, 2, 32), data[:, 128:192].reshape(-1, 2, 1, 32)
    codes = np.concatenate([low & _FIFTEEN, low >> _FOUR], 2) | (high >> _SHIFTS & np.uint8(3)) << _FOUR
    scales, d = _numbers(data[:, 192:208], np.int8), _numbers(data[:, 208:], np.float16)
    return SuperBlocks(codes.reshape(-1, 256), d, None, scales, None)


def _bytes(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers).view(np.uint8)


def _numbers(data: Array, dtype: npt.DTypeLike) -> Array:
    return np.ascontiguousarray(data).view(dtype)
