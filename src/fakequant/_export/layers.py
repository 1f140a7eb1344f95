"""What every exporter makes of a golden model: the tensors of its layers, dynamic grids, and recurrent layers."""

import dataclasses

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.formula import onnx_steps
from fakequant._backends.torch.tensor_checks import block_shape
from fakequant._convert.golden.integer_layer import IntegerLayer, biases, float_weight
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant.nn._records import NAME, find_record
from fakequant.nn._recurrent import Recurrence, Sequences
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """The tensors of a layer with a quantized weight. Scales and zero points have one entry per block."""

    # In the shape of the weight, one code per element, times 2^weight_shift.
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    # Codes and scale of the bias for each call with an input grid of its own. Empty if the bias has no codes.
    biases: tuple[tuple[Tensor, Tensor], ...] = ()


def stored_layer(layer: IntegerLayer) -> StoredLayer:
    """Returns the tensors of a converted layer whose weight has integer codes."""
    record = layer._fakequant
    spec = record.weight_spec
    scale = layer.weight_scale * 2.0**record.weight_shift
    zero_point = 0 if layer.weight_zero_point is None else layer.weight_zero_point
    codes = tensor_functions.quantize(float_weight(layer), scale, zero_point, spec)
    blocks = block_shape(record.weight_shape, spec) if spec.axis is not None else ()
    return StoredLayer(
        codes=codes * 2**record.weight_shift if record.weight_shift else codes,
        scale=layer.weight_scale.reshape(blocks),
        zero_point=None if layer.weight_zero_point is None else layer.weight_zero_point.reshape(blocks),
        # Copies: a row of another tensor would not be a constant of the traced program.
        biases=tuple((codes.clone(), scale) for codes, scale in biases(layer)),
    )


# Why a layer whose weight is quantized is computed in float.
NO_INPUT = "its input is not quantized"
# The largest number of bits that integer kernels take.
_BITS = 8


def reason_for_float(weight: QuantSpec, grid: GoldenQuantizer | None) -> str | None:
    """Returns why no runtime has an integer kernel for a layer, or None if one may have.

    `weight` is the spec of its weight, and `grid` the grid of its input, or None if that is a float.
    """
    for name, spec in (("weight", weight), ("input", None if grid is None else grid.spec)):
        if spec is not None and spec.format != "int":
            return f"its {name} is {spec.format}; sums of products of floats are floats"
    if weight.group_size is not None:
        return "its weight has groups, for which there is no integer kernel"
    if grid is None:
        return NO_INPUT
    if grid.scale is None:
        return "the scale of its input is computed at run time"
    if not grid.has_one_scale:
        return "its input has more than one scale"
    for name, spec in (("weight", weight), ("input", grid.spec)):
        if spec.bits > _BITS:
            return f"its {name} has {spec.bits} bits; integer kernels take at most {_BITS}"
    return None


def dynamic_grid(x: Tensor, spec: QuantSpec, eps: float) -> Tensor:
    """Fake-quantizes `x` with a scale that is computed at run time, in operations that exporters have.

    Equals `min_max`, `choose_qparams` and `fake_quantize` for a finite tensor that is not empty.
    """
    axes = tuple(range(x.dim())) if spec.axis is None else (spec.axis,)
    lo, hi = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
    if spec.symmetric:
        scale = (torch.maximum(-lo, hi) / ((spec.qmax - spec.qmin) / 2)).clamp(min=eps)
        zero = torch.zeros(())
    else:
        scale = ((hi - lo) / (spec.qmax - spec.qmin)).clamp(min=eps)
        zero = (spec.qmin - onnx_steps(lo, scale)).clamp(spec.qmin, spec.qmax)
    return (torch.clamp(onnx_steps(x, scale) + zero, spec.qmin, spec.qmax) - zero) * scale


class DynamicLength(ValueError):
    """The length of a sequence is dynamic, and the steps of a recurrent layer cannot be written one by one."""


@dataclasses.dataclass(eq=False, kw_only=True)
class ExportedRecurrence(Recurrence):
    """The record of a recurrent layer that is being exported."""

    path: str
    # How to write a file for a fixed length.
    advice: str

    def sequences(self, x: Tensor, axis: int) -> Sequences:
        """Returns sequences whose steps are written one by one. Raises DynamicLength if their length is not fixed."""
        if isinstance(x.shape[axis], torch.SymInt):
            raise DynamicLength(
                f"The length of the sequences of {self.path or 'the recurrent layer'} is dynamic (axis {axis} of its "
                "input), but a file has one node for each step, so the file keeps the length of the example.\n"
                f"{self.advice}, or use `dynamic_shapes` that leave the axis of time out, such as "
                f"{{{1 - axis}: 'batch'}} for this input."
            )
        return super().sequences(x, axis)


def refuse_dynamic_lengths(golden: nn.Module, advice: str) -> None:
    """Makes recurrent layers say why a dynamic length is refused, in place."""
    for path, module in golden.named_modules():
        record = find_record(module)
        if isinstance(record, Recurrence):
            module.__dict__[NAME] = ExportedRecurrence(**vars(record), path=path, advice=advice)
