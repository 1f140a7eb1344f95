"""Layers that hold a frozen weight as packed codes, for LoRA: 4-bit weights take a sixth of their memory in float32.

    weight = dequantize(weight_codes, weight_scale, weight_zero_point)        computed whenever it is read

The values of the weight become those of its grid, and the scales of its quantizer are frozen. So a layer computes the
same as before, as long as nothing is added to its weight.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.checks import can_be_packed
from fakequant._backends.torch import tensor_functions
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._quantized_layer import QuantizedLayer, quantized_class

CODES, SCALE, ZERO_POINT = _BUFFERS = ("weight_codes", "weight_scale", "weight_zero_point")


class PackedLayer(QuantizedLayer):
    """The base of prepared layers that hold their weight as codes."""

    weight_codes: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None

    @property
    def weight(self) -> Tensor:
        """The values of the codes; within `given_weight`, the given tensor."""
        given: Tensor | None = self.__dict__.get("given")
        if given is not None:
            return given
        zero_point = 0 if self.weight_zero_point is None else self.weight_zero_point
        shape, dtype = self._fakequant.packed
        assert self.weight_quantizer is not None
        spec = self.weight_quantizer.spec
        known = shape if can_be_packed(spec) else None
        return tensor_functions.dequantize(
            self.weight_codes, self.weight_scale, zero_point, spec, shape=known, dtype=dtype
        )

    def packed_tensors(self) -> list[Tensor]:
        """Returns the tensors from which the weight is computed."""
        return [value for value in map(self._buffers.get, _BUFFERS) if value is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scale, (shape, dtype) = self.weight_scale, self._fakequant.packed
        found = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight_scale = scale.to(self.weight_scale.device)  # as scales of quantizers, it stays float32
        self._fakequant.packed = shape, fn(torch.empty(0, dtype=dtype, device=scale.device)).dtype
        return found


def require_packable(path: str, layer: Any) -> None:
    """Raises ValueError if a prepared layer cannot hold its weight as codes."""
    quantizer, weight = layer.weight_quantizer, layer._parameters.get("weight")
    reason = None
    if not isinstance(weight, nn.Parameter) or layer._fakequant.kind.weight_name != "weight":
        reason = "it is computed from other parameters"
    elif weight.requires_grad:
        reason = "it is trained"
    elif not quantizer.quantizing:
        reason = "its quantizer is switched off"
    elif quantizer._blocks is None or quantizer.spec.bits > 8:
        reason = f"its spec ({quantizer.spec}) has no fixed number of scales, or more than 8 bits"
    if reason is not None:
        raise ValueError(f"The weight of {path} cannot be held as codes: {reason}.\nUse packed=False.")


@torch.no_grad()
def pack(layer: Any) -> None:
    """Replaces the weight of a prepared layer, which must be packable, by codes."""
    quantizer, weight = layer.weight_quantizer, layer._parameters["weight"]
    training = quantizer.training
    quantizer.eval()(weight)  # a dynamic quantizer computes its scale now
    scale, zero_point = quantizer.qparams()
    quantizer.train(training)
    if isinstance(quantizer, FakeQuantize):
        quantizer.frozen = True
    spec = quantizer.spec
    shift = 0 if spec.symmetric else zero_point
    codes = tensor_functions.quantize(weight, scale, shift, spec, packed=can_be_packed(spec))
    layer._fakequant.packed = tuple(weight.shape), weight.dtype
    layer._parameters["weight"] = None  # keeps its place in the order of parameters
    for name, value in zip(_BUFFERS, (codes, scale, None if spec.symmetric else zero_point), strict=True):
        layer.register_buffer(name, value)
    layer.__class__ = quantized_class(layer._fakequant.float_class, PackedLayer)


def unpack(layer: Any) -> None:
    """Gives a layer its weight as floats again: the values of its codes, and no gradient."""
    weight = layer.weight
    for name in _BUFFERS:
        del layer._buffers[name]
    layer._fakequant.packed = None
    layer.__class__ = quantized_class(layer._fakequant.float_class)
    layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)


@contextmanager
def given_weight(layer: PackedLayer, weight: Tensor) -> Iterator[None]:
    """Context in which a layer has another weight."""
    layer.__dict__["given"] = weight
    try:
        yield
    finally:
        del layer.__dict__["given"]
