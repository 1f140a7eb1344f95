"""How runtimes quantize floats, where they do not divide by the scale as ONNX says.

    openvino    rint(fma(clip(x, low, high), k, c)) + lowest      see `openvino_line`
    xnnpack     rint(x * (1 / scale)) + zero_point

Scales that XNNPACK computes at run time, one per token, are in `xnnpack_token_qparams`.

Their codes differ from those of ONNX only at ties, and by one. Data can have many ties: pixels are multiples of 1/255.
Scales are scalars, and codes are integers in float32 that are not clipped to the range of the spec.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fakequant._backends.torch.formula import onnx_steps
from fakequant._backends.torch.fused_multiply_add import fma
from fakequant.spec import QuantSpec

_STEPS = 255.0


def openvino_ends(scale: Tensor, zero_point: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """Returns `low` and `high`: the floats of the lowest and the highest code of the 8-bit type."""
    return scale * (lowest - zero_point).float(), scale * (lowest + 255 - zero_point).float()


def openvino_line(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factor `k` and the shift `c` of a quantizer.

    k = 255 / (high - low)
    c = -low * 255 / (high - low)
    """
    steps = torch.tensor(_STEPS, device=low.device)  # torch computes `number / tensor` with the reciprocal
    return steps / (high - low), -low * steps / (high - low)


def openvino_codes(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the codes of a float tensor in OpenVINO."""
    lowest = -128 if spec.signed else 0
    low, high = openvino_ends(scale, zero_point, lowest)
    x = torch.minimum(torch.maximum(x.float(), low), high)
    return torch.round(fma(*torch.broadcast_tensors(x, *openvino_line(low, high)))) + lowest


def xnnpack_codes(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the codes of a float tensor in XNNPACK."""
    return torch.round(x.float() * (1 / scale)) + zero_point


RULES: dict[str, Callable[[Tensor, Tensor, Tensor, QuantSpec], Tensor]] = {
    "openvino": openvino_codes,
    "xnnpack": xnnpack_codes,
}


def moved_from_ties(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, rule: str) -> Tensor:
    """Returns `x` with elements moved onto the grid, so that the rule of ONNX gives them the codes of a runtime.

    Only elements whose codes differ are moved, by half a step. The gradient is that of the identity.

    Args:
        x: The tensor.
        scale: The scale, a scalar.
        zero_point: The zero point, a scalar.
        spec: The grid.
        rule: A key of `RULES`.

    >>> x = torch.tensor([0.5, 0.7])
    >>> scale, zero = torch.tensor(1 / 255), torch.tensor(0)
    >>> moved_from_ties(x, scale, zero, QuantSpec(signed=False, symmetric=False), "openvino") / scale
    tensor([128.0000, 178.5000])
    """
    with torch.no_grad():
        scale, zero_point = scale.detach(), zero_point.detach()
        theirs = RULES[rule](x, scale, zero_point, spec).clamp(spec.qmin, spec.qmax)
        ours = (onnx_steps(x.float(), scale) + zero_point).clamp(spec.qmin, spec.qmax)
        target = ((theirs - zero_point) * scale).to(x.dtype)
        step = torch.where((theirs != ours) & x.isfinite(), target - x, 0)
    return x + step


def xnnpack_token_qparams(x: Tensor, axes: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the scale, the zero point and the factor `k` of each token. The axes are kept with length 1.

    low, high  = min(x, 0), max(x, 0)        over the axes
    k          = 255 / (high - low), or 1 if both are 0
    scale      = 1 / k
    zero_point = rint(clip(-128 - low * k))  if (-128 + low * k) + (127 + high * k) > 0
                 rint(clip(127 - high * k))  otherwise
    """
    low, high = x.amin(axes, keepdim=True).clamp_max(0), x.amax(axes, keepdim=True).clamp_min(0)
    steps = torch.tensor(_STEPS, device=x.device)  # torch computes `number / tensor` with the reciprocal
    k = torch.where(low == high, 1.0, steps / (high - low))
    first, last = low * k, high * k
    zero_point = torch.where((-128 + first) + (127 + last) > 0, -128 - first, 127 - last).clamp(-128, 127)
    return 1 / k, torch.round(zero_point), k


def xnnpack_token_codes(x: Tensor, axes: tuple[int, ...] = (-1,)) -> Tensor:
    """Returns clip(rint(x * k) + zero_point): the codes of tokens whose scales are computed at run time."""
    _, zero_point, k = xnnpack_token_qparams(x, axes)
    return (torch.round(x * k) + zero_point).clamp(-128, 127)


def xnnpack_tokens(x: Tensor) -> Tensor:
    """Fake-quantizes a tensor per token, as XNNPACK does. The gradient is that of the identity.

    >>> xnnpack_tokens(torch.tensor([[0.0, 1.0, 2.55]]))
    tensor([[0.0000, 1.0000, 2.5500]])
    """
    with torch.no_grad():
        data = x.float()
        scale, zero_point, _ = xnnpack_token_qparams(data)
        y = ((xnnpack_token_codes(data) - zero_point) * scale).to(x.dtype)
    return y + (x - x.detach())
