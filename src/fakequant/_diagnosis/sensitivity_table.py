"""`Sensitivity`: the table that `sensitivity` returns, and what it suggests."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from fakequant._diagnosis.pareto import Pareto, pareto_of
from fakequant._diagnosis.suggestion import suggested
from fakequant._util.text_table import table
from fakequant.config import LayerConfig, QuantConfig

# What a cost is: the loss of a score, the error of the output, or an estimate of that error.
Measure: TypeAlias = Literal["score", "output", "second_order"]


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
    # The cost of quantizing only the weight, by its number of bits. None if no widths were measured.
    costs: dict[int, float] | None = None
    # The number of scales of the weight.
    scales: int = 0
    # The path of an earlier layer that has the same weight. Both have the same width.
    tied_to: str | None = None
    # The config of a layer whose widths were measured, with what `first_last_bits` and the target have changed.
    config: LayerConfig | None = None


@dataclasses.dataclass(frozen=True)
class Sensitivity:
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
            precision: The higher precision. None for float. A module without weights always stays in float. Not for
                measured widths, except with `keep`.

        >>> from fakequant import presets, recipes
        >>> rows = [LayerSensitivity("b", "Linear", 100, 4, 0.5, 0.4), LayerSensitivity("a", "Linear", 10, 4, 0.1, 0.1)]
        >>> found = Sensitivity(rows, 0.9, 0.3, recipes.w4a8())
        >>> found.suggest(bits=100 * 8 + 10 * 4, precision=LayerConfig(weight=presets.int8())).rules[0].path
        'b'
        """
        return suggested(self.config, self.layers, keep, bits, bytes, latency, times, precision)

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
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **self._parts()}

    def _parts(self) -> dict[str, Any]:
        layers = [
            {**dataclasses.asdict(layer), "config": layer.config and layer.config.to_dict()} for layer in self.layers
        ]
        return {"layers": layers, "config": self.config.to_dict()}

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
