"""Converted layers: layers that hold codes instead of weights, and compute with them.

Like a prepared layer, a converted layer is an instance of a class derived from the layer's own, with the forward pass
of its `LayerKind`. It has buffers for codes and scales, and an `Integers` record in `_fakequant`.
"""

import dataclasses
import platform
from typing import Any

import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.tracked_codes import Accumulated, OnGrid, origin_of, plain, track
from fakequant.nn._deployed_bias import along_outputs, has_one_scale_per_sum
from fakequant.nn._quantized_layer import Operator, QuantizedLayer, input_grid_of, reduced
from fakequant.nn._records import LayerRecord
from fakequant.spec import QuantSpec

# Whether the CPU's convolutions sum products as they are: on ARM some are transformed first, which rounds.
_DIRECT_CONVOLUTIONS = platform.machine().lower() in ("x86_64", "amd64")
# Integers up to here are exact in float32, and so are all sums of them that stay below it.
_EXACT_IN_FLOAT32 = 2**24


class IntegerLayer(QuantizedLayer):
    """The base of all converted layers, for `isinstance`.

        sum_j (x_codes_j - x_zero_point) * (weight_codes_j - weight_zero_point) * 2^weight_shift  +  bias_codes

    without rounding, times `x_scale * weight_scale`. Where the input is not on a grid of one scale, or scales of
    the weight vary along the sum, the layer computes with the numbers that the codes stand for, in float.
    """

    # Packed below 8 bits, where the spec can be packed.
    weight_codes: Tensor
    # What one unit of `weight_levels` stands for: the scale of training over 2^weight_shift.
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    # At the scale of the sums; None: there is no bias, or it is a float.
    bias_codes: Tensor | None

    def __getattr__(self, name: str) -> Any:
        """Returns the weight and the bias as floats, for model code that reads them; they are not stored."""
        record = self.__dict__.get("_fakequant")
        if isinstance(record, Integers):
            if name == record.kind.weight_name and record.weight_spec is not None:
                return record.quantized_weight(self)
            if name == record.kind.bias_name and self._buffers.get("bias_codes") is not None:
                return record.quantized_bias(self)
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, IntegerLayer)


@dataclasses.dataclass(eq=False, kw_only=True)
class Integers(LayerRecord):
    """The record of a converted layer: `layer._fakequant`."""

    base = IntegerLayer

    # The path of the layer in its model, for names in files and messages.
    path: str
    # None: the weight is a float.
    weight_spec: QuantSpec | None = None
    weight_shape: tuple[int, ...] = ()
    # Codes times 2^weight_shift are what a byte in a file holds, at a scale that is 2^weight_shift smaller.
    weight_shift: int = 0
    # The grid of the module that computes the input, if the layer has no `input_quantizer`.
    input_grid: Any = None
    # A batch norm was folded in that normalizes the channels of vectors, not of tokens.
    takes_vectors: bool = False

    def quantize_input(self, layer: Any, x: Tensor) -> Tensor:
        """`x` on the grid of the layer's input."""
        return x if layer.input_quantizer is None else layer.input_quantizer(x)

    def quantized_weight(self, layer: Any) -> Tensor:
        """The numbers that the codes of the weight stand for."""
        if self.weight_spec is None:
            return getattr(layer, self.kind.weight_name)
        return float_weight(layer)

    def quantized_bias(self, layer: Any) -> Tensor | None:
        """The bias as a float; None if there is none."""
        return float_bias(layer)

    def compute(self, layer: Any, operator: Operator, input: Tensor, rows: slice = slice(None)) -> Tensor:
        """`operator` of codes if input and weight have one scale per sum, else of floats.

        `rows` selects a part of the weight and the bias.
        """
        if self.takes_vectors and input.dim() != 2:
            raise ValueError(
                f"{self.path or 'The layer'} has a batch norm folded into it, which holds for inputs of shape "
                f"(batch, features); it was given {tuple(input.shape)}, where the batch norm is of another axis.\n"
                f"Leave the layer in float: config.skip({self.path!r})."
            )
        return self.result(layer, operator, input, rows)

    def compute_rows(self, layer: Any, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
        """`operator` of each input with its part of the weight and the bias, cut into equal parts along axis 0."""
        rows = self.weight_shape[0] if self.weight_spec is not None else len(getattr(layer, self.kind.weight_name))
        size = rows // len(inputs)
        return [self.compute(layer, operator, x, slice(i * size, (i + 1) * size)) for i, x in enumerate(inputs)]

    def name(self, tensor: str) -> str:
        """The name of one of the layer's tensors in a file."""
        return f"{self.path}.{tensor}" if self.path else tensor

    @torch.no_grad()
    def result(self, layer: Any, operator: Operator, input: Tensor, rows: slice) -> Tensor:
        """`compute`, when the input has been checked."""
        x = self.quantize_input(layer, input)
        origin = origin_of(x)
        if self.weight_spec is None or not isinstance(origin, OnGrid) or not _sums_have_one_scale(layer):
            return operator(plain(x), self.quantized_weight(layer)[rows], part_of(float_bias(layer), rows))
        grid = origin.grid
        levels = torch.round(plain(x) / grid.scale)
        weight = weight_levels(layer)
        dtype = _wide_enough(layer, grid, weight)
        bias = None if layer.bias_codes is None else layer.bias_codes.to(dtype)
        sums = operator(levels.to(dtype), weight[rows].to(dtype), part_of(bias, rows))
        scale = self._along_channels(part_of(along_outputs(layer, sum_scale(layer, grid.scale)), rows))
        value = sums.float() * scale
        floating = None if layer.bias_codes is not None else getattr(layer, self.kind.bias_name, None)
        if floating is not None:
            return value + self._along_channels(floating[rows])
        return track(value, Accumulated(sums, scale, layer, levels + grid.zero_point, grid.zero_point))

    def _along_channels(self, value: Tensor) -> Tensor:
        """Values per output channel in a shape that broadcasts with the sums."""
        spatial = len(self.weight_shape) - 2
        return value if value.dim() == 0 or spatial == 0 else value.reshape(-1, *[1] * spatial)


def weight_levels(layer: Any) -> Tensor:
    """Codes minus zero point times 2^weight_shift, in float32, in the shape of the weight."""
    return _dequantized(layer, torch.full_like(layer.weight_scale, 2.0**layer._fakequant.weight_shift))


def float_weight(layer: Any) -> Tensor:
    """The numbers that the codes of the weight stand for: `weight_levels * weight_scale`."""
    return _dequantized(layer, layer.weight_scale * 2.0**layer._fakequant.weight_shift)


def set_weight(layer: Any, weight: Tensor) -> None:
    """Stores the codes of a weight, packed if several fit in a byte."""
    spec = layer._fakequant.weight_spec
    scale = layer.weight_scale * 2.0**layer._fakequant.weight_shift
    zero_point: Any = 0 if layer.weight_zero_point is None else layer.weight_zero_point
    layer.weight_codes = tensor_functions.quantize(weight, scale, zero_point, spec, packed=spec.bits in (2, 4))


def set_levels(layer: Any, levels: Tensor) -> None:
    """Stores codes of a symmetric grid that are given as `weight_levels` returns them."""
    spec = dataclasses.replace(layer._fakequant.weight_spec, axis=None, group_size=None)
    step = torch.tensor(2.0**layer._fakequant.weight_shift)
    layer.weight_codes = tensor_functions.quantize(levels, step, 0, spec, packed=spec.bits in (2, 4))


def is_packed(layer: Any) -> bool:
    """Whether several codes of the weight share a byte."""
    return tuple(layer.weight_codes.shape) != layer._fakequant.weight_shape


def _dequantized(layer: Any, scale: Tensor) -> Tensor:
    record = layer._fakequant
    zero_point: Any = 0 if layer.weight_zero_point is None else layer.weight_zero_point
    shape = record.weight_shape if is_packed(layer) else None
    return tensor_functions.dequantize(layer.weight_codes, scale, zero_point, record.weight_spec, shape=shape)


def is_integer(layer: Any) -> bool:
    """Whether a layer computes with integers: input and weight have scales that do not vary within a sum."""
    grid = input_grid_of(layer)
    has_scale = isinstance(grid, Grid) and grid.has_one_scale
    return has_scale and layer._fakequant.weight_spec is not None and _sums_have_one_scale(layer)


def _sums_have_one_scale(layer: Any) -> bool:
    record = layer._fakequant
    return has_one_scale_per_sum(layer, record.weight_spec, len(record.weight_shape))


def sum_scale(layer: Any, x_scale: Tensor) -> Tensor:
    """The scale of sums of products, in float32, as runtimes multiply it."""
    return x_scale * layer.weight_scale


def bias_scale(layer: Any) -> Tensor:
    """The scale of `bias_codes`, per output channel."""
    grid = input_grid_of(layer)
    return along_outputs(layer, sum_scale(layer, grid.scale))


def float_bias(layer: Any) -> Tensor | None:
    """The bias as a float; None if there is none."""
    if layer.bias_codes is None:
        return getattr(layer, layer._fakequant.kind.bias_name, None)
    return layer.bias_codes.float() * bias_scale(layer)


def _wide_enough(layer: Any, grid: Any, weight: Tensor) -> torch.dtype:
    """A float type in which no partial sum is rounded."""
    zero = int(grid.zero_point) if grid.zero_point.numel() == 1 else None
    spec = grid.spec
    largest = spec.levels if zero is None else max(spec.qmax - zero, zero - spec.qmin)
    axes = [axis for axis in range(weight.dim()) if axis != layer._fakequant.kind.channel_axis]
    bound = largest * float(weight.abs().double().sum(axes).max())
    if layer.bias_codes is not None:
        bound += float(layer.bias_codes.abs().max())
    # On other devices products of float32 may be of fewer bits.
    plainly = weight.is_cpu and (weight.dim() == 2 or _DIRECT_CONVOLUTIONS)
    plainly = plainly and torch.get_float32_matmul_precision() == "highest"
    narrow = bound < _EXACT_IN_FLOAT32 and plainly
    return torch.float32 if narrow else torch.float64


def part_of(value: Any, rows: slice) -> Any:
    """The rows of a bias, or of scales per output channel; None of None."""
    if value is None or value.dim() == 0 or rows == slice(None):  # all of it: a slice would hide its name in a file
        return value
    return value[..., rows]
