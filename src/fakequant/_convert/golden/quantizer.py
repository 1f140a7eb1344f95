"""`GoldenQuantizer`: the quantizer of activations in a golden model."""

import torch
from torch import Tensor, nn

from fakequant._backends.blocks import blocks_of
from fakequant._backends.checks import EPS
from fakequant._backends.torch import tensor_functions
from fakequant._convert.golden.tracked_codes import Arithmetic, GridOf, on_grid, origin_of, plain, was_moved
from fakequant._runtimes.arithmetic import find_arithmetic
from fakequant.functional import fake_quantize
from fakequant.spec import QuantSpec


class GoldenQuantizer(nn.Module):
    """Quantizes activations to the same codes as the runtime.

    Args:
        spec: The spec of the activation.
        scale: The scale. If None, it is dynamic: scale and zero point are computed from each tensor.
        zero_point: The zero point. None if `scale` is None.
        arithmetic: How sums become codes: one of `ARITHMETICS`.
        eps: The smallest dynamic scale.
        path: The path of the quantizer in the model.

    >>> fixed = GoldenQuantizer(QuantSpec(bits=4), torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))
    >>> fixed(torch.tensor([0.3, 9.0]))
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
        # Whether it returns ordinary tensors: caches would keep the origins of tracked ones alive.
        self.is_plain = False
        self.register_buffer("scale", None if scale is None else scale.detach().clone())
        self.register_buffer("zero_point", None if zero_point is None else zero_point.detach().clone())

    @property
    def has_one_scale(self) -> bool:
        """Whether the scale is fixed and the same for all elements of a tensor."""
        return self.scale is not None and self.scale.dim() == 0

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` on the grid, as a tracked tensor if it is an integer grid whose scales vary along no axis."""
        with torch.no_grad():
            return plain(self._quantized(x)) if self.is_plain else self._quantized(x)

    def _quantized(self, x: Tensor) -> Tensor:
        if self.scale is not None and self.spec.axis is not None:
            return fake_quantize(plain(x), self.scale, 0 if self.spec.symmetric else self.zero_point, self.spec)
        if not self.spec.is_integer or (self.scale is None and self.spec.granularity == "group"):
            return self._rounded(plain(x))
        grid, origin, arithmetic = self.grid_for(x), origin_of(x), self.arithmetic_in_use
        if grid.scale.dim() > 0 and was_moved(origin):
            origin = None  # the scales of tokens are those after the move
        codes = arithmetic.from_float(plain(x), grid) if origin is None else origin.codes(arithmetic, grid)
        value = (codes - grid.zero_point) * grid.scale
        # NaN stays NaN as in training. Runtimes have no code for it.
        return on_grid(torch.where(plain(x).isnan(), plain(x), value) if x.isnan().any() else value, grid)

    def _rounded(self, x: Tensor) -> Tensor:
        """Returns `x` on the grid of a float format, or with scales of blocks or groups that follow the data.

        Layers compute with these as floats.
        """
        if self.scale is not None:
            return fake_quantize(x, self.scale, 0, self.spec)
        blocks = blocks_of(tuple(x.shape), self.spec).parameters
        low = torch.full(blocks, torch.inf, dtype=torch.float32, device=x.device)
        seen = tensor_functions.observe_fake_quantize(
            x, self.spec, low, -low, update="dynamic", averaging_constant=1.0, eps=self.eps
        )
        return seen.y

    def grid_for(self, x: Tensor) -> GridOf:
        """Returns the grid for `x`. Scales per token broadcast with `x`."""
        if self.scale is not None and self.zero_point is not None:
            return GridOf(self.scale, self.zero_point, self.spec)
        return self.arithmetic_in_use.dynamic_grid(x, self.spec, self.eps)

    @property
    def arithmetic_in_use(self) -> Arithmetic:
        """How codes are computed. Files compute the scale of a whole tensor operator by operator."""
        is_whole = self.scale is None and self.spec.granularity != "token"
        return find_arithmetic("reference" if is_whole else self.arithmetic)

    def extra_repr(self) -> str:
        """Returns the spec, and whether the scale is fixed."""
        return f"{self.spec}; {'dynamic' if self.scale is None else 'fixed'}"
