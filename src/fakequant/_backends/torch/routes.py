"""How derivatives call the kernels: directly, or through torch's dispatcher.

Tensors that are plain memory take the direct way. Tensors that are fake, batched, traced or on another device take the
operators `torch.ops.fakequant`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.checks import refuse_nan_zero_point
from fakequant._backends.torch import tensor_kernels
from fakequant._backends.torch.formula import wide_dtype
from fakequant._backends.torch.plain_memory import is_memory
from fakequant._backends.torch.tensor_kernels import Grid, Observed, ObserverOptions, Order
from fakequant._backends.torch.torch_annotations import Operator, Results
from fakequant._backends.torch.torch_private import BelowAutograd, set_forward_mode_enabled
from fakequant._kernels import is_ggml, largest_level

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
# Usually dx, dscale and dzero_point.
ThreeTensors: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Kernels(Protocol):
    """The module `tensor_kernels`, `gpu_kernels` or `formula`, which have the same functions."""

    def fake_quantize(self, x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor | None]: ...
    def mask_backward(self, dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor: ...
    def learned_backward(self, dy: Tensor, x: Tensor, grid: Grid, grad_factor: float) -> ThreeTensors: ...
    def quantize(self, x: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor: ...
    def quantize_packed(self, x: Tensor, grid: Grid, bits: int) -> Tensor: ...
    def dequantize(self, q: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor: ...
    def dequantize_packed(
        self, q: Tensor, grid: Grid, shape: tuple[int, ...], bits: int, dtype: torch.dtype
    ) -> Tensor: ...
    def min_max(self, x: Tensor, blocks: tuple[int, ...]) -> ThreeTensors: ...
    def choose_qparams(
        self, lo: Tensor, hi: Tensor, qmin: int, qmax: int, numerics: str, symmetric: bool, scale_rule: str, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def observe_fake_quantize(
        self, x: Tensor, running_min: Tensor, running_max: Tensor, options: ObserverOptions
    ) -> Observed: ...


# --- learned zero points --------------------------------------------------------------------------
#
# csrc/torch/autograd.cc has the same rules.


def round_forward(zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """Returns `clamp(rint(zero_point), qmin, qmax)` as int32.

    Raises ValueError for NaN on plain memory. Fake tensors and other devices are not checked.
    """
    # Not in float32, which may round the end of a wide range to a number outside it.
    rounded = zero_point.detach().to(wide_dtype(zero_point)).round()
    if not torch.compiler.is_compiling() and is_memory(rounded) and rounded.isnan().any():
        refuse_nan_zero_point()
    return rounded.clamp(qmin, qmax).to(torch.int32)


def _round_backward(zero_point: Tensor, qmin: int, qmax: int, numerics: str) -> Tensor:
    """Returns the zero point of the backward. torch's per-tensor rule truncates `zero_point + 0.5` there."""
    if numerics == "torch_tensor":
        zero_point = (zero_point.float() + 0.5).clamp(qmin, qmax).trunc()
    return round_forward(zero_point, qmin, qmax)


def learned_factor(grad_factor: float | None, x: Tensor, qmax: int, numerics: str) -> float:
    """Returns the factor of the gradients of scale and zero point. None means LSQ's `1 / sqrt(numel * qmax)`."""
    if grad_factor is not None:
        return grad_factor
    return 1 / sqrt(max(x.numel(), 1) * largest_level(qmax, numerics))


def _has_learned_zero(grid: Grid) -> bool:
    z = grid.zero_point
    return isinstance(z, Tensor) and z.is_floating_point() and not is_ggml(grid.numerics)


def forward_grid(grid: Grid) -> Grid:
    """Returns the grid of the forward, with a learned zero point rounded half to even. Offsets of ggml stay floats."""
    if _has_learned_zero(grid):
        assert isinstance(grid.zero_point, Tensor)
        return grid._replace(zero_point=round_forward(grid.zero_point, grid.qmin, grid.qmax))
    return grid


def backward_grid(grid: Grid) -> Grid:
    """Returns the grid of the backward, with a learned zero point rounded by its rule. Offsets of ggml stay floats."""
    if _has_learned_zero(grid):
        assert isinstance(grid.zero_point, Tensor)
        return grid._replace(zero_point=_round_backward(grid.zero_point, grid.qmin, grid.qmax, grid.numerics))
    return grid


# --- directly -------------------------------------------------------------------------------------


def count_changes(*tensors: Tensor) -> None:
    """Tells autograd that tensors were changed in place, so that it rejects stale saved tensors.

    Inference tensors have no version counter.
    """
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def fake_quantize_learned(run: Kernels, x: Tensor, grid: Grid, grad_factor: float | None) -> Tensor:
    """Runs the forward of `Learned`. `grad_factor` only matters for its gradients."""
    return run.fake_quantize(x, forward_grid(grid), _kernels.MASK_NONE)[0]


def learned_backward(run: Kernels, dy: Tensor, x: Tensor, grid: Grid, grad_factor: float | None) -> ThreeTensors:
    """Runs the backward of `Learned`."""
    factor = learned_factor(grad_factor, x, grid.qmax, grid.numerics)
    return run.learned_backward(dy, x, backward_grid(grid), factor)


def observe_into(
    run: Kernels,
    x: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    nonfinite: Tensor,
    options: ObserverOptions,
) -> tuple[Tensor, Tensor | None]:
    """Runs `observe_fake_quantize`, overwrites scale and zero point, and adds to the number of non-finite values."""
    found = run.observe_fake_quantize(x, running_min, running_max, options)
    scale.copy_(found.scale)
    zero_point.copy_(found.zero_point)
    nonfinite.add_(found.nonfinite)
    return found.y, found.mask


def observe_and_count(x: Tensor, running_min: Tensor, running_max: Tensor, options: ObserverOptions) -> Observed:
    """Runs `observe_fake_quantize` on plain memory, and tells autograd that the running range has changed."""
    count_changes(running_min, running_max)
    return tensor_kernels.observe_fake_quantize(x, running_min, running_max, options)


# --- through the dispatcher -----------------------------------------------------------------------


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
    learned_backward: OperatorOf[ThreeTensors]
    quantize: OperatorOf[Tensor]
    quantize_packed: OperatorOf[Tensor]
    dequantize: OperatorOf[Tensor]
    dequantize_packed: OperatorOf[Tensor]
    min_max: OperatorOf[ThreeTensors]
    choose_qparams: OperatorOf[tuple[Tensor, Tensor]]
    observe_fake_quantize: OperatorOf[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    observe_into: OperatorOf[tuple[Tensor, Tensor]]
    checked_scale: OperatorOf[Tensor]


ops = cast("Operators", torch.ops.fakequant)


def with_grid(function: Operator, *, after: int = 1) -> Operator:
    """Returns `function` in the form of an operator, whose arguments include the fields of a grid.

    `function` takes a `Grid` in their place. They come after the first argument, or after several.
    """
    end = after + len(Grid._fields)

    def operator(*args: Any) -> Results:
        return function(*args[:after], Grid(*args[after:end]), *args[end:])

    return operator


def below_autograd(operator: Callable[..., Result], *args: Any) -> Result:
    """Calls the operator's kernel, past its autograd rule."""
    with BelowAutograd():
        return operator(*args)


@contextmanager
def _one_level_down() -> Iterator[None]:
    """Switches derivatives on again inside an autograd function, where outer levels of nested transforms need them."""
    with torch.enable_grad(), set_forward_mode_enabled(True), BelowAutograd():
        yield


@_one_level_down()
def dispatched_fake_quantize(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor | None]:
    """Returns the fake-quantized values, and a mask unless `mask_kind` is MASK_NONE."""
    if mask_kind == _kernels.MASK_NONE:
        return ops.fake_quantize(x, *grid, False), None
    return ops.fake_quantize_masked(x, *grid, mask_kind == _kernels.MASK_PACKED)


@_one_level_down()
def dispatched_mask_backward(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """Returns dy where the mask is set, otherwise 0. See `gradients.masked`."""
    return ops.mask_backward(dy, mask, order, multiply)


@_one_level_down()
def dispatched_learned(x: Tensor, grid: Grid, grad_factor: float | None) -> Tensor:
    """Returns the fake-quantized values with learned scale and zero point."""
    return ops.fake_quantize_learned(x, *grid, grad_factor)


@_one_level_down()
def dispatched_learned_backward(dy: Tensor, x: Tensor, grid: Grid, grad_factor: float | None) -> ThreeTensors:
    """Returns dx, dscale and dzero_point."""
    return ops.learned_backward(dy, x, *grid, grad_factor)


@_one_level_down()
def dispatched_observe(x: Tensor, running_min: Tensor, running_max: Tensor, options: ObserverOptions) -> Observed:
    """Updates the running range and fake-quantizes."""
    return Observed(*ops.observe_fake_quantize(x, running_min, running_max, *options))


@_one_level_down()
def dispatched_observe_into(x: Tensor, state: tuple[Tensor, ...], options: ObserverOptions) -> tuple[Tensor, Tensor]:
    """Updates the state of a quantizer and fake-quantizes. See `observe_into`."""
    return ops.observe_into(x, *state, *options)
