"""The functions of `tensor_kernels`, called through torch's dispatcher.

For tensors that are fake, batched, traced or on another device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.kernel_enums import Update
from fakequant._backends.torch.tensor_kernels import Grid, Observed, Order
from fakequant._backends.torch.torch_annotations import Operator
from fakequant._backends.torch.torch_private import BelowAutograd, set_forward_mode_enabled

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class OperatorOf(Protocol[Result_co]):
    """An operator that returns `Result_co`. Its schema in `operators` has the arguments."""

    @property
    def default(self) -> Operator: ...

    def __call__(self, *args: Any) -> Result_co: ...


class Operators(Protocol):
    """The operators of `torch.ops.fakequant`. torch looks them up at runtime, so they have no types there."""

    fake_quantize: OperatorOf[Tensor]
    fake_quantize_masked: OperatorOf[tuple[Tensor, Tensor]]
    mask_backward: OperatorOf[Tensor]
    fake_quantize_learned: OperatorOf[Tensor]
    learned_backward: OperatorOf[tuple[Tensor, Tensor, Tensor]]
    quantize: OperatorOf[Tensor]
    quantize_packed: OperatorOf[Tensor]
    dequantize: OperatorOf[Tensor]
    dequantize_packed: OperatorOf[Tensor]
    min_max: OperatorOf[tuple[Tensor, Tensor, Tensor]]
    choose_qparams: OperatorOf[tuple[Tensor, Tensor]]
    observe_fake_quantize: OperatorOf[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    checked_scale: OperatorOf[Tensor]


ops = cast("Operators", torch.ops.fakequant)

# The arguments after the running range in the schema of `observe_fake_quantize`: qmin, qmax, numerics, symmetric,
# scale_rule, update, averaging_constant, eps, clipped.
ObserverOptions: TypeAlias = tuple[int, int, str, bool, str, Update, float, float, bool]


def below_autograd(operator: Callable[..., Result], *args: Any) -> Result:
    """Calls the operator's kernel, past its autograd rule."""
    with BelowAutograd():
        return operator(*args)


@contextmanager
def _one_level_down() -> Iterator[None]:
    """Switches derivatives on again inside an autograd function, where outer levels of nested transforms need them."""
    with torch.enable_grad(), set_forward_mode_enabled(True), BelowAutograd():
        yield


def fake_quantize(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor | None]:
    """Returns the fake-quantized values, and a mask unless `mask_kind` is MASK_NONE."""
    with _one_level_down():
        if mask_kind == _kernels.MASK_NONE:
            return ops.fake_quantize(x, *grid, False), None
        return ops.fake_quantize_masked(x, *grid, mask_kind == _kernels.MASK_PACKED)


def mask_backward(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """Returns `dy` where the mask is set, otherwise 0. See `gradients.masked`."""
    with _one_level_down():
        return ops.mask_backward(dy, mask, order, multiply)


def fake_quantize_learned(x: Tensor, *grid_and_factor: Any) -> Tensor:
    """Returns the fake-quantized values with learned scale and zero point."""
    with _one_level_down():
        return ops.fake_quantize_learned(x, *grid_and_factor)


def learned_backward(dy: Tensor, x: Tensor, *grid_and_factor: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx, dscale and dzero_point."""
    with _one_level_down():
        return ops.learned_backward(dy, x, *grid_and_factor)


def observe_fake_quantize(x: Tensor, running_min: Tensor, running_max: Tensor, rest: ObserverOptions) -> Observed:
    """Runs the operator. `rest` is everything after the running range in its schema."""
    with _one_level_down():
        return Observed(*ops.observe_fake_quantize(x, running_min, running_max, *rest))
