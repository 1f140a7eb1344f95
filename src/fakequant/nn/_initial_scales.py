"""Rules for the first value of a learned scale: LSQ's rule, an observer's range, or whichever has the smaller error."""

import abc
import dataclasses
from math import sqrt
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.types import Device

from fakequant._backends.torch import formula, tensor_functions
from fakequant._backends.torch.tensor_checks import block_shape, filled
from fakequant.observers._histogram import Histogram, squared_errors_on_bins
from fakequant.observers._mse import MSE, squared_error
from fakequant.observers._observer import Observer, State
from fakequant.observers._ranks import Ranks
from fakequant.qparams import QParams
from fakequant.spec import QuantSpec

Init = Literal["lsq"] | Observer | None
_LARGEST = torch.finfo(torch.float32).max
_LARGEST_F16 = torch.finfo(torch.float16).max


def largest_scale(spec: QuantSpec) -> float:
    """Returns the largest scale for which every value on the grid is finite, or that ggml can store."""
    if spec.ggml_type is not None:
        return _LARGEST_F16 * {"q4_k": 63, "q6_k": 128}.get(spec.ggml_type, 1)
    return _LARGEST / max(spec.levels, 2 * spec.largest)


@dataclasses.dataclass(frozen=True)
class Start(abc.ABC):
    """A rule for the first scale. As with observers, everything it has seen is in a state."""

    spec: QuantSpec
    eps: float

    @abc.abstractmethod
    def init(self, blocks: tuple[int, ...], device: Device = None) -> State:
        """Returns the state before anything was seen."""

    @abc.abstractmethod
    def update(self, state: State, x: Tensor, ranks: Ranks) -> Tensor:
        """Updates `state` with the `x` of all ranks. Returns the number of non-finite values on this rank."""

    @abc.abstractmethod
    def qparams(self, state: State) -> QParams[Tensor]:
        """Returns scale and zero point. The scale is NaN where nothing was seen."""


@dataclasses.dataclass(frozen=True)
class LSQRule(Start):
    """LSQ's rule: `2 * mean(|x|) / sqrt(largest)` over everything seen, with zero point 0."""

    def init(self, blocks: tuple[int, ...], device: Device = None) -> State:
        return {
            "total": torch.zeros(blocks, dtype=torch.float64, device=device),
            "number": torch.zeros(blocks, dtype=torch.int64, device=device),
        }

    def update(self, state: State, x: Tensor, ranks: Ranks) -> Tensor:
        """Adds the magnitudes of the finite values of each block to `total`, and their number to `number`."""
        blocks = state["total"].shape
        finite = x.isfinite()
        like = state["total"].reshape(block_shape(tuple(x.shape), self.spec))
        magnitudes = filled(torch.where(finite, x, 0).abs().double(), self.spec)
        state["total"] += ranks.total(formula.block_sums(magnitudes, like).reshape(blocks))
        number = formula.block_sums(filled(finite.double(), self.spec), like).reshape(blocks)
        state["number"] += ranks.total(number.long())
        return (~finite).sum()

    def qparams(self, state: State) -> QParams[Tensor]:
        mean = state["total"] / state["number"].clamp(min=1)
        scale = (2 * mean / sqrt(self.spec.largest)).clamp(self.eps, largest_scale(self.spec)).float()
        zero_point = torch.zeros_like(scale).clamp(self.spec.qmin, self.spec.qmax)
        return QParams(torch.where(state["number"] > 0, scale, torch.nan), zero_point)


@dataclasses.dataclass(frozen=True)
class ObservedStart(Start):
    """The scale and zero point of an observer's range."""

    observer: Observer

    def init(self, blocks: tuple[int, ...], device: Device = None) -> State:
        return self.observer.init(blocks, device)

    def update(self, state: State, x: Tensor, ranks: Ranks) -> Tensor:
        return self.observer.update(state, x, self.spec, ranks)

    def qparams(self, state: State) -> QParams[Tensor]:
        lo, hi = self.observer.range(state, self.spec)
        known = lo <= hi
        scale, zero_point = tensor_functions.choose_qparams(
            torch.where(known, lo, 0), torch.where(known, hi, 0), self.spec, eps=self.eps
        )
        return QParams(torch.where(known, scale, torch.nan), zero_point)


@dataclasses.dataclass(frozen=True)
class _Better(Start):
    """LSQ's rule or the range found by a search, per scale: whichever has the smaller squared error.

    For symmetric grids, where both have zero point 0.
    """

    observer: ClassVar[Observer]

    @property
    def lsq(self) -> LSQRule:
        return LSQRule(self.spec, self.eps)

    @property
    def searched(self) -> ObservedStart:
        return ObservedStart(self.spec, self.eps, self.observer)

    def init(self, blocks: tuple[int, ...], device: Device = None) -> State:
        return {**self.lsq.init(blocks, device), **self.searched.init(blocks, device)}

    def scales(self, state: State) -> Tensor:
        """Returns the scales of both rules, with the sign that ggml's q4_0 and q6_k choose by the largest magnitude."""
        searched = self.searched.qparams(state).scale
        return torch.stack([torch.copysign(self.lsq.qparams(state).scale, searched), searched])


@dataclasses.dataclass(frozen=True)
class BetterOnBins(_Better):
    """Compares the errors over everything seen, on a histogram."""

    observer: ClassVar[Observer] = Histogram()

    def update(self, state: State, x: Tensor, ranks: Ranks) -> Tensor:
        self.searched.update(state, x, ranks)
        return self.lsq.update(state, x, ranks)

    def qparams(self, state: State) -> QParams[Tensor]:
        scales = self.scales(state)
        counts, centers, _ = Histogram().binned(state)
        valid = scales.nan_to_num(nan=1.0)  # NaN if nothing was seen; then all counts are 0
        lsq_error, searched_error = squared_errors_on_bins(counts, centers, valid, self.spec)
        return _symmetric(torch.where(searched_error < lsq_error, scales[1], scales[0]))


@dataclasses.dataclass(frozen=True)
class BetterOnData(_Better):
    """Compares the errors on the latest tensor. For many scales, whose histograms would be large.

    LSQ's mean is still over everything seen.
    """

    observer: ClassVar[Observer] = MSE()

    def init(self, blocks: tuple[int, ...], device: Device = None) -> State:
        better = torch.full(blocks, torch.nan, dtype=torch.float32, device=device)
        return {**super().init(blocks, device), "better": better}

    def update(self, state: State, x: Tensor, ranks: Ranks) -> Tensor:
        """Updates both rules, and `better` in the blocks where `x` has finite values."""
        before = state["number"].clone()
        self.searched.update(state, x, ranks)
        nonfinite = self.lsq.update(state, x, ranks)
        scales = self.scales(state)
        finite = x.masked_fill(~x.isfinite(), 0)  # zeros have no error
        errors = [squared_error(finite, scale.nan_to_num(nan=1.0), self.spec) for scale in scales]
        lsq_error, searched_error = ranks.total(torch.stack(errors))
        better = torch.where(searched_error < lsq_error, scales[1], scales[0])
        state["better"].copy_(torch.where(state["number"] > before, better, state["better"]))
        return nonfinite

    def qparams(self, state: State) -> QParams[Tensor]:
        return _symmetric(state["better"])


def start_for(init: Init, spec: QuantSpec, eps: float, *, learn_zero_point: bool) -> Start:
    """Returns the rule for a value of `init`, as described in `LearnedFakeQuantize`.

    >>> type(start_for(None, QuantSpec(bits=4, axis=0), 1e-6, learn_zero_point=False)).__name__
    'BetterOnData'
    """
    if init == "lsq" or (init is None and not spec.symmetric and not learn_zero_point):
        return LSQRule(spec, eps)
    if isinstance(init, Observer):
        return ObservedStart(spec, eps, init)
    if init is not None:
        raise ValueError(f'`init` must be "lsq" or an observer, such as MinMax(), got {init!r}.')
    if not spec.symmetric:
        return ObservedStart(spec, eps, Histogram() if spec.axis is None else MSE())
    return BetterOnBins(spec, eps) if spec.axis is None else BetterOnData(spec, eps)


def _symmetric(scale: Tensor) -> QParams[Tensor]:
    return QParams(scale, torch.zeros_like(scale))
