"""Counts the values of quantized tensors: their positions on the grid, and the codes that occur."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.grid_values import number_of_values, places_of, scale_of_each
from fakequant._paired_models.calls import watching_inputs
from fakequant._paired_models.errors import decibels, known_qparams, quantized_weights
from fakequant.nn._model_quantizers import named_quantizers
from fakequant.nn._quantizer import Quantizer
from fakequant.spec import QuantSpec

# The minimum number of histogram bins inside the range. There are as many on either side of it.
BINS = 96
# The maximum number of counters for codes. More levels are counted in this many bins.
COUNTED = 1 << 16


@dataclasses.dataclass
class TensorCounts:
    """The counts of one quantized tensor, over all batches.

    The position of a value is value / scale + zero point: before it is rounded and clipped, it is the code of an
    integer grid, and a value of a float format.
    """

    path: str
    kind: str  # "weight" or "activation"
    spec: QuantSpec
    shape: tuple[int, ...] = ()
    total: int = 0
    below: int = 0
    above: int = 0
    # Values more than one step outside. A symmetric grid clips its largest value by half a step, which is harmless.
    far: int = 0
    nonfinite: int = 0
    # The number of values per bin of positions, and of those beyond the first and the last bin.
    bins: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))
    under: int = 0
    over: int = 0
    # How often each value of the grid occurs, in ascending order.
    codes: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))
    signal: float = 0.0
    noise: float = 0.0
    # Scale and zero point, if all values share them.
    one_grid: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self.bins = torch.zeros(3 * self.inside, dtype=torch.int64)
        self.codes = torch.zeros(min(self.levels, COUNTED), dtype=torch.int64)

    @property
    def levels(self) -> int:
        """The number of values of the grid."""
        return number_of_values(self.spec)

    @property
    def ends(self) -> tuple[float, float, float]:
        """The positions of the lowest and the highest value, and the last step before them."""
        form = self.spec.float_format
        if form is None:
            return float(self.spec.qmin), float(self.spec.qmax), 1.0
        return -form.largest, form.largest, form.largest - float(form.grid()[-2])

    @property
    def width(self) -> float:
        """The width of the range in positions: half a step more than its values on either side."""
        low, high, step = self.ends
        return high - low + step

    @property
    def inside(self) -> int:
        """The number of bins inside the range. A step has a whole number of bins, unless a bin covers several steps."""
        form = self.spec.float_format
        steps = self.spec.levels if form is None else round(self.width / form.smallest)
        return steps * max(1, round(BINS / steps)) if steps <= 2 * BINS else BINS

    @property
    def edges(self) -> Tensor:
        """The edges of the bins of positions. The range is the middle third."""
        (low, _, step), width = self.ends, self.width / self.inside
        return low - step / 2 + width * (torch.arange(3 * self.inside + 1, dtype=torch.float64) - self.inside)

    @property
    def clipped(self) -> float:
        """The share of values outside the range."""
        return (self.below + self.above) / max(self.total, 1)

    @property
    def used(self) -> int:
        """The number of codes, or bins of codes, that occur."""
        return int((self.codes > 0).sum())

    @property
    def sqnr(self) -> float | None:
        """10 log10(sum x^2 / sum (x - y)^2) in dB. None if all values are 0, infinite if all are on the grid."""
        return decibels(self.signal, self.noise) if self.signal else None

    def add(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> None:
        """Counts one tensor, quantized with this scale and zero point."""
        x = x.detach()
        self.shape = tuple(x.shape)
        y, inside = tensor_functions.fake_quantize_and_mask(x, scale, zero_point, self.spec, mask="bool")
        places = places_of(tensor_functions.quantize(x, scale, zero_point, self.spec).flatten(), self.spec)
        outside = ~inside.flatten()
        self.total += x.numel()
        self.below += int((outside & (places == 0)).sum())
        self.above += int((outside & (places == self.levels - 1)).sum())
        self.codes += torch.bincount(self._index(places[places >= 0]), minlength=len(self.codes)).cpu()
        self._add_positions(x, scale, zero_point)
        finite = x.isfinite()
        self.nonfinite += int((~finite).sum())
        self.signal += float(torch.where(finite, x, 0).double().square().sum())
        self.noise += float(torch.where(finite, x.double() - y.double(), 0).square().sum())
        grid = (float(scale), float(zero_point)) if scale.dim() == 0 else None
        # A dynamic quantizer may have another grid for each tensor.
        self.one_grid = grid if self.total == x.numel() or grid == self.one_grid else None

    def _index(self, places: Tensor) -> Tensor:
        return places if self.levels <= COUNTED else places * COUNTED // self.levels

    def _add_positions(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> None:
        zeros = tensor_functions.quantize(torch.zeros_like(x), scale, zero_point, self.spec)  # the code of 0
        at = (x.double() / scale_of_each(scale, x, self.spec).double() + zeros.double()).flatten()
        at = at[~at.isnan()]
        low, high, step = self.ends
        self.far += int(((at < low - step) | (at > high + step)).sum())
        first, width = float(self.edges[0]), self.width / self.inside
        n = len(self.bins)
        places = ((at - first) / width).floor().clamp(-1, n).long() + 1
        found = torch.bincount(places, minlength=n + 2).cpu()
        self.under += int(found[0])
        self.over += int(found[-1])
        self.bins += found[1:-1]


@contextmanager
def counting(model: nn.Module) -> Iterator[list[TensorCounts]]:
    """Counts the weights of a model, and the activations that pass its quantizers inside the context.

    Yields the counts of all quantizers. Activations themselves are not kept. The total is 0 for a quantizer without
    scale, or one that received no data.
    """
    weights = quantized_weights(model)
    found: dict[Quantizer, TensorCounts] = {
        q: TensorCounts(path, "weight" if q in weights else "activation", q.spec) for path, q in named_quantizers(model)
    }

    @torch.no_grad()
    def count(quantizer: Quantizer, x: Tensor) -> None:
        grid = known_qparams(quantizer, x)
        if grid is not None and x.numel():
            found[quantizer].add(x, *grid)

    for quantizer, weight in weights.items():
        count(quantizer, weight)
    with watching_inputs([q for q in found if q not in weights], count):
        yield list(found.values())
