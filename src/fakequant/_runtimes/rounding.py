"""`Rounding`: how a runtime quantizes floats, where it does not divide by the scale as ONNX says.

Its codes differ from those of ONNX only at ties, and by one. Data can have many ties: pixels are multiples of 1/255.
Training calls it for the quantizers that `fakequant._prepare.input_rounding` chooses.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fakequant._backends.torch.formula import onnx_steps
from fakequant.spec import QuantSpec


class Rounding:
    """The base of all roundings. They have no state: a copy, and a pickle that is loaded, is the same object.

    Scales are scalars, and codes are integers in float32.
    """

    # What `rounding_of` finds it by.
    name: str
    # The grid of tokens whose scales the runtime computes at run time, by a rule of its own. None if it has none.
    token_spec: QuantSpec | None = None

    def codes(self, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Tensor:
        """Returns the codes of a float tensor, which are not clipped to the range of the spec."""
        raise NotImplementedError

    def tokens(self, x: Tensor) -> Tensor:
        """Fake-quantizes a tensor per token. The gradient is that of the identity."""
        raise NotImplementedError

    def moved(self, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Tensor:
        """Returns `x` with elements moved onto the grid, so that the rule of ONNX gives them the codes of the runtime.

        Only elements whose codes differ are moved, by half a step. The gradient is that of the identity. Scale and zero
        point are scalars.

        >>> class Up(Rounding):
        ...     def codes(self, x, scale, zero_point, spec):
        ...         return torch.floor(x / scale + 0.5) + zero_point
        >>> Up().moved(torch.tensor([0.5, 1.5, 1.6]), torch.tensor(1.0), torch.tensor(0), QuantSpec())
        tensor([1.0000, 1.5000, 1.6000])
        """
        with torch.no_grad():
            scale, zero_point = scale.detach(), zero_point.detach()
            theirs = self.codes(x, scale, zero_point, spec).clamp(spec.qmin, spec.qmax)
            ours = (onnx_steps(x.float(), scale) + zero_point).clamp(spec.qmin, spec.qmax)
            target = ((theirs - zero_point) * scale).to(x.dtype)
            step = torch.where((theirs != ours) & x.isfinite(), target - x, 0)
        return x + step

    def __repr__(self) -> str:
        return f"the rounding of {self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return rounding_of, (self.name,)


def rounding_of(name: str) -> Rounding:
    """Returns the rounding of a room, or of some of its kernels: "room", or "room/kernels"."""
    room, _, kernels = name.partition("/")
    module = import_module(f"fakequant._runtimes.{room}.rounding")
    found: Rounding = module.KERNELS[kernels] if kernels else module.ROUNDING
    return found
