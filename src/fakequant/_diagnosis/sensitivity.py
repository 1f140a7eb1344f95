"""`sensitivity`: scores a model with each layer quantized alone, and with each layer left in float."""

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._diagnosis.output_error import OutputScore, estimated_costs, kept
from fakequant._diagnosis.sensitivity_table import LayerSensitivity, Measure, Sensitivity
from fakequant._diagnosis.switched_layers import (
    Choice,
    SwitchedLayer,
    Switches,
    checked_candidates,
    find_choices,
    find_switched_layers,
    layer_config,
    scales_of,
)
from fakequant._model.running import Bar, Data, as_batches, check_module, first_batch
from fakequant._model.snapshot import unchanged
from fakequant._paired_models.calls import Args
from fakequant._prepare.prepare import MissingExampleError, prepare
from fakequant._train.calibrate import calibrate, require_scales
from fakequant.config import QuantConfig
from fakequant.nn._model_quantizers import named_quantizers


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
    observer, and gets a new scale. A width that the target does not support is replaced by one that it does. Layers
    with `first_last_bits` keep at least this width, and weights in float formats or with block scales keep their own.
    Layers that share a weight are measured together, and get the same width.

    Without `evaluate` the score needs no labels. It is minus the error of the output of the model,

        sum (y - y_quantized)^2 / sum y^2

    over all elements of the first float tensor that the model returns. `measure="second_order"` estimates that error
    for all weights and widths from one forward and backward pass per batch: the squared errors of the weights times the
    mean squares of their gradients. It takes errors as small, independent and without bias. That ranks layers; at few
    bits the errors themselves are too far from small.

    A copy of the model is prepared and calibrated once. Then its quantizers are switched on and off. A layer is
    quantized with all its quantizers: weight, input, projections and output. If another module quantizes its input, the
    input is put on that module's grid whenever the layer is quantized, even if that module is not.

    Args:
        model: A float model. It is not changed.
        config: Which layers to quantize, and how.
        evaluate: A function that takes a model and returns a score, larger for a better model: an accuracy, or a
            negative loss. It is called 2 + 2 * layers times with the copy, and once more for each weight and width, in
            evaluation mode and without gradients. If None, the score is minus the error of the output.
        data: Batches for the calibration, and for the error of the output, which keeps them all. None if no
            activation needs it (dynamic ranges, or weights only) and there is `evaluate`. The first batch is also the
            example for `prepare`.
        candidates: Bit widths to try for each weight, such as (2, 4, 8). If None, widths are not measured.
        measure: What a cost is. If None, it is "score" with `evaluate`, and "output" without. With "second_order"
            nothing is evaluated: cost and gain are both the estimate for the weight at the width that it has in the
            config.
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
    data = as_batches(data) if isinstance(data, Iterable) else data
    example = first_batch(data) if isinstance(data, Iterable) else None
    try:
        prepared = prepare(copy.deepcopy(model), config, example).eval()
    except MissingExampleError as error:
        raise ValueError(
            "This config needs batches, of which the first shows how data flows through the model.\n"
            "Pass `data`: some batches that reach every layer, as for fakequant.calibrate."
        ) from error
    if evaluate is None and data is not None:
        data = kept(data)
        evaluate = OutputScore(data)
    is_ready = all(quantizer.is_initialized for _, quantizer in named_quantizers(prepared))
    if data is not None and not (is_ready and how != "score"):
        calibrate(prepared, data, progress=progress)
    require_scales(prepared, "Pass `data`: some batches that reach every layer, as for fakequant.calibrate.")
    layers = find_switched_layers(prepared)
    choices = [] if widths is None else find_choices(prepared, layers, widths)
    if how == "second_order":
        assert data is not None
        return _estimated(prepared, data, layers, choices, config)
    assert evaluate is not None
    rows, switches = _Rows(prepared, choices), Switches(layers)
    total = 2 + 2 * len(layers) + sum(len(choice.specs) for choice in choices)
    with Bar(total=total, desc="sensitivity", disable=not progress, leave=False) as bar, switches:
        score = Scorer(prepared, evaluate, layers, switches, bar)
        in_float = score.with_only([], "nothing")
        quantized = score.with_only(layers, "everything")
        for layer in layers:
            name = layer.path or "the model"
            alone = score.with_only([layer], f"only {name}")
            without = score.with_only([other for other in layers if other is not layer], f"all but {name}")
            rows.add(layer, in_float - alone, without - quantized)
        for choice in choices:  # last, because it changes specs
            costs = {}
            for bits in choice.specs:
                choice.set(bits)
                name = choice.layers[0].path or "the model"
                costs[bits] = in_float - score.with_weights(choice.layers, f"only the weight of {name} at {bits} bits")
            rows.add_costs(choice, costs)
    return Sensitivity(
        layers=rows.sorted(), float_score=in_float, quantized_score=quantized, config=config, measure=how
    )


def _estimated(
    model: nn.Module, data: Data, layers: list[SwitchedLayer], choices: list[Choice], config: QuantConfig
) -> Sensitivity:
    """Returns estimated costs of all weights, at their widths in the config and at the candidates."""
    rows = _Rows(model, choices)
    Switches(layers).set([])
    now = {}
    for choice, (own, costs) in zip(choices, estimated_costs(model, data, choices), strict=True):
        rows.add_costs(choice, costs)
        now[choice.layers[0]] = own
    for layer in layers:
        cost = now.get(layer, 0.0)  # 0 without a weight, and for the second layer of a shared one
        rows.add(layer, cost, cost)
    lost = math.fsum(now.values())
    return Sensitivity(
        layers=rows.sorted(), float_score=0.0, quantized_score=-lost, config=config, measure="second_order"
    )


class _Rows:
    """The rows of the table."""

    def __init__(self, model: nn.Module, choices: list[Choice]) -> None:
        """Keeps what rows say about widths, which must be read before specs are changed."""
        self._costs: dict[SwitchedLayer, dict[int, float]] = {}
        self._widths: dict[SwitchedLayer, dict[str, Any]] = {
            layer: {
                "scales": scales_of(layer),
                "tied_to": None if layer is choice.layers[0] else choice.layers[0].path,
                "config": layer_config(model, layer),
            }
            for choice in choices
            for layer in choice.layers
        }
        self._scores: list[tuple[SwitchedLayer, float, float]] = []

    def add(self, layer: SwitchedLayer, cost: float, gain: float) -> None:
        """Adds the cost and the gain of a layer."""
        self._scores.append((layer, cost, gain))

    def add_costs(self, choice: Choice, costs: dict[int, float]) -> None:
        """Adds the costs of widths."""
        self._costs.update((layer, costs) for layer in choice.layers)

    def sorted(self) -> list[LayerSensitivity]:
        """Returns the rows, the most sensitive first."""
        rows = [
            LayerSensitivity(
                path=layer.path, kind=layer.kind, weights=layer.weights, bits=layer.bits, cost=cost, gain=gain,
                float_bits=layer.float_bits, part_of=layer.part_of, costs=self._costs.get(layer),
                **self._widths.get(layer, {}),
            )
            for layer, cost, gain in self._scores
        ]  # fmt: skip
        return sorted(rows, key=lambda row: (-row.cost, -row.gain))  # stable: equal rows stay in the model's order


def _checked(evaluate: object, data: object, candidates: object, measure: object) -> tuple[Measure, list[int] | None]:
    """Returns what a cost is, and the widths in ascending order, or None if widths are not measured."""
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


class Scorer:
    """Calls `evaluate` with selected layers quantized."""

    def __init__(
        self,
        model: nn.Module,
        evaluate: Callable[[nn.Module], object],
        layers: list[SwitchedLayer],
        switches: Switches,
        bar: Bar,
    ) -> None:
        self.model, self.evaluate, self.layers, self.switches, self.bar = model, evaluate, layers, switches, bar
        self.was_run = False

    def with_only(self, layers: list[SwitchedLayer], words: str) -> float:
        """Returns the score with only these layers quantized; `words` describes them in errors."""
        self.switches.set(layers)
        return self._score(words)

    def with_weights(self, layers: list[SwitchedLayer], words: str) -> float:
        """Returns the score with only the weights of these layers quantized; `words` describes them in errors."""
        self.switches.set_weights(layers)
        return self._score(words)

    def _score(self, words: str) -> float:
        if any(module.training for module in self.model.modules()):
            self.model.eval()
        with ExitStack() as undo:
            if not self.was_run:
                for layer in self.layers:
                    undo.callback(layer.module.register_forward_pre_hook(self._note).remove)
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
