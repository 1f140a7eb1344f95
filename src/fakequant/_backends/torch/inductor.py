"""Decompositions that let Inductor fuse forward operators with the operations around them.

Inductor cannot fuse a custom operator: its input has to be written to memory, and its result too. A decomposed operator
becomes part of the loop that computes its input. The bits are the same.

`fake_quantize`, `fake_quantize_learned` and `min_max` are decomposed. The other operators keep their kernels, and so
do all on GPUs:

    masks, gradients, observing    Inductor graphs that return a mask are several times slower than the kernel.
    quantize, dequantize           Inductor's conversions to and from bytes are slower than the kernels.
"""

import hashlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from fakequant._backends.torch import torch_private
from fakequant._backends.torch.routes import forward_grid, ops, with_grid
from fakequant._backends.torch.tensor_kernels import Grid, scale_dtype
from fakequant._backends.torch.torch_annotations import Operator
from fakequant._kernels import is_ggml, is_own


def decompositions(formulas: Mapping[str, Operator]) -> dict[Any, Operator]:
    """Returns the decompositions by operator. `formulas` are the implementations in torch operations by name."""
    fake_quantize: Callable[..., Tensor] = formulas["fake_quantize"]
    learned: Callable[..., Tensor] = formulas["fake_quantize_learned"]

    def decompose(x: Tensor, grid: Grid, clipped: bool) -> Tensor:
        if _is_left_to_the_kernel(x, grid):
            return ops.fake_quantize_masked(x, *grid, True)[0]
        return fake_quantize(x, *_checked(x, grid), False)

    def decompose_learned(x: Tensor, grid: Grid, factor: float | None) -> Tensor:
        if _is_left_to_the_kernel(x, grid):
            return ops.fake_quantize_masked(x, *forward_grid(grid), True)[0]
        return learned(x, *_checked(x, grid), factor)

    return {
        ops.fake_quantize.default: with_grid(decompose),
        ops.fake_quantize_learned.default: with_grid(decompose_learned),
        ops.min_max.default: formulas["min_max"],
    }


def _is_left_to_the_kernel(x: Tensor, grid: Grid) -> bool:
    """Returns True on GPUs, where Inductor's division is not rounded correctly, and for some rules on the CPU.

    These are torch's rules, which use int64 and float64, and ggml's, which round to float16.

    The masked operator runs that kernel. It has no decomposition, and its unused mask costs little.
    """
    return x.device.type == "cuda" or (x.device.type == "cpu" and (not is_own(grid.numerics) or is_ggml(grid.numerics)))


def _checked(x: Tensor, grid: Grid) -> Grid:
    """Returns the grid, with a check of its values that runs in the graph, as in the kernels.

    Only on the CPU: other devices would have to synchronize.
    """
    if x.device.type != "cpu":
        return grid
    scale, zero_point = grid.scale, grid.zero_point
    assert isinstance(scale, Tensor)
    integers = zero_point if isinstance(zero_point, Tensor) and not zero_point.is_floating_point() else None
    wide = scale.to(scale_dtype(x.dtype, grid.numerics))
    return grid._replace(scale=ops.checked_scale(wide, integers, grid.qmin, grid.qmax))


def offer(table: Mapping[Any, Operator]) -> None:
    """Adds the decompositions to Inductor's tables if Inductor is imported and does not have them yet.

    Has to be called before a graph is lowered.
    """
    inductor = torch_private.inductor()
    if inductor is None:
        return
    for known in inductor.tables:
        if not known.keys() >= table.keys():
            known.update(table)
    # Inductor caches compiled graphs on disk by the names of their operators. The digest makes it recompile them if the
    # formulas change.
    keys = inductor.config.unsafe_marked_cacheable_functions
    if keys.get("torch.ops.fakequant") != _digest():
        inductor.config.unsafe_marked_cacheable_functions = {**keys, "torch.ops.fakequant": _digest()}


_DEFINING_FILES = (
    "_kernels.py",
    *(
        f"_backends/torch/{name}.py"
        for name in (
            "inductor", "operators", "gpu_kernels", "formula", "float_formula", "fused_multiply_add", "ggml_formula",
            "gradients", "routes", "tensor_kernels",
        )
    ),
)  # fmt: skip


@cache
def _digest() -> str:
    """Returns a digest of the files that define the decompositions."""
    digest = hashlib.sha256()
    for name in _DEFINING_FILES:
        digest.update(pkgutil.get_data("fakequant", name) or b"")
    return digest.hexdigest()
