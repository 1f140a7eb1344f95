"""The two ways in which derivatives call the kernels: directly, or through torch's dispatcher."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.kernel_enums import largest_level
from fakequant._backends.torch import operator_calls, tensor_kernels
from fakequant._backends.torch.operator_calls import ObserverOptions
from fakequant._backends.torch.tensor_kernels import Grid, Observation, Observed
from fakequant._backends.torch.tensor_zero_points import round_backward, round_forward


@dataclass(frozen=True, slots=True)
class Route:
    """The functions that derivatives call. `operator_calls` documents their arguments."""

    fake_quantize: Callable[..., tuple[Tensor, Tensor | None]]
    mask_backward: Callable[..., Tensor]
    fake_quantize_learned: Callable[..., Tensor]
    learned_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    observe_fake_quantize: Callable[..., Observed]


def learned_factor(grad_factor: float | None, x: Tensor, qmax: int, numerics: str) -> float:
    """Returns the factor of the gradients of scale and zero point. None means LSQ's `1 / sqrt(numel * qmax)`."""
    if grad_factor is not None:
        return grad_factor
    return 1 / sqrt(max(x.numel(), 1) * largest_level(qmax, numerics))


def forward_grid(scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int, numerics: str) -> Grid:
    """Returns the grid of the forward, with a learned zero point rounded half to even."""
    if zero_point is not None and zero_point.is_floating_point():
        zero_point = round_forward(zero_point, qmin, qmax)
    return Grid(scale, zero_point, qmin, qmax, numerics)


def backward_grid(scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int, numerics: str) -> Grid:
    """Returns the grid of the backward, with a learned zero point rounded by its rule."""
    if zero_point is not None and zero_point.is_floating_point():
        zero_point = round_backward(zero_point, qmin, qmax, numerics)
    return Grid(scale, zero_point, qmin, qmax, numerics)


def count_changes(*tensors: Tensor) -> None:
    """Tells autograd that tensors were changed in place, so that it rejects stale saved tensors.

    Inference tensors have no version counter.
    """
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _fake_quantize_learned(x: Tensor, *grid_and_factor: Any) -> Tensor:
    return tensor_kernels.fake_quantize(x, forward_grid(*grid_and_factor[:-1]), _kernels.MASK_NONE)[0]


def _learned_backward(dy: Tensor, x: Tensor, *grid_and_factor: Any) -> tuple[Tensor, Tensor, Tensor]:
    *grid, grad_factor = grid_and_factor
    return tensor_kernels.learned_backward(dy, x, backward_grid(*grid), learned_factor(grad_factor, x, *grid[3:]))


def _observe_fake_quantize(x: Tensor, running_min: Tensor, running_max: Tensor, rest: ObserverOptions) -> Observed:
    qmin, qmax, numerics, symmetric, scale_rule, update, averaging_constant, eps, clipped = rest
    grid = Grid(running_min, None, qmin, qmax, numerics)
    kind = _kernels.MASK_PACKED if clipped else _kernels.MASK_NONE
    how = Observation(update, averaging_constant, eps, symmetric, scale_rule)
    count_changes(running_min, running_max)
    return tensor_kernels.observe_fake_quantize(x, running_min, running_max, how, grid, kind)


# For tensors that are plain memory.
DIRECT = Route(
    tensor_kernels.fake_quantize,
    tensor_kernels.mask_backward,
    _fake_quantize_learned,
    _learned_backward,
    _observe_fake_quantize,
)
# For tensors that are fake, batched, traced or on another device.
DISPATCHED = Route(
    operator_calls.fake_quantize,
    operator_calls.mask_backward,
    operator_calls.fake_quantize_learned,
    operator_calls.learned_backward,
    operator_calls.observe_fake_quantize,
)
