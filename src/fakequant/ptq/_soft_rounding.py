"""AdaRound's relaxation of rounding up or down to a number between 0 and 1.

h(v) = clip(sigmoid(v) * (1 + 2 c) - c, 0, 1)        c = 0.1, so that h reaches 0 and 1

regularization = sum of 1 - |2 h(v) - 1|^beta        0 if all h are 0 or 1
"""

import math

import torch
from torch import Tensor

STRETCH = 0.1
# The rate of Adam.
RATE = 0.1
# The weight of the regularization of a weight, relative to the error of the nearest codes of its output channel.
REGULARIZATION = 0.1
# The share of iterations without regularization, and the first and last beta.
_WARM_UP, _BETAS = 0.2, (20.0, 2.0)


def soft_rounding(v: Tensor) -> Tensor:
    """Returns h(v).

    >>> soft_rounding(torch.tensor([-9.0, 0.0, 9.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    return (torch.sigmoid(v) * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)


def initial_rounding(fraction: Tensor) -> Tensor:
    """Returns v with h(v) = fraction, or nearly so if it is close to 0 or 1.

    >>> soft_rounding(initial_rounding(torch.tensor([0.0, 0.25, 0.5])))
    tensor([0.0100, 0.2500, 0.5000])
    """
    inner = (fraction.clamp(0.01, 0.99) + STRETCH) / (1 + 2 * STRETCH)
    return torch.log(inner / (1 - inner))


def regularization(v: Tensor, beta: float) -> Tensor:
    """Returns the sum of 1 - |2 h(v) - 1|^beta.

    >>> regularization(torch.tensor([-9.0, 0.0, 9.0]), 2.0)
    tensor(1.)
    """
    return (1 - (2 * soft_rounding(v) - 1).abs() ** beta).sum()


def exponent_at(progress: float) -> float | None:
    """Returns beta after a share of the iterations. None before the regularization starts.

    >>> exponent_at(0.1), exponent_at(0.2), exponent_at(1.0)
    (None, 20.0, 2.0)
    """
    if progress < _WARM_UP:
        return None
    first, last = _BETAS
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP)))
