"""Weights that a post-training method rounds: their grids, and how they are written."""

import dataclasses
from collections import Counter

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.grid_values import scale_of_each
from fakequant._diagnosis.inputs import qparams_for
from fakequant.nn._expert_product import ExpertProduct
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._owned_product import stored_weight
from fakequant.nn._quantizer import Quantizer


@dataclasses.dataclass(frozen=True)
class WeightGrid:
    """The weight of a layer, with the scale and zero point of every element.

    weight ~ (code - zero_point) * scale, qmin <= code <= qmax

    In a float format, codes are its values here, in units of the scale.
    """

    layer: AnyLayer
    weight: Tensor
    # Of the shape of the weight, float32.
    scale: Tensor
    zero_point: Tensor
    # As the quantizer has them.
    qparams: tuple[Tensor, Tensor]

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of the weight."""
        quantizer: Quantizer = self.layer.weight_quantizer
        return quantizer

    def codes(self, weight: Tensor) -> Tensor:
        """Returns the codes nearest to a weight, as floats."""
        return tensor_functions.quantize(weight, *self.qparams, self.quantizer.spec).float()

    @torch.no_grad()
    def write(self, codes: Tensor) -> None:
        """Sets the weight to the values of the codes, and keeps the scale from changing with it."""
        spec = self.quantizer.spec
        if spec.float_format is None:
            stored = codes.to(getattr(torch, spec.storage))
        else:  # values of the format, in units of the scale
            stored = tensor_functions.quantize(codes.float() * self.scale, *self.qparams, spec)
        values = tensor_functions.dequantize(stored, *self.qparams, spec, dtype=self.weight.dtype)
        keep_scale(self.quantizer, self.qparams)
        _write(self.layer, values)


def weight_grid(layer: AnyLayer, float_weight: Tensor | None = None) -> WeightGrid:
    """Returns the weight of a prepared layer and its grid, for which `reasons_against_rounding` has no reason.

    Args:
        layer: The layer.
        float_weight: The weight to round. None for that of the layer, which may be rounded already.
    """
    quantizer: Quantizer = layer.weight_quantizer
    weight: Tensor = layer._fakequant.kind.read_weight(layer).detach()
    scale, zero_point = qparams_for(quantizer, weight)
    spec = quantizer.spec
    steps = scale_of_each(scale, weight, spec)
    zeros = tensor_functions.quantize(torch.zeros_like(weight), scale, zero_point, spec)
    weight = weight if float_weight is None else float_weight.to(weight.dtype)
    return WeightGrid(layer, weight.clone(), steps, zeros.float(), (scale.clone(), zero_point.clone()))


@torch.no_grad()
def keep_scale(quantizer: Quantizer, qparams: tuple[Tensor, Tensor]) -> None:
    """Freezes a quantizer with this scale and zero point, if its scale would follow the weight."""
    if isinstance(quantizer, FakeQuantize):
        quantizer.scale.copy_(qparams[0])
        quantizer.zero_point.copy_(qparams[1])
        quantizer.frozen = True


def reasons_against_rounding(
    model: nn.Module, layers: dict[str, AnyLayer], *, needs_equal_steps: bool
) -> dict[str, str]:
    """Returns why the weights of some layers cannot be rounded in place, by path.

    Args:
        model: The prepared model.
        layers: Its layers, by path.
        needs_equal_steps: Whether the method does not round weights in float formats.
    """
    users = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    found = {}
    for path, layer in layers.items():
        reason = _reason(layer, users, needs_equal_steps)
        if reason is not None:
            found[path] = reason
    return found


def _reason(layer: AnyLayer, users: Counter[int], needs_equal_steps: bool) -> str | None:
    quantizer = layer.weight_quantizer
    if quantizer is None or not quantizer.quantizing:
        return "its weight is not quantized"
    if needs_equal_steps and quantizer.spec.float_format is not None:
        return f"its weight is in {quantizer.spec.format}, whose steps are not equal"
    kind = layer._fakequant.kind
    stored = stored_weight(layer, kind.weight_name)
    if not isinstance(stored, nn.Parameter):
        return "its weight is computed from other parameters"
    if users[id(stored)] > 1:
        return "its weight is shared with another layer"
    if kind.runs_float_forward and not torch.equal(kind.read_weight(layer), stored):
        return "its weight is computed from other parameters"
    return None


def _write(layer: AnyLayer, values: Tensor) -> None:
    stored = stored_weight(layer, layer._fakequant.kind.weight_name)
    if isinstance(layer, ExpertProduct):
        values = values.unflatten(0, (stored.shape[0], -1))
        values = values.transpose(1, 2) if layer.owner.is_transposed else values
    stored.copy_(values)
