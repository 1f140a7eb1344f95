"""The range with the least squared error, found on the tensor itself."""

import dataclasses

import torch
from torch import Tensor

from fakequant._backends.torch import formula, operators
from fakequant._backends.torch.tensor_checks import block_shape, filled
from fakequant._backends.torch.tensor_functions import fake_quantize
from fakequant.observers._observer import State, _RangeKeeper
from fakequant.observers._ranks import ALONE, Ranks
from fakequant.observers._search import check_steps, search
from fakequant.qparams import choose_qparams, min_max
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class MSE(_RangeKeeper):
    """The range of the latest tensor whose grid has the least squared error on it.

        minimize  sum of (fake_quantize(x) - x)^2

    First both ends of the range are cut at `steps` thresholds. On an affine grid, each end is then moved separately. A
    search takes `steps` or three times `steps` passes over the tensor. For weights, once before training. Use
    `Histogram` to search over many tensors.

    Empty tensors and tensors without a finite value change nothing. NaN and infinities are ignored. Zeros give the
    range 0 to 0, a constant c a range between 0 and c, one-sided data a range that starts at 0. The errors of all ranks
    are summed in float64, so that all ranks choose the same range.

    >>> x = torch.cat([torch.linspace(-1, 1, 1001), torch.tensor([5.0])])
    >>> observer, spec = MSE(), QuantSpec(bits=4)
    >>> state = observer.init(())
    >>> nonfinite = observer.update(state, x, spec)
    >>> observer.range(state, spec)
    (tensor(-1.), tensor(2.2500))
    """

    steps: int = 100

    def __post_init__(self) -> None:
        check_steps(self.steps)

    def update(self, state: State, x: Tensor, spec: QuantSpec, ranks: Ranks = ALONE) -> Tensor:
        """Searches for the best range for `x`, which is kept until the next search."""
        x = x.detach()
        seen = min_max(x, spec)
        limit = torch.finfo(torch.float32).max
        lo, hi = ranks.range(seen.min, seen.max)
        # Values of float64 may exceed the limits of float32, the dtype of ranges.
        lo, hi = (torch.where(lo <= hi, end.clamp(-limit, limit), end).float() for end in (lo, hi))
        grid = spec.to_numbers()
        found = search(
            lambda low, high: ranks.total(errors_on_data(x, low, high, grid)),
            lo, hi, self.steps, each_end=not spec.symmetric,
        )  # fmt: skip
        for name, value in zip(("running_min", "running_max"), found, strict=True):
            state[name].copy_(torch.where(lo <= hi, value, state[name]))
        return (seen.nan + seen.posinf + seen.neginf).sum()


# An operator, so that compilers do not unroll the loop.
@operators.add(
    "errors_on_data(Tensor x, Tensor lo, Tensor hi, int[] spec) -> Tensor",
    lambda x, lo, *_: lo.new_empty(lo.shape, dtype=torch.float64),
)
def errors_on_data(x: Tensor, lo: Tensor, hi: Tensor, spec: list[int]) -> Tensor:
    """Returns the squared error of quantizing `x`, per block, for every candidate range.

    Values of `x` that are not finite are ignored. Candidates are along the first axis of `lo` and `hi`. `spec` is
    encoded by `QuantSpec.to_numbers`.
    """
    grid = QuantSpec.from_numbers(spec)
    x = x.masked_fill(~x.isfinite(), 0)  # 0 has no error
    shape = block_shape(tuple(x.shape), grid)
    errors = torch.empty(lo.shape, dtype=torch.float64, device=lo.device)
    for error, low, high in zip(errors, lo, hi, strict=True):
        distance = filled(fake_quantize(x, *choose_qparams(low, high, grid), grid).sub_(x).double(), grid)
        error.copy_(formula.block_sums(distance.square_(), error.reshape(shape)).reshape(error.shape))
    return errors


def squared_error(x: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the squared error of quantizing a finite `x` on a symmetric grid, per block, in float64.

    >>> squared_error(torch.tensor([0.25, 3.0]), torch.tensor(0.5), QuantSpec(bits=2))
    tensor(6.3125, dtype=torch.float64)
    """
    distance = filled((fake_quantize(x, scale, 0, spec) - x).double(), spec)
    like = distance.new_empty(block_shape(tuple(x.shape), spec))
    return formula.block_sums(distance.square(), like).reshape(scale.shape)
