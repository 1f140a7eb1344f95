"""Weights in float formats, or with scales of few bits, as a file stores them."""

import dataclasses

from torch import Tensor

from fakequant._backends.blocks import group_length
from fakequant._backends.torch import tensor_functions
from fakequant._convert.golden.integer_layer import IntegerLayer, is_packed, weight_levels
from fakequant._onnx import format_operators
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class StoredFormat:
    """The codes and scales of a weight in a file. There are no zero points, and the bias is a float."""

    spec: QuantSpec
    # One per element: bit patterns of a float format, or int8.
    codes: Tensor
    # float32, one per block.
    scale: Tensor

    zero_point: None = None
    biases: tuple[()] = ()
    is_transposed: bool = False

    def weight(self, name: str) -> Tensor:
        """Returns the dequantized weight as the result of the operator that stores its codes."""
        spec = self.spec
        axis, block = axis_and_block(spec, tuple(self.codes.shape))
        return format_operators.stored_format(self.codes, self.scale, spec.format, spec.scale_format, axis, block, name)

    def values(self) -> Tensor:
        """Returns the values of the codes, without the scales."""
        return tensor_functions.dequantize(self.codes, 1.0, 0, _without_scales(self.spec))


def stored_format(layer: IntegerLayer) -> StoredFormat:
    """Returns what a file stores for the weight of a converted layer."""
    spec = layer._fakequant.weight_spec
    codes = layer.weight_codes
    if is_packed(layer):
        codes = tensor_functions.quantize(weight_levels(layer), 1.0, 0, _without_scales(spec))
    return StoredFormat(spec, codes, layer.weight_scale)


def _without_scales(spec: QuantSpec) -> QuantSpec:
    return dataclasses.replace(spec, axis=None, group_size=None, scale_format="float32", scale_rule="floor")


def axis_and_block(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the axis of scales, or 0 without one, and how many elements share a scale along it, or 0 for channels."""
    if spec.axis is None:
        return 0, 0
    axis = spec.axis % len(shape)
    return axis, 0 if spec.group_size is None else group_length(shape[axis], spec)
