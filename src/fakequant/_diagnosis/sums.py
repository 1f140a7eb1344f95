"""Errors of tensors with respect to expected ones, summed over calls."""

import dataclasses
import math

import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.tracked_codes import plain
from fakequant._diagnosis.inputs import is_on, qparams_for, step_of
from fakequant.nn._quantizer import Quantizer


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of a layer. A field is None if the layer was not called, or if its input has no grid."""

    # 10 log10(sum y^2 / sum (y - y_quantized)^2) of the result, in dB. Infinite if both are equal.
    sqnr: float | None
    # The largest |x - x_quantized| of the input, in steps of the grid. Rounding alone gives at most 0.5.
    max_steps: float | None
    # The share of input values outside the range.
    clipped: float | None


class Sums:
    """Sums over calls, in float64."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0
        self.results = self.total = self.clipped = 0
        self.steps: float | None = None

    def add_result(self, expected: Tensor | None, result: Tensor | None) -> None:
        """Adds the error of a result."""
        if expected is None or result is None or expected.shape != result.shape:
            return  # the models took different paths
        y, z = exact(expected), exact(result)
        self.results += y.numel()
        self.signal += float(y.square().sum())
        self.noise += float(torch.where(y == z, 0, y - z).square().sum())

    def add_quantized(self, quantizer: Quantizer | Grid, x: Tensor, expected: Tensor | None) -> None:
        """Adds the clipped share and the error of quantizing `x`, with respect to `expected`."""
        if expected is None or expected.shape != x.shape or not x.numel() or not is_on(quantizer):
            return
        numbers = plain(x).detach()
        scale, zero_point = qparams_for(quantizer, numbers)
        _, inside = tensor_functions.fake_quantize(numbers, scale, zero_point, quantizer.spec, mask="bool")
        self.total += x.numel()
        self.clipped += int((~inside).sum())
        difference = (exact(quantizer(x)) - exact(expected)).abs()
        # Steps of a float format depend on the magnitude: those at the larger one count.
        wanted = plain(expected).detach().to(numbers.dtype)
        larger = torch.where(wanted.abs() > numbers.abs(), wanted, numbers)
        steps = float((difference / exact(step_of(quantizer, scale, larger))).max())
        if self.steps is None or steps > self.steps or math.isnan(steps):  # NaN stays the largest
            self.steps = steps

    def errors(self) -> Errors:
        """Returns the errors over all calls so far."""
        clipped = self.clipped / self.total if self.total else None
        return Errors(decibels(self.signal, self.noise) if self.results else None, self.steps, clipped)


def decibels(signal: float, noise: float) -> float:
    """Returns 10 log10(signal / noise), infinity if there is no noise."""
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf if ratio == 0 else math.nan


def exact(x: Tensor) -> Tensor:
    """Returns a float64 copy, on the CPU if the device has no float64 (Apple GPUs)."""
    x = plain(x).detach()
    return (x.cpu() if x.device.type == "mps" else x).double()
