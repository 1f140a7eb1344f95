"""Scales of few bits (MX, NVFP4) in the file of a converted model: bytes, and for NVFP4 one float32 scale per tensor.

weight_scale             float32, in the model
weight_scale_codes       uint8, in the file, as `encode_scales` returns them
weight_tensor_scale      float32 without axes, in the file, NVFP4 only
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.blocks import blocks_of
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant.qparams import decode_scales, encode_scales

_SCALE, _CODES, _TENSOR_SCALE = "weight_scale", "weight_scale_codes", "weight_tensor_scale"


def encode_scales_of(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replaces the scales of few bits among the tensors of a converted model by bytes."""
    for start, layer in _layers_with_block_scales(model):
        codes, tensor_scale = encode_scales(tensors.pop(start + _SCALE), layer._fakequant.weight_spec)
        tensors[start + _CODES] = codes
        if tensor_scale is not None:
            tensors[start + _TENSOR_SCALE] = tensor_scale


def decode_scales_of(model: nn.Module, state: dict[str, Any]) -> None:
    """Replaces bytes in the state of a file by scales. Raises an error if one is missing or has another form."""
    for start, layer in _layers_with_block_scales(model):
        spec, shape = layer._fakequant.weight_spec, layer._fakequant.weight_shape
        codes = _taken(state, start + _CODES, torch.uint8, blocks_of(shape, spec).parameters)
        factor = None
        if spec.scale_format == "e4m3fn":
            factor = _taken(state, start + _TENSOR_SCALE, torch.float32, ())
        if start + _SCALE in state:
            raise ValueError(f"{start}{_SCALE} is there although the scales are bytes")
        state[start + _SCALE] = decode_scales(codes, factor, spec)


def _layers_with_block_scales(model: nn.Module) -> Iterator[tuple[str, IntegerLayer]]:
    """Yields the layers whose weights have scales of few bits, each with the start of its tensors' names."""
    for path, module in model.named_modules():
        if isinstance(module, IntegerLayer):
            spec = module._fakequant.weight_spec
            if spec is not None and spec.has_block_scales:
                yield f"{path}." if path else "", module


def _taken(state: dict[str, Any], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    value = state.pop(name, None)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is missing, or is not a tensor")
    if value.dtype != dtype or tuple(value.shape) != shape:
        found = f"{str(value.dtype)[6:]} of shape {tuple(value.shape)}"
        raise ValueError(f"{name} is {found}, but must be {str(dtype)[6:]} of shape {shape}")
    return value
