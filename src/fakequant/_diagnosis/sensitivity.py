"""`sensitivity`: what each layer costs when it is quantized, and what is won when it is not."""

import copy
import dataclasses
import math
from collections.abc import Callable
from contextlib import ExitStack
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._diagnosis.suggestion import suggested
from fakequant._diagnosis.units import Switches, Unit, find_units
from fakequant._prepare.prepare import prepare
from fakequant._train.calibrate import calibrate, without_scale
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import Bar, Data, check_module
from fakequant._util.text_table import table
from fakequant.config import LayerConfig, QuantConfig


@dataclasses.dataclass(frozen=True)
class LayerSensitivity:
    """One layer with all its quantizers, or a module that only quantizes its result: it has no weights."""

    path: str
    kind: str
    # How many, and the bits of each; of a module without weights the bits of its result.
    weights: int
    bits: int
    # Score in float minus score with only this layer quantized.
    cost: float
    # Score with all but this layer quantized minus score with all quantized.
    gain: float
    # Bits of a weight in float.
    float_bits: int = 32
    # The attention that the layer is in: where that stays in float, so does the layer.
    part_of: str | None = None


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What `sensitivity` found, the worst layer first; prints as a table."""

    layers: list[LayerSensitivity]
    # Scores with nothing and with everything quantized.
    float_score: float
    quantized_score: float
    config: QuantConfig

    def suggest(
        self, *, keep: int | None = None, bits: int | None = None, precision: LayerConfig | None = None
    ) -> QuantConfig:
        """The config with the worst layers in a higher precision; None: in float.

        `keep` is how many. Or `bits` is what the weights of all layers in the table may have together: as many
        of the worst are kept as that allows, in the order of the table and without a gap. Where an attention stays
        in float its `out_proj` does too, which is counted. A module without weights stays in float in any case:
        there is nothing between that and `QuantConfig.operands`.

        >>> from fakequant import presets, recipes
        >>> rows = [LayerSensitivity("b", "Linear", 100, 4, 0.5, 0.4), LayerSensitivity("a", "Linear", 10, 4, 0.1, 0.1)]
        >>> found = Sensitivity(rows, 0.9, 0.3, recipes.w4a8())
        >>> found.suggest(bits=100 * 8 + 10 * 4, precision=LayerConfig(weight=presets.int8())).rules[0].path
        'b'
        """
        return suggested(self.config, self.layers, keep, bits, precision)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and strings."""
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **self._parts()}

    def _parts(self) -> dict[str, Any]:
        return {"layers": [dataclasses.asdict(layer) for layer in self.layers], "config": self.config.to_dict()}

    def __str__(self) -> str:
        header = ["layer", "kind", "weights", "bits", "cost alone", "gain if left out"]
        rows = [[x.path, x.kind, f"{x.weights:,}", x.bits, f"{x.cost:.4g}", f"{x.gain:.4g}"] for x in self.layers]
        words = f"score in float {self.float_score:.6g}, with all quantized {self.quantized_score:.6g}"
        return f"{table(header, rows)}\n\n{words}"


def sensitivity(
    model: nn.Module,
    config: QuantConfig,
    evaluate: Callable[[nn.Module], Any],
    *,
    data: Data | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Scores a model with each layer quantized alone, and with each one left out; ranks the layers.

        cost = score in float - score with only this layer quantized
        gain = score with all but this layer quantized - score with all quantized

    The worst layer is the one with the highest cost; of equal costs the one with the higher gain, then the first
    in the model. Costs show a layer by itself; gains show it beside the others, which may hide its errors.

    `model` is in float and stays as it is: a copy of it is prepared, and calibrated with `data`, once. Then
    quantizers are switched on and off. `evaluate(model)` is called 2 + 2 * layers times, with the copy in
    evaluation mode and without gradients, and returns a number that is larger for a better model: an accuracy, or
    a loss with a minus. `data` may be left out if no activation needs it (ranges found at run time, weights only).

    A layer is quantized with all it has: weight, input, projections, result. An input that comes from a module
    which quantizes it is on that module's grid whenever the layer is quantized, whether that module is or not.

    >>> import fakequant as fq
    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> with torch.no_grad():
    ...     _ = model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.01]]))  # one scale is too coarse for both
    ...     _ = model[1].weight.copy_(torch.eye(2))
    >>> config = fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(bits=4)))
    >>> x, y = torch.tensor([[1.0, 50.0]]), torch.tensor([[1.0, 0.5]])
    >>> found = sensitivity(model, config, lambda model: -(model(x) - y).abs().sum(), progress=False)
    >>> [layer.path for layer in found.layers], found.suggest(keep=1).rules[0].path
    (['0', '1'], '0')
    """
    check_module(model)
    if not callable(evaluate):
        raise TypeError(
            f"`evaluate` must be a function of a model that returns a number, got {type(evaluate).__name__}."
        )
    model = getattr(model, "_orig_mod", model)  # of a compiled one: its layers have the paths that rules speak of
    prepared = prepare(copy.deepcopy(model), config).eval()
    if data is not None:
        calibrate(prepared, data, progress=progress)
    _require_scales(prepared)
    units = find_units(prepared)
    switches = Switches(units)
    with Bar(total=2 + 2 * len(units), desc="sensitivity", disable=not progress, leave=False) as bar, switches:
        score = _Scorer(prepared, evaluate, units, switches, bar)
        in_float = score.with_only([], "nothing")
        quantized = score.with_only(units, "everything")
        rows = []
        for unit in units:
            name = unit.path or "the model"
            alone = score.with_only([unit], f"only {name}")
            without = score.with_only([u for u in units if u is not unit], f"all but {name}")
            rows.append(_row(unit, in_float - alone, without - quantized))
    rows.sort(key=lambda row: (-row.cost, -row.gain))  # of equal ones the first in the model
    return Sensitivity(rows, in_float, quantized, config)


def _row(unit: Unit, cost: float, gain: float) -> LayerSensitivity:
    return LayerSensitivity(unit.path, unit.kind, unit.weights, unit.bits, cost, gain, unit.float_bits, unit.part_of)


def _require_scales(model: nn.Module) -> None:
    missing = without_scale(model)
    if missing is not None:
        raise ValueError(
            f"{missing} have no scale: ranges of these have to be seen first.\n"
            "Pass `data`, some batches that run through every layer, as to fakequant.calibrate."
        )


class _Scorer:
    """Calls `evaluate` with some layers quantized."""

    def __init__(self, model: nn.Module, evaluate: Any, units: list[Unit], switches: Switches, bar: Any) -> None:
        self.model, self.evaluate, self.units, self.switches, self.bar = model, evaluate, units, switches, bar
        self.was_run = False

    def with_only(self, units: list[Unit], words: str) -> float:
        """The score with these quantized."""
        self.switches.set(units)
        self.model.eval()
        with ExitStack() as undo:
            if not self.was_run:
                for unit in self.units:
                    undo.callback(unit.module.register_forward_pre_hook(self._note).remove)
            # Who runs it in training mode moves ranges and statistics: not for the next one.
            with torch.no_grad(), unchanged(self.model):
                score = _number(self.evaluate(self.model), words)
        if not self.was_run:
            raise ValueError(
                "`evaluate` did not run the model that it was given: none of its quantized layers was called.\n"
                "Use the argument, a prepared copy, as in evaluate=lambda model: accuracy(model, images)."
            )
        self.bar.update()
        return score

    def _note(self, module: nn.Module, args: Any) -> None:
        self.was_run = True


def _number(score: Any, words: str) -> float:
    if isinstance(score, (Tensor, np.ndarray)) and math.prod(score.shape) == 1:
        score = score.item()
    if not isinstance(score, Real) or isinstance(score, bool):
        raise TypeError(
            f"`evaluate` must return a number, larger for a better model, got {type(score).__name__} with {words} "
            "quantized."
        )
    if not math.isfinite(score):
        raise ValueError(
            f"`evaluate` returned {float(score)} with {words} quantized, which cannot be ranked.\n"
            "Return a finite number, such as an accuracy, or look for values that overflow."
        )
    return float(score)
