"""Checks of the contents of a converted model's file: dtypes, ranges and a checksum."""

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fakequant._backends.blocks import blocks_of
from fakequant._backends.torch import tensor_functions
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant.spec import QuantSpec


def checksum(described: str, tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256, in hexadecimal, of a description and of tensors with their names, dtypes and shapes.

    >>> len(checksum("{}", {"x": torch.ones(2)}))
    64
    """
    found = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_scale(name: str, scale: Tensor) -> None:
    """Raises ValueError unless scales are positive, finite and float32."""
    _require_dtype(name, scale, torch.float32)
    _require(name, scale, scale.isfinite() & (scale > 0), "positive and finite")


def check_zero_point(name: str, zero_point: Tensor, scale: Tensor, spec: QuantSpec) -> None:
    """Raises ValueError unless zero points are codes of the grid, one per scale."""
    _require_dtype(name, zero_point, torch.int32)
    if zero_point.shape != scale.shape:
        raise ValueError(f"{name} has shape {tuple(zero_point.shape)}, but its scale has {tuple(scale.shape)}")
    lowest, highest = (0, 0) if spec.symmetric else (spec.qmin, spec.qmax)
    _require(name, zero_point, (zero_point >= lowest) & (zero_point <= highest), f"from {lowest} to {highest}")


def check_codes(name: str, codes: Tensor, shape: tuple[int, ...], spec: QuantSpec) -> None:
    """Raises ValueError unless all codes of a weight are in the range of its spec, or are finite floats."""
    packed = tuple(codes.shape) != shape
    _require_dtype(name, codes, torch.uint8 if packed else getattr(torch, spec.storage))
    if spec.float_format is not None:
        if not packed:  # formats that are packed have neither NaN nor infinities
            values = torch.from_numpy(spec.float_format.values())[codes.long()]
            _require(name, values, values.isfinite(), "finite")
        return
    if packed:
        # A spec without narrow range, in which every packed code is valid.
        whole = QuantSpec(bits=spec.bits, signed=spec.signed, symmetric=spec.symmetric)
        zero_point = 0 if spec.symmetric else torch.zeros((), dtype=torch.int32)
        values = tensor_functions.dequantize(codes, torch.ones(()), zero_point, whole, shape=shape)
    else:
        values = codes.to(torch.int64)
    _require(name, values, (values >= spec.qmin) & (values <= spec.qmax), f"from {spec.qmin} to {spec.qmax}")


def check_bias(name: str, bias: Tensor) -> None:
    """Raises ValueError unless a bias holds int32 or finite floats."""
    if not bias.is_floating_point():
        _require_dtype(name, bias, torch.int32)
    _require(name, bias, bias.isfinite(), "finite")


def check_same_dtype(name: str, found: Tensor, place: Tensor) -> None:
    """Raises ValueError unless a tensor has the dtype of its place in the model."""
    if found.dtype != place.dtype:
        raise ValueError(f"{name} is {_word(found.dtype)} in the file but {_word(place.dtype)} in the model")


def check_eps(name: str, eps: object) -> None:
    """Raises ValueError unless `eps` is a positive, finite float."""
    if not isinstance(eps, float) or not 0 < eps < math.inf:
        raise ValueError(f"{name} has `eps` {eps!r}, but it must be a positive, finite number")


def check_grid(name: str, spec: QuantSpec, scale: Tensor | None, zero_point: Tensor | None) -> None:
    """Raises ValueError unless the scale and zero point of a grid are valid for its spec."""
    if scale is None or zero_point is None:
        return
    if spec.has_block_scales:
        raise ValueError(f"{name} has a fixed scale, but the scales of its spec ({spec}) follow the data")
    check_scale(f"{name}.scale", scale)
    check_zero_point(f"{name}.zero_point", zero_point, scale, spec)
    wanted = 0 if spec.axis is None else len(blocks_of((1,) * 8, spec).parameters)
    if spec.granularity in ("tensor", "channel") and scale.dim() != wanted:
        raise ValueError(f"{name}.scale has shape {tuple(scale.shape)}, which does not fit the spec ({spec})")


def check_weight(name: str, layer: IntegerLayer) -> None:
    """Raises ValueError unless the codes, scales, zero points and biases of an integer layer are valid."""
    record, bias_name = layer._fakequant, layer._fakequant.kind.bias_name
    spec = record.weight_spec
    start = f"{name}." if name else ""
    check_scale(f"{start}weight_scale", layer.weight_scale)
    if layer.weight_zero_point is not None:
        check_zero_point(f"{start}weight_zero_point", layer.weight_zero_point, layer.weight_scale, spec)
    elif not spec.symmetric:
        raise ValueError(f"{start}weight_zero_point is missing, but the spec ({spec}) needs it")
    check_codes(f"{start}weight_codes", layer.weight_codes, record.weight_shape, spec)
    if layer.bias_codes is not None:
        _require_dtype(f"{start}bias_codes", layer.bias_codes, torch.int32)
    bias = layer._parameters.get(bias_name)
    if bias is not None:
        check_bias(f"{start}{bias_name}", bias)


def _require_dtype(name: str, value: Tensor, dtype: torch.dtype) -> None:
    if value.dtype != dtype:
        raise ValueError(f"{name} is {_word(value.dtype)}, but must be {_word(dtype)}")


def _require(name: str, value: Tensor, holds: Tensor, words: str) -> None:
    if not bool(holds.all()):
        bad = value.reshape(-1)[holds.reshape(-1).int().argmin()].item()
        raise ValueError(f"{name} has the value {bad:g}, but values must be {words}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
