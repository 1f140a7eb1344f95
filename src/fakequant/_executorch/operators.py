"""The operators of a model that is being exported to ExecuTorch: quantizers, each of which is one node of the graph.

`graph_forms` moves these nodes. `lowering` then replaces them by the operators of ExecuTorch, which they call here.
These are registered when executorch is imported.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fakequant_executorch", "DEF")
_LIBRARY.define("grid(Tensor x, float scale, int zero_point, int qmin, int qmax, str name) -> Tensor")
_LIBRARY.define("token_grid(Tensor x, str name) -> Tensor")

# The codes of 8 bits.
LOW, HIGH = -128, 127


def _grid(x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int, name: str) -> Tensor:
    offset = offset_of(qmax)
    settings = (scale, zero_point + offset, qmin + offset, qmax + offset, torch.int8)
    ops = torch.ops.quantized_decomposed
    y: Tensor = ops.dequantize_per_tensor.default(ops.quantize_per_tensor.default(x, *settings), *settings)
    return y


def _token_grid(x: Tensor, name: str) -> Tensor:
    ops = torch.ops.quantized_decomposed
    settings = (*ops.choose_qparams_per_token_asymmetric.default(x, torch.int8), LOW, HIGH, torch.int8)
    codes = ops.quantize_per_token.default(x, *settings)
    y: Tensor = ops.dequantize_per_token.default(codes, *settings, torch.float32)
    return y


_LIBRARY.impl("grid", _grid, "CompositeExplicitAutograd")
_LIBRARY.impl("token_grid", _token_grid, "CompositeExplicitAutograd")
for _name in ("grid", "token_grid"):
    torch.library.register_fake(f"fakequant_executorch::{_name}", lambda x, *_: torch.empty_like(x), lib=_LIBRARY)

# A fixed grid with one scale for the whole tensor.
grid: Callable[[Tensor, float, int, int, int, str], Tensor] = torch.ops.fakequant_executorch.grid.default
# One grid per token, which is a row along the last axis. Its scale is computed from the range of the token.
token_grid: Callable[[Tensor, str], Tensor] = torch.ops.fakequant_executorch.token_grid.default


def offset_of(qmax: int) -> int:
    """Returns what is added to codes up to `qmax` so that they fit in 8 signed bits.

    >>> offset_of(127), offset_of(255)
    (0, -128)
    """
    return 0 if qmax <= HIGH else LOW
