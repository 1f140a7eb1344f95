"""torch's fake-quantize operators on fakequant's kernels, with torch's arguments, results and bits.

Each function returns None for arguments it does not handle: what torch rejects, what torch converts
first, and a few layouts of observer state. The caller then runs torch's operator.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fakequant import _kernels, _native
from fakequant._backends.torch import tensor_kernels
from fakequant._backends.torch.plain_memory import is_memory
from fakequant._backends.torch.tensor_blocks import along, place
from fakequant._backends.torch.tensor_kernels import KERNEL_DTYPES, Grid, dense
from fakequant._backends.torch_rules import ZERO_POINT, check, sign_zeros, zero_point_of_backward
from fakequant._backends.types import FusedArguments, Unchecked

_INT32 = range(-(2**31), 2**31)
# torch's check allows bfloat16 scales but its kernel fails on them. fakequant's functions accept them.
_SCALE_DTYPES = (torch.float32, torch.bfloat16)
_ZERO_DTYPES = (torch.int32, torch.float32, torch.float16)
_LARGE = (-(2**62), 2**62)
_FLOAT32_MAX = torch.finfo(torch.float32).max


def has_kernel(x: object) -> bool:
    """Returns True if `x` is a plain CPU tensor of a dtype that has a kernel."""
    return isinstance(x, Tensor) and x.dtype in KERNEL_DTYPES and is_memory(x)


def number_grid(scale: Unchecked, zero_point: Unchecked, qmin: Unchecked, qmax: Unchecked) -> Grid | None:
    """Returns the grid of four numbers, or None if torch would reject or convert them."""
    if type(scale) not in (float, int) or not type(zero_point) is type(qmin) is type(qmax) is int:
        return None
    if not -(2**63) <= qmin <= zero_point <= qmax < 2**63:
        return None
    return Grid(float(scale), zero_point, qmin, qmax, "torch_tensor")


def one_element_grid(scale: Unchecked, zero_point: Unchecked, qmin: Unchecked, qmax: Unchecked) -> Grid | None:
    """Returns the grid of one-element tensors, or None if torch would reject them.

    Like torch, accepts a zero point outside the range.
    """
    if not (isinstance(scale, Tensor) and isinstance(zero_point, Tensor) and type(qmin) is type(qmax) is int):
        return None
    if scale.numel() != 1 or zero_point.numel() != 1 or not (scale.is_floating_point() and is_memory(scale)):
        return None
    if zero_point.dtype not in (torch.int32, torch.int64) or not is_memory(zero_point):
        return None
    s, z = scale.item(), int(zero_point.item())
    if z not in _INT32 or (abs(s) > _FLOAT32_MAX and not np.isinf(s)) or not -(2**63) <= qmin <= qmax < 2**63:
        return None
    return Grid(s, z, qmin, qmax, "torch_tensor")


def channel_grid(
    x: Tensor, scale: Unchecked, zero_point: Unchecked, axis: Unchecked, qmin: Unchecked, qmax: Unchecked
) -> Grid | None:
    """Returns the grid with one scale and zero point per index on `axis`, or None if torch would reject it."""
    if not (isinstance(scale, Tensor) and isinstance(zero_point, Tensor)):
        return None
    if not type(axis) is type(qmin) is type(qmax) is int or not -(2**63) <= qmin <= qmax < 2**63:
        return None
    if not 0 <= axis < x.dim() or scale.dtype not in _SCALE_DTYPES or zero_point.dtype not in _ZERO_DTYPES:
        return None
    channels = (x.shape[axis],)
    if scale.shape != channels or zero_point.shape != channels or not (is_memory(scale) and is_memory(zero_point)):
        return None
    if zero_point.dtype == torch.int32:
        zero_point = zero_point.contiguous()
        if (
            channels == (0,)
            or _native.first_outside(zero_point.data_ptr(), _kernels.ZERO_I32, channels[0], qmin, qmax) >= 0
        ):
            return None
    scale, zero_point = (along(t.detach(), x, axis) for t in (scale, zero_point))
    return Grid(scale, zero_point, qmin, qmax, "torch_channel")


def cachemask(x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int) -> tuple[Tensor, Tensor] | None:
    """Runs `aten::fake_quantize_per_tensor_affine_cachemask`."""
    grid = number_grid(scale, zero_point, qmin, qmax)
    return None if grid is None or not has_kernel(x) else _with_bytes(x, grid)


def cachemask_tensor_qparams(
    x: Tensor, scale: Tensor, zero_point: Tensor, enabled: Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor] | None:
    """Runs `aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams`."""
    grid = one_element_grid(scale, zero_point, qmin, qmax)
    if grid is None or not has_kernel(x) or not _is_flag(enabled) or enabled.item() == 0:
        return None
    return _with_bytes(x, grid)


def channel_cachemask(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, qmin: int, qmax: int
) -> tuple[Tensor, Tensor] | None:
    """Runs `aten::fake_quantize_per_channel_affine_cachemask` with float32 scales."""
    if not has_kernel(x) or scale.dtype != torch.float32:
        return None
    grid = channel_grid(x, scale, zero_point, axis, qmin, qmax)
    return None if grid is None else _with_bytes(x, grid)


def _with_bytes(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    y, mask = tensor_kernels.fake_quantize(x, grid, _kernels.MASK_BYTES)
    assert mask is not None
    return y, mask


def cachemask_backward(grad: Tensor, mask: Tensor) -> Tensor | None:
    """Runs `aten::fake_quantize_per_tensor_affine_cachemask_backward`, or its per-channel twin."""
    if not has_kernel(grad) or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return None
    if mask.shape != grad.shape or not is_memory(mask):
        return None
    size = grad.numel()
    if size == 0:
        return None  # torch returns grad itself
    if not (grad.is_contiguous() and mask.is_contiguous()):
        return tensor_kernels.mask_backward(grad, mask, None, True)
    # The usual layout, without the overhead of the general case.
    dx = torch.empty_like(grad, memory_format=torch.contiguous_format)
    dtype = KERNEL_DTYPES[grad.dtype]
    _native.mask_backward(grad.data_ptr(), mask.data_ptr(), _kernels.MASK_BYTES, dx.data_ptr(), dtype, size, True)
    return dx


# --- learnable ------------------------------------------------------------------------------------


def learnable_backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, grad_factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Runs `aten::_fake_quantize_learnable_per_tensor_affine_backward`, in every float dtype."""
    if not _are_learnable(grad, x, scale, zero_point, qmin, qmax) or scale.shape != (1,) or zero_point.shape != (1,):
        return None
    if not np.isfinite(np.float32(zero_point.item())):
        return None
    z = zero_point_of_backward(zero_point.item(), qmin, qmax)
    if not qmin <= z <= qmax:  # beyond 2^24, rounding to float32 may move it outside the range
        return None
    zeros = torch.tensor([z], dtype=torch.int32 if z in _INT32 else torch.int64, device="cpu")
    return _learnable(grad, x, Grid(scale.float(), zeros, qmin, qmax, "torch_tensor"), grad_factor)


def learnable_channel_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int,
    qmin: int,
    qmax: int,
    grad_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Runs `aten::_fake_quantize_learnable_per_channel_affine_backward`, in every float dtype."""
    if not _are_learnable(grad, x, scale, zero_point, qmin, qmax) or not 0 <= axis < x.dim():
        return None
    channels = (x.shape[axis],)
    if scale.shape != channels or zero_point.shape != channels:
        return None
    if not (zero_point.abs() < _LARGE[1]).all():  # or NaN; torch releases differ in what they reject
        return None
    z = zero_point.float().round().clamp(qmin, qmax)
    if _is_exact_in_float32(qmin, qmax):
        z = z.to(torch.int32)
    elif not all(qmin <= int(value) <= qmax for value in z.tolist()):
        return None
    # The per-tensor rule serves float zero points too: torch's backward always adds them before rounding.
    grid = Grid(along(scale.float(), x, axis), along(z, x, axis), qmin, qmax, "torch_tensor")
    dx, *sums = _learnable(grad, x, grid, grad_factor)
    # For 1-D input torch sums over all channels.
    dscale, dzero_point = (s.double().sum().float() if x.dim() == 1 else s.flatten() for s in sums)
    return dx, dscale, dzero_point


def _is_exact_in_float32(qmin: int, qmax: int) -> bool:
    """Returns True if float32 represents every integer of the range exactly."""
    return qmin >= -(2**24) and qmax <= 2**24


def _are_learnable(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: Unchecked, qmax: Unchecked
) -> bool:
    return (
        all(has_kernel(t) for t in (grad, x, scale, zero_point))
        and grad.shape == x.shape
        and x.numel() > 0
        and type(qmin) is type(qmax) is int
        and -(2**63) <= qmin <= 0 <= qmax < 2**63
    )


def _learnable(grad: Tensor, x: Tensor, grid: Grid, grad_factor: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # float32 represents every 16-bit value exactly, and torch returns float32.
    return tensor_kernels.learned_backward(grad.to(wide), x.to(wide), grid, grad_factor)


# --- fused ----------------------------------------------------------------------------------------


def _is_flag(t: object) -> bool:
    return isinstance(t, Tensor) and t.numel() == 1 and t.dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)


class Fused(NamedTuple):
    """A call of the fused operator that the kernels can run."""

    x: Tensor
    state: tuple[Tensor, Tensor, Tensor, Tensor]  # running_min, running_max, scale, zero_point
    averaging_const: float
    qmin: int
    qmax: int
    observe: bool
    quantize: bool
    per_row: bool
    symmetric: bool

    def run(self, mask_kind: int) -> tuple[Tensor, Tensor | None]:
        """Updates the state in place. Returns y and its mask."""
        x = self.x
        y = torch.empty_like(x)
        mask, mask_address = tensor_kernels.empty_mask(y, mask_kind)
        placed = x if x.is_contiguous() else dense(x, y)
        rows = self.state[0].numel()
        # Blocks along a single axis always fit the kernels' shape, so scales need not be expanded.
        shape = place(tuple(x.shape), placed.stride(), (rows, *[1] * (x.dim() - 1)) if self.per_row else ()).shape
        # Only an uninitialized range is infinite, and only its zeros can have the wrong sign afterwards.
        first = self.observe and any(
            _native.first_outside(t.data_ptr(), _kernels.ZERO_F32, rows, *_LARGE) >= 0 for t in self.state[:2]
        )
        unseen = [running.isinf() for running in self.state[:2]] if first else ()
        # torch does not change scale and zero point unless it quantizes.
        unused = () if self.quantize else tuple(torch.empty_like(t) for t in self.state[2:])
        _native.observe_fake_quantize(
            placed.data_ptr(), y.data_ptr(), mask_address, mask_kind, KERNEL_DTYPES[x.dtype], shape,
            _kernels.TORCH_CHANNEL if self.per_row else _kernels.TORCH_TENSOR, self.qmin, self.qmax,
            _kernels.RANGE_TORCH_FUSED, _kernels.UPDATES["moving_average"], self.observe, self.quantize, self.symmetric,
            _kernels.SCALE_RULES["any"], self.averaging_const, 0.0,
            *(t.data_ptr() for t in (*self.state[: 4 - len(unused)], *unused)),
        )  # fmt: skip
        for running, new in zip(self.state, unseen, strict=False):
            if (new & (running == 0)).any():
                sign_zeros(running.numpy(), new.numpy(), x.detach().numpy(), self.per_row)
        if self.quantize and self.per_row:
            # A NaN has become a zero point far below the range.
            zeros = self.state[3].data_ptr()
            outside = _native.first_outside(zeros, _kernels.ZERO_I32, rows, self.qmin, self.qmax)
            check(outside < 0, ZERO_POINT)
        return y, mask


_STATE_DTYPES = (torch.float32, torch.float32, torch.float32, torch.int32)


def fused_call(x: Tensor, given: FusedArguments) -> Fused | None:
    """Returns the call of `aten::_fused_moving_avg_obs_fq_helper`, or None if the kernels cannot run it."""
    state, (running_min, running_max, scale, zero_point) = given.state, given.state
    qmin, qmax, ch_axis, per_row = given.quant_min, given.quant_max, given.ch_axis, given.per_row
    if not has_kernel(x) or x.numel() == 0 or not (_is_flag(given.observer_on) and _is_flag(given.fake_quant_on)):
        return None
    if qmin not in _INT32 or qmax not in _INT32 or qmin > qmax or ch_axis >= x.dim():
        return None
    if per_row and (ch_axis != 0 or x.dim() < 2):
        return None
    count = x.shape[0] if per_row else 1
    for t, dtype in zip(state, _STATE_DTYPES, strict=True):
        if t.dtype != dtype or t.numel() != count or t.dim() > 1 or not t.is_contiguous() or not is_memory(t):
            return None
    # torch reads scale[0] and zero_point[0], which fails on 0-d tensors.
    if scale.dim() == 0 or zero_point.dim() == 0 or (per_row and running_min.dim() == running_max.dim() == 0):
        return None
    if running_min.data_ptr() == running_max.data_ptr():
        return None
    observe, quantize = bool(given.observer_on.item()), bool(given.fake_quant_on.item())
    if not (observe or quantize) or (observe and x.dtype != torch.float32):
        return None
    return Fused(x, state, given.averaging_const, qmin, qmax, observe, quantize, per_row, given.symmetric)


def fused(x: Tensor, *arguments: Unchecked) -> tuple[Tensor, Tensor | None] | None:
    """Runs `aten::_fused_moving_avg_obs_fq_helper`."""
    call = fused_call(x, FusedArguments(*arguments))
    return None if call is None else call.run(_kernels.MASK_BYTES)
