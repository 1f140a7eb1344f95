"""The derivatives: straight-through, clipped or not, and with learned scale and zero point.

    clipped        dx = dy inside the range, otherwise 0      saves 1 bit per element
    pass-through   dx = dy                                    saves nothing
    learned        dx, dscale, dzero_point                    saves x, scale, zero_point

Each also has a forward-mode derivative and can be differentiated twice. Second derivatives apply the straight-through
estimator again, so the rounding error `(q - z) - x / scale` is a constant in them.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.kernel_enums import is_own
from fakequant._backends.torch import compiled_nodes, formula, operator_calls, tensor_kernels
from fakequant._backends.torch.aten_kernels import Fused as FusedCall
from fakequant._backends.torch.compiled_nodes import CompiledNodes
from fakequant._backends.torch.operator_calls import ObserverOptions
from fakequant._backends.torch.plain_memory import is_eager
from fakequant._backends.torch.routes import DIRECT, Route, backward_grid, learned_factor
from fakequant._backends.torch.tensor_kernels import Grid, Observed, Order, order_of
from fakequant._backends.torch.torch_annotations import Context, unpack_dual
from fakequant._backends.torch.torch_private import SingleLevelFunction, is_forward_mode, unwrap_dead_wrappers

# Usually dx, dscale and dzero_point.
ThreeTensors: TypeAlias = tuple[Tensor, Tensor, Tensor]


def multiplies(numerics: str) -> bool:
    """Returns True if the gradient is `dy * mask`, as in torch, rather than `where(mask, dy, 0)`."""
    return not is_own(numerics)


def is_differentiating(*tensors: Tensor | None) -> bool:
    """Returns True if autograd may need the derivative of a function of these tensors."""
    if is_forward_mode():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


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


# --- on plain memory ------------------------------------------------------------------------------
#
# Callers have checked `is_eager(x)`. With compiled nodes, the forward runs first and a node is then attached to its
# result. Without them, or for forward-mode derivatives, the classes below are used.


def _nodes() -> CompiledNodes | None:
    return None if is_forward_mode() else compiled_nodes.compiled


def clipped(x: Tensor, grid: Grid) -> Tensor:
    """Returns y, whose gradient is clipped."""
    if not is_differentiating(x):
        return tensor_kernels.fake_quantize(x, grid, _kernels.MASK_NONE)[0]
    nodes = _nodes()
    if nodes is None:
        in_python: Tensor = Clipped.apply(x, grid, DIRECT)
        return in_python
    y, mask = tensor_kernels.fake_quantize(x.detach(), grid, _kernels.MASK_PACKED)
    assert mask is not None
    nodes.clipped(x, y, mask, order_of(x), multiplies(grid.numerics))
    return y


def clipped_and_mask(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor]:
    """Returns y, whose gradient is clipped, and the mask: packed, or bytes like y."""
    nodes, differentiating = _nodes(), is_differentiating(x)
    if differentiating and nodes is None:
        in_python: tuple[Tensor, Tensor] = ClippedAndMask.apply(x, grid, mask_kind, DIRECT)
        return in_python
    y, mask = tensor_kernels.fake_quantize(x.detach(), grid, mask_kind)
    assert mask is not None
    if differentiating and nodes is not None:
        nodes.clipped(x, y, mask, order_of(x), multiplies(grid.numerics))
    return y, mask


def pass_through(x: Tensor, grid: Grid) -> Tensor:
    """Returns y, whose gradient is passed through."""
    nodes, differentiating = _nodes(), is_differentiating(x)
    if differentiating and nodes is None:
        in_python: Tensor = PassThrough.apply(x, grid, DIRECT)
        return in_python
    y, _ = tensor_kernels.fake_quantize(x.detach(), grid, _kernels.MASK_NONE)
    if differentiating and nodes is not None:
        nodes.pass_through(x, y)
    return y


def learned(x: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: Any) -> Tensor:
    """Returns y, differentiable with respect to x, scale and zero point.

    `rest` is qmin, qmax, numerics, grad_factor.
    """
    if is_differentiating(x, scale, zero_point):
        y: Tensor = Learned.apply(x, scale, zero_point, *rest, DIRECT)
        return y
    return DIRECT.fake_quantize_learned(x, scale, zero_point, *rest)


def observe(x: Tensor, running_min: Tensor, running_max: Tensor, rest: ObserverOptions) -> Observed:
    """Runs `observe_fake_quantize`. Returns its results, of which y has a gradient.

    Args:
        x: The data.
        running_min: The lower ends of the ranges. Updated in place.
        running_max: The upper ends of the ranges. Updated in place.
        rest: Everything after the running range in the operator's schema.
    """
    nodes, differentiating = _nodes(), is_differentiating(x)
    if differentiating and nodes is None:
        return Observed(*ObservedAndQuantized.apply(x, running_min, running_max, rest, DIRECT))
    result = DIRECT.observe_fake_quantize(x.detach(), running_min, running_max, rest)
    if differentiating and nodes is not None:
        if result.mask is None:
            nodes.pass_through(x, result.y)
        else:
            nodes.clipped(x, result.y, result.mask, order_of(x), multiplies(rest[2]))
    return result


def fused(x: Tensor, call: FusedCall, mask_kind: int) -> tuple[Tensor, Tensor]:
    """Runs torch's fused observer. Returns y, whose gradient is clipped, and the mask."""
    nodes, differentiating = _nodes(), is_differentiating(x)
    if differentiating and nodes is None:
        in_python: tuple[Tensor, Tensor] = Fused.apply(x, call, mask_kind)
        return in_python
    with torch.no_grad():
        y, mask = call.run_with_mask(mask_kind)
    if differentiating and nodes is not None:
        nodes.clipped(x, y, mask, order_of(x), True)
    return y, mask


# --- nodes in Python ------------------------------------------------------------------------------


class Clipped(SingleLevelFunction):
    """y, whose gradient is clipped. Saves one bit per element."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, grid: Grid, route: Route) -> Tensor:
        """`route` is `DIRECT` or `DISPATCHED`."""
        y, mask = route.fake_quantize(x, grid, _kernels.MASK_PACKED)
        _keep(ctx, mask)
        ctx.order = order_of(x)
        ctx.multiply = multiplies(grid.numerics)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None, None]:
        """dx = dy inside, 0 outside."""
        (mask,) = _kept(ctx)
        return masked(dy, mask, ctx.order, ctx.multiply), None, None

    @staticmethod
    def jvp(ctx: Context, x_t: Tensor, *_: None) -> Tensor:
        """The tangent is treated like the gradient."""
        (mask,) = _kept(ctx)
        return masked(x_t, mask, ctx.order, ctx.multiply)


class ClippedAndMask(Clipped):
    """`Clipped` with the mask as a second result: packed, or bytes like y."""

    @staticmethod
    def forward(  # type: ignore[override]  # one more argument and result than its base
        ctx: Context, x: Tensor, grid: Grid, mask_kind: int, route: Route
    ) -> tuple[Tensor, Tensor | None]:
        """`route` is `DIRECT` or `DISPATCHED`."""
        y, mask = route.fake_quantize(x, grid, mask_kind)
        _keep(ctx, mask)
        ctx.order = order_of(x)
        ctx.multiply = multiplies(grid.numerics)
        ctx.mark_non_differentiable(mask)
        return y, mask

    @staticmethod
    def backward(  # type: ignore[override]  # a gradient for each result, one for each argument
        ctx: Context, dy: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """dx = dy inside, 0 outside."""
        (mask,) = _kept(ctx)
        return masked(dy, mask, ctx.order, ctx.multiply), None, None, None

    @staticmethod
    def jvp(  # type: ignore[override]  # a tangent for each result
        ctx: Context, x_t: Tensor, *_: None
    ) -> tuple[Tensor, None]:
        """The tangent is treated like the gradient. The mask has no tangent."""
        return Clipped.jvp(ctx, x_t), None


class ObservedAndQuantized(SingleLevelFunction):
    """The results of `observe_fake_quantize`, of which only y is differentiable."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, running_min: Tensor, running_max: Tensor, rest: ObserverOptions, route: Route
    ) -> tuple[Tensor | None, ...]:
        """`rest` is everything after the running range in the operator's schema."""
        result = route.observe_fake_quantize(x, running_min, running_max, rest)
        _, _, numerics, *_, ctx.clipped = rest
        if ctx.clipped:
            _keep(ctx, result.mask)
            ctx.order = order_of(x)
            ctx.multiply = multiplies(numerics)
        ctx.mark_non_differentiable(*(t for t in result[1:] if t is not None))
        return tuple(result)

    @staticmethod
    def backward(ctx: Context, dy: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        """dx is dy, clipped or passed through. The observed range is a constant."""
        if ctx.clipped:
            (mask,) = _kept(ctx)
            dy = masked(dy, mask, ctx.order, ctx.multiply)
        return dy, None, None, None, None

    @staticmethod
    def jvp(ctx: Context, x_t: Tensor, *_: None) -> tuple[Tensor, None, None, None, None]:
        """The tangent is treated like the gradient."""
        if ctx.clipped:
            (mask,) = _kept(ctx)
            return masked(x_t, mask, ctx.order, ctx.multiply), None, None, None, None
        return x_t.clone(), None, None, None, None


class Fused(Clipped):
    """y and its mask from torch's fused observer."""

    @staticmethod
    def forward(  # type: ignore[override]  # other arguments than its base, and one more result
        ctx: Context, x: Tensor, call: FusedCall, mask_kind: int
    ) -> tuple[Tensor, Tensor]:
        """Runs `call`, which changes its state in place."""
        y, mask = call.run_with_mask(mask_kind)
        _keep(ctx, mask)
        ctx.order = order_of(x)
        ctx.multiply = True
        ctx.mark_non_differentiable(mask)
        return y, mask

    @staticmethod
    def backward(  # type: ignore[override]  # a gradient for each result
        ctx: Context, dy: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None]:
        """dx = dy inside, 0 outside."""
        return Clipped.backward(ctx, dy)

    @staticmethod
    def jvp(  # type: ignore[override]  # a tangent for each result
        ctx: Context, x_t: Tensor, *_: None
    ) -> tuple[Tensor, None]:
        """The tangent is treated like the gradient. The mask has no tangent."""
        return Clipped.jvp(ctx, x_t), None


class PassThrough(SingleLevelFunction):
    """y, whose gradient is passed through. Saves nothing."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, grid: Grid, route: Route) -> Tensor:
        """`route` is `DIRECT` or `DISPATCHED`."""
        return route.fake_quantize(x, grid, _kernels.MASK_NONE)[0]

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None, None]:
        """dx = dy."""
        return dy, None, None

    @staticmethod
    def jvp(ctx: Context, x_t: Tensor, *_: None) -> Tensor:
        """The tangent, unchanged."""
        return x_t.clone()


def masked(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """Returns `dy` where the mask is set, otherwise 0, differentiable with respect to `dy`.

    Args:
        dy: The gradient.
        mask: A packed mask, or a bool mask like `dy`.
        order: The order of axes in which a packed mask has its bits, or None for C order.
        multiply: Whether to compute `dy * mask` instead, as torch does.
    """
    if not is_eager(dy):
        return operator_calls.ops.mask_backward(dy, mask, order, multiply)
    if is_differentiating(dy):
        differentiable: Tensor = Masked.apply(dy, mask, order, multiply, DIRECT)
        return differentiable
    return tensor_kernels.mask_backward(dy, mask, order, multiply)


class Masked(SingleLevelFunction):
    """The gradient of `Clipped`. It is linear in dy and therefore its own derivative."""

    @staticmethod
    def forward(ctx: Context, dy: Tensor, mask: Tensor, order: Order, multiply: bool, route: Route) -> Tensor:
        """`route` is `DIRECT` or `DISPATCHED`."""
        _keep(ctx, mask)
        ctx.order, ctx.multiply = order, multiply
        return route.mask_backward(dy, mask, order, multiply)

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


class Learned(SingleLevelFunction):
    """y, differentiable with respect to x, scale and zero point."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: Any) -> Tensor:
        """`rest` is qmin, qmax, numerics, grad_factor, and `DIRECT` or `DISPATCHED`."""
        _keep(ctx, x, scale, zero_point)
        route: Route
        *ctx.rest, route = rest
        return route.fake_quantize_learned(x, scale, zero_point, *ctx.rest)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Returns dx, dscale and dzero_point."""
        x, scale, zero_point = _kept(ctx)
        dx, dscale, dzero_point = learned_gradients(dy, x, scale, zero_point, *ctx.rest)
        return dx, dscale, None if zero_point is None else dzero_point.reshape(zero_point.shape), *[None] * 5

    @staticmethod
    def jvp(ctx: Context, *tangents: Tensor | None) -> Tensor:
        """x' inside + scale' dy/dscale + zero_point' dy/dzero_point, without grad_factor."""
        x, scale, zero_point = _kept(ctx)
        qmin, qmax, numerics, _ = ctx.rest
        terms = formula.learned_terms(x, backward_grid(scale, zero_point, qmin, qmax, numerics))
        return _combine(tangents[:3], terms, x).to(x.dtype)


def _combine(values: tuple[Tensor | None, ...], terms: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Returns `v0 * terms[0] + spread(v1) * terms[1] + spread(v2) * terms[2]`, without the values that are None."""
    total = torch.zeros(x.shape, dtype=terms[1].dtype, device=x.device)
    for i, (value, term) in enumerate(zip(values, terms, strict=True)):
        if value is not None:
            spread = value if i == 0 else formula.spread(value, x)
            total = total + torch.where(term != 0, spread * term, 0)
    return total


def learned_gradients(dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: Any) -> ThreeTensors:
    """Returns dx, dscale and dzero_point, which can be differentiated again.

    `rest` is qmin, qmax, numerics, grad_factor.
    """
    if not is_eager(dy) or not is_eager(x):
        return operator_calls.ops.learned_backward(dy, x, scale, zero_point, *rest)
    if is_differentiating(dy, x, scale, zero_point):
        differentiable: ThreeTensors = LearnedGradient.apply(dy, x, scale, zero_point, *rest, DIRECT)
        return differentiable
    return DIRECT.learned_backward(dy, x, scale, zero_point, *rest)


class LearnedGradient(SingleLevelFunction):
    """The gradients of `Learned`, differentiable with respect to dy, scale and zero point."""

    @staticmethod
    def forward(
        ctx: Context, dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: Any
    ) -> ThreeTensors:
        """`rest` as in `Learned`."""
        _keep(ctx, dy, x, scale, zero_point)
        route: Route
        *ctx.rest, route = rest
        return route.learned_backward(dy, x, scale, zero_point, *ctx.rest)

    @staticmethod
    def backward(ctx: Context, g_dx: Tensor, g_dscale: Tensor, g_dzero: Tensor) -> tuple[Tensor | None, ...]:
        """Outside the range dscale = dy * (bound - z) depends on z, and dzero_point = -dy * scale on the scale."""
        dy, x, scale, zero_point = _kept(ctx)
        qmin, qmax, numerics, grad_factor = ctx.rest
        factor = learned_factor(grad_factor, x, qmax, numerics)
        terms = formula.learned_terms(x, backward_grid(scale, zero_point, qmin, qmax, numerics))
        g_dy = _combine((g_dx, g_dscale * factor, g_dzero * factor), terms, x).to(dy.dtype)
        outside = torch.where(terms[2] != 0, -dy.to(terms[2].dtype) * factor, 0)
        g_scale = formula.block_sums(outside * formula.spread(g_dzero, x), scale)
        g_zero = None
        if zero_point is not None and zero_point.is_floating_point():
            g_zero = formula.block_sums(outside * formula.spread(g_dscale, x), scale).to(zero_point.dtype)
        return g_dy, None, g_scale, g_zero, *[None] * 5

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
        return learned_gradients(tangents[0], x, scale, zero_point, *ctx.rest)
