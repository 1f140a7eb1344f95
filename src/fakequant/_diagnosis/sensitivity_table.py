"""`Sensitivity`: the table that `sensitivity` returns, and the configs that it suggests."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, TypeAlias, TypeGuard

from fakequant import _runtimes
from fakequant._diagnosis.bit_allocation import Pareto, pareto_of, within_budget
from fakequant._prepare.bit_widths import weight_at
from fakequant._util.shown import Shown
from fakequant._util.text import table
from fakequant.config import LayerConfig, QuantConfig, Rule

# What a cost is: the loss of a score, the error of the output, or an estimate of that error.
Measure: TypeAlias = Literal["score", "output", "second_order"]


@dataclasses.dataclass(frozen=True)
class LayerSensitivity:
    """The sensitivity of one layer, or of a module without weights that only quantizes its output."""

    path: str
    kind: str
    # The number of weights and the bits of each; the bits of the output for a module without weights.
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
    # The cost of quantizing only the weight, by its number of bits. None if no widths were measured.
    costs: dict[int, float] | None = None
    # The number of scales of the weight.
    scales: int = 0
    # The path of an earlier layer that has the same weight. Both have the same width.
    tied_to: str | None = None
    # The config of a layer whose widths were measured, with what `first_last_bits` and the target have changed.
    config: LayerConfig | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Sensitivity(Shown):
    """The result of `sensitivity`, the most sensitive layer first. Prints as a table."""

    layers: list[LayerSensitivity]
    # The scores with nothing and with everything quantized.
    float_score: float
    quantized_score: float
    config: QuantConfig
    # What scores and costs are. "score": the result of `evaluate`. "output": minus the relative squared error of the
    # model's output. "second_order": an estimate of that, for the weights alone.
    measure: Measure = "score"

    def suggest(
        self,
        *,
        keep: int | None = None,
        bits: float | None = None,
        bytes: int | None = None,
        latency: float | None = None,
        times: Mapping[Any, Any] | None = None,
        precision: LayerConfig | None = None,
    ) -> QuantConfig:
        """Returns the config with rules for some layers: the most sensitive in higher precision, or a width for each.

        Pass either `keep` or one budget: `bits`, `bytes` or `latency`.

        If widths were measured (`candidates`), every layer gets one of them, so that the sum of all costs is the least
        that the budget allows. It is found exactly, by integer programming (SciPy, `pip install "fakequant[search]"`).
        No width that is the same everywhere and within the budget costs less. Budgets count the weights in the table
        whose widths were measured. Because measured costs are noisy, a width counts at most as much as every narrower
        one. What is left of the budget goes to the narrowest layers.

        A rule keeps everything else that the config says about the layer: other fields of the weight's grid, its
        observer, input and output.

        Args:
            keep: The number of layers in higher precision.
            bits: With measured widths, the average number of bits per weight. Otherwise a limit for the bits of all
                weights in the table together: the first layers of the table are kept in higher precision, up to the
                first one that would exceed the limit. If an attention stays in float, its `out_proj` does too and is
                counted.
            bytes: The size of all weights and their scales together, with packed codes, as `summary` counts it.
            latency: A limit for the sum of `times`, in their unit.
            times: The time of each layer at each of its widths: {path: {bits: time}} or {(path, bits): time}.
            precision: The higher precision. If None, it is float. A module without weights always stays in float. Not
                for measured widths, except with `keep`.

        >>> from fakequant import presets, recipes
        >>> rows = [LayerSensitivity("b", "Linear", 100, 4, 0.5, 0.4), LayerSensitivity("a", "Linear", 10, 4, 0.1, 0.1)]
        >>> found = Sensitivity(rows, 0.9, 0.3, recipes.w4a8())
        >>> found.suggest(bits=100 * 8 + 10 * 4, precision=LayerConfig(weight=presets.int8())).rules[0].path
        'b'
        """
        budgets = {"keep": keep, "bits": bits, "bytes": bytes, "latency": latency}
        if sum(value is not None for value in budgets.values()) != 1:
            got = ", ".join(f"{name}={value!r}" for name, value in budgets.items())
            raise ValueError(
                "Pass either `keep`, the number of layers in higher precision, or one budget: `bits`, `bytes` or "
                f"`latency`, got {got}."
            )
        _check_times(latency, times)
        if precision is not None and not isinstance(precision, LayerConfig):
            raise TypeError(f"`precision` must be a LayerConfig, or None for float, got {precision!r}.")
        if keep is None and self.has_widths:
            if precision is not None:
                raise ValueError(
                    "`precision` is for tables without widths: here every layer has one of the measured widths.\n"
                    "Leave it out, or pass `keep`."
                )
            return _with_widths(self.config, self.layers, within_budget(self.layers, bits, bytes, latency, times))
        if bytes is not None or latency is not None:
            raise ValueError(
                f"`{'latency' if bytes is None else 'bytes'}` needs the cost of every layer at several widths.\n"
                "Measure them: fakequant.sensitivity(..., candidates=(2, 4, 8))."
            )
        return _with_worst_kept(self.config, self.layers, keep, bits, precision)

    def pareto(self) -> Pareto:
        """Returns the least cost for budgets from the narrowest widths to the widest, and the cost of uniform widths.

        It needs measured widths (`candidates`), and SciPy. `suggest(bits=point.bits)` returns the config of a point.

        >>> from fakequant import recipes
        >>> costs = {"a": {2: 0.9, 4: 0.1, 8: 0.0}, "b": {2: 0.2, 4: 0.1, 8: 0.0}}
        >>> rows = [LayerSensitivity(p, "Linear", 100, 4, 0.1, 0.1, costs=c, scales=1) for p, c in costs.items()]
        >>> print(Sensitivity(rows, 0.9, 0.3, recipes.w4a8()).pareto())
        bits | bytes | cost | layers at 2 | layers at 4 | layers at 8 | uniform
        -----+-------+------+-------------+-------------+-------------+------------------
        2.00 | 58    | 1.1  | 2           | 0           | 0           |
        3.00 | 83    | 0.3  | 1           | 1           | 0           |
        4.00 | 108   | 0.2  | 0           | 2           | 0           |
        6.00 | 158   | 0.1  | 0           | 1           | 1           |
        8.00 | 208   | 0    | 0           | 0           | 2           |
        2.00 | 58    | 1.1  | 2           | 0           | 0           | 2 bits everywhere
        4.00 | 108   | 0.2  | 0           | 2           | 0           | 4 bits everywhere
        8.00 | 208   | 0    | 0           | 0           | 2           | 8 bits everywhere
        """
        if not self.has_widths:
            raise ValueError(
                "There are no costs of widths to compare.\n"
                "Measure them: fakequant.sensitivity(..., candidates=(2, 4, 8))."
            )
        return pareto_of(self.layers)

    @property
    def has_widths(self) -> bool:
        """Whether the costs of widths were measured."""
        return any(layer.costs is not None for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
        layers = [
            {**dataclasses.asdict(layer), "config": layer.config and layer.config.to_dict()} for layer in self.layers
        ]
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "layers": layers, "config": self.config.to_dict()}

    def __str__(self) -> str:
        widths = sorted({bits for layer in self.layers for bits in layer.costs or ()})
        header = ["layer", "kind", "weights", "bits", "cost alone", "gain if left out"]
        rows = [
            [x.path, x.kind, f"{x.weights:,}", x.bits, f"{x.cost:.4g}", f"{x.gain:.4g}"]
            + [f"{x.costs[bits]:.4g}" if x.costs and bits in x.costs else "-" for bits in widths]
            for x in self.layers
        ]
        lost = -self.quantized_score
        words = {
            "score": f"score in float {self.float_score:.6g}, with all quantized {self.quantized_score:.6g}",
            "output": f"costs are relative squared errors of the output, with all quantized {lost:.4g}",
            "second_order": "costs are estimates of the relative squared error of the output, from weights alone",
        }
        return f"{table([*header, *(f'{bits}-bit weight' for bits in widths)], rows)}\n\n{words[self.measure]}"


def _check_times(latency: float | None, times: object) -> None:
    if (latency is None) != (times is None):
        raise ValueError(
            "`latency` is a limit for the sum of `times`, the time of each layer at each width: pass both, got "
            f"latency={latency!r}, times={'None' if times is None else 'a table'}.\n"
            "Use times={path: {bits: time}} or {(path, bits): time}."
        )
    if times is not None and not isinstance(times, Mapping):
        raise TypeError(f"`times` must be a dict, {{path: {{bits: time}}}} or {{(path, bits): time}}, got {times!r}.")


def _with_widths(config: QuantConfig, layers: Sequence[LayerSensitivity], widths: Mapping[str, int]) -> QuantConfig:
    """Returns the config with a rule for every layer whose weight has another width than the config gives it."""
    target, rules = _runtimes.find(config.target), []
    for layer in layers:
        bits = widths.get(layer.path)
        if bits is not None and bits != layer.bits:
            assert layer.config is not None
            assert layer.config.weight is not None
            use = dataclasses.replace(layer.config, weight=weight_at(layer.config.weight, bits, target))
            rules.append(Rule(path=_literal(layer.path), use=use))
    return dataclasses.replace(config, rules=(*rules, *config.rules))


def _with_worst_kept(
    config: QuantConfig,
    layers: Sequence[LayerSensitivity],
    keep: int | None,
    bits: float | None,
    precision: LayerConfig | None,
) -> QuantConfig:
    """Returns the config with the first of `layers` in `precision`, or in float if it is None.

    Their number is `keep`, or the largest with which all weights together have at most `bits` bits.
    """
    higher = None if precision is None or precision.weight is None else precision.weight
    higher_bits = None if higher is None else _runtimes.find(config.target).fit_weight(higher).bits
    number = _within(layers, higher_bits, precision is None, bits) if keep is None else _checked_keep(keep, len(layers))
    for layer in layers[:number]:
        if higher_bits is not None and layer.weights and higher_bits < layer.bits:
            raise ValueError(
                f"`precision` has weights of {higher_bits} bits, but {layer.path or 'the layer'} already has "
                f"{layer.bits}.\nUse a LayerConfig with more bits, or None for float."
            )
    rules = [Rule(path=_literal(layer.path), use=precision if layer.weights else None) for layer in layers[:number]]
    return dataclasses.replace(config, rules=(*rules, *config.rules))


def total_bits(layers: Sequence[LayerSensitivity], number: int, higher_bits: int | None, in_float: bool) -> int:
    """Returns the bits of all weights together, with the first `number` layers in higher precision.

    If `higher_bits` is None, these have the bits of their float type. If the higher precision is float (`in_float`),
    layers inside a kept attention are in float too.

    >>> from types import SimpleNamespace as Layer
    >>> rows = [Layer(path=p, weights=10, bits=4, float_bits=32, part_of=None) for p in "ab"]
    >>> total_bits(rows, 1, 8, False), total_bits(rows, 1, None, True)
    (120, 360)
    """
    kept = {layer.path for layer in layers[:number]}
    total = 0
    for layer in layers:
        bits = layer.bits
        if layer.path in kept:
            bits = layer.float_bits if higher_bits is None else higher_bits
        elif in_float and layer.part_of in kept:  # stays in float with its attention
            bits = layer.float_bits
        total += layer.weights * bits
    return total


def _within(layers: Sequence[LayerSensitivity], higher_bits: int | None, in_float: bool, budget: float | None) -> int:
    if not _is_whole(budget) or budget < 0:
        raise ValueError(f"`bits` must be a whole number of bits for all weights together, at least 0, got {budget!r}.")
    totals = [total_bits(layers, number, higher_bits, in_float) for number in range(len(layers) + 1)]
    if totals[0] > budget:
        raise ValueError(
            f"The weights have {totals[0]:,} bits with the config alone, more than `bits`, which is {budget:,}.\n"
            "Use a config with fewer bits, or a larger budget. For `bits` per weight, measure widths: "
            "fakequant.sensitivity(..., candidates=(2, 4, 8))."
        )
    return max(number for number, total in enumerate(totals) if total <= budget)


def _checked_keep(keep: object, layers: int) -> int:
    if not _is_whole(keep) or not 0 <= keep <= layers:
        raise ValueError(f"`keep` must be a whole number of layers, 0 to {layers}, got {keep!r}.")
    return int(keep)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _literal(path: str) -> str:
    """Returns a pattern that matches only this path."""
    return re.sub(r"([*?[])", r"[\1]", path)
