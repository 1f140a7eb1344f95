"""The functions of `kernels`, through torch's dispatcher: for tensors that are fake, batched, traced or elsewhere."""

import torch
from torch import Tensor

from fakequant import native
from fakequant.torch.kernels import Grid, Observed, Order

ops = torch.ops.fakequant


def fake_quantize(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor | None]:
    """The forward, with a mask if one is asked for."""
    with torch._C._AutoDispatchBelowAutograd():
        if mask_kind == native.MASK_NONE:
            return ops.fake_quantize(x, *grid, False), None
        return ops.fake_quantize_masked(x, *grid, mask_kind == native.MASK_PACKED)


def mask_backward(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """`dy` where the mask is set."""
    with torch._C._AutoDispatchBelowAutograd():
        return ops.mask_backward(dy, mask, order, multiply)


def learned_backward(dy: Tensor, x: Tensor, grid: Grid, grad_factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dscale and dzero_point."""
    with torch._C._AutoDispatchBelowAutograd():
        return ops.learned_backward(dy, x, *grid, grad_factor)


def observe_fake_quantize(x: Tensor, running_min: Tensor, running_max: Tensor, rest: tuple) -> Observed:
    """`rest` is everything after the running range in the operator's schema."""
    with torch._C._AutoDispatchBelowAutograd():
        return Observed(*ops.observe_fake_quantize(x, running_min, running_max, *rest))
