"""Learned parameters that stay within bounds, whatever an optimizer does to them."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fakequant import _native
from fakequant._backends.torch import compiled_nodes
from fakequant._backends.torch.plain_memory import is_eager, is_transformed
from fakequant._backends.torch.torch_annotations import Function


class FunctionContext(Protocol):
    """The part of the `ctx` of an autograd function that saves tensors."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Saves tensors for `backward`."""

    def save_for_forward(self, *tensors: Tensor) -> None:
        """Saves tensors for `jvp`."""


def within(value: Tensor, before: Tensor, low: float, high: float) -> Tensor:
    """Returns `value` clamped to [low, high], with elements of `before` where it is not finite.

    Positive bounds are bounds of magnitudes: a value keeps the sign that it had before.

    >>> within(torch.tensor([-3.0, 0.5, torch.nan]), torch.tensor([1.0, 1.0, 0.25]), 0.125, 8.0)
    tensor([0.1250, 0.5000, 0.2500])
    """
    if low <= 0:
        return torch.where(value.isfinite(), value.clamp(low, high), before)
    kept = torch.where(before < 0, value.clamp(-high, -low), value.clamp(low, high))
    return torch.where(value.isfinite(), kept, before)


class _Within(Function):
    """`within` with a straight-through gradient, so that a value beyond the bounds can come back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, before: Tensor, low: float, high: float) -> Tensor:
        return within(value, before, low, high)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Tensor | float, ...], output: Tensor) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, None, None


class _WithinForward(_Within):
    """`_Within` with a forward-mode derivative, which torch.compile does not support."""

    @staticmethod
    def jvp(ctx: FunctionContext, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()


class _Replaced(Function):
    """Returns the second tensor, with the gradient of the first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, by: Tensor) -> Tensor:
        return by.clone()

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: FunctionContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def replaced(value: Tensor, by: Tensor) -> Tensor:
    """Returns `by`, whose gradient goes to `value` unchanged: straight through."""
    result: Tensor = _Replaced.apply(value, by)
    return result


def keep_within(value: Tensor, before: Tensor, low: float, high: float) -> Tensor:
    """Returns a learned `value` within its bounds, differentiable, and copies it to `before`.

    In ordinary memory `value` itself is corrected, without changing its version counter: it only needs correction
    after an optimizer step, when no graph that has saved it is used again.
    """
    if not torch.compiler.is_compiling() and _kept_in_memory(value, before, low, high):
        return value
    function = _Within if torch.compiler.is_compiling() else _WithinForward
    kept: Tensor = function.apply(value, before, low, high)
    if not is_transformed():  # torch.func does not allow changes in place
        before.copy_(kept.detach())
    return kept


def _kept_in_memory(value: Tensor, before: Tensor, low: float, high: float) -> bool:
    if compiled_nodes.compiled is not None:
        return bool(compiled_nodes.compiled.keep_within(value, before, low, high))
    if not (_is_memory(value) and _is_memory(before)):
        return False
    _native.keep_within(value.data_ptr(), before.data_ptr(), value.numel(), low, high)
    return True


def _is_memory(value: Tensor) -> bool:
    return is_eager(value) and value.dtype == torch.float32 and value.is_contiguous()


def whole(parameter: Tensor) -> Tensor:
    """Returns all values of a parameter, also if it is sharded over several devices."""
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def put(parameter: Tensor, value: Tensor) -> None:
    """Copies values into a parameter, also if it is sharded over several devices."""
    if hasattr(parameter, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter  # a DTensor, a class that exists only in builds with torch.distributed
        # Every rank has the values, so nothing has to be sent.
        value = distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
    parameter.copy_(value)


def write_back(parameter: Tensor, value: Tensor) -> None:
    """Writes the effective value back into the parameter if it differs. NaN, which is no value yet, equals NaN."""
    own = whole(parameter)
    if bool(((own != value) & ~(own.isnan() & value.isnan())).any()):
        put(parameter, value)


class _Kept(Function):
    """Returns `x`, with gradients of 0 for the parameters."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        return x.detach()  # a view, so that the result may be changed in place

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: FunctionContext, dy: Tensor) -> tuple[Tensor, ...]:
        return dy, *map(torch.zeros_like, ctx.saved_tensors)


def keep_in_graph(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """Returns `x` with a graph in which it depends on `parameters`, which get gradients of 0.

    DistributedDataParallel waits for a gradient of every parameter, also of those not in use at the moment.
    """
    waiting = [p for p in parameters if p is not None and p.requires_grad]
    if waiting and torch.is_grad_enabled() and dist.is_available() and dist.is_initialized():
        x = _Kept.apply(x, *waiting)
    return x
