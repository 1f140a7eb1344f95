"""How OpenVINO quantizes floats: rint(fma(clip(x, low, high), k, c)) + lowest, where `line` has `k` and `c`."""

import torch
from torch import Tensor

from fakequant._backends.torch.fused_multiply_add import fma
from fakequant._runtimes.rounding import Rounding
from fakequant.spec import QuantSpec

_STEPS = 255.0


def ends(scale: Tensor, zero_point: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """Returns `low` and `high`: the floats of the lowest and the highest code of the 8-bit type."""
    return scale * (lowest - zero_point).float(), scale * (lowest + 255 - zero_point).float()


def line(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factor `k` and the shift `c` of a quantizer.

    k = 255 / (high - low)
    c = -low * 255 / (high - low)
    """
    steps = torch.tensor(_STEPS, device=low.device)  # torch computes `number / tensor` with the reciprocal
    return steps / (high - low), -low * steps / (high - low)


class OpenVinoRounding(Rounding):
    """The rule of OpenVINO."""

    name = "openvino"

    def codes(self, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Tensor:
        """Returns the codes of a float tensor."""
        lowest = -128 if spec.signed else 0
        low, high = ends(scale, zero_point, lowest)
        x = torch.minimum(torch.maximum(x.float(), low), high)
        return torch.round(fma(*torch.broadcast_tensors(x, *line(low, high)))) + lowest


ROUNDING = OpenVinoRounding()
