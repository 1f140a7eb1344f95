"""Factors of channels: checks and rounding."""

from typing import Any

import torch
from torch import Tensor

# Factors are within 2^-16 and 2^16.
_LARGEST = 16.0


def finished_factors(factors: Tensor, *, powers_of_two: bool) -> Tensor:
    """Returns factors with a geometric mean of about 1, in float64.

    Factors that are not positive and finite, those of channels without values, become 1. A common factor of all
    channels has no effect on quantization, so it is left out.

    >>> finished_factors(torch.tensor([1.0, 3.9, 0.0, 15.0]), powers_of_two=True)
    tensor([0.2500, 1.0000, 1.0000, 4.0000], dtype=torch.float64)
    """
    factors = factors.double()
    valid = (factors > 0) & factors.isfinite()
    logs = torch.where(valid, factors, 1.0).log2()
    if bool(valid.any()):
        logs = torch.where(valid, logs - logs[valid].mean(), 0.0)
    logs = logs.clamp(-_LARGEST, _LARGEST)
    return torch.exp2(logs.round() if powers_of_two else logs)


def check_switch(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")
