"""Rounding all layers of a block together, so that the result of the block stays close to that of the float model."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._diagnosis.sums import decibels
from fakequant._train.running import copied
from fakequant.nn._call_quantizers import Counted, counting_from
from fakequant.nn._quantizer import Quantizer
from fakequant.ptq._soft_rounding import (
    RATE,
    REGULARIZATION,
    exponent_at,
    initial_rounding,
    regularization,
    soft_rounding,
)
from fakequant.ptq._weight_grids import WeightGrid, weight_grid


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """One call of a block: its arguments in the quantized model, and the tensors of its result in the float model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # How far calls were counted before it, see `counted_calls`.
    counted: Counted
    expected: list[Tensor]


def tensors_of(result: Any) -> list[Tensor]:
    """Returns the float tensors in a result, which may be any nesting of tensors."""
    leaves: list[Any] = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


class _SoftWeight:
    """The weight of a layer with rounding that is being learned.

    Args:
        grid: The float weight and its grid.
        codes: The codes to start from.
    """

    def __init__(self, grid: WeightGrid, codes: Tensor) -> None:
        self.grid = grid
        steps = grid.weight.float() / grid.scale
        self.down = torch.floor(steps)
        up = (codes - grid.zero_point - self.down).clamp(0, 1)
        self.v = initial_rounding((steps - self.down + up) / 2).requires_grad_()
        # Codes to use instead of the soft ones. None while the rounding is learned.
        self.fixed: Tensor | None = None

    def value(self) -> Tensor:
        codes = self._within(soft_rounding(self.v)) if self.fixed is None else self.fixed
        return ((codes - self.grid.zero_point) * self.grid.scale).to(self.grid.weight.dtype)

    def learned(self) -> Tensor:
        return self._within((soft_rounding(self.v.detach()) >= 0.5).float())

    def _within(self, h: Tensor) -> Tensor:
        spec = self.grid.quantizer.spec
        return (self.down + h + self.grid.zero_point).clamp(spec.qmin, spec.qmax)


def round_block(
    block: nn.Module, grids: list[WeightGrid], calls: list[BlockCall], iterations: int
) -> tuple[float, float]:
    """Learns the rounding of all layers of a block, in place.

    Returns the SQNR of the block's result in dB, with the nearest codes and with the chosen ones: the learned ones, or
    the present ones if these are better.

    Args:
        block: A module of a prepared model, in evaluation mode.
        grids: The float weights and the grids of the layers. The layers' weights are rounded already.
        calls: The calls of the block in all batches.
        iterations: The number of steps of the optimizer, each on one call.
    """
    present = {grid.layer: grid.codes(weight_grid(grid.layer).weight) for grid in grids}
    soft = [_SoftWeight(grid, present[grid.layer]) for grid in grids]
    signal = sum(float(y.double().square().sum()) for call in calls for y in call.expected)
    with _weights_from(soft):
        nearest = _error(block, soft, calls, [grid.codes(grid.weight) for grid in grids])
        least = _error(block, soft, calls, list(present.values()))
        if least > 0:
            _learn(block, soft, calls, least / len(calls), iterations)
            codes = [weight.learned() for weight in soft]
            error = _error(block, soft, calls, codes)
            if error < least:
                least, present = error, dict(zip(present, codes, strict=True))
    for grid in grids:
        grid.write(present[grid.layer])
    return decibels(signal, nearest), decibels(signal, least)


def _learn(block: nn.Module, weights: list[_SoftWeight], calls: list[BlockCall], unit: float, iterations: int) -> None:
    for weight in weights:
        weight.fixed = None
    parameters = [weight.v for weight in weights]
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    # The error is that of the whole block, so each output channel has a share of it.
    strength = REGULARIZATION / sum(len(weight.v) for weight in weights)
    order: list[int] = []
    generator = torch.Generator().manual_seed(0)
    for iteration in range(iterations):
        if not order:
            order = torch.randperm(len(calls), generator=generator).tolist()
        with torch.enable_grad():
            loss = _error_of(block, calls[order.pop()]) / unit
            beta = exponent_at(iteration / iterations)
            if beta is not None:
                loss = loss + strength * torch.stack([regularization(v, beta) for v in parameters]).sum()
            # Not `backward`, which would also add to the gradients of the model's own parameters.
            slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
        for v, slope in zip(parameters, slopes, strict=True):
            v.grad = slope
        optimizer.step()


def _error(block: nn.Module, weights: list[_SoftWeight], calls: list[BlockCall], codes: list[Tensor]) -> float:
    """Returns the squared error of a block's results with these codes."""
    for weight, fixed in zip(weights, codes, strict=True):
        weight.fixed = fixed
    with torch.no_grad():
        return sum(float(_error_of(block, call)) for call in calls)


def _error_of(block: nn.Module, call: BlockCall) -> Tensor:
    args, kwargs = copied(call.args, call.kwargs)
    with counting_from(call.counted):
        found = tensors_of(block(*args, **kwargs))
    pairs = zip(found, call.expected, strict=False)
    return torch.stack([(y - z).float().square().sum() for y, z in pairs]).sum()


@contextmanager
def _weights_from(soft: list[_SoftWeight]) -> Iterator[None]:
    """Context in which layers multiply by the soft weights."""
    with ExitStack() as undo:
        for weight in soft:
            record = weight.grid.layer._fakequant
            undo.callback(setattr, record, "save_codes", record.save_codes)
            record.save_codes = False  # the backward pass would quantize the weight again
            undo.callback(weight.grid.quantizer.register_forward_hook(_returning(weight)).remove)
        yield


def _returning(weight: _SoftWeight) -> Any:
    def hook(quantizer: Quantizer, args: Any, result: Tensor) -> Tensor:
        return weight.value()

    return hook
