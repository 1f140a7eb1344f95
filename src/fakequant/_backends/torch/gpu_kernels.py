"""What runs on a GPU: the Triton kernels where they have the CPU's bits, and `formula` for everything else.

The functions have the names and arguments of those in `formula`. What the kernels handle is said here and nowhere else:

    is_simple            dtypes and sizes
    supports             grids
    supports_ranges      blocks whose ranges are found
    supports_observing   blocks whose scales are chosen, and rules for scales
"""

import importlib
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

from fakequant._backends import import_whole
from fakequant._backends.blocks import KernelShape
from fakequant._backends.torch import formula, routes
from fakequant._backends.torch.tensor_blocks import Placement, place
from fakequant._backends.torch.tensor_kernels import Grid, Observed, ObserverOptions, Order
from fakequant._kernels import SIGNED_RULES, is_ggml
from fakequant.formats import SUPER_BLOCKS

# Their elements are computed in float32.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# In ranges up to this bound, levels are exact in float32.
_LARGEST_CODE = 2**22
# A program holds a block of so many neighbours.
LARGEST_BLOCK = 8192
# Scales that depend on all blocks of the tensor.
_TENSOR_RULES = ("e4m3fn", "e4m3fn_divided")


# --- the choice -----------------------------------------------------------------------------------


@cache
def has_triton() -> bool:
    """Returns True if the package triton is installed, without importing it. It exists for Linux only."""
    return sys.platform == "linux" and find_spec("triton") is not None


def is_simple(values: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Returns True if the kernels handle data of this dtype: not float64, and not empty."""
    return has_triton() and (values.dtype if dtype is None else dtype) in _DTYPES and values.numel() > 0


def supports(values: Tensor, grid: Grid, dtype: torch.dtype | None = None) -> bool:
    """Returns True if the kernels handle this grid.

    They do not handle ranges beyond 2^22, and float zero points that are added before rounding, which functions of
    this library never have on a GPU.
    """
    z = grid.zero_point
    if isinstance(z, Tensor) and z.is_floating_point() and not is_ggml(grid.numerics):
        return False
    return is_simple(values, dtype) and max(-grid.qmin, grid.qmax) <= _LARGEST_CODE


def _placement(x: Tensor, blocks: tuple[int, ...]) -> Placement:
    return place(tuple(x.shape), torch.empty_like(x, device="meta").stride(), blocks)


def supports_ranges(x: Tensor, blocks: tuple[int, ...]) -> bool:
    """Returns True if the kernels find the ranges of these blocks: not of blocks that are cut along three axes."""
    return is_simple(x) and (
        _placement(x, blocks).expand is None or place(tuple(x.shape), _c_order(x), blocks).expand is None
    )


def _c_order(x: Tensor) -> tuple[int, ...]:
    return torch.empty_like(x, device="meta", memory_format=torch.contiguous_format).stride()


def supports_observing(x: Tensor, running_min: Tensor, options: ObserverOptions) -> bool:
    """Returns True if the kernels choose scales of these blocks by this rule.

    They do not handle K-quants, blocks that are cut along three axes, and, where the sign of the largest magnitude
    or the whole tensor matters, blocks that are not neighbours in memory.
    """
    if not is_simple(x) or max(-options.qmin, options.qmax) > _LARGEST_CODE or options.scale_rule in SUPER_BLOCKS:
        return False
    shape, _, expand = _placement(x, () if running_min.numel() == 1 else tuple(running_min.shape))
    needs_rows = options.scale_rule in (*SIGNED_RULES, *_TENSOR_RULES)
    return expand is None and (not needs_rows or fits_rows(shape, options.clipped))


def fits_rows(shape: KernelShape, is_packed: bool) -> bool:
    """Returns True if a program can observe and quantize whole blocks of neighbours, and bytes of a packed mask."""
    batch, outer, blocks, inner = shape
    if outer > 1 or inner > LARGEST_BLOCK:
        return False
    return not is_packed or inner % 8 == 0 or batch * blocks == 1


def _triton() -> Any:
    import_whole("_backends.torch.triton.kernels")
    return importlib.import_module("fakequant._backends.torch.triton.kernels")


def _kernels(supported: bool) -> routes.Kernels:
    return cast("routes.Kernels", _triton() if supported else formula)


# --- the functions of `formula` -------------------------------------------------------------------


def fake_quantize(x: Tensor, grid: Grid, mask_kind: int) -> tuple[Tensor, Tensor | None]:
    """See `formula.fake_quantize`."""
    return _kernels(supports(x, grid)).fake_quantize(x, grid, mask_kind)


def mask_backward(dy: Tensor, mask: Tensor, order: Order, multiply: bool) -> Tensor:
    """See `formula.mask_backward`."""
    return _kernels(is_simple(dy)).mask_backward(dy, mask, order, multiply)


def learned_backward(dy: Tensor, x: Tensor, grid: Grid, grad_factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `formula.learned_backward`."""
    return _kernels(supports(x, grid) and dy.dtype == x.dtype).learned_backward(dy, x, grid, grad_factor)


def quantize(x: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """See `formula.quantize`."""
    return _kernels(supports(x, grid)).quantize(x, grid, dtype)


def quantize_packed(x: Tensor, grid: Grid, bits: int) -> Tensor:
    """See `formula.quantize_packed`."""
    return _kernels(supports(x, grid)).quantize_packed(x, grid, bits)


def dequantize(q: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """See `formula.dequantize`."""
    return _kernels(supports(q, grid, dtype)).dequantize(q, grid, dtype)


def dequantize_packed(q: Tensor, grid: Grid, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> Tensor:
    """See `formula.dequantize_packed`."""
    return _kernels(supports(q, grid, dtype)).dequantize_packed(q, grid, shape, bits, dtype)


def min_max(x: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """See `formula.min_max`."""
    return _kernels(supports_ranges(x, blocks)).min_max(x, blocks)


def choose_qparams(
    lo: Tensor, hi: Tensor, qmin: int, qmax: int, numerics: str, symmetric: bool, scale_rule: str, eps: float
) -> tuple[Tensor, Tensor]:
    """See `formula.choose_qparams`. Ranges are few numbers."""
    return formula.choose_qparams(lo, hi, qmin, qmax, numerics, symmetric, scale_rule, eps)


def observe_fake_quantize(x: Tensor, running_min: Tensor, running_max: Tensor, options: ObserverOptions) -> Observed:
    """See `formula.observe_fake_quantize`."""
    run = _kernels(supports_observing(x, running_min, options))
    return run.observe_fake_quantize(x, running_min, running_max, options)


def observe_into(
    x: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    nonfinite: Tensor,
    options: ObserverOptions,
) -> tuple[Tensor, Tensor | None]:
    """See `routes.observe_into`, which does it in several steps."""
    state = running_min, running_max, scale, zero_point, nonfinite
    if not supports_observing(x, running_min, options):
        return routes.observe_into(cast("routes.Kernels", formula), x, *state, options)
    found: tuple[Tensor, Tensor | None] = _triton().observe_into(x, *state, options)
    return found
