"""How LiteRT quantizes floats.

XNNPACK and the optimized kernels multiply by the reciprocal of the scale: rint(x * (1 / scale)) + zero_point, and
tokens have scales of their own. The reference divides, and rounds ties away from zero.
"""

import torch
from torch import Tensor

from fakequant._runtimes.litert.target import RUNTIME, TOKEN_SPEC
from fakequant._runtimes.reciprocal_rounding import ReciprocalRounding
from fakequant._runtimes.rounding import Rounding
from fakequant.spec import QuantSpec


def away(x: Tensor) -> Tensor:
    """Returns the nearest integers, ties away from zero.

    >>> away(torch.tensor([0.5, -2.5, 2.4]))
    tensor([ 1., -3.,  2.])
    """
    return (torch.floor(x.double().abs() + 0.5) * x.sign()).to(x.dtype)


class DividingRounding(Rounding):
    """The rounding of the reference."""

    name = "litert/reference"

    def codes(self, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Tensor:
        """Returns the codes of a float tensor."""
        return away(x.float() / scale) + zero_point


ROUNDING = ReciprocalRounding(RUNTIME.room, TOKEN_SPEC)
KERNELS = {"builtin": ROUNDING, "reference": DividingRounding()}
