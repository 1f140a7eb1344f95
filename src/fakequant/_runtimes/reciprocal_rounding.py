"""`ReciprocalRounding`: of kernels that multiply by the reciprocal of a scale, rint(x * (1 / scale)) + zero_point.

`token_qparams` has the scales of tokens.
"""

import torch
from torch import Tensor

from fakequant._runtimes.rounding import Rounding
from fakequant.spec import QuantSpec

_STEPS = 255.0


def token_qparams(x: Tensor, axes: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor, Tensor]:
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


def token_codes(x: Tensor, axes: tuple[int, ...] = (-1,)) -> Tensor:
    """Returns clip(rint(x * k) + zero_point): the codes of tokens whose scales are computed at run time."""
    _, zero_point, k = token_qparams(x, axes)
    return (torch.round(x * k) + zero_point).clamp(-128, 127)


def reciprocal_codes(x: Tensor, scale: Tensor | float, zero_point: Tensor | int) -> Tensor:
    """Returns the codes of floats, which are not clipped.

    >>> reciprocal_codes(torch.tensor([6.0, -1.0]), 0.5, -3)
    tensor([ 9., -5.])
    """
    return torch.round(x.float() * (1 / torch.as_tensor(scale, dtype=torch.float32))) + zero_point


def reciprocal_code(number: float, scale: Tensor | float, zero_point: Tensor | int) -> int:
    """Returns the code of a number, which is not clipped."""
    return int(reciprocal_codes(torch.tensor(number), scale, zero_point))


class ReciprocalRounding(Rounding):
    """The rounding of a room whose runtime has this rule."""

    def __init__(self, name: str, token_spec: QuantSpec) -> None:
        self.name, self.token_spec = name, token_spec

    def codes(self, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Tensor:
        """Returns the codes of a float tensor."""
        return reciprocal_codes(x, scale, zero_point)

    def tokens(self, x: Tensor) -> Tensor:
        """Fake-quantizes a tensor per token. The gradient is that of the identity.

        >>> ReciprocalRounding("room", QuantSpec().per_token()).tokens(torch.tensor([[0.0, 1.0, 2.55]]))
        tensor([[0.0000, 1.0000, 2.5500]])
        """
        with torch.no_grad():
            data = x.float()
            scale, zero_point, _ = token_qparams(data)
            y = ((token_codes(data) - zero_point) * scale).to(x.dtype)
        return y + (x - x.detach())
