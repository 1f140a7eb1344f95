"""Forward passes for the export to LiteRT: one operator per quantizer, and one per quantized weight."""

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
    largest_sum,
    sums_have_one_scale,
    weight_levels,
)
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._export.layers import dynamic_grid, refuse_dynamic_lengths, stored_layer
from fakequant._export.litert.operators import GRID, TOKEN_GRID, WEIGHT
from fakequant._runtimes.litert.target import TOKEN_SPEC
from fakequant.nn._experts import ExpertProduct
from fakequant.nn._quantized_layer import Operator, input_grid_of, input_grids_of
from fakequant.nn._records import NAME
from fakequant.nn._saved_codes import linear, transposed_linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """The weight of a layer, or some rows of it, and the bias of one call."""

    # The path of the layer.
    path: str
    # Dequantized, in the shape that the function of torch takes.
    floats: Tensor
    # The codes in that shape, or None if the layer computes in float. One scale per index along `axis`.
    codes: Tensor | None = None
    scale: Tensor | None = None
    axis: int = 0
    bits: int = 8
    # The largest magnitude that a sum of products and the bias can have, if the input has one grid.
    largest_sum: float = 0.0
    # Codes of the bias and their scale per output, or None; the bias as floats, or None.
    bias: tuple[Tensor, Tensor] | None = None
    float_bias: Tensor | None = None


class Tables:
    """What the operators of a traced model refer to."""

    def __init__(self) -> None:
        # Weights by the key in the graph.
        self.weights: dict[str, Weight] = {}
        # The constants that the model's code reads, by key: a traced function must always see the same tensor.
        self.floats: dict[str, Tensor] = {}


class ExportedGrid(GoldenQuantizer):
    """A quantizer of a model that is being exported."""

    # Scale and zero point, or None if they are computed at run time.
    fixed: tuple[float, int] | None
    # Whether a kernel computes them, together with the layer that follows.
    is_in_kernel: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Rounds `x` to the grid, with a single operator if there is one."""
        if self.fixed is not None:
            y: Tensor = GRID(x, *self.fixed, self.spec.qmin, self.spec.qmax, self.path)
        elif self.is_in_kernel:
            y = TOKEN_GRID(x, self.path)
        else:
            y = dynamic_grid(x, self.spec, self.eps)
        return y


@dataclasses.dataclass(eq=False, kw_only=True)
class ExportedIntegers(Integers):
    """The record of a layer of a model that is being exported."""

    tables: Tables
    # The weight of the whole layer, and its bias for each call. Empty if the weight is a float parameter.
    per_call: tuple[Weight, ...] = ()

    def quantized_weight(self, layer: IntegerLayer) -> Tensor:
        """Returns the weight, in the shape of the layer's, for functions: the golden model computes them in float."""
        if not self.per_call:
            return super().quantized_weight(layer)
        weight, _ = self._traced(layer, slice(None))
        weight = weight if isinstance(layer, nn.Embedding) else self.per_call[0].floats
        return weight.T if is_transposed_linear(self) else weight

    def quantized_bias(self, layer: IntegerLayer) -> Tensor | None:
        """Returns the bias, or None."""
        return self._traced(layer, slice(None))[1] if self.per_call else float_bias(layer)

    def result(
        self, layer: IntegerLayer, operator: Operator, input: Tensor, rows: slice, given: Tensor | None = None
    ) -> Tensor:
        """Applies `operator` to floats. The graph becomes a kernel in integers where there is one."""
        x = self.quantize_input(layer, input)
        if not self.per_call:
            weight, bias = self.float_weight(layer, given), float_bias(layer)
            return operator(x, weight[rows], None if bias is None else bias[rows])
        weight, bias = self._traced(layer, rows)
        return (linear if operator is transposed_linear else operator)(x, weight, bias)

    def _traced(self, layer: IntegerLayer, rows: slice) -> tuple[Tensor, Tensor | None]:
        number = current_call(layer) if len(self.per_call) > 1 else 0
        key = f"{self.path}#{number}:{rows.start}:{rows.stop}"
        if key not in self.tables.weights:
            self.tables.weights[key] = made = _rows_of(self.per_call[number], rows)
            self.tables.floats[key] = made.floats
        found = self.tables.weights[key]
        return WEIGHT(found.floats, key), found.float_bias


def is_transposed_linear(record: Any) -> bool:
    """Returns True for a linear layer whose weight is stored with the inputs first."""
    return len(record.weight_shape) == 2 and record.kind.channel_axis == 1


def _rows_of(weight: Weight, rows: slice) -> Weight:
    if rows == slice(None):
        return weight

    def part(value: Tensor | None) -> Any:
        return None if value is None else value[rows].clone()

    bias = None if weight.bias is None else (part(weight.bias[0]), part(weight.bias[1]))
    return dataclasses.replace(
        weight,
        floats=part(weight.floats),
        codes=part(weight.codes),
        scale=part(weight.scale) if weight.axis == 0 else weight.scale,
        bias=bias,
        float_bias=part(weight.float_bias),
    )


@torch.no_grad()
def make_exportable(golden: nn.Module) -> Tables:
    """Prepares a converted model, in place and irreversibly, for torch's exporter."""
    for path, module in golden.named_modules():
        if isinstance(module, ExpertProduct):
            raise ValueError(  # noqa: TRY004
                f"{path} multiplies tokens by the weights of experts, which LiteRT has no form for.\n"
                "Use fakequant.export_onnx."
            )
    refuse_dynamic_lengths(golden, "Use dynamic_batch=False")
    tables = Tables()
    layers = [module for module in golden.modules() if isinstance(module, IntegerLayer)]
    for layer in layers:
        record = ExportedIntegers(**vars(layer._fakequant), tables=tables)
        if record.weight_spec is not None:
            record.per_call = _calls(layer, record)
            if _has_tokens(layer.input_quantizer):
                layer.input_quantizer.is_in_kernel = record.per_call[0].codes is not None
        layer.__dict__[NAME] = record
    for layer in layers:
        record = layer._fakequant
        if record.per_call:
            layer._parameters.pop(record.kind.bias_name, None)
            layer.__dict__[record.kind.bias_name] = record.per_call[0].float_bias
        for name in ("weight_codes", "weight_scale", "weight_zero_point", "bias_codes"):  # they are in the tables
            if name in layer._buffers:
                layer._buffers[name] = None
    for module in golden.modules():
        if isinstance(module, GoldenQuantizer):
            _export_grid(module)
    return tables


def _export_grid(grid: Any) -> None:
    """Turns a grid into an `ExportedGrid`, whose scale is a Python number."""
    has_scale = grid.has_one_scale
    if grid.scale is not None and not has_scale:
        raise ValueError(f"{grid.path} has more than one scale, which LiteRT has no form for.\nUse one per tensor.")
    grid.__class__ = ExportedGrid
    grid.fixed = (float(grid.scale), int(grid.zero_point)) if has_scale else None
    grid.scale = grid.zero_point = None


def _has_tokens(grid: Any) -> bool:
    """Returns True for a grid that kernels compute for every token."""
    return isinstance(grid, GoldenQuantizer) and grid.scale is None and grid.spec == TOKEN_SPEC


def _calls(layer: IntegerLayer, record: ExportedIntegers) -> tuple[Weight, ...]:
    """Returns the weight of a layer, with the bias of each call."""
    assert record.weight_spec is not None
    stored, axis = stored_layer(layer), record.kind.channel_axis
    is_linear = len(record.weight_shape) == 2
    is_flipped = is_transposed_linear(record)
    has_tokens = _has_tokens(input_grid_of(layer)) and is_linear and not is_flipped
    floats = float_weight(layer)
    floats = floats.T.contiguous() if is_flipped else floats
    own = float_biases(layer)
    usual = Weight(path=record.path, floats=floats, float_bias=own[0] if own else None)
    is_static = is_integer(layer)
    is_lookup = isinstance(layer, nn.Embedding)
    fits = stored.codes.dtype == torch.int8 and stored.zero_point is None and sums_have_one_scale(layer)
    if not fits or not (is_static or has_tokens or is_lookup):
        return tuple(dataclasses.replace(usual, float_bias=bias) for bias in own) or (usual,)
    codes = stored.codes
    scale = stored.scale.reshape(-1).expand(codes.shape[axis]).clone()
    if is_flipped:
        codes, axis = codes.T.contiguous(), 0
    bits = 4 if has_tokens and not is_static and record.weight_spec.bits <= 4 and codes.shape[1] % 2 == 0 else 8
    made = dataclasses.replace(usual, codes=codes, scale=scale, axis=axis, bits=bits)
    if not is_static:
        return (made,)
    levels = weight_levels(layer)
    largest = max(largest_sum(layer, grid.grid_for(levels), levels) for grid in input_grids_of(layer))
    made = dataclasses.replace(made, largest_sum=largest)
    if stored.biases:
        return tuple(
            dataclasses.replace(made, bias=(bias, step.expand(len(bias)).clone()), float_bias=floating)
            for (bias, step), floating in zip(stored.biases, own, strict=True)
        )
    return (made if not own else usual,)
