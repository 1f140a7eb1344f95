"""Decompositions of forward operators, with which Inductor fuses them into the operations around them.

Inductor cannot look into an operator: the input is written to memory, read by the kernel, and the result written again.
A decomposed operator is computed where its input is. The bits are the same.

Decomposed are `fake_quantize`, `fake_quantize_learned` and `min_max`. The others keep their kernels:

    masks, gradients, observing    Inductor graphs that return a mask are several times slower than the kernel.
    quantize, dequantize           Inductor's conversions to and from bytes are slower than the kernels.
"""

import hashlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from fakequant._backends.kernel_types import is_own
from fakequant._backends.torch import torch_private
from fakequant._backends.torch.operator_calls import ops
from fakequant._backends.torch.routes import forward_grid
from fakequant._backends.torch.tensor_kernels import scale_dtype
from fakequant._backends.torch.torch_annotations import Operator


def decompositions(formulas: Mapping[str, Operator]) -> dict[Any, Operator]:
    """Decompositions by operator, from the implementations in torch's operations by name."""
    fake_quantize: Callable[..., Tensor] = formulas["fake_quantize"]
    learned: Callable[..., Tensor] = formulas["fake_quantize_learned"]
    masked: Callable[..., tuple[Tensor, Tensor]] = ops.fake_quantize_masked

    def decompose(x: Tensor, *grid_and_clipped: Any) -> Tensor:
        *grid, _ = grid_and_clipped
        if _is_left_to_the_kernel(x, *grid):
            return masked(x, *grid, True)[0]
        return fake_quantize(x, *_checked(x, *grid), False)

    def decompose_learned(x: Tensor, *grid_and_factor: Any) -> Tensor:
        *grid, factor = grid_and_factor
        if _is_left_to_the_kernel(x, *grid):
            return masked(x, *forward_grid(*grid), True)[0]
        return learned(x, *_checked(x, *grid), factor)

    return {
        ops.fake_quantize.default: decompose,
        ops.fake_quantize_learned.default: decompose_learned,
        ops.min_max.default: formulas["min_max"],
    }


def _is_left_to_the_kernel(x: Tensor, scale: Tensor, zero_point: Tensor | None, *range_and_numerics: Any) -> bool:
    """On the CPU, torch's rules: they go through int64 and float64. The kernel is faster, even with an unused mask."""
    *_, numerics = range_and_numerics
    return x.device.type == "cpu" and not is_own(numerics)


def _checked(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int, numerics: str
) -> tuple[Tensor, Tensor | None, int, int, str]:
    """The grid, checked by its values when the graph runs, as the kernels do it. Other devices would have to wait."""
    if x.device.type == "cpu":
        integers = None if zero_point is None or zero_point.is_floating_point() else zero_point
        scale = ops.checked_scale(scale.to(scale_dtype(x.dtype, numerics)), integers, qmin, qmax)
    return scale, zero_point, qmin, qmax, numerics


def offer(table: Mapping[Any, Operator]) -> None:
    """Adds decompositions to Inductor's tables if Inductor is imported.

    Call it before a graph is lowered. Nothing happens if they are there already.
    """
    inductor = torch_private.inductor()
    if inductor is None:
        return
    for known in inductor.tables:
        if not known.keys() >= table.keys():
            known.update(table)
    # Inductor keeps compiled graphs on disk by the names of operators in them: other formulas need another key.
    keys = inductor.config.unsafe_marked_cacheable_functions
    if keys.get("torch.ops.fakequant") != _digest():
        inductor.config.unsafe_marked_cacheable_functions = {**keys, "torch.ops.fakequant": _digest()}


@cache
def _digest() -> str:
    """A digest of the files that the decompositions are made from."""
    digest = hashlib.sha256()
    for name in ("inductor", "operators", "formula", "fused_multiply_add", "gradients", "tensor_kernels"):
        digest.update(pkgutil.get_data("fakequant._backends.torch", f"{name}.py") or b"")
    return digest.hexdigest()
