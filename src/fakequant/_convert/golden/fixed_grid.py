"""`Grid`: a quantizer with its scale and zero point for good."""

from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._convert.golden.sums_to_codes import ARITHMETICS
from fakequant._convert.golden.tracked_codes import GridOf, on_grid, origin_of, plain, quantized
from fakequant.qparams import EPS
from fakequant.spec import QuantSpec


class Grid(nn.Module):
    """Puts a tensor on a grid, by the codes that the runtime has there.

    `scale` and `zero_point` are None where they are found for every tensor anew.

    >>> grid = Grid(QuantSpec(bits=4), torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))
    >>> grid(torch.tensor([0.3, 9.0]))
    tensor([0.5000, 3.5000])
    """

    scale: Tensor | None
    zero_point: Tensor | None

    def __init__(
        self,
        spec: QuantSpec,
        scale: Tensor | None,
        zero_point: Tensor | None,
        *,
        arithmetic: str = "reference",
        eps: float = EPS,
        path: str = "",
    ) -> None:
        super().__init__()
        self.spec, self.arithmetic, self.eps, self.path = spec, arithmetic, eps, path
        self.register_buffer("scale", None if scale is None else scale.detach().clone())
        self.register_buffer("zero_point", None if zero_point is None else zero_point.detach().clone())

    @property
    def has_one_scale(self) -> bool:
        """Whether a code stands for the same number everywhere in a tensor, whatever tensor it is."""
        return self.scale is not None and self.scale.dim() == 0

    def forward(self, x: Tensor) -> Tensor:
        """`x` on the grid."""
        with torch.no_grad():
            return self._quantized(x)

    def _quantized(self, x: Tensor) -> Tensor:
        if self.scale is not None and self.spec.axis is not None:
            zero_point: Any = 0 if self.spec.symmetric else self.zero_point
            return tensor_functions.fake_quantize(plain(x), self.scale, zero_point, self.spec)
        grid = self.grid_for(x)
        origin = origin_of(x)
        codes = quantized(x, grid) if origin is None else origin.codes(ARITHMETICS[self.arithmetic], grid)
        value = (codes - grid.zero_point) * grid.scale
        # As in training; a runtime has no code for it.
        return on_grid(torch.where(plain(x).isnan(), plain(x), value) if x.isnan().any() else value, grid)

    def grid_for(self, x: Tensor) -> GridOf:
        """The grid of `x`: in the shape of its tokens, if each has its own."""
        if self.scale is not None and self.zero_point is not None:
            return GridOf(self.scale, self.zero_point, self.spec)
        x = plain(x)
        seen = tensor_functions.min_max(x, self.spec)
        empty = seen.min > seen.max
        found = tensor_functions.choose_qparams(
            seen.min.masked_fill(empty, 0), seen.max.masked_fill(empty, 0), self.spec, eps=self.eps
        )
        if self.spec.granularity == "token":
            return GridOf(found.scale.reshape(*x.shape[:-1], 1), found.zero_point.reshape(*x.shape[:-1], 1), self.spec)
        return GridOf(found.scale, found.zero_point, self.spec)

    def extra_repr(self) -> str:
        """The spec and where the scale comes from."""
        return f"{self.spec}; {'found at run time' if self.scale is None else 'fixed'}"
