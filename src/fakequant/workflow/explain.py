"""Why two codes of the same number differ."""

from typing import Any

import torch
from torch import Tensor

from fakequant.integer.arithmetic import ARITHMETICS
from fakequant.integer.layer import weight_levels
from fakequant.integer.saturation import can_saturate, saturated_sums
from fakequant.integer.values import Accumulated, GridOf, Moved, Origin, Rectified
from fakequant.nn.layer import input_grid_of

SATURATION = "saturation: the kernels of this CPU add pairs of products in 16 bits; use 7-bit weights (onnxruntime-x86)"
NOT_FUSED = "fusion: the runtime computed the operations one by one, in float32"
FUSED = "fusion: the runtime computed layer and quantizer as one kernel"
RECIPROCAL = "reciprocal: the runtime multiplied by 1 / scale instead of dividing"
TIE = "rounding tie: a float sum in another order fell on the other side"
BIAS = "bias: it is an integer at the scale of the sums, and was a float"
UNKNOWN = "not explained"

# Float32 sums of some thousand terms in two orders differ by less than this, in steps of a grid of 8 bits.
_HAIR = 2e-4


def why_runtime(
    origin: Origin | None, x: Tensor, grid: GridOf, before: list[Accumulated], golden: Tensor, runtime: Tensor
) -> str:
    """Why the runtime has other codes for what the golden model was given too.

    `before` are the sums of the layers that ran since the last quantizer.
    """
    differ = golden != runtime
    source = origin
    while isinstance(source, (Moved, Rectified)):
        source = source.of
    if isinstance(source, Accumulated) and isinstance(origin, (Accumulated, Rectified)):
        saturated = _saturated(source)
        if saturated is not None:
            again = ARITHMETICS["onnxruntime"].from_sums(saturated, source.scale, grid)
            if isinstance(origin, Rectified):
                again = torch.maximum(again, grid.zero_point)
            if torch.equal(again[differ], runtime[differ]):
                return SATURATION
    if any(did_saturate(sums) for sums in before):
        return SATURATION
    for name, reason in (("reference", NOT_FUSED), ("onnxruntime", FUSED)):
        if origin is not None and torch.equal(origin.codes(ARITHMETICS[name], grid)[differ], runtime[differ]):
            return reason
    inverse = 1 / grid.scale
    by_inverse = (torch.round(x * inverse) + grid.zero_point).clamp(grid.spec.qmin, grid.spec.qmax)
    if torch.equal(by_inverse[differ], runtime[differ]):
        return RECIPROCAL
    return TIE if _is_near_tie(x, grid, differ) else UNKNOWN


def why_prepared(
    origin: Origin | None, x: Tensor, grid: GridOf, before: list[Accumulated], golden: Tensor, prepared: Tensor
) -> str:
    """Why the prepared model has other codes for what the golden model was given too."""
    differ = golden != prepared
    if _is_near_tie(x, grid, differ):
        return TIE
    source = origin
    while isinstance(source, (Moved, Rectified)):
        source = source.of
    if isinstance(source, Accumulated):
        half_a_step = float((source.scale / grid.scale).max()) / 2
        if _is_near_tie(x, grid, differ, half_a_step + _HAIR):
            return BIAS
    return UNKNOWN


def _is_near_tie(x: Tensor, grid: GridOf, differ: Tensor, hair: float = _HAIR) -> bool:
    """Whether all of them lie that close to the middle between two codes."""
    steps = (x.double() / grid.scale.double())[differ]
    return bool(((steps - steps.floor() - 0.5).abs() <= hair).all())


def _may_saturate(sums: Accumulated) -> bool:
    return sums.layer is not None and can_saturate(weight_levels(sums.layer))


def did_saturate(sums: Accumulated) -> bool:
    """Whether the kernels of an x86 without VNNI would have saturated on these sums."""
    saturated = _saturated(sums)
    return saturated is not None and not torch.equal(saturated, sums.sums.double())


def _saturated(sums: Accumulated) -> Tensor | None:
    layer: Any = sums.layer
    if not _may_saturate(sums) or sums.codes_in is None or sums.zero_point_in is None:
        return None
    if sums.zero_point_in.numel() != 1 or input_grid_of(layer) is None:
        return None
    bias = None if layer.bias_codes is None else layer.bias_codes.double()
    # Stored as unsigned numbers: a signed code is larger by 2^(bits - 1).
    grid = input_grid_of(layer).spec
    offset = -grid.qmin if grid.qmin < 0 else 0
    codes = sums.codes_in.double() + offset
    return saturated_sums(layer, codes, int(sums.zero_point_in) + offset, weight_levels(layer), bias)
