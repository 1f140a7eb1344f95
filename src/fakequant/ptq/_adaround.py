"""`adaround`: learns for each weight whether it is rounded up or down."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fakequant._train.running import Data
from fakequant.ptq._changes import Changes
from fakequant.ptq._rounding import Problem, round_layers

# The rectified sigmoid h(v) = clip(sigmoid(v) * (1 + 2 * _STRETCH) - _STRETCH, 0, 1) reaches 0 and 1.
_STRETCH = 0.1
_RATE = 0.1
# The weight of the regularization, relative to the error of the nearest codes, and the share of iterations before it.
_REGULARIZATION, _WARM_UP = 0.1, 0.2
# The exponent of the regularization is lowered from the first to the second.
_EXPONENTS = (20.0, 2.0)


def adaround(
    model: nn.Module,
    data: Data,
    *,
    iterations: int = 500,
    damping: float = 0.01,
    layers: str | Sequence[str] = "*",
    steps: int | None = None,
    reference: nn.Module | None = None,
    progress: bool = True,
) -> Changes:
    """Learns for each weight whether it is rounded up or down (AdaRound), in place, without labels.

    The rounding of a layer is chosen so that its result on the data is as close as possible to its result in the float
    model. It is relaxed to numbers between 0 and 1 at first; a regularization drives these to 0 or 1:

        code = floor(w / scale) + h(v) + zero_point        0 <= h(v) <= 1
        loss = error(code) / error(nearest) + r * sum(1 - |2 h(v) - 1|^beta)        beta falls from 20 to 2

    The error is a quadratic form of the weights, so all data count in every iteration, at no cost. At last single codes
    are changed where this lowers the error. Layers are rounded in the order in which they run, with the inputs of the
    quantized model, so that a layer also compensates for errors before it.

    Weights become points of their grids, and scales of weights are frozen. The model trains, converts and exports as
    before.

    Args:
        model: A prepared and calibrated model.
        data: Batches, as for `fakequant.calibrate`. A few hundred samples suffice.
        iterations: The number of steps of the optimizer per layer.
        damping: How strongly weights are kept near those of the float model, relative to the mean square of the inputs.
        layers: Patterns of the paths of the layers to round, such as "encoder.*".
        steps: The maximum number of batches. If None, all are used.
        reference: The float model. If None, `model` with quantizers off, as it is when the function is called.
        progress: Whether to show a progress bar.

    Returns:
        The SQNR of each layer's result, with the nearest codes and with the chosen ones.

    >>> import fakequant as fq
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> config = fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(bits=3, axis=0)))
    >>> model = fq.calibrate(fq.prepare(nn.Sequential(nn.Linear(8, 4)), config), [x], progress=False)
    >>> changes = fq.ptq.adaround(model, [x], progress=False)
    >>> changes.layers[0].after > changes.layers[0].before
    True
    """
    if type(iterations) is not int or iterations < 1:
        raise ValueError(f"`iterations` must be a number of steps, at least 1, got {iterations!r}.")
    solve = partial(_learn_rounding, iterations=iterations)
    return round_layers(
        model,
        data,
        "adaround",
        solve,
        damping=damping,
        layers=layers,
        steps=steps,
        reference=reference,
        progress=progress,
    )


def soft_rounding(v: Tensor) -> Tensor:
    """Returns h(v), between 0 and 1.

    >>> soft_rounding(torch.tensor([-9.0, 0.0, 9.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    return (torch.sigmoid(v) * (1 + 2 * _STRETCH) - _STRETCH).clamp(0, 1)


def initial_rounding(fraction: Tensor) -> Tensor:
    """Returns v with h(v) = fraction."""
    inner = (fraction.clamp(0.01, 0.99) + _STRETCH) / (1 + 2 * _STRETCH)
    return torch.log(inner / (1 - inner))


def exponent_at(progress: float) -> float | None:
    """Returns beta after a share of the iterations. None before the regularization starts."""
    if progress < _WARM_UP:
        return None
    first, last = _EXPONENTS
    done = (progress - _WARM_UP) / (1 - _WARM_UP)
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * done))


def _learn_rounding(problem: Problem, iterations: int) -> Tensor:
    """Returns the codes that AdaRound chooses."""
    scale, zero_point = problem.scale, problem.zero_point
    a, b = problem.moments.a.float(), problem.moments.b.float()
    down = torch.floor(problem.weight / scale)
    least = problem.moments.error(problem.values(problem.nearest()))
    unit = torch.where(least > 0, least, 1.0)[..., None].float()
    v = nn.Parameter(initial_rounding(problem.weight / scale - down))
    optimizer = torch.optim.Adam([v], lr=_RATE)
    for iteration in range(iterations):
        s = torch.sigmoid(v.detach())
        stretched = s * (1 + 2 * _STRETCH) - _STRETCH
        h = stretched.clamp(0, 1)
        codes = down + h + zero_point
        inside = (codes >= problem.qmin) & (codes <= problem.qmax)
        slope = 2 * (problem.values(codes.clamp(problem.qmin, problem.qmax)) @ a - b) / unit * scale * inside
        beta = exponent_at(iteration / iterations)
        if beta is not None:
            u = 2 * h - 1
            slope = slope - _REGULARIZATION * 2 * beta * u.abs() ** (beta - 1) * u.sign()
        v.grad = slope * (h == stretched) * (1 + 2 * _STRETCH) * s * (1 - s)
        optimizer.step()
    return (down + (soft_rounding(v.detach()) >= 0.5) + zero_point).clamp(problem.qmin, problem.qmax)
