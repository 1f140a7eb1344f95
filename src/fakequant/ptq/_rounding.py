"""Rounding the weights of a model, layer by layer from the front: what AdaRound and GPTQ have in common."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.compiled_nodes import release_memory
from fakequant._backends.torch.grid_values import scale_of_each
from fakequant._model.running import Data
from fakequant._paired_models.calls import RecordedCall
from fakequant._paired_models.errors import decibels, qparams_for
from fakequant._paired_models.products import Form
from fakequant._paired_models.runs import PairedRuns
from fakequant.nn._experts import ExpertProduct
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._owners import stored_weight
from fakequant.nn._quantizer import Quantizer
from fakequant.ptq._layer_changes import Changes, LayerChange, layer_filter, undone_on_error
from fakequant.ptq._quadratic_error import (
    LayerSums,
    RoundingProblem,
    SolverOf,
    best_codes,
    parts_of,
    rows_of,
    sums_of,
)
from fakequant.spec import QuantSpec

# Rows of a matrix that are checked at once.
_ROWS = 256
# Inputs of layers for which it is worth a note that the model runs from its start.
_MANY = 8


@dataclasses.dataclass(frozen=True)
class WeightGrid:
    """The weight of a layer and its grid.

    weight ~ (code - zero_point) * scale, qmin <= code <= qmax

    In a float format, codes are its values here, in units of the scale.
    """

    layer: AnyLayer
    weight: Tensor
    # Scale and zero point, as the quantizer has them.
    qparams: tuple[Tensor, Tensor]

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of the weight."""
        quantizer: Quantizer = self.layer.weight_quantizer
        return quantizer

    def scales(self) -> Tensor:
        """Returns the scale of each weight, float32."""
        return scale_of_each(self.qparams[0], self.weight, self.quantizer.spec)

    def zero_points(self) -> Tensor:
        """Returns the code of 0 for each weight."""
        return tensor_functions.quantize(torch.zeros_like(self.weight), *self.qparams, self.quantizer.spec)

    def parts(self, form: Form) -> Callable[[slice], tuple[Tensor, Tensor]]:
        """Returns a function that returns scales and codes of 0 for some outputs, as matrices.

        If outputs are rows of the weight, they are computed for these only: for all they are as large as the weight.
        """
        spec, (scale, zero_point) = self.quantizer.spec, self.qparams
        is_matrix = form.geometry is None and form.matrices == 1 and not form.is_transposed
        has_rows = scale.dim() == self.weight.dim() or (scale.dim() == 1 and spec.axis == 0)
        if is_matrix and has_rows and len(scale) == len(self.weight) and spec.ggml_type is None:
            return lambda rows: _part(self.weight[rows], scale[rows], zero_point[rows], spec)
        scales, zero_points = form.matrix(self.scales()), form.matrix(self.zero_points())
        return lambda outputs: (scales[:, outputs], zero_points[:, outputs])

    def codes(self, weight: Tensor) -> Tensor:
        """Returns the codes nearest to a weight, as floats."""
        return tensor_functions.quantize(weight, *self.qparams, self.quantizer.spec).float()

    @torch.no_grad()
    def write(self, codes: Tensor) -> None:
        """Sets the weight to the values of the codes, and keeps the scale from changing with it."""
        spec = self.quantizer.spec
        if spec.float_format is None:
            stored = codes.to(getattr(torch, spec.storage))
        else:  # values of the format, in units of the scale
            stored = tensor_functions.quantize(codes.float() * self.scales(), *self.qparams, spec)
        values = tensor_functions.dequantize(stored, *self.qparams, spec, dtype=self.weight.dtype)
        keep_scale(self.quantizer, self.qparams)
        _write_weight(self.layer, values)


def _part(rows: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    zero_points = tensor_functions.quantize(torch.zeros_like(rows), scale, zero_point, spec)
    return scale_of_each(scale, rows, spec)[None], zero_points[None]


def weight_grid(layer: AnyLayer, float_weight: Tensor | None = None) -> WeightGrid:
    """Returns the weight of a prepared layer and its grid, for which `reasons_against_rounding` has no reason.

    Args:
        layer: The layer.
        float_weight: The weight to round. If None, the weight of the layer, which may be rounded already.
    """
    quantizer: Quantizer = layer.weight_quantizer
    weight: Tensor = layer._fakequant.kind.read_weight(layer).detach()
    scale, zero_point = qparams_for(quantizer, weight)
    weight = weight.clone() if float_weight is None else float_weight.to(weight.dtype)
    return WeightGrid(layer, weight, (scale.clone(), zero_point.clone()))


@torch.no_grad()
def keep_scale(quantizer: Quantizer, qparams: tuple[Tensor, Tensor]) -> None:
    """Freezes a quantizer with this scale and zero point, if its scale would follow the weight."""
    if isinstance(quantizer, FakeQuantize):
        quantizer.scale.copy_(qparams[0])
        quantizer.zero_point.copy_(qparams[1])
        quantizer.frozen = True


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Layers that are rounded together.

    Attributes:
        layers: The paths of the layers of each block, by the path of the block.
        round: Rounds the layers of a block with these grids, on its calls. Returns the SQNR before and after.
    """

    layers: dict[str, list[str]]
    round: Callable[[nn.Module, list[WeightGrid], list[RecordedCall]], tuple[float, float]]

    def of(self, path: str) -> str:
        """Returns the path of the block that contains a layer, or of the layer if none does."""
        return next((block for block, inner in self.layers.items() if path in inner), path)

    def ended_by(self, wave: list[str], called: list[str]) -> list[str]:
        """Returns the blocks whose last layer, in the order of the calls, is in a wave."""
        position = {path: number for number, path in enumerate(called)}
        ends = {block: max(inner, key=lambda path: position.get(path, -1)) for block, inner in self.layers.items()}
        return [block for block, path in ends.items() if path in wave]


def round_layers(
    model: nn.Module,
    data: Data,
    name: str,
    solver_of: SolverOf,
    *,
    damping: float,
    layers: str | Sequence[str],
    blocks: Blocks | None = None,
    steps: int | None,
    reference: nn.Module | None,
    progress: bool,
    needs_equal_steps: bool = False,
) -> Changes:
    """Rounds the weights of a prepared model with a solver, in place, and returns the SQNR of the layers' outputs.

    Layers are rounded in the order in which they run, each with the inputs that it has after all layers before it
    were rounded.
    """
    _check_damping(damping)
    chosen = layer_filter("layers", layers)
    modules = () if blocks is None else blocks.layers
    with undone_on_error(model), PairedRuns(model, data, steps, reference, rows_of, modules) as runs:
        reasons = reasons_against_rounding(model, runs.layers, needs_equal_steps=needs_equal_steps)
        changes: dict[str, LayerChange] = {}
        grids: dict[str, WeightGrid] = {}
        for wave in runs.each_wave(name if progress else None):
            paths = [path for path in wave if path not in reasons and chosen(path)]
            weights = {path: runs.reference_weight(path) for path in paths}
            found = sums_of(runs.pairs(paths), weights) if paths else {}
            release_memory()  # what the models ran in is not needed to solve
            for path in [path for path in paths if path in found]:
                sums = found.pop(path)
                grid = weight_grid(runs.layers[path], weights.pop(path))
                _check_finite(path, sums)
                try:
                    sqnr = _round(grid, sums.damp(damping), solver_of)
                except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                    raise ValueError(
                        f"The inputs of {path} differ too much in size to solve for its weight.\n"
                        f"Use a larger damping than {damping}, or leave the layer out with `layers`."
                    ) from error
                changes[path] = LayerChange.of(path, runs.layers[path], sqnr)
                if blocks is not None and blocks.of(path) != path:
                    grids[path] = grid
                del grid, sums  # as large as the weight
            if blocks is not None:
                for block in blocks.ended_by(wave, runs.called):
                    changes[block] = _round_block(runs, block, blocks, grids)
    return Changes(name, "SQNR dB", layer_rows(runs, changes, reasons, chosen, blocks), note_on(runs))


def _round_block(runs: PairedRuns, path: str, blocks: Blocks, grids: dict[str, WeightGrid]) -> LayerChange:
    block = runs.model.get_submodule(path)
    own = [grids.pop(layer) for layer in blocks.layers[path] if layer in grids]
    if not own:
        return LayerChange.of(path, block, reason="the weights of its layers cannot be rounded")
    return LayerChange.of(path, block, blocks.round(block, own, runs.module_calls(path)))


def note_on(runs: PairedRuns) -> str | None:
    """Returns a note if the time of a method grows with the square of the depth of the model."""
    if runs.in_blocks or len(runs.waves) <= _MANY:
        return None
    return (
        "The model has no blocks that run one after another in an nn.ModuleList or nn.Sequential, so it ran from its "
        "start for every layer."
    )


def layer_rows(
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
        rows.append(LayerChange.of(path, layer, reason=reason))
    return rows


def _round(grid: WeightGrid, sums: LayerSums, solver_of: SolverOf) -> tuple[float, float]:
    """Writes the solver's codes to a layer, and returns the SQNR of its output before and after, in dB."""
    spec, matrix = grid.quantizer.spec, sums.form.matrix
    weight, parts = matrix(grid.weight), grid.parts(sums.form)
    # The codes of float formats are values.
    dtype = torch.float32 if spec.float_format is not None else getattr(torch, spec.storage)
    codes = torch.empty_like(weight, dtype=dtype)
    solve = solver_of(sums.a)
    before, after = torch.zeros(2, 2, dtype=torch.float64)
    for outputs in parts_of(weight):
        scale, zero_point = parts(outputs)
        problem = RoundingProblem(
            weight=weight[:, outputs].float(),
            scale=scale,
            zero_point=zero_point.float(),
            qmin=spec.qmin,
            qmax=spec.qmax,
            moments=sums.moments(outputs),
            float_grid=None if spec.float_format is None else QuantSpec(format=spec.format),
        )
        found = best_codes(problem, solve)
        codes[:, outputs] = found.codes
        before += problem.moments.powers(problem.values(problem.nearest()), found.nearest).cpu()
        after += problem.moments.powers(problem.values(found.codes), found.error).cpu()
    del parts  # it may have tensors as large as the weight
    grid.write(sums.form.weight(codes, grid.weight))
    (signal, noise), (same, left) = before.clamp(min=0).tolist(), after.clamp(min=0).tolist()
    return decibels(signal, noise), decibels(same, left)


def _check_finite(path: str, sums: LayerSums) -> None:
    parts = (sums.a, sums.cross, sums.square, sums.reference)
    if not all(rows.isfinite().all() for part in parts for rows in part.split(_ROWS, 1)):
        raise ValueError(
            f"The error of {path} is not finite: its inputs or its weight have NaN, infinity, or values that are "
            "too large to be squared.\nUse other data, or leave the layer out with `layers`."
        )


def _check_damping(damping: float) -> None:
    if not isinstance(damping, (int, float)) or isinstance(damping, bool) or not 0 < damping < float("inf"):
        raise ValueError(f"`damping` must be a number above 0, such as 0.01, got {damping!r}.")


def reasons_against_rounding(
    model: nn.Module, layers: dict[str, AnyLayer], *, needs_equal_steps: bool
) -> dict[str, str]:
    """Returns why the weights of some layers cannot be rounded in place, by path.

    A method that needs equal steps does not round weights in float formats.
    """
    users = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    found = {}
    for path, layer in layers.items():
        reason = _reason_against_rounding(layer, users, needs_equal_steps)
        if reason is not None:
            found[path] = reason
    return found


def _reason_against_rounding(layer: AnyLayer, users: Counter[int], needs_equal_steps: bool) -> str | None:
    quantizer = layer.weight_quantizer
    if quantizer is None or not quantizer.quantizing:
        return "its weight is not quantized"
    if needs_equal_steps and quantizer.spec.float_format is not None:
        return f"its weight is in {quantizer.spec.format}, whose steps are not equal"
    kind = layer._fakequant.kind
    stored = stored_weight(layer, kind.weight_name)
    if not isinstance(stored, nn.Parameter):
        return "its weight is computed from other parameters"
    if users[id(stored)] > 1:
        return "its weight is shared with another layer"
    if kind.runs_float_forward and not torch.equal(kind.read_weight(layer), stored):
        return "its weight is computed from other parameters"
    return None


def _write_weight(layer: AnyLayer, values: Tensor) -> None:
    stored = stored_weight(layer, layer._fakequant.kind.weight_name)
    if isinstance(layer, ExpertProduct):
        values = values.unflatten(0, (stored.shape[0], -1))
        values = values.transpose(1, 2) if layer.owner.is_transposed else values
    # In other memory, because the reference still reads the weight of before there.
    stored.data = torch.empty_like(stored).copy_(values) if values.stride() != stored.stride() else values.to(stored)
