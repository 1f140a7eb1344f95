"""The super-blocks of K-quants: bytes from and to codes and integer scales. Each has 256 codes along a row.

    type    bytes  contents
    Q4_K    144    d; dmin; 12 bytes with 8 scales and 8 offsets of 6 bits; 128 bytes, byte i of 32 with codes i and i + 32
    Q6_K    210    128 bytes with the low 4 bits of codes, 64 with the high 2 bits; 16 scales, signed bytes; d
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]  # uint8, unless the comment says otherwise
_FOUR, _FIFTEEN = np.uint8(4), np.uint8(15)


def pack_q4_k(d: Array, dmin: Array, scales: Array, offsets: Array, codes: Array) -> Array:
    """Returns super-blocks as rows of bytes. `d` and `dmin` are rows of bytes too; the rest are numbers."""
    low = scales[:, :4] | scales[:, 4:] >> _FOUR << np.uint8(6)
    middle = offsets[:, :4] | offsets[:, 4:] >> _FOUR << np.uint8(6)
    high = scales[:, 4:] & _FIFTEEN | (offsets[:, 4:] & _FIFTEEN) << _FOUR
    pairs = codes.reshape(-1, 4, 2, 32)
    return np.concatenate([d, dmin, low, middle, high, (pairs[:, :, 0] | pairs[:, :, 1] << _FOUR).reshape(-1, 128)], -1)


def unpack_q4_k(data: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Returns what `pack_q4_k` takes."""
    low, middle, high = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = np.concatenate([low & np.uint8(63), high & _FIFTEEN | low >> np.uint8(6) << _FOUR], -1)
    offsets = np.concatenate([middle & np.uint8(63), high >> _FOUR | middle >> np.uint8(6) << _FOUR], -1)
    packed = data[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([packed & _FIFTEEN, packed >> _FOUR], 2).reshape(-1, 256)
    return data[:, :2], data[:, 2:4], scales, offsets, codes


def pack_q6_k(d: Array, scales: Array, codes: Array) -> Array:
    """Returns super-blocks as rows of bytes. `d` is rows of bytes too, and `scales` are signed bytes."""
    quarters = codes.reshape(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & _FIFTEEN | (quarters[:, :, 2:] & _FIFTEEN) << _FOUR).reshape(-1, 128)
    high = np.bitwise_or.reduce(quarters >> _FOUR << _SHIFTS, axis=2).reshape(-1, 64)
    return np.concatenate([low, high, scales.view(np.uint8), d], -1)


def unpack_q6_k(data: Array) -> tuple[Array, Array, Array]:
    """Returns what `pack_q6_k` takes."""
    low, high = data[:, :128].reshape(-1, 2, 2, 32), data[:, 128:192].reshape(-1, 2, 1, 32)
    four_bits = np.concatenate([low & _FIFTEEN, low >> _FOUR], 2)
    codes = four_bits | (high >> _SHIFTS & np.uint8(3)) << _FOUR
    return data[:, 208:], np.ascontiguousarray(data[:, 192:208]).view(np.int8), codes.reshape(-1, 256)


_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]
