"""Rounding the weights of a model, layer by layer from the front: what AdaRound and GPTQ have in common."""

import dataclasses
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._train.running import Bar, Data
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._records import float_class_of
from fakequant.ptq._block_rounding import round_block
from fakequant.ptq._changes import Changes, LayerChange
from fakequant.ptq._coordinate_descent import descend
from fakequant.ptq._moments import Moments, moments_of, rows_of
from fakequant.ptq._paired_runs import PairedRuns
from fakequant.ptq._undoing import undone_on_error
from fakequant.ptq._weight_grids import WeightGrid, reasons_against_rounding, weight_grid
from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class Problem:
    """Which codes to choose for the weight of a layer.

        weight = (codes - zero_point) * scale, qmin <= codes <= qmax

    The codes of a float format are its values here, in units of the scale, instead of bit patterns.

    Attributes:
        weight: The float weight, as matrices.
        scale: The scale of each weight.
        zero_point: The zero point of each weight.
        qmin: The lowest code.
        qmax: The highest code.
        moments: The error of the layer's result, damped.
        float_grid: The float format, for one scale per tensor. None for integers.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    moments: Moments
    float_grid: QuantSpec | None = None

    def rounded(self, steps: Tensor, zero_point: Tensor) -> Tensor:
        """Returns the codes nearest to values in units of the scale."""
        if self.float_grid is not None:
            return tensor_functions.fake_quantize(steps, 1.0, 0, self.float_grid)
        return (torch.round(steps) + zero_point).clamp(self.qmin, self.qmax)

    def values(self, codes: Tensor) -> Tensor:
        """Returns the weights of codes."""
        return (codes - self.zero_point) * self.scale

    def nearest(self) -> Tensor:
        """Returns the codes nearest to the float weight."""
        return self.rounded(self.weight / self.scale, self.zero_point)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Layers that are rounded together.

    Attributes:
        layers: The paths of the layers of each block, by the path of the block.
        iterations: The number of steps of the optimizer per block.
    """

    layers: dict[str, list[str]]
    iterations: int

    def of(self, path: str) -> str:
        """Returns the path of the block that contains a layer, or of the layer if none does."""
        return next((block for block, inner in self.layers.items() if path in inner), path)

    def ended_by(self, wave: list[str], called: list[str]) -> list[str]:
        """Returns the blocks whose last layer, in the order of the calls, is in a wave."""
        position = {path: number for number, path in enumerate(called)}
        ends = {block: max(inner, key=lambda path: position.get(path, -1)) for block, inner in self.layers.items()}
        return [block for block, path in ends.items() if path in wave]


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
    blocks: Blocks | None = None,
    steps: int | None,
    reference: nn.Module | None,
    progress: bool,
    needs_equal_steps: bool = False,
) -> Changes:
    """Rounds the weights of a prepared model with a solver, in place, and returns the SQNR of the layers' results.

    Layers are rounded in the order in which they run, each with the inputs that it has after all layers before it
    were rounded.
    """
    _check_damping(damping)
    chosen = layer_filter("layers", layers)
    blocks = blocks or Blocks({}, 0)
    with undone_on_error(model), PairedRuns(model, data, steps, reference, rows_of) as runs:
        reasons = reasons_against_rounding(model, runs.layers, needs_equal_steps=needs_equal_steps)
        changes: dict[str, LayerChange] = {}
        grids: dict[str, WeightGrid] = {}
        with Bar(total=len(runs.called), desc=name, disable=not progress, leave=False) as bar:
            for wave in runs.waves:
                paths = [path for path in wave if path not in reasons and chosen(path)]
                weights = {path: runs.reference_weight(path) for path in paths}
                found = moments_of(runs.pairs(paths), weights) if paths else {}
                for path in paths:
                    moments = found.get(path)
                    if moments is not None:
                        grids[path] = weight_grid(runs.layers[path], weights[path])
                        sqnr = _round(grids[path], moments, solve, damping)
                        changes[path] = LayerChange(path, kind_name(runs.layers[path]), *sqnr)
                for block in blocks.ended_by(wave, runs.called):
                    own = [grids[path] for path in blocks.layers[block] if path in grids]
                    changes[block] = _round_block(runs, block, own, blocks.iterations)
                bar.update(len(wave))
    return Changes(name, "SQNR dB", listed(runs, changes, reasons, chosen, blocks))


def _round_block(runs: PairedRuns, path: str, grids: list[WeightGrid], iterations: int) -> LayerChange:
    block = runs.model.get_submodule(path)
    kind = float_class_of(block).__name__
    if not grids:
        return LayerChange(path, kind, reason="the weights of its layers cannot be rounded")
    return LayerChange(path, kind, *round_block(block, grids, runs.block_calls(path), iterations))


def listed(
    runs: PairedRuns,
    changes: dict[str, LayerChange],
    reasons: dict[str, str],
    chosen: Callable[[str], bool],
    blocks: Blocks | None = None,
) -> list[LayerChange]:
    """Returns a row for every layer, those that ran first, with the reason why a layer was not changed.

    Layers that were changed together have one row.
    """
    rows: list[LayerChange] = []
    for path in (*runs.called, *(p for p in runs.layers if p not in runs.called)):
        layer = runs.layers[path]
        change = changes.get(path if blocks is None else blocks.of(path))
        if change is not None:
            rows += [change] if change not in rows else []
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


def layer_filter(name: str, patterns: str | Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that tells whether a path matches one of the patterns given as the argument `name`."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"`{name}` must be a pattern of paths, such as 'encoder.*', or several, got {pattern!r}.")
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
        None if spec.float_format is None else QuantSpec(format=spec.format),
    )
    codes = best_codes(problem, solve)
    grid.write(form.weight(codes, grid.weight))
    return moments.sqnr(problem.values(problem.nearest())), moments.sqnr(problem.values(codes))


def best_codes(problem: Problem, solve: Solver) -> Tensor:
    """Returns, for each output, the better of the solver's codes and the nearest codes, both improved one by one."""
    nearest = problem.nearest()
    best, least = nearest, problem.moments.error(problem.values(nearest))
    for start in (nearest, solve(problem)):
        codes = descend(problem, start)
        error = problem.moments.error(problem.values(codes))
        best = torch.where((error < least)[..., None], codes, best)
        least = torch.minimum(error, least)
    return best


def _check_damping(damping: float) -> None:
    if not isinstance(damping, (int, float)) or isinstance(damping, bool) or not 0 < damping < float("inf"):
        raise ValueError(f"`damping` must be a number above 0, such as 0.01, got {damping!r}.")
