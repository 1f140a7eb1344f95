"""The blocks of ggml: bytes from and to codes and scales. Blocks run along a row, and bytes are little-endian.

    type    codes  bytes  contents
    Q4_0    32     18     d; 16 bytes, byte i with code i and code i + 16
    Q4_1    32     20     d; m; the same
    Q8_0    32     34     d; 32 signed bytes
    TQ2_0   256    66     64 bytes with 4 codes each, 32 bytes for each half of the block; d
    MXFP4   32     17     the exponent; 16 bytes as in Q4_0
    NVFP4   64     36     4 scales (e4m3); for each 16 codes 8 bytes, byte i with code i and code i + 8

d and m are float16. `Blocks.scale` holds them, or the bytes of the other scales.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fakequant import presets
from fakequant._backends.ggml_blocks import ggml_blocks
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
    # The number of codes with a common scale.
    group: int


TYPES = {
    "Q4_0": BlockType(32, 18, 32),
    "Q4_1": BlockType(32, 20, 32),
    "Q8_0": BlockType(32, 34, 32),
    "TQ2_0": BlockType(256, 66, 256),
    "MXFP4": BlockType(32, 17, 32),
    "NVFP4": BlockType(64, 36, 16),
}


class Blocks(NamedTuple):
    """The codes of a matrix, in its shape, and the scales of its blocks, one row per row."""

    codes: Array
    scale: Array
    # m of Q4_1.
    offset: Array | None = None
    # The scale of the whole matrix, of NVFP4.
    tensor_scale: float | None = None


def type_of(spec: QuantSpec) -> str | None:
    """Returns the type that holds weights with this spec. None if there is none.

    >>> type_of(presets.q4_0()), type_of(presets.mxfp4()), type_of(presets.int4())
    ('Q4_0', 'MXFP4', None)
    """
    for name in TYPES:
        known = _spec_of_type(name)
        if all(getattr(spec, field) == getattr(known, field) for field in _FIELDS) and spec.axis in (1, -1):
            return name
    return None


# What the values of codes depend on.
_FIELDS = ("bits", "signed", "symmetric", "group_size", "format", "scale_format", "scale_rule")


def _spec_of_type(name: str) -> QuantSpec:
    spec: QuantSpec = getattr(presets, name.lower())()
    return spec


# --- codes -----------------------------------------------------------------------------------------


def blocks_of(layer: PreparedLayer) -> Blocks:
    """Returns the codes and scales with which a prepared layer computes, as ggml stores them."""
    quantizer, weight, spec = layer.layer.weight_quantizer, layer.weight(), layer.spec
    assert quantizer is not None
    grid = grid_of(quantizer, weight)
    if spec.ggml_type is not None:
        found = ggml_blocks(weight, spec, grid)
        return Blocks(found.codes, found.d, found.m)
    codes = quantize(weight, grid.scale, grid.zero_point, spec)
    scales = encode_scales(grid.scale, spec)
    whole = None if scales.tensor_scale is None else float(scales.tensor_scale)
    return Blocks(codes.to(torch.uint8).numpy(), scales.codes.to(torch.uint8).numpy(), None, whole)


# --- bytes -----------------------------------------------------------------------------------------


def pack(name: str, blocks: Blocks) -> Array:
    """Returns the bytes of a matrix, uint8, one row per row.

    >>> d = np.ones((1, 1), np.float16)
    >>> pack("Q8_0", Blocks(np.arange(32, dtype=np.int8)[None], d))[0, :4].tolist()
    [0, 60, 0, 1]
    """
    known = TYPES[name]
    rows, length = blocks.codes.shape
    parts = blocks.codes.reshape(rows, -1, known.length)
    if name == "Q8_0":
        codes = parts.view(np.uint8)
    elif name == "TQ2_0":
        quarters = parts.reshape(rows, -1, 2, 4, 32)
        shifted = quarters << np.array([0, 2, 4, 6], np.uint8)[:, None]
        codes = np.bitwise_or.reduce(shifted, axis=-2).reshape(rows, -1, 64)
    else:
        half = 8 if name == "NVFP4" else 16
        pairs = parts.reshape(rows, -1, known.length // (2 * half), 2, half)
        codes = (pairs[..., 0, :] | pairs[..., 1, :] << np.uint8(4)).reshape(rows, -1, known.length // 2)
    scales = [_as_bytes(blocks.scale, rows, known.length // known.group)]
    if blocks.offset is not None:
        scales.append(_as_bytes(blocks.offset, rows, 1))
    pieces = [codes, *scales] if name == "TQ2_0" else [*scales, codes]
    return np.concatenate(pieces, -1).reshape(rows, length // known.length * known.size)


def unpack(name: str, data: Array) -> Blocks:
    """Returns the codes and scales in the bytes of a matrix."""
    known = TYPES[name]
    rows = len(data)
    parts = np.ascontiguousarray(data).reshape(rows, -1, known.size)
    if name == "TQ2_0":
        packed, scale, offset = parts[..., :64], _as_floats(parts[..., 64:]), None
        quarters = packed.reshape(rows, -1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
        return Blocks(quarters.reshape(rows, -1), scale)
    width = {"MXFP4": 1, "NVFP4": 4}.get(name, 2)
    scale, offset = parts[..., :width], None
    scale = _as_floats(scale) if width == 2 else scale.reshape(rows, -1)
    if name == "Q4_1":
        offset, width = _as_floats(parts[..., 2:4]), 4
    packed = np.ascontiguousarray(parts[..., width:])
    if name == "Q8_0":
        return Blocks(packed.view(np.int8).reshape(rows, -1), scale)
    half = packed.reshape(rows, -1, 8 if name == "NVFP4" else 16)
    codes = np.stack([half & np.uint8(15), half >> np.uint8(4)], -2)
    return Blocks(codes.reshape(rows, -1), scale, offset)


def _as_bytes(scale: Array, rows: int, number: int) -> Array:
    """Returns scales as bytes, those of each block together."""
    return np.ascontiguousarray(scale).view(np.uint8).reshape(rows, -1, number * scale.itemsize)


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
    spec = _spec_of_type(name)
    if spec.ggml_type is None:
        whole = None if blocks.tensor_scale is None else torch.tensor(blocks.tensor_scale)
        scale = decode_scales(torch.from_numpy(blocks.scale.copy()), whole, spec)
        return Grid(spec, scale, None, dequantize(torch.from_numpy(blocks.codes), scale, 0, spec))
    d = torch.from_numpy(blocks.scale.astype(np.float32))
    m = None if blocks.offset is None else torch.from_numpy(blocks.offset.astype(np.float32))
    codes = torch.from_numpy(blocks.codes.astype(np.float32)).unflatten(-1, (-1, TYPES[name].group))
    middle = {"Q4_0": 8, "TQ2_0": 1}.get(name, 0)
    values = (codes - middle) * d[..., None]
    if m is not None:
        values = values + m[..., None]
    return Grid(spec, d, m, values.flatten(-2))
