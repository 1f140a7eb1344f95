"""The functions of `kernels`, through torch's dispatcher: for tensors that are fake, batched, traced or elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.kernel_types import Update
from fakequant._backends.torch.tensor_kernels import Grid, Observed, Order
from fakequant._backends.torch.torch_private import BelowAutograd, set_forward_mode_enabled

ops = torch.ops.fakequant

# What follows the running range in the schema of `observe_fake_quantize`: qmin, qmax, numerics, symmetric, update,
# averaging_constant, eps, clipped.
ObserverOptions: TypeAlias = tuple[int, int, str, bool, Update, float, float, bool]


def below_autograd(operator: Any, *args: Any) -> Any:
    """The operator without its derivative."""
    with BelowAutograd():
        return operator(*args)


@contextmanager
def _one_level_down() -> Iterator[None]:
    """Inside an autograd function derivatives are off. Under nested transforms the outer ones still need them."""
    with torch.enable_grad(), set_forward_mode_enabled(True), BelowAutograd():
        yield


def fake_quantize(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor | None]:
    """The forward, with a mask if one is asked for."""
    with _one_level_down():
        if mask_kind == _kernels.MASK_NONE:
            return ops.fake_quantize(x, *grid, False), None
        both: tuple[Tensor, Tensor] = ops.fake_quantize_masked(x, *grid, mask_kind == _kernels.MASK_PACKED)
        return both


def mask_backward(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """`dy` where the mask is set."""
    with _one_level_down():
        dx: Tensor = ops.mask_backward(dy, mask, order, multiply)
        return dx


def fake_quantize_learned(x: Tensor, *grid_and_factor: Any) -> Tensor:
    """The forward with learned scale and zero point."""
    with _one_level_down():
        y: Tensor = ops.fake_quantize_learned(x, *grid_and_factor)
        return y


def learned_backward(dy: Tensor, x: Tensor, *grid_and_factor: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dscale and dzero_point."""
    with _one_level_down():
        found: tuple[Tensor, Tensor, Tensor] = ops.learned_backward(dy, x, *grid_and_factor)
        return found


def observe_fake_quantize(x: Tensor, running_min: Tensor, running_max: Tensor, rest: ObserverOptions) -> Observed:
    """`rest` is everything after the running range in the operator's schema."""
    with _one_level_down():
        return Observed(*ops.observe_fake_quantize(x, running_min, running_max, *rest))
