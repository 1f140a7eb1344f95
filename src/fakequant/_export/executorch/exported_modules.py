"""Forward passes for the export to ExecuTorch: one operator per quantizer, and weights as constants.

weight of an integer layer      codes and a dequantize operator, with one scale per output channel
other weights                   floats: XNNPACK multiplies them in float
biases                          floats, which XNNPACK quantizes to the codes of the golden model
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._convert.golden.integer_layer import (
    IntegerLayer,
    Integers,
    current_call,
    float_bias,
    float_biases,
    float_weight,
    is_integer,
    sums_have_one_scale,
)
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._export.executorch import graph
from fakequant._export.layers import dynamic_grid, refuse_dynamic_lengths, stored_layer
from fakequant._runtimes.xnnpack.arithmetic import float_of_codes
from fakequant._runtimes.xnnpack.target import TOKEN_SPEC
from fakequant.nn._experts import ExpertProduct
from fakequant.nn._quantized_layer import Operator, input_grid_of
from fakequant.nn._records import NAME
from fakequant.nn._saved_codes import linear, transposed_linear

# The values of quantizers in one forward pass, in the order of their calls: the path of the quantizer and its result.
Seen = list[tuple[str, Tensor]]


class DelegatedGrid(GoldenQuantizer):
    """A quantizer of a model that is being exported."""

    # Scale and zero point, or None if they are computed at run time.
    fixed: tuple[float, int] | None
    # Whether XNNPACK computes them, together with the layer that follows.
    is_delegated: bool = False
    # Where results are added if the scale is fixed.
    seen: Seen

    def forward(self, x: Tensor) -> Tensor:
        """Rounds `x` to the grid, with a single operator if there is one."""
        if self.fixed is not None:
            y = graph.GRID(x, *self.fixed, self.spec.qmin, self.spec.qmax, self.path)
            self.seen.append((self.path, y.clone()))  # the model's code may change `y` in place
        elif self.is_delegated:
            y = graph.TOKEN_GRID(x, self.path)
        else:
            y = dynamic_grid(x, self.spec, self.eps)
        return y


def _has_tokens(grid: Any) -> bool:
    """Returns True for a grid that XNNPACK computes for every token."""
    return isinstance(grid, GoldenQuantizer) and grid.scale is None and grid.spec == TOKEN_SPEC


@dataclasses.dataclass(frozen=True)
class Constants:
    """The tensors of a layer in the file."""

    # Codes in int8, or floats if the layer computes in float.
    weight: Tensor
    # One scale per output channel along `axis`, or None for floats.
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    axis: int = 0
    # One for each call with an input grid of its own. Empty if there is no bias.
    biases: tuple[Tensor, ...] = ()
    # The range of the codes. ExecuTorch stores codes from -8 to 7 in 4 bits.
    limits: tuple[int, int] = (graph.LOW, graph.HIGH)

    def float_weight(self) -> Tensor:
        """Returns the weight as the result of the operator that dequantizes its codes."""
        if self.scale is None:
            return self.weight
        weight: Tensor = torch.ops.quantized_decomposed.dequantize_per_channel.default(
            self.weight, self.scale, self.zero_point, self.axis, *self.limits, torch.int8
        )
        return weight

    def rows(self, rows: slice) -> "Constants":
        """Returns the constants of some rows of the weight."""
        if rows == slice(None):
            return self
        scale, zero_point = (v if v is None else v[rows].clone() for v in (self.scale, self.zero_point))
        biases = tuple(bias[rows].clone() for bias in self.biases)
        return dataclasses.replace(
            self, weight=self.weight[rows].clone(), scale=scale, zero_point=zero_point, biases=biases
        )

    def bias(self, layer: IntegerLayer) -> Tensor | None:
        """Returns the bias of the running call, or None."""
        return self.biases[current_call(layer)] if self.biases else None


@dataclasses.dataclass(eq=False, kw_only=True)
class DelegatedIntegers(Integers):
    """The record of a layer of a model that is being exported."""

    # By the first and the last row: (None, None) for the whole layer. Empty if the weight is a float parameter. Parts
    # are added when the layer is first called, which must happen before the model is traced.
    constants: dict[tuple[Any, Any], Constants] = dataclasses.field(default_factory=dict)
    # The weight as floats, if a function reads it. With codes, XNNPACK would compute the function in integers.
    floats: Tensor | None = None

    def quantized_weight(self, layer: IntegerLayer) -> Tensor:
        """Returns the weight, in the shape of the layer's, for functions: XNNPACK computes them in float."""
        if not self.constants:
            return super().quantized_weight(layer)
        if self.floats is None:
            self.floats = self._part(slice(None)).float_weight()
        return self.floats.T if self._is_transposed else self.floats

    def quantized_bias(self, layer: IntegerLayer) -> Tensor | None:
        """Returns the bias, or None."""
        return self._part(slice(None)).bias(layer) if self.constants else float_bias(layer)

    def result(
        self, layer: IntegerLayer, operator: Operator, input: Tensor, rows: slice, given: Tensor | None = None
    ) -> Tensor:
        """Applies `operator` to floats. XNNPACK fuses it with the operators around it into an integer kernel."""
        x = self.quantize_input(layer, input)
        if not self.constants:
            weight, bias = self.float_weight(layer, given), float_bias(layer)
            return operator(x, weight[rows], None if bias is None else bias[rows])
        part = self._part(rows)
        return (linear if operator is transposed_linear else operator)(x, part.float_weight(), part.bias(layer))

    @property
    def _is_transposed(self) -> bool:
        return _is_transposed_linear(self)

    def _part(self, rows: slice) -> Constants:
        key = (rows.start, rows.stop)
        if key not in self.constants:
            self.constants[key] = self.constants[None, None].rows(rows)
        return self.constants[key]


def _is_transposed_linear(record: Any) -> bool:
    return len(record.weight_shape) == 2 and record.kind.channel_axis == 1


@torch.no_grad()
def make_exportable(golden: nn.Module) -> Seen:
    """Prepares a converted model, in place and irreversibly, for torch's exporter.

    Returns a list to which the quantizers add their results whenever the model is called.
    """
    for path, module in golden.named_modules():
        if isinstance(module, ExpertProduct):
            raise ValueError(  # noqa: TRY004
                f"{path} multiplies tokens by the weights of experts, which ExecuTorch has no form for.\n"
                "Use fakequant.export_onnx."
            )
    refuse_dynamic_lengths(golden, "Leave `max_batch` out")
    seen: Seen = []
    layers = [module for module in golden.modules() if isinstance(module, IntegerLayer)]
    for layer in layers:
        record = DelegatedIntegers(**vars(layer._fakequant))
        if record.weight_spec is not None:
            made = record.constants[None, None] = _constants(layer, record)
            if _has_tokens(layer.input_quantizer):
                layer.input_quantizer.is_delegated = made.scale is not None
        layer.__dict__[NAME] = record
    for layer in layers:
        record = layer._fakequant
        if record.constants:
            layer._parameters.pop(record.kind.bias_name, None)
            layer.__dict__[record.kind.bias_name] = record.quantized_bias(layer)
        for name in ("weight_codes", "weight_scale", "weight_zero_point", "bias_codes"):  # they are in the constants
            if name in layer._buffers:
                layer._buffers[name] = None
    for module in golden.modules():
        if isinstance(module, GoldenQuantizer):
            _delegate(module, seen)
    return seen


def _delegate(grid: Any, seen: Seen) -> None:
    """Turns a grid into a `DelegatedGrid`, whose scale is a Python number. The file does not store it as a tensor."""
    has_scale = grid.scale is not None
    grid.__class__ = DelegatedGrid
    grid.seen, grid.fixed = seen, (float(grid.scale), int(grid.zero_point)) if has_scale else None
    grid.scale = grid.zero_point = None


def has_transposed_groups(layer: IntegerLayer) -> bool:
    """Returns True for a transposed convolution with groups, which XNNPACK computes in float only."""
    record = layer._fakequant
    return record.kind.channel_axis == 1 and len(record.weight_shape) > 2 and layer.groups > 1


def _constants(layer: IntegerLayer, record: DelegatedIntegers) -> Constants:
    """Returns the constants of a layer with a quantized weight."""
    assert record.weight_spec is not None
    stored = stored_layer(layer)
    axis = record.kind.channel_axis
    has_tokens = _has_tokens(input_grid_of(layer)) and axis == 0 and len(record.weight_shape) == 2
    in_integers = is_integer(layer) or (has_tokens and sums_have_one_scale(layer))
    in_integers &= not has_transposed_groups(layer)
    if not in_integers or stored.codes.dtype != torch.int8 or stored.zero_point is not None:
        weight = float_weight(layer)
        weight = weight.T.contiguous() if _is_transposed_linear(record) else weight
        return Constants(weight, biases=tuple(float_biases(layer)))
    codes = stored.codes
    scale = stored.scale.reshape(-1).expand(codes.shape[axis]).contiguous()
    added = tuple(float_of_codes(bias, step.expand(len(bias))) for bias, step in stored.biases)
    added = added or tuple(float_biases(layer))
    # Any scale suits a channel without weights and bias. Its own may be so small that XNNPACK refuses it.
    is_empty = (codes == 0).transpose(0, axis).flatten(1).all(1)
    for bias in added:
        is_empty &= bias == 0
    scale = torch.where(is_empty, scale.max(), scale)
    if _is_transposed_linear(record):
        codes, axis = codes.T.contiguous(), 0
    # ExecuTorch 1.5 multiplies wrongly by 4-bit weights with an odd number of inputs.
    is_packed = has_tokens and record.weight_spec.bits <= 4 and codes.shape[1] % 2 == 0
    limits = (-8, 7) if is_packed else (graph.LOW, graph.HIGH)
    return Constants(codes, scale, torch.zeros(len(scale), dtype=torch.int64), axis, added, limits)
