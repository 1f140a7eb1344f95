"""The operators that stand for quantizers and quantized weights while torch traces a golden model."""

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fakequant_litert", "DEF")
_LIBRARY.define("grid(Tensor x, float scale, int zero_point, int qmin, int qmax, str name) -> Tensor")
_LIBRARY.define("token_grid(Tensor x, str name) -> Tensor")
_LIBRARY.define("weight(Tensor floats, str key) -> Tensor")


def _grid(x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int, name: str) -> Tensor:
    codes = (torch.round(x.float() * (1 / torch.tensor(scale))) + zero_point).clamp(qmin, qmax)
    return (codes - zero_point) * scale


def _same(x: Tensor, name: str) -> Tensor:
    return x.clone()


for _name, _function in (("grid", _grid), ("token_grid", _same), ("weight", _same)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fakequant_litert::{_name}", lambda x, *_: torch.empty_like(x), lib=_LIBRARY)

# A fixed grid with one scale for the whole tensor.
GRID: Any = torch.ops.fakequant_litert.grid.default
# One grid per token, which is a row along the last axis. Its scale is computed from the range of the token.
TOKEN_GRID: Any = torch.ops.fakequant_litert.token_grid.default
# The dequantized weight of a layer. The key says which.
WEIGHT: Any = torch.ops.fakequant_litert.weight.default
