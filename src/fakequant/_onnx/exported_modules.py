"""Forward passes for export: one operator per grid and per stored tensor.

`make_exportable` changes the grids and layers of a converted model so that they call the operators of
`onnx_operators`. The golden model itself does not depend on ONNX.
"""

import dataclasses

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.tensor_checks import block_shape
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import (
    IntegerLayer,
    Integers,
    bias_scale,
    float_weight,
    is_integer,
    part_of,
)
from fakequant._onnx import onnx_operators
from fakequant.nn._linear_function import linear
from fakequant.nn._quantized_layer import Operator
from fakequant.nn._records import NAME, find_record
from fakequant.nn._recurrent import Recurrence


@dataclasses.dataclass(frozen=True)
class Stored:
    """The tensors of one layer in a file. Scales and zero points have one entry per block."""

    # Bit width of the codes' type in the file.
    bits: int
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias_scale: Tensor | None


def stored_tensors(layer: IntegerLayer, bits: int) -> Stored:
    """Returns the tensors that a file stores for a converted layer with a quantized weight and codes of `bits` bits."""
    record = layer._fakequant
    spec = record.weight_spec
    scale = layer.weight_scale * 2.0**record.weight_shift
    zero_point = 0 if layer.weight_zero_point is None else layer.weight_zero_point
    codes = tensor_functions.quantize(float_weight(layer), scale, zero_point, spec)
    blocks = block_shape(record.weight_shape, spec) if spec.axis is not None else ()
    return Stored(
        bits=bits,
        codes=codes * 2**record.weight_shift if record.weight_shift else codes,
        scale=layer.weight_scale.reshape(blocks),
        zero_point=None if layer.weight_zero_point is None else layer.weight_zero_point.reshape(blocks),
        bias_scale=None if layer.bias_codes is None else bias_scale(layer),
    )


@dataclasses.dataclass(eq=False, kw_only=True)
class ExportedIntegers(Integers):
    """The record of a converted layer that is being exported."""

    # Computed before the model is traced. None if the weight is a float.
    stored: Stored | None = None

    def quantized_weight(self, layer: IntegerLayer) -> Tensor:
        """Returns the weight as the result of the operator that stores its codes."""
        if self.stored is None:
            return super().quantized_weight(layer)
        file = self.stored
        return onnx_operators.stored(file.codes, file.scale, file.zero_point, file.bits, self.name("weight"))

    def quantized_bias(self, layer: IntegerLayer) -> Tensor | None:
        """Returns the bias, as an operator that holds its codes if it has any."""
        if layer.bias_codes is None:
            return super().quantized_bias(layer)
        assert self.stored is not None
        assert self.stored.bias_scale is not None
        return onnx_operators.stored(layer.bias_codes, self.stored.bias_scale, None, 32, self.name("bias"))

    def result(
        self, layer: IntegerLayer, operator: Operator, input: Tensor, rows: slice, given: Tensor | None = None
    ) -> Tensor:
        """Applies `operator` to floats. Runtimes fuse it with the DQ and Q nodes around it into an integer kernel."""
        x = self.quantize_input(layer, input)
        weight, bias = self.float_weight(layer, given), self.quantized_bias(layer)
        weight, bias = weight[rows] if rows != slice(None) else weight, part_of(bias, rows)
        if operator is linear and x.dim() > 2:  # runtimes have one kernel for a 2-D product with bias
            return torch.unflatten(operator(x.flatten(0, -2), weight, bias), 0, (-1, *x.shape[1:-1]))
        return operator(x, weight, bias)


class DynamicLength(ValueError):
    """The length of a sequence is dynamic, and the steps of a recurrent layer cannot be written one by one."""


@dataclasses.dataclass(eq=False, kw_only=True)
class ExportedRecurrence(Recurrence):
    """The record of a recurrent layer that is being exported."""

    path: str

    def length(self, x: Tensor, axis: int) -> int:
        """Returns the number of steps. Raises DynamicLength if it is not fixed."""
        steps = x.shape[axis]
        if isinstance(steps, torch.SymInt):
            raise DynamicLength(
                f"The length of the sequences of {self.path or 'the recurrent layer'} is dynamic (axis {axis} of its "
                "input), but a file has one node for each step, so the length is that of the example.\n"
                "Use dynamic_batch=False, or `dynamic_shapes` that leave the axis of time out, such as "
                f"{{{1 - axis}: 'batch'}} for this input."
            )
        return steps


class ExportedGrid(Grid):
    """A grid of a model that is being exported."""

    def forward(self, x: Tensor) -> Tensor:
        """Rounds `x` to the grid, with a single operator if the scale is fixed."""
        spec = self.spec
        if self.scale is None or self.zero_point is None:
            return onnx_operators.dynamic_grid(x, spec, self.eps)
        shape = block_shape(tuple(x.shape), spec) if spec.axis is not None else ()
        scale, zero_point = self.scale.reshape(shape), self.zero_point.reshape(shape)
        return onnx_operators.grid(x, scale, zero_point, spec.qmin, spec.qmax, self.path)


@torch.no_grad()
def make_exportable(golden: nn.Module) -> None:
    """Prepares a converted model, in place and irreversibly, for torch's exporter."""
    for path, module in golden.named_modules():
        record = find_record(module)
        if isinstance(record, Recurrence):
            module.__dict__[NAME] = ExportedRecurrence(**vars(record), path=path)
        if isinstance(module, Grid):
            module.__class__ = ExportedGrid
        elif isinstance(module, IntegerLayer):
            record = module._fakequant
            stored = None
            if record.weight_spec is not None:
                bits = record.weight_spec.bits
                # Integer kernels read 8-bit weights, even if the codes have fewer bits.
                stored = stored_tensors(module, max(bits, 8) if is_integer(module) else bits)
            module.__dict__[NAME] = ExportedIntegers(**vars(record), stored=stored)
