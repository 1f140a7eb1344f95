"""Ranges that do not fit their data: all zeros, nothing finite, or so wide that most values share a code or two."""

import warnings
from collections.abc import Iterable, Mapping
from math import gcd
from typing import NamedTuple

from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant._util.text import indented
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._quantizer import Quantizer

# Enough to know quantiles to about a percent, and cheap for any model.
_SAMPLE = 4096
# Four of five values in two codes: they have less than 1 bit each. Normal, uniform and exponential data has more than
# 40 codes of 256 there. With 4 bits or fewer, two codes are a large share of the grid.
_MIDDLE, _CODES, _FEWEST_BITS = (0.1, 0.9), 2, 5
# Masks, categories and constants do not need codes between their values.
_FEWEST_VALUES, _SMALLEST_SPREAD = 16, 1e-3


class Problem(NamedTuple):
    """Why a range does not fit."""

    kind: str
    words: str


_ADVICE = {
    "zero": "If values are 0 only at the start of training, calibrate again after some steps. Otherwise leave the "
    "layer in float with config.skip(path).",
    "nothing": "Where no value was finite, check the data and the layers before.",
    "wide": "Where values share a code, leave the layer in float with config.skip(path), or use another observer, such "
    "as activation_observer=fakequant.observers.Percentile() or MSE(), more bits, or scales per token, as "
    "recipes.int8_dynamic() does.",
}


def sample_of(x: Tensor) -> Tensor:
    """Returns some finite values of a tensor that are not 0. Returns none for probabilities that sum to 1.

    Of these the large ones matter, so it is right that the small ones share the code of 0.

    >>> import torch
    >>> sample_of(torch.tensor([0.0, 2.0, torch.nan]))
    tensor([2.])
    """
    x = x.detach()
    number = x.numel()
    step = max(number // _SAMPLE, 1)
    while gcd(step, number) != 1:  # otherwise it might see some channels only
        step += 1
    values = x.reshape(-1)[::step].float()
    values = values[values.isfinite() & (values != 0)]
    if values.numel() and x.dim() > 1 and float(values.min()) >= 0 and float(values.max()) <= 1:
        sums = [x[:4].float().sum(axis) for axis in {1, x.dim() - 1}]
        if any(bool(((total - 1).abs() < 1e-3).all()) for total in sums):
            return values[:0]
    return values


def find_problem(quantizer: Quantizer, sample: Tensor | None) -> Problem | None:
    """Returns why the range of a calibrated quantizer of an activation does not fit, or None if it fits.

    `sample` has some of the values that it has seen, from `sample_of`. It is None if only its range is known.
    """
    if quantizer.is_dynamic or (isinstance(quantizer, FakeQuantize) and not quantizer.observer.needs_data):
        return None
    try:
        scale, zero_point = quantizer.qparams()
    except RuntimeError:
        return None if sample is None else Problem("nothing", "no value was finite")
    if scale.is_meta:
        return None
    if bool((scale <= getattr(quantizer, "eps", 0.0)).all()):
        return Problem("zero", "all values were 0")
    spec = quantizer.spec
    if sample is None or spec.format != "int" or spec.axis is not None or spec.bits < _FEWEST_BITS:
        return None
    values = sample.sort().values
    if int((values[1:] != values[:-1]).sum()) < _FEWEST_VALUES:
        return None
    ends = values[[int(share * (len(values) - 1)) for share in _MIDDLE]]
    low, high = ends.tolist()
    if high - low <= _SMALLEST_SPREAD * max(abs(low), abs(high)):
        return None
    first, last = tensor_functions.quantize(ends, scale, zero_point, spec).tolist()
    if last - first >= _CODES:
        return None
    lowest, highest = ((end - int(zero_point)) * float(scale) for end in (spec.qmin, spec.qmax))
    codes = "one code" if first == last else f"{last - first + 1} codes"
    middle, grid = f"within {low:.2g} and {high:.2g}", f"the range {lowest:.3g} to {highest:.3g}"
    return Problem("wide", f"four of five values are {middle}, on {codes} of {grid}")


def warn_about_ranges(samples: Mapping[Quantizer, Tensor], paths: Iterable[tuple[str, Quantizer]]) -> None:
    """Warns once about all quantizers whose range does not fit.

    `samples` has what quantizers of activations have seen, from `sample_of`.
    """
    found = {
        path: problem
        for path, quantizer in paths
        if quantizer in samples and (problem := find_problem(quantizer, samples[quantizer])) is not None
    }
    if not found:
        return
    lines = indented([f"{path}: {problem.words}" for path, problem in found.items()])
    kinds = {problem.kind for problem in found.values()}
    advice = [text for kind, text in _ADVICE.items() if kind in kinds]
    warnings.warn(
        "\n".join(["Ranges found by `calibrate` do not fit their data:", lines, *advice]), UserWarning, stacklevel=4
    )
