"""Decides which differing codes of two models are ties, and finds the reasons for the others."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant._backends.torch.grid_values import positions, values_at
from fakequant._convert.convert import WIDENED
from fakequant._convert.golden.integer_layer import weight_levels
from fakequant._convert.golden.saturation import can_saturate, cpu_saturates, saturated_sums
from fakequant._convert.golden.tracked_codes import Accumulated, Arithmetic, Clamped, GridOf, Moved, Origin, Rectified
from fakequant._runtimes import TARGETS
from fakequant._runtimes.arithmetic import arithmetics, find_arithmetic
from fakequant._verify.passes import Difference
from fakequant.nn._quantized_layer import input_grid_of

OVERFLOW = "overflow: sums of products do not fit in 32 bits; use fewer bits, or split the layer"
SATURATION = (
    "saturation: the kernels of this CPU add pairs of products in 16 bits; use 7-bit weights "
    f"(target {' or '.join(name for name, target in TARGETS.items() if target.weights.bits == 7)})"
)
NOT_FUSED = "fusion: the runtime computed layer and quantizer separately, in float32"
FUSED = "fusion: the runtime computed layer and quantizer as one kernel"
RECIPROCAL = "reciprocal: the runtime multiplied by 1 / scale instead of dividing"
KERNEL = "kernel: the runtime's kernel rounds otherwise, most of them twice, and the golden model follows it"
TIE = "rounding tie: the input lies between two codes, and float rounding decided"
UNSTEADY = "rounding: float operations before the quantizer have rounding errors larger than its steps"
BIAS = "bias: it was rounded to an integer in the conversion"
NAN = "NaN: the quantizer's input has NaNs, which have no code"
SCALE = "scale: the two models found different ranges"
READ_WEIGHT = "weight: the model's code uses a quantized weight as a float; see the notes of summary(model)"
LARGE_BIAS = f"bias: {WIDENED}"
UNKNOWN = "not explained"

_INT32 = 2**31


class Differing(NamedTuple):
    """Which codes differ, and which of these are at a tie."""

    differ: Tensor
    at_tie: Tensor
    # Further codes: those that differ by one step because the kernels of a runtime round sums more than once.
    by_kernel: Tensor
    # By how much rounding may move each element, with the effect of a scale that rounding has moved.
    tolerance: Tensor
    # Whether the scales differ by more than rounding.
    has_other_scale: bool


def differing(found: Difference, tolerance: Tensor, arithmetic: Arithmetic | None = None) -> Differing:
    """Returns which codes differ, if rounding may move each element of the grid's input by `tolerance`.

    The golden model has the codes of `arithmetic`, and the other one must have those of floats, unless it is None.
    """
    golden, other = found.golden, found.other
    differ = (golden != other) & ~(golden.isnan() & other.isnan())
    off = (found.scale.double() - found.grid.scale.double()).abs()
    has_other_scale = bool(off > _scale_tolerance(found, tolerance))
    if has_other_scale:
        # Every code stands for another value, except that of 0. The state that a recurrent layer starts with is 0.
        differ |= other != found.grid.zero_point
    tolerance = tolerance + found.x.double().abs() * (off / found.grid.scale.double())
    at_tie = differ & ties(found.x, found.grid, tolerance, golden, other)
    by_kernel = torch.zeros_like(differ)
    if arithmetic is not None and arithmetic.rounds_twice and not has_other_scale and bool(differ.any()):
        by_kernel = differ & _rounded_by_kernel(found)
    return Differing(differ & ~by_kernel, at_tie & ~by_kernel, by_kernel, tolerance, has_other_scale)


def _scale_tolerance(found: Difference, tolerance: Tensor) -> Tensor:
    """Returns by how much rounding may change the scale of a tensor: by that of its range, and its own."""
    spec = found.grid.spec
    width = spec.qmax - spec.qmin if spec.format == "int" else 2 * spec.largest
    moved = 2 * tolerance.max() / width
    return moved + found.grid.scale.double() * 2.0**-22


def ties(x: Tensor, grid: GridOf, tolerance: Tensor, golden: Tensor, other: Tensor) -> Tensor:
    """Returns a mask of the codes at a tie: one step apart, and `x` within `tolerance` of the midpoint.

    `tolerance` is how far rounding may move each element of `x`.
    """
    steps = x.double() / grid.scale.double()
    if grid.spec.format == "int":
        distance = (steps - steps.floor() - 0.5).abs()
    else:
        middle = (values_at(golden, grid.spec).double() + values_at(other, grid.spec).double()) / 2
        distance = (steps - middle).abs()
    return ((golden - other).abs() == 1) & (distance <= tolerance / grid.scale.double())


def _rounded_by_kernel(found: Difference) -> Tensor:
    """Returns a mask of the codes that are one step off, and that the other model has from a single rounding."""
    reference = find_arithmetic("reference")
    x, origin, grid = found.x, found.origin, found.grid
    once = reference.from_float(x, grid) if origin is None else origin.codes(reference, grid)
    return (once == found.other) & ((found.golden - found.other).abs() == 1)


def within(x: Tensor, grid: GridOf, tolerance: Tensor, other: Tensor) -> Tensor:
    """Returns a mask of integer codes: whether an input that differs from `x` by at most `tolerance` has them."""
    if grid.spec.format != "int":
        return torch.zeros_like(other, dtype=torch.bool)
    distance = (x.double() / grid.scale.double() - (other - grid.zero_point).double()).abs() - 0.5
    return distance <= tolerance / grid.scale.double()


def repeated_ties(x: Tensor, other: Tensor, at_tie: Tensor) -> int:
    """Returns how many ties only repeat another one: equal inputs to which the other model gave different codes.

    Few elements of a tensor are at a tie by chance. If many are, they are usually equal, such as the sigmoid of
    accumulators that are 0, and so they are one coincidence. A model with another rounding rule would give equal inputs
    the same code, so different codes can only come from rounding errors before the quantizer. `at_tie` is a mask of the
    codes that differ and are at a tie.

    >>> x, mask = torch.tensor([0.5, 0.5, 0.5, 1.5]), torch.tensor([True, True, False, True])
    >>> repeated_ties(x, torch.tensor([1, 1, 0, 1]), mask), repeated_ties(x, torch.tensor([1, 1, 1, 1]), mask)
    (1, 0)
    """
    values, number = x[at_tie].unique(return_counts=True)
    alike = torch.isin(x, values)
    which, codes = torch.searchsorted(values, x[alike]), other[alike].double()
    lowest, highest = (
        torch.zeros(len(values), dtype=torch.float64).scatter_reduce(0, which, codes, how, include_self=False)
        for how in ("amin", "amax")
    )
    return int((number - 1)[lowest != highest].sum())


def why_runtime(
    origin: Origin | None,
    x: Tensor,
    grid: GridOf,
    before: list[Accumulated],
    golden: Tensor,
    runtime: Tensor,
    differ: Tensor | None = None,
) -> str:
    """Returns the reason why the runtime's codes differ from the golden model's, given equal codes before.

    `origin` says how the input `x` of the grid was computed, and is None if that is unknown. `before` has the sums of
    the layers that ran since the previous grid. `differ` is a mask of the codes to explain. If it is None, all that
    differ are.
    """
    differ = golden != runtime if differ is None else differ
    if bool(x.isnan()[differ].any()):
        return NAN
    source = _source(origin)
    if isinstance(source, Accumulated) and isinstance(origin, (Accumulated, Rectified)):
        for sums, reason in ((_wrapped(source), OVERFLOW), (_saturated(source), SATURATION)):
            if sums is not None and any(
                torch.equal(codes[differ], runtime[differ]) for codes in _codes_of_sums(sums, source, origin, grid)
            ):
                return reason
    reason_before = why_sums(before)
    if reason_before is not None:
        return reason_before
    for name, arithmetic in arithmetics().items():
        if origin is not None and torch.equal(origin.codes(arithmetic, grid)[differ], runtime[differ]):
            return NOT_FUSED if name == "reference" else FUSED
    inverse = 1 / grid.scale
    if grid.spec.format != "int":
        by_inverse = positions(x * inverse, torch.ones(()), grid.spec)
        return RECIPROCAL if torch.equal(by_inverse[differ], runtime[differ]) else UNKNOWN
    by_inverse = (torch.round(x * inverse) + grid.zero_point).clamp(grid.spec.qmin, grid.spec.qmax)
    return RECIPROCAL if torch.equal(by_inverse[differ], runtime[differ]) else UNKNOWN


def why_prepared(
    origin: Origin | None,
    x: Tensor,
    grid: GridOf,
    before: list[Accumulated],
    golden: Tensor,
    prepared: Tensor,
    differ: Tensor | None = None,
) -> str:
    """Returns the reason why the prepared model's codes differ from the golden model's. See `why_runtime`."""
    differ = golden != prepared if differ is None else differ
    if bool((golden.isnan() != prepared.isnan())[differ].any()):
        return NAN
    source = _source(origin)
    if isinstance(source, Accumulated):
        # A little more than half a step of the bias, because the sums themselves are rounded too.
        reach = 1.01 * float(source.scale.max()) / 2
        steps = (x.double() / grid.scale.double())[differ]
        if bool(((steps - steps.floor() - 0.5).abs() <= reach / grid.scale.double()).all()):
            return BIAS
    return UNKNOWN


def why_sums(sums: list[Accumulated]) -> str | None:
    """Returns OVERFLOW or SATURATION if these sums overflow or saturate in a runtime, otherwise None."""
    if any(_wrapped(one) is not None for one in sums):
        return OVERFLOW
    return SATURATION if cpu_saturates() and any(did_saturate(one) for one in sums) else None


def did_saturate(sums: Accumulated) -> bool:
    """Returns True if kernels for x86 without VNNI would saturate on these sums."""
    saturated = _saturated(sums)
    return saturated is not None and not torch.equal(saturated, sums.sums.double())


def _source(origin: Origin | None) -> Origin | None:
    while isinstance(origin, (Moved, Rectified, Clamped)):
        origin = origin.of
    return origin


def _codes_of_sums(sums: Tensor, source: Accumulated, origin: Origin, grid: GridOf) -> Iterator[Tensor]:
    """Yields the codes of other sums of a layer in the arithmetic of each runtime."""
    for arithmetic in arithmetics().values():
        codes = arithmetic.from_layer(dataclasses.replace(source, sums=sums), grid)
        yield torch.maximum(codes, grid.zero_point) if isinstance(origin, Rectified) else codes


def _wrapped(sums: Accumulated) -> Tensor | None:
    """Returns the sums wrapped to 32 bits. None if they fit."""
    exact = sums.sums.double()
    if not exact.numel() or float(exact.abs().max()) < _INT32:
        return None
    return torch.remainder(exact + _INT32, 2.0 * _INT32) - _INT32


def _saturated(sums: Accumulated) -> Tensor | None:
    layer: Any = sums.layer
    if layer is None or sums.codes_in is None or sums.grid_in is None:
        return None
    levels = weight_levels(layer)
    if not can_saturate(levels) or sums.grid_in.zero_point.numel() != 1 or input_grid_of(layer) is None:
        return None
    bias = None if layer.bias_codes is None else layer.bias_codes.double()
    # Kernels read unsigned codes: signed ones are stored with an offset of 2^(bits - 1).
    grid = input_grid_of(layer).spec
    offset = -grid.qmin if grid.qmin < 0 else 0
    codes = sums.codes_in.double() + offset
    return saturated_sums(layer, codes, int(sums.grid_in.zero_point) + offset, levels, bias)
