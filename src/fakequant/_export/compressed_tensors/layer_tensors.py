"""The tensors of a layer in a compressed-tensors folder, from and to codes, scales and zero points.

    format                   tensors beside weight_scale
    pack-quantized           weight_packed: int32 with dense codes along a row; weight_shape; weight_zero_point, packed
                             along the outputs
    int-quantized            weight: int8; weight_zero_point: int8
    float-quantized          weight: float8_e4m3fn. weight_scale per block has a row for each row of blocks
    mxfp8-quantized          weight: float8_e4m3fn. weight_scale holds exponents as bytes
    mxfp4-, mxfp6-pack-...   weight_packed: bytes with 2 codes in 1, or 4 in 3. weight_scale holds exponents as bytes
    nvfp4-pack-quantized     weight_packed: bytes; weight_scale: float8_e4m3fn; weight_global_scale: its divisor

Codes of integers are signed there. Unsigned codes and their zero points are moved by half the range.
"""

from typing import Any, cast

import torch
from torch import Tensor

from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant._export.compressed_tensors.schemes import Scheme
from fakequant._export.prepared_layers import StoredWeight
from fakequant._util.packages import require
from fakequant.functional import dequantize
from fakequant.qparams import decode_scales, encode_scales
from fakequant.spec import QuantSpec

Tensors = dict[str, Tensor]


def to_tensors(weight: StoredWeight, scheme: Scheme) -> Tensors:
    """Returns the tensors of a weight by their names in the layer."""
    spec, rows = scheme.weight, len(weight.codes)
    if spec.has_block_scales:
        return _blocks_to_tensors(weight, scheme)
    scale = weight.scale.reshape(-1) if spec.granularity == "tensor" else weight.scale
    if spec.granularity in ("channel", "token"):
        scale = scale.reshape(rows, -1)
    tensors = {"weight_scale": scale.contiguous()}
    if spec.format != "int":
        return {"weight": weight.codes.to(torch.uint8).view(torch.float8_e4m3fn), **tensors}
    offset = offset_of(spec)
    codes = (weight.codes.to(torch.int16) - offset).to(torch.int8) if offset else weight.codes
    zero_point = None
    if weight.zero_point is not None and not spec.symmetric:
        zero_point = (weight.zero_point.reshape(scale.shape) - offset).to(torch.int8)
    if scheme.format == "int-quantized":
        return {"weight": codes, **tensors} | ({} if zero_point is None else {"weight_zero_point": zero_point})
    tensors |= {"weight_packed": packed_in_words(codes, spec.bits), "weight_shape": torch.tensor(codes.shape)}
    if zero_point is not None:
        # Zero points per tensor are not packed.
        packed = zero_point if zero_point.dim() == 1 else _packing().pack_to_int32(zero_point, spec.bits, packed_dim=0)
        tensors["weight_zero_point"] = packed.contiguous()
    return tensors


def packed_in_words(codes: Tensor, bits: int) -> Tensor:
    """Returns rows of signed codes as int32 words, the first code in the lowest bits, each moved to be at least 0.

    The helper of compressed-tensors takes any number of bits, but ten times as long.

    >>> packed_in_words(torch.tensor([[-8, 7, 0, 0, 0, 0, 0, 0]], dtype=torch.int8), 4).item() == 0x888888F0 - 2**32
    True
    """
    in_byte, rest = divmod(8, bits)
    if rest or codes.shape[-1] % (4 * in_byte) or codes.numel() == 0:
        return cast(Tensor, _packing().pack_to_int32(codes, bits))
    moved = (codes + (1 << (bits - 1))).view(torch.uint8).unflatten(-1, (-1, in_byte))
    packed = moved[..., 0].clone()
    for i in range(1, in_byte):
        packed |= moved[..., i] << (bits * i)
    words: Tensor = packed.view(torch.int32)
    return words


def _packing() -> Any:
    return require("compressed_tensors.compressors.pack_quantized.helpers", "compressed-tensors", "llm")


def from_tensors(tensors: Tensors, scheme: Scheme) -> StoredWeight:
    """Returns the weight that `to_tensors` wrote, or another writer of the format."""
    spec = scheme.weight
    if spec.has_block_scales:
        return _blocks_from_tensors(tensors, scheme)
    scale, zero_point = tensors["weight_scale"], tensors.get("weight_zero_point")
    if spec.format != "int":
        return StoredWeight(tensors["weight"].view(torch.uint8), _blocks_of(scale, spec), None)
    if scheme.format == "int-quantized":
        codes = tensors["weight"]
    else:
        packing = _packing()
        shape, packed = torch.Size(tensors["weight_shape"].tolist()), tensors["weight_packed"]
        words = -(-shape[-1] * spec.bits // 32)
        if packed.shape != (*shape[:-1], words):
            raise ValueError(
                f"weight_packed has the shape {tuple(packed.shape)}, but {tuple(shape)} codes of {spec.bits} bits fill "
                f"{(*shape[:-1], words)}"
            )
        codes = packing.unpack_from_int32(packed, spec.bits, shape)
        if zero_point is not None and zero_point.dtype == torch.int32 and zero_point.dim() == 2:
            # Turned here, with new strides: the helper cannot turn a single row, which a few outputs have.
            turned = zero_point.T.clone(memory_format=torch.contiguous_format)
            zero_point = packing.unpack_from_int32(turned, spec.bits, torch.Size(scale.shape[::-1])).T
    if not spec.symmetric and zero_point is None:
        raise ValueError("there is no weight_zero_point, which affine codes need")
    if zero_point is not None:
        zero_point = _blocks_of(zero_point, spec).to(torch.int32)
    return StoredWeight(codes, _blocks_of(scale, spec), zero_point)


def values_of(weight: StoredWeight, spec: QuantSpec) -> Tensor:
    """Returns the float32 values of a stored weight."""
    zero_point = 0 if weight.zero_point is None else weight.zero_point
    return dequantize(weight.codes, weight.scale.float(), zero_point, spec)


def offset_of(spec: QuantSpec) -> int:
    """Returns by how much codes are moved to be signed."""
    return 0 if spec.signed else 1 << (spec.bits - 1)


def _blocks_of(value: Tensor, spec: QuantSpec) -> Tensor:
    """Returns scales or zero points in the shape of a spec's blocks: none, one per row, or rows of groups."""
    if spec.granularity == "tensor":
        return value.reshape(())
    return value.reshape(-1) if spec.granularity == "channel" else value


def _blocks_to_tensors(weight: StoredWeight, scheme: Scheme) -> Tensors:
    spec, codes = scheme.weight, weight.codes.to(torch.uint8)
    scales = encode_scales(weight.scale, spec)
    if scheme.format == "mxfp8-quantized":
        return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scales.codes.to(torch.uint8)}
    if spec.bits == 4:
        packed = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        four = codes.to(torch.int32).unflatten(-1, (-1, 4))
        word = sum(four[..., i] << 6 * i for i in range(4))
        packed = torch.stack([word & 0xFF, word >> 8 & 0xFF, word >> 16], -1).flatten(-2).to(torch.uint8)
    tensors = {"weight_packed": packed.contiguous()}
    if scales.tensor_scale is None:
        return {**tensors, "weight_scale": scales.codes.to(torch.uint8)}
    return {
        **tensors,
        "weight_scale": scales.codes.to(torch.uint8).view(torch.float8_e4m3fn),
        "weight_global_scale": scales.tensor_scale.reshape(1),
    }


def _blocks_from_tensors(tensors: Tensors, scheme: Scheme) -> StoredWeight:
    spec = scheme.weight
    if scheme.format == "mxfp8-quantized":
        codes = tensors["weight"].view(torch.uint8)
    elif spec.bits == 4:
        packed = tensors["weight_packed"]
        codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)
    else:
        three = tensors["weight_packed"].to(torch.int32).unflatten(-1, (-1, 3))
        word = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
        codes = torch.stack([word >> 6 * i & 0x3F for i in range(4)], -1).flatten(-2).to(torch.uint8)
    found = tensors.get("weight_global_scale")
    scale_codes = tensors["weight_scale"].view(torch.uint8)
    scale = decode_scales(scale_codes, None if found is None else found.reshape(()), spec)
    return StoredWeight(codes, scale, None)


def in_dtype(scale: Tensor, dtype: torch.dtype, path: str, name: str) -> Tensor:
    """Returns scales in the dtype of the model, in which engines keep them. Raises ValueError if that moves one."""
    stored = scale.to(dtype)
    if not torch.equal(stored.float(), scale):
        raise ValueError(
            f"{name} of {path} is not exact in {dtype_name(dtype)}, the dtype of the model, in which engines keep "
            f"scales.\nTrain with QuantSpec(..., scale_format={dtype_name(dtype)!r}), as target='compressed-tensors' "
            "does for models in this dtype, or export model.float()."
        )
    return stored
