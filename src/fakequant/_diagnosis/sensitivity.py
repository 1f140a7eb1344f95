"""`sensitivity`: scores a model with each layer quantized alone, and with each layer left in float."""

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
from fakequant._diagnosis.watching import Args
from fakequant._prepare.prepare import prepare
from fakequant._train.calibrate import calibrate, without_scale
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import Bar, Data, check_module
from fakequant._util.text_table import table
from fakequant.config import LayerConfig, QuantConfig


@dataclasses.dataclass(frozen=True)
class LayerSensitivity:
    """The sensitivity of one layer, or of a module without weights that only quantizes its result."""

    path: str
    kind: str
    # The number of weights and the bits of each; the bits of the result for a module without weights.
    weights: int
    bits: int
    # The score in float minus the score with only this layer quantized.
    cost: float
    # The score with all but this layer quantized minus the score with all quantized.
    gain: float
    # The bits of a weight in float.
    float_bits: int = 32
    # The path of the attention that contains the layer. If the attention stays in float, so does the layer.
    part_of: str | None = None


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The result of `sensitivity`, the most sensitive layer first. Prints as a table."""

    layers: list[LayerSensitivity]
    # The scores with nothing and with everything quantized.
    float_score: float
    quantized_score: float
    config: QuantConfig

    def suggest(
        self, *, keep: int | None = None, bits: int | None = None, precision: LayerConfig | None = None
    ) -> QuantConfig:
        """Returns the config with rules that give the most sensitive layers a higher precision.

        Pass either `keep` or `bits`.

        Args:
            keep: The number of layers in higher precision.
            bits: A limit for the bits of all weights in the table together. The first layers of the table are kept in
                higher precision, up to the first one that would exceed the limit. If an attention stays in float, its
                `out_proj` does too and is counted.
            precision: The higher precision. None for float. A module without weights always stays in float.

        >>> from fakequant import presets, recipes
        >>> rows = [LayerSensitivity("b", "Linear", 100, 4, 0.5, 0.4), LayerSensitivity("a", "Linear", 10, 4, 0.1, 0.1)]
        >>> found = Sensitivity(rows, 0.9, 0.3, recipes.w4a8())
        >>> found.suggest(bits=100 * 8 + 10 * 4, precision=LayerConfig(weight=presets.int8())).rules[0].path
        'b'
        """
        return suggested(self.config, self.layers, keep, bits, precision)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
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
    evaluate: Callable[[nn.Module], object],
    *,
    data: Data | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Ranks layers by their effect on a score: each layer quantized alone, and each layer left in float.

        cost = score in float - score with only this layer quantized
        gain = score with all but this layer quantized - score with all quantized

    Layers are sorted by cost, then by gain, then by their order in the model. The cost shows a layer alone. The gain
    shows it together with the other layers, whose errors may hide its own.

    A copy of the model is prepared and calibrated once. Then its quantizers are switched on and off. A layer is
    quantized with all its quantizers: weight, input, projections and result. If another module quantizes its input, the
    input is put on that module's grid whenever the layer is quantized, even if that module is not.

    Args:
        model: A float model. It is not changed.
        config: Which layers to quantize, and how.
        evaluate: A function that takes a model and returns a score, larger for a better model: an accuracy, or a
            negative loss. It is called 2 + 2 * layers times with the copy, in evaluation mode and without gradients.
        data: Batches for the calibration. None if no activation needs it (dynamic ranges, or weights only).
        progress: Whether to show a progress bar.

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
            f"`evaluate` must be a function that takes a model and returns a number, got {type(evaluate).__name__}."
        )
    model = getattr(model, "_orig_mod", model)  # inside a compiled model, paths are those that rules use
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
    rows.sort(key=lambda row: (-row.cost, -row.gain))  # stable: equal rows stay in the model's order
    return Sensitivity(rows, in_float, quantized, config)


def _row(unit: Unit, cost: float, gain: float) -> LayerSensitivity:
    return LayerSensitivity(unit.path, unit.kind, unit.weights, unit.bits, cost, gain, unit.float_bits, unit.part_of)


def _require_scales(model: nn.Module) -> None:
    missing = without_scale(model)
    if missing is not None:
        raise ValueError(
            f"{missing} have no scale, because they have not observed any data.\n"
            "Pass `data`: some batches that reach every layer, as for fakequant.calibrate."
        )


class _Scorer:
    """Calls `evaluate` with selected layers quantized."""

    def __init__(
        self,
        model: nn.Module,
        evaluate: Callable[[nn.Module], object],
        units: list[Unit],
        switches: Switches,
        bar: Bar,
    ) -> None:
        self.model, self.evaluate, self.units, self.switches, self.bar = model, evaluate, units, switches, bar
        self.was_run = False

    def with_only(self, units: list[Unit], words: str) -> float:
        """Returns the score with only these units quantized; `words` describes them in errors."""
        self.switches.set(units)
        self.model.eval()
        with ExitStack() as undo:
            if not self.was_run:
                for unit in self.units:
                    undo.callback(unit.module.register_forward_pre_hook(self._note).remove)
            # `evaluate` may use training mode, which changes ranges and statistics: restore them for the next call.
            with torch.no_grad(), unchanged(self.model):
                score = _number(self.evaluate(self.model), words)
        if not self.was_run:
            raise ValueError(
                "`evaluate` did not run the model that it was given: none of its quantized layers was called.\n"
                "Run the function's argument, a prepared copy, as in evaluate=lambda model: accuracy(model, images)."
            )
        self.bar.update()
        return score

    def _note(self, module: nn.Module, args: Args) -> None:
        self.was_run = True


def _number(score: object, words: str) -> float:
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
