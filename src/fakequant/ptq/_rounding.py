"""Rounding the weights of a model, layer by layer from the front: what AdaRound and GPTQ have in common."""

import dataclasses
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fakequant._train.running import Bar, Data
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.ptq._changes import Changes, LayerChange
from fakequant.ptq._coordinate_descent import descend
from fakequant.ptq._moments import Moments, moments_of
from fakequant.ptq._paired_runs import PairedRuns
from fakequant.ptq._undoing import undone_on_error
from fakequant.ptq._weight_grids import WeightGrid, reasons_against_rounding, weight_grid

# Rows of one product that are used at most. More hardly change the moments.
_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Problem:
    """Which codes to choose for the weight of a layer.

        weight = (codes - zero_point) * scale, qmin <= codes <= qmax

    Attributes:
        weight: The float weight, as matrices.
        scale: The scale of each weight.
        zero_point: The zero point of each weight.
        qmin: The lowest code.
        qmax: The highest code.
        moments: The error of the layer's result, damped.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    moments: Moments

    def values(self, codes: Tensor) -> Tensor:
        """Returns the weights of codes."""
        return (codes - self.zero_point) * self.scale

    def nearest(self) -> Tensor:
        """Returns the codes nearest to the float weight."""
        return (torch.round(self.weight / self.scale) + self.zero_point).clamp(self.qmin, self.qmax)


# Returns the codes of the weight, as floats.
Solver: TypeAlias = Callable[[Problem], Tensor]


def round_layers(
    model: nn.Module,
    data: Data,
    name: str,
    solve: Solver,
    *,
    damping: float,
    layers: str | Sequence[str],
    steps: int | None,
    reference: nn.Module | None,
    progress: bool,
) -> Changes:
    """Rounds the weights of a prepared model with a solver, in place, and returns the SQNR of the layers' results.

    Layers are rounded in the order in which they run, each with the inputs that it has after all layers before it
    were rounded. The solver's codes are improved one by one. Where they are no better than the nearest codes, the
    nearest are used.
    """
    _check_damping(damping)
    chosen = layer_filter(layers)
    with undone_on_error(model), PairedRuns(model, data, steps, reference) as runs:
        reasons = reasons_against_rounding(model, runs.layers)
        changes: dict[str, LayerChange] = {}
        with Bar(total=len(runs.called), desc=name, disable=not progress, leave=False) as bar:
            for wave in runs.waves:
                paths = [path for path in wave if path not in reasons and chosen(path)]
                weights = {path: runs.reference_weight(path) for path in paths}
                found = moments_of(runs.pairs(paths), weights, _ROWS) if paths else {}
                for path in wave:
                    moments = found.get(path)
                    if moments is not None:
                        before, after = _round(weight_grid(runs.layers[path]), moments, solve, damping)
                        changes[path] = LayerChange(path, kind_name(runs.layers[path]), before, after)
                    bar.update()
    return Changes(name, "SQNR dB", listed(runs, changes, reasons, chosen))


def listed(
    runs: PairedRuns, changes: dict[str, LayerChange], reasons: dict[str, str], chosen: Callable[[str], bool]
) -> list[LayerChange]:
    """Returns a row for every layer, those that ran first, with the reason why a layer was not changed."""
    rows = []
    for path in (*runs.called, *(p for p in runs.layers if p not in runs.called)):
        layer = runs.layers[path]
        if path in changes:
            rows.append(changes[path])
            continue
        reason = "not chosen by `layers`" if not chosen(path) else reasons.get(path)
        if reason is None and not layer._fakequant.kind.has_input:
            reason = "it looks up rows of its weight"
        if reason is None:
            reason = "its product has an unknown form" if path in runs.called else "no data reached it"
        rows.append(LayerChange(path, kind_name(layer), reason=reason))
    return rows


def kind_name(layer: AnyLayer) -> str:
    """Returns the name of the float class of a layer."""
    name: str = layer._fakequant.float_class.__name__
    return name


def layer_filter(layers: str | Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that tells whether a path matches one of some patterns."""
    patterns = [layers] if isinstance(layers, str) else list(layers)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"`layers` must be a pattern of paths, such as 'encoder.*', or several, got {pattern!r}.")
    return lambda path: any(fnmatchcase(path, pattern) for pattern in patterns)


def _round(grid: WeightGrid, moments: Moments, solve: Solver, damping: float) -> tuple[float, float]:
    """Writes the solver's codes to a layer, and returns the SQNR of its result before and after, in dB."""
    form, spec = moments.form, grid.quantizer.spec
    problem = Problem(
        form.matrix(grid.weight).float(),
        form.matrix(grid.scale),
        form.matrix(grid.zero_point),
        spec.qmin,
        spec.qmax,
        moments.damped(damping),
    )
    nearest = problem.nearest()
    codes = descend(problem, solve(problem))
    error, least = (problem.moments.error(problem.values(c)) for c in (codes, nearest))
    codes = torch.where((error < least)[..., None], codes, nearest)
    grid.write(form.weight(codes, grid.weight))
    return moments.sqnr(problem.values(nearest)), moments.sqnr(problem.values(codes))


def _check_damping(damping: float) -> None:
    if not isinstance(damping, (int, float)) or isinstance(damping, bool) or not 0 < damping < float("inf"):
        raise ValueError(f"`damping` must be a number above 0, such as 0.01, got {damping!r}.")
