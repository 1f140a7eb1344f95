"""The derivatives: straight-through, clipped or not, and with learned scale and zero point.

    clipped        dx = dy inside the range, otherwise 0      saves 1 bit per element
    pass-through   dx = dy                                    saves nothing
    learned        dx, dscale, dzero_point                    saves x, scale, zero_point

Each also has a forward-mode derivative and can be differentiated twice. Second derivatives apply the straight-through
estimator again, so the rounding error `(q - z) - x / scale` is a constant in them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.torch import compiled_nodes, formula, routes, tensor_kernels
from fakequant._backends.torch.aten_kernels import Fused as FusedCall
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.routes import (
    ThreeTensors,
    backward_grid,
    learned_factor,
    observe_and_count,
    ops,
)
from fakequant._backends.torch.tensor_kernels import Grid, Observed, ObserverOptions, Order, order_of
from fakequant._backends.torch.torch_annotations import Context, unpack_dual
from fakequant._backends.torch.torch_private import SingleLevelFunction, is_forward_mode, unwrap_dead_wrappers
from fakequant._kernels import is_own

# On plain memory.
_learned = partial(routes.fake_quantize_learned, tensor_kernels)
_learned_backward = partial(routes.learned_backward, tensor_kernels)


def multiplies(numerics: str) -> bool:
    """Returns True if the gradient is `dy * mask`, as in torch, rather than `where(mask, dy, 0)`."""
    return not is_own(numerics)


def is_differentiating(*values: object) -> bool:
    """Returns True if autograd may need the derivative of a function of these values, of which some may be tensors."""
    if is_forward_mode():
        return True
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


def has_derivative(parameter: object) -> bool:
    """Returns True if autograd may need the derivative with respect to a scale or zero point."""
    if not isinstance(parameter, Tensor):
        return False
    if torch.is_grad_enabled() and parameter.requires_grad:
        return True
    return is_forward_mode() and unpack_dual(parameter).tangent is not None


def refuse_gradient(function: str, **parameters: object) -> None:
    """Raises RuntimeError if a scale or zero point needs a derivative that the function does not have."""
    for name, value in parameters.items():
        if has_derivative(value):
            raise RuntimeError(
                f"`{name}` requires a gradient, but `{function}` does not differentiate it.\n"
                f"Use `fake_quantize_learned`, or pass `{name}.detach()`."
            )


def _keep(ctx: Context, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    if is_forward_mode():
        ctx.save_for_forward(*tensors)


def _kept(ctx: Context) -> tuple[Tensor, ...]:
    """Returns the saved tensors, unwrapped from functorch levels that have ended (`torch.func.vjp`)."""
    return unwrap_dead_wrappers(ctx.saved_tensors)


# --- straight-through -----------------------------------------------------------------------------

# A forward pass without a derivative. It returns y, its mask or None, and further results.
Forward: TypeAlias = Callable[[Tensor], tuple[Any, ...]]


class StraightThrough(SingleLevelFunction):
    """The results of a forward pass, of which only y has a gradient: dy inside the range, or everywhere."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, run: Forward, clipped: bool, multiply: bool) -> tuple[Any, ...]:
        """Returns `run(x)`. Saves the mask if the gradient is clipped."""
        found = run(x)
        ctx.clipped, ctx.multiply, ctx.number = clipped, multiply, len(found)
        if clipped:
            _keep(ctx, found[1])
            ctx.order = order_of(x)
        ctx.mark_non_differentiable(*(t for t in found[1:] if t is not None))
        ctx.set_materialize_grads(False)  # no zeros for the mask: they take time, and hang in a forked process
        return tuple(found)

    @staticmethod
    def backward(ctx: Context, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """dx is dy, clipped or passed through."""
        return None if dy is None else _clip(ctx, dy), None, None, None

    @staticmethod
    def jvp(ctx: Context, x_t: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        """The tangent is treated like the gradient. Only y has one."""
        return _clip(ctx, x_t) if ctx.clipped else x_t.clone(), *[None] * (ctx.number - 1)


def _clip(ctx: Context, dy: Tensor) -> Tensor:
    if not ctx.clipped:
        return dy
    (mask,) = _kept(ctx)
    return masked(dy, mask, ctx.order, ctx.multiply)


# --- on plain memory ------------------------------------------------------------------------------
#
# Callers have checked `is_eager(x)`. With compiled nodes, the forward runs first and a node is then attached to its
# result. Without them, or for forward-mode derivatives, the classes in Python are used.


def _straight_through(x: Tensor, run: Forward, clipped: bool, multiply: bool) -> tuple[Any, ...]:
    """Returns the results of `run(x)`, of which y has a gradient."""
    if not is_differentiating(x):
        return run(x.detach())
    nodes = None if is_forward_mode() else compiled_nodes.compiled
    if nodes is None:
        in_python: tuple[Any, ...] = StraightThrough.apply(x, run, clipped, multiply)
        return in_python
    found = run(x.detach())
    if clipped:
        nodes.clipped(x, found[0], found[1], order_of(x), multiply)
    else:
        nodes.pass_through(x, found[0])
    return found


def clipped(x: Tensor, grid: Grid) -> Tensor:
    """Returns y, whose gradient is clipped."""
    if is_differentiating(x):
        return clipped_and_mask(x, grid, _kernels.MASK_PACKED)[0]
    return tensor_kernels.fake_quantize(x, grid, _kernels.MASK_NONE)[0]


def clipped_and_mask(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor]:
    """Returns y, whose gradient is clipped, and the mask: packed, or bytes like y."""

    def run(x: Tensor) -> tuple[Any, ...]:
        return tensor_kernels.fake_quantize(x, grid, mask_kind)

    y, mask = _straight_through(x, run, True, multiplies(grid.numerics))
    return y, mask


def pass_through(x: Tensor, grid: Grid) -> Tensor:
    """Returns y, whose gradient is passed through."""

    def run(x: Tensor) -> tuple[Any, ...]:
        return tensor_kernels.fake_quantize(x, grid, _kernels.MASK_NONE)

    y: Tensor = _straight_through(x, run, False, False)[0]
    return y


def learned(x: Tensor, grid: Grid, grad_factor: float | None) -> Tensor:
    """Returns y, differentiable with respect to x, scale and zero point."""
    if is_differentiating(x, grid.scale, grid.zero_point):
        y: Tensor = Learned.apply(x, grid.scale, grid.zero_point, levels_of(grid), grad_factor, _learned)
        return y
    return _learned(x, grid, grad_factor)


def observe(x: Tensor, running_min: Tensor, running_max: Tensor, options: ObserverOptions) -> Observed:
    """Runs `observe_fake_quantize`, which updates the running range in place. In the result, y has a gradient."""

    def run(x: Tensor) -> Observed:
        return observe_and_count(x, running_min, running_max, options)

    return Observed(*_straight_through(x, run, options.clipped, multiplies(options.numerics)))


def fused(x: Tensor, call: FusedCall, mask_kind: int) -> tuple[Tensor, Tensor]:
    """Runs torch's fused observer. Returns y, whose gradient is clipped, and the mask."""

    def run(x: Tensor) -> tuple[Any, ...]:
        return call._replace(x=x).run(mask_kind)

    y, mask = _straight_through(x, run, True, True)
    return y, mask


# --- gradients of gradients -----------------------------------------------------------------------


def masked(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """Returns `dy` where the mask is set, otherwise 0, differentiable with respect to `dy`.

    A packed mask has its bits in the `order` of axes, or in C order for None. A bool mask is like `dy`. With
    `multiply`, the result is `dy * mask`, as in torch.
    """
    if not is_eager(dy):
        return ops.mask_backward(dy, mask, order, multiply)
    if is_differentiating(dy):
        differentiable: Tensor = Masked.apply(dy, mask, order, multiply, tensor_kernels.mask_backward)
        return differentiable
    return tensor_kernels.mask_backward(dy, mask, order, multiply)


class Masked(SingleLevelFunction):
    """The clipped gradient. It is linear in dy and therefore its own derivative."""

    @staticmethod
    def forward(
        ctx: Context, dy: Tensor, mask: Tensor, order: Order, multiply: bool, run: Callable[..., Tensor]
    ) -> Tensor:
        """`run` computes it without a derivative."""
        _keep(ctx, mask)
        ctx.order, ctx.multiply = order, multiply
        return run(dy, mask, order, multiply)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        """The same mask again."""
        (mask,) = _kept(ctx)
        return masked(g, mask, ctx.order, ctx.multiply), None, None, None, None

    @staticmethod
    def jvp(ctx: Context, dy_t: Tensor, *_: None) -> Tensor:
        """The same mask again."""
        (mask,) = _kept(ctx)
        return masked(dy_t, mask, ctx.order, ctx.multiply)


# --- learned --------------------------------------------------------------------------------------


class Levels(NamedTuple):
    """A grid without its tensors, which are arguments of their own so that autograd sees them."""

    qmin: int
    qmax: int
    numerics: str


def levels_of(grid: Grid) -> Levels:
    """Returns the part of a grid without tensors."""
    return Levels(grid.qmin, grid.qmax, grid.numerics)


class Learned(SingleLevelFunction):
    """y, differentiable with respect to x, scale and zero point."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        levels: Levels,
        grad_factor: float | None,
        run: Callable[..., Tensor],
    ) -> Tensor:
        """`run` computes it without a derivative."""
        _keep(ctx, x, scale, zero_point)
        ctx.levels, ctx.grad_factor = levels, grad_factor
        return run(x, Grid(scale, zero_point, *levels), grad_factor)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Returns dx, dscale and dzero_point."""
        x, scale, zero_point = _kept(ctx)
        dx, dscale, dzero_point = learned_gradients(dy, x, Grid(scale, zero_point, *ctx.levels), ctx.grad_factor)
        return dx, dscale, None if zero_point is None else dzero_point.reshape(zero_point.shape), None, None, None

    @staticmethod
    def jvp(ctx: Context, *tangents: Tensor | None) -> Tensor:
        """x' inside + scale' dy/dscale + zero_point' dy/dzero_point, without grad_factor."""
        x, scale, zero_point = _kept(ctx)
        terms = formula.learned_terms(x, backward_grid(Grid(scale, zero_point, *ctx.levels)))
        return _combine(tangents[:3], terms, x).to(x.dtype)


def _combine(values: tuple[Tensor | None, ...], terms: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Returns `v0 * terms[0] + spread(v1) * terms[1] + spread(v2) * terms[2]`, without the values that are None."""
    total = torch.zeros(x.shape, dtype=terms[1].dtype, device=x.device)
    for i, (value, term) in enumerate(zip(values, terms, strict=True)):
        if value is not None:
            spread = value if i == 0 else formula.spread(value, x)
            total = total + torch.where(term != 0, spread * term, 0)
    return total


def learned_gradients(dy: Tensor, x: Tensor, grid: Grid, grad_factor: float | None) -> ThreeTensors:
    """Returns dx, dscale and dzero_point, which can be differentiated again."""
    if not is_eager(dy) or not is_eager(x):
        return ops.learned_backward(dy, x, *grid, grad_factor)
    if is_differentiating(dy, x, grid.scale, grid.zero_point):
        differentiable: ThreeTensors = LearnedGradient.apply(
            dy, x, grid.scale, grid.zero_point, levels_of(grid), grad_factor, _learned_backward
        )
        return differentiable
    return _learned_backward(dy, x, grid, grad_factor)


class LearnedGradient(SingleLevelFunction):
    """The gradients of `Learned`, differentiable with respect to dy, scale and zero point."""

    @staticmethod
    def forward(
        ctx: Context,
        dy: Tensor,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        levels: Levels,
        grad_factor: float | None,
        run: Callable[..., ThreeTensors],
    ) -> ThreeTensors:
        """`run` computes them without a derivative."""
        _keep(ctx, dy, x, scale, zero_point)
        ctx.levels, ctx.grad_factor = levels, grad_factor
        return run(dy, x, Grid(scale, zero_point, *levels), grad_factor)

    @staticmethod
    def backward(ctx: Context, g_dx: Tensor, g_dscale: Tensor, g_dzero: Tensor) -> tuple[Tensor | None, ...]:
        """Outside the range dscale = dy * (bound - z) depends on z, and dzero_point = -dy * scale on the scale."""
        dy, x, scale, zero_point = _kept(ctx)
        grid = Grid(scale, zero_point, *ctx.levels)
        factor = learned_factor(ctx.grad_factor, x, grid.qmax, grid.numerics)
        terms = formula.learned_terms(x, backward_grid(grid))
        g_dy = _combine((g_dx, g_dscale * factor, g_dzero * factor), terms, x).to(dy.dtype)
        outside = torch.where(terms[2] != 0, -dy.to(terms[2].dtype) * factor, 0)
        g_scale = formula.block_sums(outside * formula.spread(g_dzero, x), scale)
        g_zero = None
        if zero_point is not None and zero_point.is_floating_point():
            g_zero = formula.block_sums(outside * formula.spread(g_dscale, x), scale).to(zero_point.dtype)
        return g_dy, None, g_scale, g_zero, None, None, None

    @staticmethod
    def jvp(ctx: Context, *tangents: Tensor | None) -> ThreeTensors:
        """Supports only a tangent of dy. The others would be second derivatives in forward mode."""
        _, x, scale, zero_point = _kept(ctx)
        if any(t is not None for t in tangents[1:4]):
            raise NotImplementedError(
                "Forward-mode derivatives of the gradients of a learned fake-quantize are implemented in dy only.\n"
                "Use reverse mode over reverse mode: torch.autograd.grad(..., create_graph=True)."
            )
        assert tangents[0] is not None
        return learned_gradients(tangents[0], x, Grid(scale, zero_point, *ctx.levels), ctx.grad_factor)
