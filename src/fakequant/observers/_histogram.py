"""The range with the least error, found on a histogram of everything seen."""

import dataclasses
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from fakequant._backends.torch import operators
from fakequant._backends.torch.tensor_functions import fake_quantize
from fakequant.observers._binned import _Binned
from fakequant.observers._observer import State, number
from fakequant.observers._search import candidates_at_once, check_steps, search
from fakequant.qparams import QParams, choose_qparams
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class Histogram(_Binned):
    """The range whose grid has the least error over everything seen.

        minimize  sum of counts * |fake_quantize(centers) - centers|^norm

    First both ends of the range are cut at `steps` thresholds. On an affine grid, each end is then moved separately.
    The error is computed with the grid of the spec, at the centers of the bins. For activations in calibration.

    Empty tensors change nothing. NaN and infinities are ignored. Zeros give the range 0 to 0, a constant c a range
    between 0 and c, one-sided data a range that starts at 0. The histograms of all ranks are summed, which is exact.

    >>> x = torch.cat([torch.linspace(-1, 1, 1001), torch.tensor([20.0])])
    >>> observer, spec = Histogram(), QuantSpec(bits=4)
    >>> state = observer.init(())
    >>> nonfinite = observer.update(state, x, spec)
    >>> observer.range(state, spec)
    (tensor(-1.), tensor(6.8000))
    """

    norm: float = 2.0
    steps: int = 100

    searches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "norm", number("norm", self.norm))
        if not 0 < self.norm < inf:
            raise ValueError(f"`norm` must be finite and greater than 0, got {self.norm}.")
        check_steps(self.steps)

    def range(self, state: State, spec: QuantSpec) -> tuple[Tensor, Tensor]:
        """Searches for the range with the least error on the bins."""
        counts, centers, _ = self.binned(state)
        grid = spec.to_numbers()
        return search(
            lambda lo, hi: errors_on_bins(counts, centers, lo, hi, grid, self.norm),
            state["running_min"], state["running_max"], self.steps, each_end=not spec.symmetric,
        )  # fmt: skip


# An operator, so that compilers do not unroll the loop.
@operators.add(
    "errors_on_bins(Tensor counts, Tensor centers, Tensor lo, Tensor hi, int[] spec, float norm) -> Tensor",
    lambda counts, centers, lo, *_: lo.new_empty(lo.shape, dtype=torch.float64),
)
def errors_on_bins(counts: Tensor, centers: Tensor, lo: Tensor, hi: Tensor, spec: list[int], norm: float) -> Tensor:
    """Returns the error of quantizing the centers of the bins, for every candidate range.

    Bins are in the last axis of `counts` and `centers`, and candidates along the first axis of `lo` and `hi`. `spec` is
    encoded by `QuantSpec.to_numbers`. `norm` is the power of the distances.
    """
    grid = QuantSpec.from_numbers(spec)
    errors = torch.empty(lo.shape, dtype=torch.float64, device=lo.device)
    for part in candidates_at_once(len(lo), counts):
        errors[part] = _errors(counts, centers, choose_qparams(lo[part], hi[part], grid), grid, norm)
    return errors


def squared_errors_on_bins(counts: Tensor, centers: Tensor, scales: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the squared error of quantizing the centers of the bins on symmetric grids, in units of bin widths.

    Candidates are along the first axis of `scales`.
    """
    return _errors(counts, centers, QParams(scales, torch.zeros_like(scales, dtype=torch.int32)), spec, 2.0)


def _errors(counts: Tensor, centers: Tensor, qparams: QParams[Tensor], spec: QuantSpec, norm: float) -> Tensor:
    scale, zero_point = qparams
    candidates = centers.expand(len(scale), *centers.shape)
    y = fake_quantize(candidates, scale[..., None], zero_point[..., None], spec.per_token())
    # In units of bin widths, which are powers of two, so that powers of it do not overflow.
    distance = (y - centers).abs().double() / (centers[..., 1:2] - centers[..., :1])
    power = distance.square() if norm == 2 else distance**norm
    return torch.where(counts > 0, counts * power, 0).sum(-1)
