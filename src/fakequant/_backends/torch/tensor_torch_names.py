"""The functions with torch's names on tensors: torch's bits and errors, with one bit saved per element.

On the CPU, calls that torch would accept run on fakequant's kernels. All other calls go to torch's own operators: on
other devices because the kernels for them are torch's, and with wrong arguments because the errors are torch's.
"""

from typing import NoReturn

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.torch import aten_kernels, compiled_nodes, gradients
from fakequant._backends.torch.plain_memory import is_direct
from fakequant._backends.torch.routes import ops
from fakequant._backends.torch.tensor_blocks import along
from fakequant._backends.torch.tensor_kernels import KERNEL_DTYPES, Grid
from fakequant._backends.torch.torch_annotations import Context, Function, Operator
from fakequant._backends.torch.torch_private import Originals, is_forward_mode
from fakequant._backends.types import FusedArguments, LearnedGradients, OutputAndMask, Unchecked


def _is_direct(x: object) -> bool:
    """Returns True if the kernels can be called on `x`."""
    return isinstance(x, Tensor) and x.dtype in KERNEL_DTYPES and is_direct(x)


def _is_here(x: object) -> bool:
    """Returns True if `x` is a strided CPU or meta tensor of a dtype that has a kernel.

    Under a compiler or transform such tensors go to `torch.ops.fakequant`, because torch's operators have no rules for
    transforms. Sparse, MKL-DNN and nested tensors go to torch, which raises its own errors.
    """
    if not isinstance(x, Tensor) or x.dtype not in KERNEL_DTYPES or x.device.type not in ("cpu", "meta"):
        return False
    return x.layout == torch.strided and not x.is_nested


def _are_ints(*values: object) -> bool:
    """Returns True if all values are ints that fit int64. Bools do not count: torch rejects them."""
    return all(type(v) is int and -(2**63) <= v < 2**63 for v in values)


def _is_number(value: object) -> bool:
    """Returns True if `value` is a float, or an int that fits int64."""
    return type(value) is float or (isinstance(value, (int, float)) and -(2**63) <= value < 2**63)


def _requires_grad(*parameters: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(p, Tensor) and p.requires_grad for p in parameters)


# --- per tensor -----------------------------------------------------------------------------------


def fake_quantize_per_tensor_affine(
    input: Unchecked, scale: Unchecked, zero_point: Unchecked, quant_min: Unchecked, quant_max: Unchecked
) -> Tensor:
    """See `fakequant.torch_ops.fake_quantize_per_tensor_affine`."""
    numbers = (scale, zero_point, quant_min, quant_max)
    if _are_ints(quant_min, quant_max):
        y = compiled_nodes.fake_quantize_affine(input, *numbers)
        if y is not None:
            return y
    if _is_direct(input):
        grid = aten_kernels.number_grid(*numbers)
        if grid is None and not _requires_grad(scale, zero_point):
            grid = aten_kernels.one_element_grid(*numbers)
        if grid is not None:
            return gradients.clipped(input, grid)
    elif _is_here(input) and (grid := _tensor_grid(input, *numbers)) is not None:
        return ops.fake_quantize(input, *grid, True)
    return Originals.fake_quantize_per_tensor_affine(input, scale, zero_point, quant_min, quant_max)


def _tensor_grid(x: Tensor, scale: Unchecked, zero_point: Unchecked, qmin: Unchecked, qmax: Unchecked) -> Grid | None:
    """Returns the grid with tensors instead of numbers, as operators take it, or None if torch would reject it."""
    if isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
        if scale.numel() != 1 or zero_point.numel() != 1 or _requires_grad(scale, zero_point):
            return None
        return Grid(scale.float(), zero_point.to(torch.int32), qmin, qmax, "torch_tensor")
    if isinstance(scale, Tensor) or isinstance(zero_point, Tensor) or not qmin <= zero_point <= qmax:
        return None
    scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    zero_point = torch.full((), zero_point, dtype=torch.int64, device=x.device)
    return Grid(scale, zero_point, qmin, qmax, "torch_tensor")


def fake_quantize_per_tensor_affine_cachemask(
    input: Unchecked, scale: Unchecked, zero_point: Unchecked, quant_min: Unchecked, quant_max: Unchecked
) -> OutputAndMask[Tensor]:
    """See `fakequant.torch_ops.fake_quantize_per_tensor_affine_cachemask`."""
    grid = aten_kernels.number_grid(scale, zero_point, quant_min, quant_max)
    if grid is not None and _is_direct(input):
        return OutputAndMask(*gradients.clipped_and_mask(input, grid, _kernels.MASK_BYTES))
    if _is_here(input) and (grid := _tensor_grid(input, scale, zero_point, quant_min, quant_max)) is not None:
        return OutputAndMask(*ops.fake_quantize_masked(input, *grid, False))
    return OutputAndMask(*Originals.cachemask(input, scale, zero_point, quant_min, quant_max))


def fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
    input: Unchecked,
    scale: Unchecked,
    zero_point: Unchecked,
    fake_quant_enabled: Unchecked,
    quant_min: Unchecked,
    quant_max: Unchecked,
) -> OutputAndMask[Tensor]:
    """See `fakequant.torch_ops.fake_quantize_per_tensor_affine_cachemask_tensor_qparams`."""
    if _is_direct(input) and not _requires_grad(scale, zero_point) and isinstance(fake_quant_enabled, Tensor):
        grid = aten_kernels.one_element_grid(scale, zero_point, quant_min, quant_max)
        if grid is not None and fake_quant_enabled.numel() == 1 and fake_quant_enabled.item() == 1:
            return OutputAndMask(*gradients.clipped_and_mask(input, grid, _kernels.MASK_BYTES))
    return OutputAndMask(
        *Originals.cachemask_tensor_qparams(input, scale, zero_point, fake_quant_enabled, quant_min, quant_max)
    )


def fake_quantize_per_tensor_affine_cachemask_backward(grad: Unchecked, mask: Unchecked) -> Tensor:
    """See `fakequant.torch_ops.fake_quantize_per_tensor_affine_cachemask_backward`."""
    if _is_maskable(grad, mask):
        return gradients.masked(grad, mask, None, True)
    dx: Tensor = Originals.cachemask_backward(grad, mask)
    return dx


def _is_maskable(grad: Unchecked, mask: Unchecked) -> bool:
    if not (_is_direct(grad) and isinstance(mask, Tensor)) or grad.numel() == 0:
        return False
    return mask.dtype == torch.bool and mask.shape == grad.shape and mask.device == grad.device


# --- per channel ----------------------------------------------------------------------------------


def _channel_grid(
    x: Unchecked, scale: Unchecked, zero_point: Unchecked, axis: Unchecked, qmin: Unchecked, qmax: Unchecked
) -> Grid | None:
    if not (isinstance(scale, Tensor) and isinstance(zero_point, Tensor)) or _requires_grad(scale, zero_point):
        return None
    if not is_direct(x):
        if not 0 <= axis < x.dim() or not scale.shape == zero_point.shape == x.shape[axis : axis + 1]:
            return None
        return Grid(along(scale, x, axis), along(zero_point, x, axis), qmin, qmax, "torch_channel")
    return aten_kernels.channel_grid(x, scale, zero_point, axis, qmin, qmax)


def fake_quantize_per_channel_affine(
    input: Unchecked,
    scale: Unchecked,
    zero_point: Unchecked,
    axis: Unchecked,
    quant_min: Unchecked,
    quant_max: Unchecked,
) -> Tensor:
    """See `fakequant.torch_ops.fake_quantize_per_channel_affine`."""
    if _are_ints(axis, quant_min, quant_max):
        y = compiled_nodes.fake_quantize_affine(input, scale, zero_point, quant_min, quant_max, axis=axis)
        if y is not None:
            return y
    if _is_here(input):
        grid = _channel_grid(input, scale, zero_point, axis, quant_min, quant_max)
        if grid is not None:
            return gradients.clipped(input, grid) if _is_direct(input) else ops.fake_quantize(input, *grid, True)
    return Originals.fake_quantize_per_channel_affine(input, scale, zero_point, axis, quant_min, quant_max)


def fake_quantize_per_channel_affine_cachemask(
    input: Unchecked,
    scale: Unchecked,
    zero_point: Unchecked,
    axis: Unchecked,
    quant_min: Unchecked,
    quant_max: Unchecked,
) -> OutputAndMask[Tensor]:
    """See `fakequant.torch_ops.fake_quantize_per_channel_affine_cachemask`."""
    arguments = (scale, zero_point, axis, quant_min, quant_max)
    grid = _channel_grid(input, *arguments) if _is_here(input) else None
    if grid is None:
        return OutputAndMask(*Originals.channel_cachemask(input, *arguments))
    if _is_direct(input):
        return OutputAndMask(*gradients.clipped_and_mask(input, grid, _kernels.MASK_BYTES))
    return OutputAndMask(*ops.fake_quantize_masked(input, *grid, False))


def fake_quantize_per_channel_affine_cachemask_backward(grad: Unchecked, mask: Unchecked) -> Tensor:
    """See `fakequant.torch_ops.fake_quantize_per_channel_affine_cachemask_backward`."""
    if _is_maskable(grad, mask):
        return gradients.masked(grad, mask, None, True)
    dx: Tensor = Originals.channel_cachemask_backward(grad, mask)
    return dx


# --- learnable ------------------------------------------------------------------------------------


def fake_quantize_learnable_per_tensor_affine(
    input: Unchecked,
    scale: Unchecked,
    zero_point: Unchecked,
    quant_min: Unchecked,
    quant_max: Unchecked,
    grad_factor: Unchecked = 1.0,
) -> Tensor:
    """See `fakequant.torch_ops.fake_quantize_learnable_per_tensor_affine`."""
    arguments = (input, scale, zero_point, quant_min, quant_max)
    if _is_range_with_zero(quant_min, quant_max) and _is_number(grad_factor):
        y = compiled_nodes.fake_quantize_learnable_affine(*arguments, float(grad_factor))
        if y is not None:
            return y
        if _is_learnable(*arguments[:3]) and scale.shape == zero_point.shape == (1,):
            return _learnable(input, Grid(scale, zero_point, quant_min, quant_max, "torch_tensor"), float(grad_factor))
    forward = Originals.fake_quantize_learnable_per_tensor_affine
    if _takes_kernel_gradients(*arguments[:3], quant_min, quant_max):
        wide: Tensor = _Wide.apply(forward, fake_quantize_learnable_per_tensor_affine_backward, *arguments, grad_factor)
        return wide
    return forward(*arguments, grad_factor)


def fake_quantize_learnable_per_channel_affine(
    input: Unchecked,
    scale: Unchecked,
    zero_point: Unchecked,
    axis: Unchecked,
    quant_min: Unchecked,
    quant_max: Unchecked,
    grad_factor: Unchecked = 1.0,
) -> Tensor:
    """See `fakequant.torch_ops.fake_quantize_learnable_per_channel_affine`."""
    if _is_range_with_zero(quant_min, quant_max) and _are_ints(axis) and _is_number(grad_factor):
        ends = (quant_min, quant_max)
        y = compiled_nodes.fake_quantize_learnable_affine(
            input, scale, zero_point, *ends, float(grad_factor), axis=axis
        )
        if y is not None:
            return y
        if _is_learnable(input, scale, zero_point) and _fits(scale, zero_point, input, axis):
            grid = Grid(along(scale, input, axis), along(zero_point, input, axis), *ends, "torch_channel")
            return _learnable(input, grid, float(grad_factor))
    arguments = (input, scale, zero_point, axis, quant_min, quant_max, grad_factor)
    forward = Originals.fake_quantize_learnable_per_channel_affine
    if _takes_kernel_gradients(input, scale, zero_point, quant_min, quant_max):
        wide: Tensor = _Wide.apply(forward, fake_quantize_learnable_per_channel_affine_backward, *arguments)
        return wide
    return forward(*arguments)


def _takes_kernel_gradients(
    x: Unchecked, scale: Unchecked, zero_point: Unchecked, qmin: Unchecked, qmax: Unchecked
) -> bool:
    """Returns True if torch computes the forward and the kernels compute the gradients.

    torch has the bits and errors of the forward, but its sums in the backward depend on its number of threads.
    """
    return (
        _is_direct(x)
        and _are_tensors(scale, zero_point)
        and _are_ints(qmin, qmax)
        and qmin <= 0 <= qmax
        and _requires_grad(x, scale, zero_point)
        and not is_forward_mode()
    )


class _Wide(Function):
    """torch's forward with the gradients of the kernels, for ranges beyond 2^24."""

    @staticmethod
    def forward(ctx: Context, forward: Operator, backward: Operator, *arguments: Unchecked) -> Tensor:
        """`arguments` are the arguments of the function; the first three are tensors."""
        ctx.save_for_backward(*arguments[:3])
        ctx.backward, ctx.rest = backward, arguments[3:]
        y: Tensor = forward(*arguments)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Returns dx, dscale and dzero_point, which cannot be differentiated again, like torch's."""
        with torch.no_grad():
            found = ctx.backward(dy, *ctx.saved_tensors, *ctx.rest)
        if torch.is_grad_enabled():
            found = _NotTwice.apply(*found, dy, *ctx.saved_tensors)
        return None, None, *found, *[None] * len(ctx.rest)


class _NotTwice(Function):
    """Three gradients that depend on their sources but have no derivative."""

    @staticmethod
    def forward(ctx: Context, *gradients_and_sources: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients, detached."""
        return tuple(t.detach() for t in gradients_and_sources[:3])

    @staticmethod
    def backward(ctx: Context, *_: Tensor) -> NoReturn:
        """Raises RuntimeError: there is no second derivative."""
        raise RuntimeError(
            "Gradients of a learnable fake-quantize cannot be differentiated again for a range beyond 2^24.\n"
            "Use a range within -2^24 and 2^24, or `fakequant.fake_quantize_learned`."
        )


def _fits(scale: Tensor, zero_point: Tensor, x: Tensor, axis: Unchecked) -> bool:
    """Returns True if scale and zero point fit the axis. For 1-D input torch sums over channels, so it does not fit."""
    return 1 < x.dim() > axis >= 0 and scale.shape == zero_point.shape == (x.shape[axis],)


def _is_range_with_zero(qmin: Unchecked, qmax: Unchecked) -> bool:
    """Returns True for a range that includes 0, as torch's backward needs, and is exact in float32."""
    return _are_ints(qmin, qmax) and -(2**24) <= qmin <= 0 <= qmax <= 2**24


def _is_learnable(x: Unchecked, scale: Unchecked, zero_point: Unchecked) -> bool:
    """Returns True if the kernels, or `torch.ops.fakequant`, can run the learnable forward."""
    return (
        _is_here(x)
        and isinstance(scale, Tensor)
        and isinstance(zero_point, Tensor)
        and scale.dtype == zero_point.dtype == torch.float32
        and scale.device == zero_point.device == x.device
        and (not _is_direct(x) or bool(zero_point.isfinite().all()))
    )


def _learnable(x: Tensor, grid: Grid, grad_factor: float) -> Tensor:
    return (
        gradients.learned(x, grid, grad_factor) if _is_direct(x) else ops.fake_quantize_learned(x, *grid, grad_factor)
    )


def fake_quantize_learnable_per_tensor_affine_backward(*arguments: Unchecked) -> LearnedGradients[Tensor]:
    """See `fakequant.torch_ops.fake_quantize_learnable_per_tensor_affine_backward`."""
    return _learnable_backward(aten_kernels.learnable_backward, Originals.learnable_backward, arguments)


def fake_quantize_learnable_per_channel_affine_backward(*arguments: Unchecked) -> LearnedGradients[Tensor]:
    """See `fakequant.torch_ops.fake_quantize_learnable_per_channel_affine_backward`."""
    return _learnable_backward(aten_kernels.learnable_channel_backward, Originals.learnable_channel_backward, arguments)


def _learnable_backward(
    kernel: Operator, original: Operator, arguments: tuple[Unchecked, ...]
) -> LearnedGradients[Tensor]:
    x = arguments[1]
    if _is_direct(x) and _are_tensors(*arguments[:4]):
        if x.numel() == 0:
            return _no_gradients(original, *arguments)
        result = kernel(*arguments)
        if result is not None:
            return LearnedGradients(*result)
    return LearnedGradients(*original(*arguments))


def _no_gradients(
    operator: Operator, grad: Unchecked, x: Unchecked, scale: Unchecked, zero_point: Unchecked, *rest: Unchecked
) -> LearnedGradients[Tensor]:
    """Returns the gradients of an empty input after calling torch's operator for its checks.

    torch's operator would return the scale itself as its gradient.
    """
    # The kernels accept float dtypes that torch rejects.
    operator(*(t.float() if t.dtype in KERNEL_DTYPES else t for t in (grad, x, scale, zero_point)), *rest)
    dscale, dzero_point = (torch.zeros_like(t, dtype=torch.float32, requires_grad=False) for t in (scale, zero_point))
    return LearnedGradients(x, dscale, dzero_point)


def _are_tensors(*values: Unchecked) -> bool:
    return all(isinstance(v, Tensor) for v in values)


# --- fused ----------------------------------------------------------------------------------------


def fused_moving_avg_obs_fake_quant(input: Unchecked, arguments: FusedArguments) -> Tensor:
    """See `fakequant.torch_ops.fused_moving_avg_obs_fake_quant`."""
    call = _fused_call(input, arguments)
    if call is None:
        return Originals.fused_moving_avg_obs_fake_quant(input, *arguments)
    if gradients.is_differentiating(input):
        return gradients.fused(input, call, _kernels.MASK_PACKED)[0]
    return call.run(_kernels.MASK_NONE)[0]


def fused_moving_avg_obs_fq_helper(input: Unchecked, arguments: FusedArguments) -> OutputAndMask[Tensor]:
    """See `fakequant.torch_ops.fused_moving_avg_obs_fq_helper`."""
    call = _fused_call(input, arguments)
    if call is None:
        return OutputAndMask(*Originals.fused(input, *arguments))
    return OutputAndMask(*gradients.fused(input, call, _kernels.MASK_BYTES))


def _fused_call(x: Unchecked, given: FusedArguments) -> aten_kernels.Fused | None:
    if not _is_direct(x) or not _are_tensors(given.observer_on, given.fake_quant_on, *given.state):
        return None
    numbers = (given.quant_min, given.quant_max, given.ch_axis)
    if _requires_grad(*given.state) or not all(type(n) is int for n in numbers):
        return None
    call = aten_kernels.fused_call(x, given) if type(given.averaging_const) is float else None
    if call is not None:
        torch.autograd.graph.increment_version(call.state[: 4 if call.quantize else 2])
    return call
