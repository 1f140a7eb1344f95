"""Forward passes for export: one operator per grid and per stored tensor.

`make_exportable` changes the grids and layers of a converted model so that they call the operators of
`operators`. The golden model itself does not depend on ONNX.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.torch.grouped_linear import Groups
from fakequant._backends.torch.tensor_checks import block_shape
from fakequant._convert.convert import conversion
from fakequant._convert.golden.integer_layer import (
    IntegerLayer,
    Integers,
    current_call,
    float_bias,
    has_call_grids,
    is_integer,
    part_of,
    sums_have_one_scale,
)
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._export.layers import StoredLayer, dynamic_grid, stored_layer
from fakequant._export.notes import call_name
from fakequant._export.onnx import operators
from fakequant._export.onnx.formats import (
    StoredFormat,
    axis_and_block,
    dynamic_format_grid,
    rounded,
    stored_format,
)
from fakequant._export.onnx.recurrent import make_recurrences_scans
from fakequant._prepare.attach import attach_layer
from fakequant._runtimes import find
from fakequant._runtimes.target import DYNAMIC_SPEC, SMALLEST_DYNAMIC_SCALE, WeightRules
from fakequant.nn._experts import ExpertProduct
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._quantized_layer import QUANTIZERS, Operator, input_grid_of
from fakequant.nn._records import NAME
from fakequant.nn._saved_codes import linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored(StoredLayer):
    """The tensors of one layer in a file.

    The weight of a linear layer whose input has no fixed scale is stored transposed, with the shape (inputs, outputs):
    ONNX Runtime has kernels that read codes only for products with such a matrix.
    """

    # Bit width of the codes' type in the file.
    bits: int
    is_transposed: bool = False

    def weight(self, name: str) -> Tensor:
        """Returns the dequantized weight as the result of the operator that stores its codes."""
        return operators.stored(self.codes, self.scale, self.zero_point, self.bits, name)

    def transposed(self) -> "Stored":
        """Returns the same with codes, scales and zero points transposed."""
        zero_point = None if self.zero_point is None else _transposed(self.zero_point)
        return dataclasses.replace(
            self,
            codes=_transposed(self.codes),
            scale=_transposed(self.scale),
            zero_point=zero_point,
            is_transposed=not self.is_transposed,
        )


def _transposed(value: Tensor) -> Tensor:
    return value if value.dim() < 2 else value.T.contiguous()


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """The tensors of a part of a layer's weight in a file: the arguments of the operator `stored`, without the name."""

    weight: tuple[Tensor, Tensor, Tensor | None, int]
    bias: tuple[Tensor, Tensor, None, int] | None


def part_name(number: int) -> str:
    """Returns what is added to the name of a tensor if a file stores it in parts.

    >>> part_name(3)
    '[3]'
    """
    return f"[{number}]"


def bias_name(layer: IntegerLayer, call: int) -> str:
    """Returns the name of the bias of a call in a file."""
    return f"bias{part_name(call)}" if has_call_grids(layer) else "bias"


def stored_tensors(layer: IntegerLayer, bits: int) -> Stored:
    """Returns the tensors that a file stores for a converted layer with a quantized weight and codes of `bits` bits."""
    made = Stored(**vars(stored_layer(layer)), bits=bits)
    return made.transposed() if _has_float_input(layer) or has_dynamic_kernel(layer) else made


def _is_linear(layer: IntegerLayer) -> bool:
    record = layer._fakequant
    is_linear = record.kind.has_input and record.kind.channel_axis == 0 and len(record.weight_shape) == 2
    return is_linear and not isinstance(layer, ExpertProduct)  # the weights of experts are stored one by one


def _has_float_input(layer: IntegerLayer) -> bool:
    """Returns True for a linear layer with a quantized weight only."""
    return _is_linear(layer) and input_grid_of(layer) is None


def has_dynamic_kernel(layer: IntegerLayer) -> bool:
    """Returns True for a linear layer with a dynamic input for which runtimes have an integer kernel."""
    grid = layer.input_quantizer
    if not isinstance(grid, GoldenQuantizer) or grid.scale is not None or grid.spec != DYNAMIC_SPEC:
        return False
    has_limit = grid.eps > SMALLEST_DYNAMIC_SCALE  # the kernels have none
    return not has_limit and _is_linear(layer) and layer._fakequant.weight_spec.bits <= 8 and sums_have_one_scale(layer)


def stored_parts(layer: IntegerLayer, stored: Stored, number: int) -> tuple[StoredPart, ...]:
    """Returns the tensors of a layer cut into equal parts along the first axis of its weight."""

    def cut(value: Tensor | None) -> list[Any]:
        if value is None or value.dim() == 0 or len(value) == 1:
            return [value] * number
        return [part.clone() for part in value.chunk(number)]

    weights = zip(cut(stored.codes), cut(stored.scale), cut(stored.zero_point), [stored.bits] * number, strict=True)
    parts: Iterable[Any] = [None] * number
    if stored.biases:
        (bias,) = stored.biases  # products of experts have one grid for their input
        parts = zip(*map(cut, bias), [None] * number, [32] * number, strict=True)
    return tuple(StoredPart(weight, bias) for weight, bias in zip(weights, parts, strict=True))


def tensors_in_file(golden: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a file may store for a converted model, with their names in the file."""
    for path, module in golden.named_modules():
        yield from _tensors_of(module, path).items()


def _tensors_of(module: nn.Module, path: str) -> dict[str, Tensor]:
    start = f"{path}." if path else ""
    found: dict[str, Tensor] = {
        f"{start}{name}": value for name, value in module._parameters.items() if value is not None
    }
    if isinstance(module, GoldenQuantizer):
        if module.scale is not None and module.zero_point is not None:
            found[f"{path}_scale"] = module.scale
        return found
    if isinstance(module, IntegerLayer) and module._fakequant.weight_spec is not None:
        if not module._fakequant.weight_spec.is_integer:
            stored = stored_format(module)
            # Codes are compared as values: some formats are stored in the type of another one.
            return found | {f"{start}weight_codes": stored.values(), f"{start}weight_scale": stored.scale}
        exported = stored_tensors(module, 8)
        if isinstance(module, ExpertProduct):
            return found | _parts_of(module, exported, start)
        found |= {f"{start}weight_codes": exported.codes, f"{start}weight_scale": exported.scale}
        if exported.zero_point is not None:
            found[f"{start}weight_zero_point"] = exported.zero_point
        for call, (codes, scale) in enumerate(exported.biases):
            bias = start + bias_name(module, call)
            found |= {f"{bias}_codes": codes, f"{bias}_scale": scale}
    return found


def _parts_of(product: Any, stored: Stored, start: str) -> dict[str, Tensor]:
    """Returns the tensors of a product of experts by name. A file stores each expert separately."""
    found: dict[str, Tensor] = {}
    for number, part in enumerate(stored_parts(product, stored, product.owner.num_experts)):
        for tensor, values in (("weight", part.weight), ("bias", part.bias)):
            for name, value in zip(("codes", "scale", "zero_point"), values or (), strict=False):
                if isinstance(value, Tensor):
                    found[f"{start}{tensor}{part_name(number)}_{name}"] = value
    return found


@dataclasses.dataclass(eq=False, kw_only=True)
class ExportedIntegers(Integers):
    """The record of a converted layer that is being exported."""

    # Computed before the model is traced. None if the weight is a float.
    stored: Stored | StoredFormat | None = None
    # The same, cut into one part per expert. Empty for other layers, and for weights in float formats.
    parts: tuple[StoredPart, ...] = ()

    def quantized_weight(self, layer: IntegerLayer) -> Tensor:
        """Returns the weight as the result of the operator that stores its codes."""
        if self.stored is None:
            return super().quantized_weight(layer)
        weight = self.stored.weight(self.name("weight"))
        return weight.T if self.stored.is_transposed else weight

    def quantized_bias(self, layer: IntegerLayer) -> Tensor | None:
        """Returns the bias, as an operator that holds its codes if it has any."""
        if layer.bias_codes is None:
            return super().quantized_bias(layer)
        assert isinstance(self.stored, Stored)
        call = current_call(layer)
        return operators.stored(*self.stored.biases[call], None, 32, self.name(bias_name(layer, call)))

    def compute_groups(self, layer: IntegerLayer, input: Tensor, groups: Groups) -> Tensor:
        """Multiplies the rows of each group by themselves, with a part of the weight that the file stores by itself.

        Runtimes have integer kernels for these products.
        """
        x = self.quantize_input(layer, input)
        grid = layer.input_quantizer if isinstance(layer.input_quantizer, GoldenQuantizer) else None
        results = []
        for number, (weight, bias) in enumerate(self._operands_of_groups(layer, groups.number)):
            rows = x.index_select(0, (groups.experts == number).nonzero().squeeze(1))
            if grid is not None and grid.has_one_scale and grid.spec.format == "int":
                # Again, because runtimes look for the quantizer right before the product.
                rows = operators.grid(*grid_of(grid, rows), f"{grid.path}.{part_name(number)}")
            results.append(linear(rows, weight, bias))
        return torch.cat(results)

    def _operands_of_groups(self, layer: IntegerLayer, number: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields the weight and the bias of each group."""
        if not self.parts:
            bias = float_bias(layer)
            biases = [None] * number if bias is None else bias.chunk(number)
            yield from zip(self.quantized_weight(layer).chunk(number), biases, strict=True)
        floating = None if layer.bias_codes is not None else float_bias(layer)
        for i, part in enumerate(self.parts):
            weight = operators.stored(*part.weight, self.name(f"weight{part_name(i)}"))
            if part.bias is not None:
                yield weight, operators.stored(*part.bias, self.name(f"bias{part_name(i)}"))
            else:
                yield weight, None if floating is None else floating.chunk(number)[i]

    def result(
        self, layer: IntegerLayer, operator: Operator, input: Tensor, rows: slice, given: Tensor | None = None
    ) -> Tensor:
        """Applies `operator` to floats. Runtimes fuse it with the DQ and Q nodes around it into an integer kernel."""
        file = self.stored
        if operator is linear and file is not None and rows == slice(None) and has_dynamic_kernel(layer):
            names, bias = (self.name("weight"), layer.input_quantizer.next_call()), self.quantized_bias(layer)
            y = operators.dynamic_product(input, file.codes, file.scale, file.zero_point, *names)
            return y if bias is None else y + bias
        x = self.quantize_input(layer, input)
        if operator is linear and file is not None and file.is_transposed:
            weight, bias = file.weight(self.name("weight")), part_of(self.quantized_bias(layer), rows)
            # With three axes at least: ONNX Runtime merges a 2-D product with what follows it, and then reads no codes.
            y = x if x.dim() > 2 else x.unsqueeze(0)
            y = y @ (weight if rows == slice(None) else weight[:, rows])
            y = y if bias is None else y + bias
            return y if x.dim() > 2 else y.squeeze(0)
        weight, bias = self.float_weight(layer, given), self.quantized_bias(layer)
        weight, bias = weight[rows] if rows != slice(None) else weight, part_of(bias, rows)
        if operator is linear and x.dim() > 2:  # runtimes have one kernel for a 2-D product with bias
            return torch.unflatten(operator(x.flatten(0, -2), weight, bias), 0, (-1, *x.shape[1:-1]))
        return operator(x, weight, bias)


class ExportedGrid(GoldenQuantizer):
    """A grid of a model that is being exported."""

    # How often each grid has been called in the current pass, by path.
    calls: Counter[str]

    def next_call(self) -> str:
        """Counts a call, and returns its name."""
        number = self.calls[self.path]
        self.calls[self.path] += 1
        return call_name(self.path, number)

    def forward(self, x: Tensor) -> Tensor:
        """Rounds `x` to the grid, with a single operator if the scale is fixed."""
        spec = self.spec
        if not spec.is_integer:
            return self._on_format(x)
        if self.scale is None or self.zero_point is None:
            return dynamic_grid(x, spec, self.eps)
        return operators.grid(*grid_of(self, x), self.next_call())

    def _on_format(self, x: Tensor) -> Tensor:
        spec = self.spec
        if self.scale is None:
            return dynamic_format_grid(x, spec, self.eps, self.path)
        axis, block = axis_and_block(spec, tuple(x.shape))
        if spec.bits == 8:
            return operators.format_grid(x, self.scale, spec.format, axis, block, self.next_call())
        scale = operators.spread(self.scale, x.shape, axis, block)
        return rounded(x / scale, spec, self.path) * scale


def grid_of(grid: GoldenQuantizer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Returns the arguments of the operator that rounds `x` to a grid with a fixed scale, without the name."""
    assert grid.scale is not None
    assert grid.zero_point is not None
    spec = grid.spec
    shape = block_shape(tuple(x.shape), spec) if spec.axis is not None else ()
    return x, grid.scale.reshape(shape), grid.zero_point.reshape(shape), spec.qmin, spec.qmax


@torch.no_grad()
def make_exportable(golden: nn.Module) -> Counter[str]:
    """Prepares a converted model, in place and irreversibly, for torch's exporter.

    Returns what will count the calls of its grids.
    """
    calls: Counter[str] = Counter()
    weights = find(conversion(golden).target).weights
    make_recurrences_scans(golden)
    golden.register_forward_pre_hook(lambda *_: calls.clear())
    for path, module in golden.named_modules():
        if isinstance(module, ExpertProduct) and not isinstance(module, IntegerLayer):
            _make_layer(module, path)  # its float function has no form in ONNX
        if isinstance(module, GoldenQuantizer):
            if module.scale is None and module.spec.is_integer and module.spec.granularity == "group":
                raise ValueError(
                    f"{path} is {module.spec}, with scales computed at run time, which ONNX has no operators for.\n"
                    "Use a scale per tensor, per head or per token, or MXFP8."
                )
            module.__class__ = ExportedGrid
            module.__dict__["calls"] = calls
        elif isinstance(module, IntegerLayer):
            record = module._fakequant
            stored: Stored | StoredFormat | None = None
            if record.weight_spec is not None and not record.weight_spec.is_integer:
                stored = stored_format(module)
            elif record.weight_spec is not None:
                stored = stored_tensors(module, _stored_bits(module, weights))
            parts: tuple[StoredPart, ...] = ()
            if isinstance(module, ExpertProduct) and isinstance(stored, Stored):
                parts = stored_parts(module, stored, module.owner.num_experts)
            module.__dict__[NAME] = ExportedIntegers(**vars(record), stored=stored, parts=parts)
            if stored is not None:
                # A quarter of the float weights, and `stored` has them too.
                module._buffers["weight_codes"] = None
    return calls


def forget_codes(golden: nn.Module) -> None:
    """Lets go of the codes of a model that was exported. It cannot be exported again."""
    for module in golden.modules():
        record = module.__dict__.get(NAME)
        if isinstance(record, ExportedIntegers):
            record.stored, record.parts = None, ()


def _stored_bits(layer: IntegerLayer, rules: WeightRules) -> int:
    """Returns the width of the type that stores the codes of a layer's weight."""
    bits: int = layer._fakequant.weight_spec.bits
    if is_integer(layer):
        return max(bits, 8)  # integer kernels read 8-bit weights, even if the codes have fewer bits
    if bits <= 4 and not rules.packs_odd_rows and _has_float_input(layer) and layer._fakequant.weight_shape[1] % 2:
        return 8
    if bits <= 2 and _has_float_input(layer) and layer._fakequant.weight_shape[0] % 4:
        return 4  # ONNX Runtime 1.31 multiplies wrongly by 2-bit matrices unless their width is a multiple of 4
    return bits


def _make_layer(product: ExpertProduct, path: str) -> None:
    """Turns a product that stays in float into a converted layer without codes and grids."""
    kind = find_kind(type(product))
    assert kind is not None
    attach_layer(product, Integers(kind=kind, float_class=type(product), path=path), dict.fromkeys(QUANTIZERS))
    product.register_buffer("bias_codes", None)
