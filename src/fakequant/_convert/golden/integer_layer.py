"""Converted layers: they store codes instead of weights, and compute with them.

Like a prepared layer, a converted layer has a class derived from the float layer's class, with the forward pass of its
`LayerKind`. It has buffers for codes and scales, and an `Integers` record in `_fakequant`.
"""

import dataclasses
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from fakequant._backends.checks import can_be_packed
from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.formula import onnx_steps
from fakequant._backends.torch.grouped_linear import Groups
from fakequant._backends.torch.plain_memory import has_no_modes
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._convert.golden.tracked_codes import (
    EXACT_IN_FLOAT32,
    Accumulated,
    GridOf,
    OnGrid,
    origin_of,
    plain,
    track,
)
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._folding import along_outputs, has_one_scale_per_sum
from fakequant.nn._function_calls import not_watched
from fakequant.nn._quantized_layer import Operator, QuantizedLayer, input_grids_of
from fakequant.nn._records import LayerRecord, Operands
from fakequant.nn._saved_codes import linear
from fakequant.spec import QuantSpec

# True if float32 convolutions of integers are exact. On ARM, some use a transform that rounds.
_DIRECT_CONVOLUTIONS = platform.machine().lower() in ("x86_64", "amd64")


class IntegerLayer(QuantizedLayer):
    """The base class of all converted layers, for `isinstance`.

    A linear layer computes, without rounding, the sum

        sum_j (x_codes_j - x_zero_point) * (weight_codes_j - weight_zero_point) * 2^weight_shift  +  bias_codes

    and multiplies it by `x_scale * weight_scale`. If the input is not on an integer grid, the weight has a float
    format, or its scale varies within a sum, the layer computes in float with the dequantized weight.
    """

    # Codes of 2 and 4 bits, and of float formats of 6 bits, are packed into bytes.
    weight_codes: Tensor
    # The scale of `weight_levels`: the scale in training divided by 2^weight_shift.
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    # The bias at the scale of the sums. None if there is no bias or it is a float. A layer with a grid for the input of
    # each call has a row for each call.
    bias_codes: Tensor | None

    def __getattr__(self, name: str) -> Any:
        """Returns the weight and the bias as floats for model code that reads them. They are not stored."""
        record = self.__dict__.get("_fakequant")
        if isinstance(record, Integers):
            if name == record.kind.weight_name and record.weight_spec is not None:
                with not_watched():
                    return record.quantized_weight(self)
            if name == record.kind.bias_name and self._buffers.get("bias_codes") is not None:
                with not_watched():
                    return record.quantized_bias(self)
        return super().__getattr__(name)


@dataclasses.dataclass(eq=False, kw_only=True)
class Integers(LayerRecord):
    """The record of a converted layer: `layer._fakequant`."""

    base = IntegerLayer

    # The path of the layer in its model, for names in files and messages.
    path: str
    # None if the weight is a float.
    weight_spec: QuantSpec | None = None
    weight_shape: tuple[int, ...] = ()
    # Exported codes are multiplied by 2^weight_shift, at a scale that is 2^weight_shift times smaller.
    # See `fakequant._runtimes.target.weight_shift`.
    weight_shift: int = 0
    # The grid of the module that computes the input, if the layer has no `input_quantizer`.
    input_grid: GoldenQuantizer | None = None
    # True if a batch norm was folded into a linear layer, which is only correct for inputs of shape (batch, features).
    takes_vectors: bool = False
    # Whether the weight was rounded to a larger scale than in training, because its bias would not fit in 32 bits.
    is_widened: bool = False

    def quantize_input(self, layer: IntegerLayer, x: Tensor) -> Tensor:
        """Returns `x` on the grid of the layer's input."""
        return x if layer.input_quantizer is None else layer.input_quantizer(x)

    def quantized_weight(self, layer: IntegerLayer) -> Tensor:
        """Returns the dequantized weight, or the weight itself if it is a float."""
        if self.weight_spec is not None:
            return float_weight(layer)
        weight: Tensor = getattr(layer, self.kind.weight_name)
        return weight

    def float_weight(self, layer: IntegerLayer, given: Tensor | None) -> Tensor:
        """Returns the weight with which a layer computes in float: `given` if there is one and no codes."""
        return self.quantized_weight(layer) if given is None or self.weight_spec is not None else given

    def quantized_bias(self, layer: IntegerLayer) -> Tensor | None:
        """Returns the bias as a float, or None if the layer has none."""
        return float_bias(layer)

    def compute(
        self,
        layer: IntegerLayer,
        operator: Operator,
        input: Tensor,
        operands: Operands | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Quantizes the input and applies `operator` to it, the weight and the bias.

        Args:
            layer: The layer of this record.
            operator: A function of input, weight and bias, such as `F.linear`. It is given integers if sums have one
                scale, otherwise floats.
            input: The input, which need not be quantized.
            operands: None: calls share nothing but the codes.
            weight: Used instead of the layer's weight if that has no codes.
        """
        return self._compute_part(layer, operator, input, slice(None), weight)

    def _compute_part(
        self, layer: IntegerLayer, operator: Operator, input: Tensor, rows: slice, weight: Tensor | None = None
    ) -> Tensor:
        """Does the work of `compute` with some rows of the weight and the bias."""
        if self.takes_vectors and input.dim() != 2:
            raise ValueError(
                f"{self.path or 'The layer'} has a batch norm folded into it and takes inputs of shape (batch, "
                f"features), got {tuple(input.shape)}. With more axes, the batch norm would normalize another axis.\n"
                f"Leave the layer in float with config.skip({self.path!r})."
            )
        return self.result(layer, operator, input, rows, weight)

    def compute_rows(self, layer: IntegerLayer, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
        """Applies `operator` to each input and its part of the weight and the bias.

        Weight and bias are split along axis 0 into equal parts, one per input.
        """
        rows = self.weight_shape[0] if self.weight_spec is not None else len(getattr(layer, self.kind.weight_name))
        size = rows // len(inputs)
        return [self._compute_part(layer, operator, x, slice(i * size, (i + 1) * size)) for i, x in enumerate(inputs)]

    @torch.no_grad()
    def compute_groups(self, layer: IntegerLayer, input: Tensor, groups: Groups) -> Tensor:
        """Multiplies each row with the part of the weight that `groups` says. The result is an ordinary tensor.

        Runtimes join the results of the parts as floats, so that no sums reach the next quantizer.
        """
        x = self.quantize_input(layer, input)
        origin = origin_of(x)
        if self.weight_spec is None or not isinstance(origin, OnGrid) or not sums_have_one_scale(layer):
            return groups.linear(plain(x), self.quantized_weight(layer), float_bias(layer))
        grid, weight = origin.grid, weight_levels(layer)
        dtype = _wide_enough(weight, largest_sum(layer, grid, weight))
        bias = None if layer.bias_codes is None else layer.bias_codes.to(dtype)
        sums = groups.linear(onnx_steps(plain(x), grid.scale).to(dtype), weight.to(dtype), bias)
        value = sums.float() * (grid.scale * groups.rows_of(layer.weight_scale))
        floating = None if layer.bias_codes is not None else getattr(layer, self.kind.bias_name, None)
        return value if floating is None else value + groups.rows_of(floating)

    def name(self, tensor: str) -> str:
        """Returns the name of one of the layer's tensors in a file."""
        return f"{self.path}.{tensor}" if self.path else tensor

    @torch.no_grad()
    def result(
        self, layer: IntegerLayer, operator: Operator, input: Tensor, rows: slice, given: Tensor | None = None
    ) -> Tensor:
        """Does the work of `compute`, whose arguments it takes, after the input was checked."""
        x = self.quantize_input(layer, input)
        origin = origin_of(x)
        if self.weight_spec is None or not isinstance(origin, OnGrid) or not sums_have_one_scale(layer):
            return operator(plain(x), self.float_weight(layer, given)[rows], part_of(float_bias(layer), rows))
        grid = origin.grid
        levels = onnx_steps(plain(x), grid.scale)
        weight = weight_levels(layer)
        largest = largest_sum(layer, grid, weight)
        dtype = _wide_enough(weight, largest)
        bias = bias_codes_of(layer)
        bias = None if bias is None else bias.to(dtype)
        sums = operator(levels.to(dtype), weight[rows].to(dtype), part_of(bias, rows))
        weight_scale = self._along_channels(part_of(along_outputs(layer, layer.weight_scale), rows))
        scale = self._along_channels(part_of(along_outputs(layer, sum_scale(layer, grid.scale)), rows))
        value = sums.float() * scale
        floating = None if layer.bias_codes is not None else getattr(layer, self.kind.bias_name, None)
        if floating is not None:
            return value + self._along_channels(floating[rows])
        added = None if bias is None else self._along_channels(part_of(bias, rows))
        totals = _totals(layer, weight, rows) if operator is linear else None
        codes = levels + grid.zero_point
        return track(value, Accumulated(sums, scale, layer, codes, grid, weight_scale, added, totals, largest))

    def _along_channels(self, value: Tensor) -> Tensor:
        """Reshapes values per output channel so that they broadcast with the sums."""
        spatial = len(self.weight_shape) - 2
        return value if value.dim() == 0 or spatial == 0 else value.reshape(-1, *[1] * spatial)


class _Kept(NamedTuple):
    """A tensor that was computed from the codes of a weight."""

    value: Tensor
    # What it was computed from: tensors or None, and how often they and `value` had been changed by then.
    sources: tuple[Tensor | None, ...]
    versions: list[int]
    shift: int

    def is_current(self, sources: tuple[Tensor | None, ...], shift: int) -> bool:
        """Returns True if computing it again from these sources would return the same."""
        is_same = shift == self.shift and all(a is b for a, b in zip(sources, self.sources, strict=True))
        return is_same and _versions(self.value, *sources) == self.versions


class KeptWeights:
    """What layers compute from their codes only, kept outside of them for callers that run a model many times.

    It has as much memory as the weights in float. A weight that is changed or replaced is computed again. Passes in a
    mode, such as one that adds rounding errors, use what was kept but add nothing to it.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[IntegerLayer, str], _Kept] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which layers use it."""
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)

    def clear(self) -> None:
        """Forgets everything."""
        self._values.clear()

    def find(self, layer: IntegerLayer, what: str, compute: Callable[[], Tensor]) -> Tensor:
        """Returns the value that was kept under a name, or computes it."""
        sources = layer.weight_codes, layer.weight_scale, layer.weight_zero_point
        shift: int = layer._fakequant.weight_shift
        if any(source is not None and source.is_inference() for source in sources):
            return compute()  # changes of such tensors cannot be seen
        kept = self._values.get((layer, what))
        if kept is not None and kept.is_current(sources, shift):
            return kept.value
        value = compute()
        if has_no_modes() and not value.is_inference():
            self._values[layer, what] = _Kept(value, sources, _versions(value, *sources), shift)
        return value


_in_use: ContextVar[KeptWeights | None] = ContextVar("kept weights", default=None)


def _versions(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor._version for tensor in tensors]


def _kept(layer: IntegerLayer, what: str, compute: Callable[[], Tensor]) -> Tensor:
    """Returns what `compute` returns, which must depend on the codes of the weight only."""
    weights = _in_use.get()
    return compute() if weights is None else weights.find(layer, what, compute)


def weight_levels(layer: IntegerLayer) -> Tensor:
    """Returns (codes - zero point) * 2^weight_shift, in float32 and in the shape of the weight."""

    def compute() -> Tensor:
        return _dequantized(layer, torch.full_like(layer.weight_scale, 2.0**layer._fakequant.weight_shift))

    return _kept(layer, "levels", compute)


def float_weight(layer: IntegerLayer) -> Tensor:
    """Returns the dequantized weight: `weight_levels * weight_scale`."""

    def compute() -> Tensor:
        return _dequantized(layer, layer.weight_scale * 2.0**layer._fakequant.weight_shift)

    return _kept(layer, "floats", compute)


def _totals(layer: IntegerLayer, weight: Tensor, rows: slice) -> Tensor:
    """Returns the sum of the levels of each row. `weight` is `weight_levels(layer)`."""
    if rows != slice(None):
        return weight[rows].sum(1)
    return _kept_sum(layer, "totals", lambda: weight.sum(1))


def _kept_sum(layer: IntegerLayer, what: str, compute: Callable[[], Tensor]) -> Tensor:
    """Does the same as `_kept`, but computes in every pass in a mode: it may add rounding errors to sums."""
    return _kept(layer, what, compute) if has_no_modes() else compute()


def set_weight(layer: IntegerLayer, weight: Tensor) -> None:
    """Quantizes a weight and stores its codes, packed if they can be."""
    spec = layer._fakequant.weight_spec
    scale = layer.weight_scale * 2.0**layer._fakequant.weight_shift
    zero_point = 0 if layer.weight_zero_point is None else layer.weight_zero_point
    layer.weight_codes = tensor_functions.quantize(weight, scale, zero_point, spec, packed=can_be_packed(spec))


def set_levels(layer: IntegerLayer, levels: Tensor) -> None:
    """Stores the codes of a symmetric weight. `levels` are as `weight_levels` returns them."""
    spec = dataclasses.replace(layer._fakequant.weight_spec, axis=None, group_size=None)
    step = torch.tensor(2.0**layer._fakequant.weight_shift)
    layer.weight_codes = tensor_functions.quantize(levels, step, 0, spec, packed=can_be_packed(spec))


def is_packed(layer: IntegerLayer) -> bool:
    """Returns True if several codes of the weight share a byte."""
    shape: tuple[int, ...] = layer._fakequant.weight_shape
    return layer.weight_codes.shape != shape


def _dequantized(layer: IntegerLayer, scale: Tensor) -> Tensor:
    record = layer._fakequant
    zero_point = 0 if layer.weight_zero_point is None else layer.weight_zero_point
    shape = record.weight_shape if is_packed(layer) else None
    return tensor_functions.dequantize(layer.weight_codes, scale, zero_point, record.weight_spec, shape=shape)


def is_integer(layer: IntegerLayer) -> bool:
    """Returns True if a layer computes with integers: the scales of input and weight do not vary within a sum."""
    have_scale = all(
        isinstance(grid, GoldenQuantizer) and grid.has_one_scale and grid.spec.format == "int"
        for grid in input_grids_of(layer)
    )
    return have_scale and layer._fakequant.weight_spec is not None and sums_have_one_scale(layer)


def sums_have_one_scale(layer: IntegerLayer) -> bool:
    """Returns True if a layer's weight is an integer with one scale in every sum of products."""
    record = layer._fakequant
    return has_one_scale_per_sum(layer, record.weight_spec, len(record.weight_shape))


def sum_scale(layer: IntegerLayer, x_scale: Tensor) -> Tensor:
    """Returns the scale of the sums of products. Runtimes compute this product in float32 too."""
    return x_scale * layer.weight_scale


def bias_scales(layer: IntegerLayer) -> list[Tensor]:
    """Returns the scale of `bias_codes`, per output channel, for each call that has a grid for its input."""
    return [along_outputs(layer, sum_scale(layer, grid.scale)) for grid in input_grids_of(layer)]


def biases(layer: IntegerLayer) -> list[tuple[Tensor, Tensor]]:
    """Returns the codes of the bias and their scale for each call. Empty if there are no codes."""
    codes = layer.bias_codes
    if codes is None:
        return []
    return list(zip(codes if has_call_grids(layer) else [codes], bias_scales(layer), strict=True))


def has_call_grids(layer: IntegerLayer) -> bool:
    """Returns True if a layer has a grid for the input of each call."""
    return isinstance(layer.input_quantizer, CallQuantizers)


def current_call(layer: IntegerLayer) -> int:
    """Returns the number of the running call, which has its own bias. 0 if all calls have the same."""
    return layer.input_quantizer.calls.current if has_call_grids(layer) else 0


def bias_codes_of(layer: IntegerLayer) -> Tensor | None:
    """Returns the codes of the bias in the running call."""
    codes = layer.bias_codes
    return codes[current_call(layer)] if codes is not None and has_call_grids(layer) else codes


def float_biases(layer: IntegerLayer) -> list[Tensor]:
    """Returns the bias as floats for each call that has a grid for its input. Empty if there is no bias."""
    if layer.bias_codes is not None:
        return [codes.float() * scale for codes, scale in biases(layer)]
    bias: Tensor | None = getattr(layer, layer._fakequant.kind.bias_name, None)
    return [] if bias is None else [bias] * len(input_grids_of(layer))


def float_bias(layer: IntegerLayer) -> Tensor | None:
    """Returns the bias of the running call as floats, or None if there is no bias."""
    found = float_biases(layer)
    return found[current_call(layer)] if found else None


def largest_sum(layer: IntegerLayer, grid: GridOf, weight: Tensor) -> float:
    """Returns the largest magnitude of a sum of products with the bias. `weight` is `weight_levels(layer)`."""
    zero = int(grid.zero_point) if grid.zero_point.numel() == 1 else None
    spec = grid.spec
    largest = spec.levels if zero is None else max(spec.qmax - zero, zero - spec.qmin)
    axes = [axis for axis in range(weight.dim()) if axis != layer._fakequant.kind.channel_axis]
    sums = _kept_sum(layer, "magnitudes", lambda: weight.abs().sum(axes, dtype=torch.float64))
    bound = largest * float(sums.max())
    return bound if layer.bias_codes is None else bound + float(layer.bias_codes.abs().max())


def _wide_enough(weight: Tensor, largest: float) -> torch.dtype:
    """Returns a float type in which no partial sum is rounded."""
    # Other devices may multiply float32 with fewer bits, for example TF32.
    is_exact = weight.is_cpu and (weight.dim() == 2 or _DIRECT_CONVOLUTIONS)
    is_exact = is_exact and torch.get_float32_matmul_precision() == "highest"
    return torch.float32 if is_exact and largest < EXACT_IN_FLOAT32 else torch.float64


@overload
def part_of(value: Tensor, rows: slice) -> Tensor: ...
@overload
def part_of(value: Tensor | None, rows: slice) -> Tensor | None: ...
def part_of(value: Tensor | None, rows: slice) -> Tensor | None:
    """Returns some rows of a bias, or of scales per output channel. None and scalars are returned unchanged."""
    if value is None or value.dim() == 0 or rows == slice(None):  # no slice of all rows: exported tensors keep names
        return value
    return value[..., rows]
