"""Quantized tensors: the scales with which they are quantized, and their errors, summed over calls."""

import math

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.grid_values import step_of_each
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._convert.golden.tracked_codes import plain
from fakequant.nn._bounded_parameters import whole
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._tensor_scale import TensorScaleFakeQuantize


def quantized_weights(model: nn.Module) -> dict[Quantizer, Tensor]:
    """Returns the weights of a prepared model that are quantized, in float, by their quantizers."""
    return {
        module.weight_quantizer: whole(module._fakequant.kind.read_weight(module))
        for module in model.modules()
        if isinstance(module, QuantizedLayer) and module.weight_quantizer is not None
    }


def qparams_for(quantizer: Quantizer | GoldenQuantizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scale and zero point with which `x` is quantized. Raises RuntimeError if there are none yet."""
    if isinstance(quantizer, GoldenQuantizer):
        if quantizer.scale is not None and quantizer.zero_point is not None:
            return quantizer.scale, quantizer.zero_point
    elif isinstance(quantizer, TensorScaleFakeQuantize):
        return quantizer.qparams_for(x)
    elif not isinstance(quantizer, FakeQuantize) or not quantizer.is_dynamic:
        return quantizer.qparams()
    # A dynamic quantizer computes them from each tensor.
    seen = tensor_functions.min_max(x, quantizer.spec)
    empty = seen.min > seen.max
    lo, hi = seen.min.masked_fill(empty, 0), seen.max.masked_fill(empty, 0)
    return tensor_functions.choose_qparams(lo, hi, quantizer.spec, eps=quantizer.eps)


def known_qparams(quantizer: Quantizer, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the scale and zero point with which `x` is quantized, or None if there are none yet."""
    try:
        return qparams_for(quantizer, x)
    except RuntimeError:
        return None


class ErrorSums:
    """Sums over calls, in float64."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0
        self.results = self.total = self.clipped = 0
        # The largest error of a quantized tensor, in steps of the grid.
        self.steps: float | None = None

    @property
    def sqnr(self) -> float:
        """10 log10(sum y^2 / sum (y - y_quantized)^2) of all results, in dB. Infinite if both are equal."""
        return decibels(self.signal, self.noise)

    def add_result(self, expected: Tensor | None, result: Tensor | None) -> None:
        """Adds the error of a result."""
        if expected is None or result is None or expected.shape != result.shape:
            return  # the models took different paths
        y, z = exact(expected), exact(result)
        self.results += y.numel()
        self.signal += float(y.square().sum())
        self.noise += float(torch.where(y == z, 0, y - z).square().sum())

    def add_quantized(self, quantizer: Quantizer | GoldenQuantizer, x: Tensor, expected: Tensor | None) -> None:
        """Adds the clipped share and the error of quantizing `x`, with respect to `expected`."""
        is_on = isinstance(quantizer, GoldenQuantizer) or quantizer.quantizing
        if expected is None or expected.shape != x.shape or not x.numel() or not is_on:
            return
        numbers, spec = plain(x).detach(), quantizer.spec
        scale, zero_point = qparams_for(quantizer, numbers)
        _, inside = tensor_functions.fake_quantize_and_mask(numbers, scale, zero_point, spec, mask="bool")
        self.total += x.numel()
        self.clipped += int((~inside).sum())
        difference = (exact(quantizer(x)) - exact(expected)).abs()
        # Steps of a float format depend on the magnitude: those at the larger one count.
        wanted = plain(expected).detach().to(numbers.dtype)
        larger = torch.where(wanted.abs() > numbers.abs(), wanted, numbers)
        steps = float((difference / exact(step_of_each(scale, larger, spec))).max())
        if self.steps is None or steps > self.steps or math.isnan(steps):  # NaN stays the largest
            self.steps = steps


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
