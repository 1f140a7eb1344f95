"""Learned numbers that stay where they make sense, whatever an optimizer does to them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fakequant._backends.torch import compiled_nodes
from fakequant._backends.torch.plain_memory import is_eager, is_transformed
from fakequant._kernels import _native


def within(value: Tensor, before: Tensor, low: float, high: float) -> Tensor:
    """`value` clamped to [low, high]; what is not finite is what it was `before`.

    >>> within(torch.tensor([-3.0, 0.5, torch.nan]), torch.tensor([1.0, 1.0, 0.25]), 0.125, 8.0)
    tensor([0.1250, 0.5000, 0.2500])
    """
    return torch.where(value.isfinite(), value.clamp(low, high), before)


class _Within(torch.autograd.Function):
    """The same with the gradient passed through: a value that was sent too far can come back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, before: Tensor, low: float, high: float) -> Tensor:
        return within(value, before, low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, None, None


class _WithinForward(_Within):
    """The same with a forward-mode derivative, of which torch.compile wants to know nothing."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()


def keep_within(value: Tensor, before: Tensor, low: float, high: float) -> Tensor:
    """A learned `value` as it may be used, differentiable; `before` becomes that.

    In ordinary memory the value itself is corrected. This is no change that autograd counts: a value
    needs correcting only after an optimizer has changed it, when nothing saved of it is used any more.
    """
    if not torch.compiler.is_compiling() and _kept_in_memory(value, before, low, high):
        return value
    function = _Within if torch.compiler.is_compiling() else _WithinForward
    kept = function.apply(value, before, low, high)
    if not is_transformed():
        before.copy_(kept.detach())  # which a transform of torch.func does not allow
    return kept


def _kept_in_memory(value: Tensor, before: Tensor, low: float, high: float) -> bool:
    if compiled_nodes.compiled is not None:
        return compiled_nodes.compiled.keep_within(value, before, low, high)
    if not (_is_memory(value) and _is_memory(before)):
        return False
    _native.keep_within(value.data_ptr(), before.data_ptr(), value.numel(), low, high)
    return True


def _is_memory(value: Tensor) -> bool:
    return is_eager(value) and value.dtype == torch.float32 and value.is_contiguous()


def whole(parameter: Tensor) -> Tensor:
    """The values of a parameter, also of one that is spread over several devices."""
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def put(parameter: Tensor, value: Tensor) -> None:
    """Copies values into a parameter, also into one that is spread over several devices."""
    if hasattr(parameter, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        spread: Any = parameter
        # Every rank has the values: nothing has to be sent.
        value = distribute_tensor(value, spread.device_mesh, spread.placements, src_data_rank=None)
    parameter.copy_(value)


def write_back(parameter: Tensor, value: Tensor) -> None:
    """Writes the effective value back into the parameter if it differs."""
    if not torch.equal(whole(parameter), value):
        put(parameter, value)


class _Kept(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        """`x`, which may be changed in place."""
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """The parameters, of which only the shapes matter."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        """Zeros for the parameters."""
        return dy, *map(torch.zeros_like, ctx.saved_tensors)


def keep_in_graph(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """`x`, as if it depended on parameters that are not in use at the moment.

    DistributedDataParallel waits for a gradient of every parameter; these get zeros.
    """
    waiting = [p for p in parameters if p is not None and p.requires_grad]
    if waiting and torch.is_grad_enabled() and dist.is_available() and dist.is_initialized():
        return _Kept.apply(x, *waiting)
    return x
