"""The blocks of ggml: bytes from and to codes and scales. Blocks run along a row, and bytes are little-endian.

    type    codes  bytes  contents
    Q4_0    32     18     d; 16 bytes, byte i with code i and code i + 16
    Q4_1    32     20     d; m; the same
    Q8_0    32     34     d; 32 signed bytes
    TQ2_0   256    66     64 bytes with 4 codes each, 32 bytes for each half of the block; d
    MXFP4   32     17     the exponent; 16 bytes as in Q4_0
    Q4_K    256    144    see k_quants.py
    Q6_K    256    210    see k_quants.py

d and m are float16. `Blocks.scale` holds d, or the bytes of the exponents. NVFP4 is missing: its files multiply the
result of a product by the scale of the tensor, which is not the weight that was trained.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fakequant import presets
from fakequant._backends.ggml_blocks import ggml_blocks
from fakequant._export.gguf.k_quants import SuperBlocks, pack_super_blocks, unpack_q4_k, unpack_q6_k
from fakequant._export.prepared_layers import PreparedLayer, grid_of
from fakequant.functional import dequantize, quantize
from fakequant.qparams import decode_scales, encode_scales
from fakequant.spec import QuantSpec

Array = npt.NDArray[Any]  # of the dtype that the comment or the table says


class BlockType(NamedTuple):
    """The sizes of a block."""

    # The number of codes, and of bytes.
    length: int
    size: int


TYPES = {
    "Q4_0": BlockType(32, 18),
    "Q4_1": BlockType(32, 20),
    "Q8_0": BlockType(32, 34),
    "TQ2_0": BlockType(256, 66),
    "MXFP4": BlockType(32, 17),
    "Q4_K": BlockType(256, 144),
    "Q6_K": BlockType(256, 210),
}


class Blocks(NamedTuple):
    """The codes of a matrix, in its shape, and the scales of its blocks, one row per row."""

    codes: Array
    scale: Array
    # m of Q4_1, or dmin of Q4_K.
    offset: Array | None = None
    # The integers of K-quants, one per block of a super-block.
    scales: Array | None = None
    offsets: Array | None = None


def type_of(spec: QuantSpec) -> str | None:
    """Returns the type that holds weights with this spec. None if there is none.

    >>> type_of(presets.q4_0()), type_of(presets.mxfp4()), type_of(presets.int4())
    ('Q4_0', 'MXFP4', None)
    """
    if spec.axis not in (1, -1):
        return None
    if spec.format == "e2m1" and spec.scale_format == "e8m0" and spec.group_size == TYPES["MXFP4"].length:
        return "MXFP4"
    name = (spec.ggml_type or "").upper()
    return name if name in TYPES else None


# --- codes -----------------------------------------------------------------------------------------


def blocks_of(layer: PreparedLayer) -> Blocks:
    """Returns the codes and scales with which a prepared layer computes, as ggml stores them."""
    quantizer, weight, spec = layer.layer.weight_quantizer, layer.weight(), layer.spec
    assert quantizer is not None
    grid = grid_of(quantizer, weight)
    if spec.ggml_type is not None:
        found = ggml_blocks(weight, spec, grid)
        return Blocks(*found)
    codes = quantize(weight, grid.scale, grid.zero_point, spec)
    scales = encode_scales(grid.scale, spec).codes
    return Blocks(codes.to(torch.uint8).numpy(), scales.to(torch.uint8).numpy())


# --- bytes -----------------------------------------------------------------------------------------


def pack(name: str, blocks: Blocks) -> Array:
    """Returns the bytes of a matrix, uint8, one row per row.

    >>> d = np.ones((1, 1), np.float16)
    >>> pack("Q8_0", Blocks(np.arange(32, dtype=np.int8)[None], d))[0, :4].tolist()
    [0, 60, 0, 1]
    """
    known = TYPES[name]
    rows, length = blocks.codes.shape
    if blocks.scales is not None:
        number = rows * length // known.length
        parts: list[Any] = [None if part is None else part.reshape(number, -1) for part in blocks]
        return pack_super_blocks(SuperBlocks(*parts)).reshape(rows, -1)
    cut = blocks.codes.reshape(rows, -1, known.length)
    if name == "Q8_0":
        codes = cut.view(np.uint8)
    elif name == "TQ2_0":
        quarters = cut.reshape(rows, -1, 2, 4, 32)
        shifted = quarters << np.array([0, 2, 4, 6], np.uint8)[:, None]
        codes = np.bitwise_or.reduce(shifted, axis=-2).reshape(rows, -1, 64)
    else:
        codes = cut[..., :16] | cut[..., 16:] << np.uint8(4)
    scales = [_as_bytes(value) for value in (blocks.scale, blocks.offset) if value is not None]
    pieces = [codes, *scales] if name == "TQ2_0" else [*scales, codes]
    return np.concatenate(pieces, -1).reshape(rows, length // known.length * known.size)


def unpack(name: str, data: Array) -> Blocks:
    """Returns the codes and scales in the bytes of a matrix."""
    known = TYPES[name]
    rows = len(data)
    parts = np.ascontiguousarray(data).reshape(rows, -1, known.size)
    if name in ("Q4_K", "Q6_K"):
        found = (unpack_q4_k if name == "Q4_K" else unpack_q6_k)(parts.reshape(-1, known.size))
        in_rows: list[Any] = [None if part is None else part.reshape(rows, -1) for part in found]
        return Blocks(*in_rows)
    if name == "TQ2_0":
        scale = _as_floats(parts[..., 64:])
        quarters = parts[..., :64].reshape(rows, -1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(
            3
        )
        return Blocks(quarters.reshape(rows, -1), scale)
    width = {"MXFP4": 1, "Q4_1": 4}.get(name, 2)
    scale = parts[..., 0].copy() if name == "MXFP4" else _as_floats(parts[..., :2])
    offset = _as_floats(parts[..., 2:4]) if name == "Q4_1" else None
    packed = np.ascontiguousarray(parts[..., width:])
    if name == "Q8_0":
        return Blocks(packed.view(np.int8).reshape(rows, -1), scale)
    codes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], -1)
    return Blocks(codes.reshape(rows, -1), scale, offset)


def _as_bytes(scale: Array) -> Array:
    """Returns scales as bytes, along a new axis."""
    return np.ascontiguousarray(scale)[..., None].view(np.uint8)


def _as_floats(data: Array) -> Array:
    return np.ascontiguousarray(data).view(np.float16)[..., 0]


# --- grids -----------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """A matrix of a file as a quantizer has it: its spec, its scales and zero points, and its values."""

    spec: QuantSpec
    scale: Tensor
    zero_point: Tensor | None
    values: Tensor


def grid_of_blocks(name: str, blocks: Blocks) -> Grid:
    """Returns the grid of a matrix. Its values are ggml's, in float32."""
    spec: QuantSpec = getattr(presets, name.lower())()
    if spec.ggml_type is None:
        scale = decode_scales(torch.from_numpy(blocks.scale), None, spec)
        return Grid(spec, scale, None, dequantize(torch.from_numpy(blocks.codes), scale, 0, spec))
    d = torch.from_numpy(_times(blocks.scale, blocks.scales))
    m = None if blocks.offset is None else torch.from_numpy(_times(blocks.offset, blocks.offsets))
    if m is not None and blocks.offsets is not None:
        m = -m  # subtracted there
    codes = torch.from_numpy(blocks.codes.astype(np.float32)).unflatten(-1, (-1, spec.group_size))
    middle = {"Q4_0": 8, "TQ2_0": 1, "Q6_K": 32}.get(name, 0)
    values = (codes - middle) * d[..., None]
    if m is not None:
        values = values + m[..., None]
    return Grid(spec, d, m, values.flatten(-2))


def _times(value: Array, integers: Array | None) -> Array:
    """Returns float16 numbers as float32, each times the integers of its super-block."""
    floats: Array = value.astype(np.float32)
    if integers is None:
        return floats
    return np.repeat(floats, integers.shape[-1] // floats.shape[-1], axis=-1) * integers.astype(np.float32)
