"""`sensitivity`: scores a model with each layer quantized alone, and with each layer left in float."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fakequant._diagnosis.output_error import OutputScore, kept
from fakequant._diagnosis.scoring import Scorer
from fakequant._diagnosis.second_order import estimated_costs
from fakequant._diagnosis.sensitivity_table import LayerSensitivity, Measure, Sensitivity
from fakequant._diagnosis.units import Switches, Unit, find_units
from fakequant._diagnosis.widths import Choice, checked_candidates, find_choices, layer_config, scales_of
from fakequant._prepare.prepare import prepare
from fakequant._train.calibrate import calibrate, without_scale
from fakequant._train.running import Bar, Data, check_module
from fakequant.config import QuantConfig
from fakequant.nn._model_quantizers import quantizers


def sensitivity(
    model: nn.Module,
    config: QuantConfig,
    evaluate: Callable[[nn.Module], object] | None = None,
    *,
    data: Data | None = None,
    candidates: Iterable[int] | None = None,
    measure: Measure | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Ranks layers by their effect on a score: each layer quantized alone, and each layer left in float.

        cost = score in float - score with only this layer quantized
        gain = score with all but this layer quantized - score with all quantized

    Layers are sorted by cost, then by gain, then by their order in the model. The cost shows a layer alone. The gain
    shows it together with the other layers, whose errors may hide its own.

    With `candidates`, each weight is also quantized alone at each of these widths, with everything else in float:

        costs[bits] = score in float - score with only this weight quantized, to this number of bits

    `suggest` and `pareto` of the result choose widths by these costs. They add them up, as if errors of different
    layers did not influence each other. A grid of another width keeps the other fields of the layer's spec and its
    observer, and gets a new scale. A width that the target does not have becomes the one that it has instead. Layers
    with `first_last_bits` keep at least those. Weights in float formats and with block scales keep theirs. Layers that
    share a weight are measured, and get their width, together.

    Without `evaluate` the score needs no labels. It is minus the error of the output of the model,

        sum (y - y_quantized)^2 / sum y^2

    over all elements of the first float tensor that the model returns. `measure="second_order"` estimates that error
    for all weights and widths from one forward and backward pass per batch: the squared errors of the weights times the
    mean squares of their gradients. It takes errors as small, independent and without bias. That ranks layers; at few
    bits the errors themselves are too far from small.

    A copy of the model is prepared and calibrated once. Then its quantizers are switched on and off. A layer is
    quantized with all its quantizers: weight, input, projections and result. If another module quantizes its input, the
    input is put on that module's grid whenever the layer is quantized, even if that module is not.

    Args:
        model: A float model. It is not changed.
        config: Which layers to quantize, and how.
        evaluate: A function that takes a model and returns a score, larger for a better model: an accuracy, or a
            negative loss. It is called 2 + 2 * layers times with the copy, and once more for each weight and width, in
            evaluation mode and without gradients. None for the error of the output.
        data: Batches for the calibration, and for the error of the output, which keeps them all. None if no
            activation needs it (dynamic ranges, or weights only) and there is `evaluate`.
        candidates: Numbers of bits to measure for every weight, such as (2, 4, 8). None for none.
        measure: What a cost is. None for "score" with `evaluate`, and "output" without. With "second_order" nothing is
            evaluated: cost and gain are both the estimate for the weight at the width that the config gives it.
        progress: Whether to show a progress bar.

    >>> import torch
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
    >>> found = sensitivity(model, config, data=[x], candidates=(2, 4, 8), progress=False)
    >>> [(rule.path, rule.use.weight.bits) for rule in found.suggest(bits=5).rules]
    [('0', 8), ('1', 2)]
    """
    check_module(model)
    how, widths = _checked(evaluate, data, candidates, measure)
    model = getattr(model, "_orig_mod", model)  # inside a compiled model, paths are those that rules use
    prepared = prepare(copy.deepcopy(model), config).eval()
    if evaluate is None and data is not None:
        data = kept(data)
        evaluate = OutputScore(data)
    is_ready = all(quantizer.is_initialized for _, quantizer in quantizers(prepared))
    if data is not None and not (is_ready and how != "score"):
        calibrate(prepared, data, progress=progress)
    _require_scales(prepared)
    units = find_units(prepared)
    choices = [] if widths is None else find_choices(prepared, units, widths)
    if how == "second_order":
        assert data is not None
        return _estimated(prepared, data, units, choices, config)
    assert evaluate is not None
    rows, switches = _Rows(prepared, choices), Switches(units)
    total = 2 + 2 * len(units) + sum(len(choice.specs) for choice in choices)
    with Bar(total=total, desc="sensitivity", disable=not progress, leave=False) as bar, switches:
        score = Scorer(prepared, evaluate, units, switches, bar)
        in_float = score.with_only([], "nothing")
        quantized = score.with_only(units, "everything")
        for unit in units:
            name = unit.path or "the model"
            alone = score.with_only([unit], f"only {name}")
            without = score.with_only([u for u in units if u is not unit], f"all but {name}")
            rows.add(unit, in_float - alone, without - quantized)
        for choice in choices:  # last, because it changes specs
            costs = {}
            for bits in choice.specs:
                choice.set(bits)
                name = choice.units[0].path or "the model"
                costs[bits] = in_float - score.with_weights(choice.units, f"only the weight of {name} at {bits} bits")
            rows.add_costs(choice, costs)
    return Sensitivity(rows.sorted(), in_float, quantized, config, how)


def _estimated(
    model: nn.Module, data: Data, units: list[Unit], choices: list[Choice], config: QuantConfig
) -> Sensitivity:
    """Returns estimated costs of all weights, at their widths in the config and at the candidates."""
    rows = _Rows(model, choices)
    Switches(units).set([])
    now = {}
    for choice, (own, costs) in zip(choices, estimated_costs(model, data, choices), strict=True):
        rows.add_costs(choice, costs)
        now[choice.units[0]] = own
    for unit in units:
        cost = now.get(unit, 0.0)  # 0 without a weight, and for the second layer of a shared one
        rows.add(unit, cost, cost)
    return Sensitivity(rows.sorted(), 0.0, -math.fsum(now.values()), config, "second_order")


class _Rows:
    """The rows of the table."""

    def __init__(self, model: nn.Module, choices: list[Choice]) -> None:
        """Keeps what rows say about widths, which must be read before specs are changed."""
        self._costs: dict[Unit, dict[int, float]] = {}
        self._widths: dict[Unit, dict[str, Any]] = {
            unit: {
                "scales": scales_of(unit),
                "tied_to": None if unit is choice.units[0] else choice.units[0].path,
                "config": layer_config(model, unit),
            }
            for choice in choices
            for unit in choice.units
        }
        self._scores: list[tuple[Unit, float, float]] = []

    def add(self, unit: Unit, cost: float, gain: float) -> None:
        """Adds the cost and the gain of a unit."""
        self._scores.append((unit, cost, gain))

    def add_costs(self, choice: Choice, costs: dict[int, float]) -> None:
        """Adds the costs of widths."""
        self._costs.update((unit, costs) for unit in choice.units)

    def sorted(self) -> list[LayerSensitivity]:
        """Returns the rows, the most sensitive first."""
        rows = [
            LayerSensitivity(
                unit.path, unit.kind, unit.weights, unit.bits, cost, gain, unit.float_bits, unit.part_of,
                costs=self._costs.get(unit), **self._widths.get(unit, {}),
            )
            for unit, cost, gain in self._scores
        ]  # fmt: skip
        return sorted(rows, key=lambda row: (-row.cost, -row.gain))  # stable: equal rows stay in the model's order


def _checked(evaluate: object, data: object, candidates: object, measure: object) -> tuple[Measure, list[int] | None]:
    """Returns what a cost is, and the widths in ascending order, or None for none."""
    if evaluate is not None and not callable(evaluate):
        raise TypeError(
            f"`evaluate` must be a function that takes a model and returns a number, got {type(evaluate).__name__}."
        )
    measures: tuple[Measure, ...] = ("score", "output", "second_order")
    how: Measure = "output" if evaluate is None else "score"
    if measure is not None:
        if measure not in measures:
            raise ValueError(f"`measure` must be one of {', '.join(measures)}, or None, got {measure!r}.")
        how = next(name for name in measures if name == measure)
    if (how == "score") != (evaluate is not None):
        raise ValueError(
            f'`evaluate` is the function of measure="score" and of no other, got measure={measure!r} '
            f"{'without' if evaluate is None else 'with'} `evaluate`.\nUse either of them."
        )
    if evaluate is None and data is None:
        raise ValueError(
            "There is nothing to measure with.\n"
            "Pass `evaluate`, a function that takes a model and returns a score, or `data`, batches for its outputs."
        )
    if candidates is None and how == "second_order":
        raise ValueError('measure="second_order" estimates the costs of widths.\nPass `candidates`, such as (2, 4, 8).')
    return how, None if candidates is None else checked_candidates(candidates)


def _require_scales(model: nn.Module) -> None:
    missing = without_scale(model)
    if missing is not None:
        raise ValueError(
            f"{missing} have no scale, because they have not observed any data.\n"
            "Pass `data`: some batches that reach every layer, as for fakequant.calibrate."
        )
