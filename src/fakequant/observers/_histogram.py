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
from fakequant.spec import WHOLE_AXIS, QuantSpec


@dataclasses.dataclass(frozen=True)
class Histogram(_Binned):
    """The range whose grid has the least error over everything seen.

        minimize  sum of counts * |fake_quantize(centers) - centers|^norm

    over ranges cut at `steps` thresholds, and for an affine grid each end then by itself. The error is
    that of the spec's own grid at the middle of the bins. For activations in calibration.

    An empty tensor changes nothing. NaN and infinities are left out. Zeros give the range 0 to 0, a
    constant c a range between 0 and c, one-sided data a range from 0 on that side. Over several ranks: the
    histograms are summed, which is exact.

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
        """A search over the bins."""
        counts, centers, _ = self.binned(state)
        grid = spec.to_numbers()
        return search(
            lambda lo, hi: errors_on_bins(counts, centers, lo, hi, grid, self.norm),
            state["running_min"], state["running_max"], self.steps, each_end=not spec.symmetric,
        )  # fmt: skip


# One operator, so that a compiler does not see the loop.
@operators.add(
    "errors_on_bins(Tensor counts, Tensor centers, Tensor lo, Tensor hi, int[] spec, float norm) -> Tensor",
    lambda counts, centers, lo, *_: lo.new_empty(lo.shape, dtype=torch.float64),
)
def errors_on_bins(counts: Tensor, centers: Tensor, lo: Tensor, hi: Tensor, spec: list[int], norm: float) -> Tensor:
    """The error of quantizing the bins' centers within every candidate range; `spec` as numbers."""
    grid = QuantSpec.from_numbers(spec)
    errors = torch.empty(lo.shape, dtype=torch.float64, device=lo.device)
    for part in candidates_at_once(len(lo), counts):
        errors[part] = _errors(counts, centers, choose_qparams(lo[part], hi[part], grid), grid, norm)
    return errors


def squared_errors_on_bins(counts: Tensor, centers: Tensor, scales: Tensor, spec: QuantSpec) -> Tensor:
    """The squared error of quantizing the bins' centers on symmetric grids with `scales`, in widths of a bin.

    The first axis of `scales` counts the candidates.
    """
    return _errors(counts, centers, QParams(scales, torch.zeros_like(scales, dtype=torch.int32)), spec, 2.0)


def _errors(counts: Tensor, centers: Tensor, qparams: QParams, spec: QuantSpec, norm: float) -> Tensor:
    scale, zero_point = qparams
    rows = dataclasses.replace(spec, axis=-1, group_size=WHOLE_AXIS)
    y = fake_quantize(centers.expand(len(scale), *centers.shape), scale[..., None], zero_point[..., None], rows)
    # In bins, so that no power of it is too large; their width is a power of two.
    distance = (y - centers).abs().double() / (centers[..., 1:2] - centers[..., :1])
    power = distance.square() if norm == 2 else distance**norm
    return torch.where(counts > 0, counts * power, 0).sum(-1)
