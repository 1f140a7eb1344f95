"""`History`: the health of a model over its training."""

import dataclasses
from numbers import Integral
from typing import Any

from fakequant._train.health import Health, QuantizerHealth
from fakequant._util.text_table import table

# The recorded fields of `QuantizerHealth`.
NAMES = ("clipped", "levels_used", "scale_drift", "oscillating", "nonfinite")


@dataclasses.dataclass
class History:
    """The results of `health` at several training steps. `fakequant.report` plots them.

    >>> import torch, fakequant as fq
    >>> model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), fq.recipes.int8())
    >>> history = fq.History()
    >>> for step in (0, 100):
    ...     history.add(step, fq.health(model))
    >>> history.series("0.weight_quantizer", "clipped")
    ([0, 100], [0.0, 0.0])
    """

    steps: list[int] = dataclasses.field(default_factory=list)
    # By path: the steps and the health at each step.
    quantizers: dict[str, list[tuple[int, QuantizerHealth]]] = dataclasses.field(default_factory=dict)

    def add(self, step: int, health: Health) -> None:
        """Adds the result of `health` at `step`, which must be larger than the last one."""
        if isinstance(step, bool) or not isinstance(step, Integral):
            raise TypeError(f"`step` must be a whole number of steps, got {step!r}.")
        step = int(step)  # NumPy integers cannot be written as JSON
        if not isinstance(health, Health):
            raise TypeError(
                f"`health` must be what fakequant.health(model) returns, got {type(health).__name__}.\n"
                "Use history.add(step, fakequant.health(model))."
            )
        if self.steps and step <= self.steps[-1]:
            raise ValueError(
                f"`step` must be larger than the last one, {self.steps[-1]}, got {step}.\n"
                "Use a new History for each training run."
            )
        self.steps.append(step)
        for quantizer in health.quantizers:
            self.quantizers.setdefault(quantizer.path, []).append((step, quantizer))

    @property
    def paths(self) -> list[str]:
        """The quantizers, in the order in which they were first seen."""
        return list(self.quantizers)

    def series(self, path: str, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a value of a quantizer is known, and the values.

        Args:
            path: The path of the quantizer.
            name: A field of `QuantizerHealth`, such as "clipped".
        """
        if name not in NAMES:
            raise ValueError(f"`name` must be one of {', '.join(NAMES)}, got {name!r}.")
        if path not in self.quantizers:
            known = ", ".join(self.paths[:5]) + (", ..." if len(self.paths) > 5 else "")
            raise KeyError(f"There is no quantizer {path!r} in this history, which has {known or 'none'}.")
        found = [(step, getattr(q, name)) for step, q in self.quantizers[path] if getattr(q, name) is not None]
        return [step for step, _ in found], [value for _, value in found]

    def to_dict(self) -> dict[str, dict[str, dict[str, list[Any]]]]:
        """Returns {"steps": [...], "values": [...]} by path and name."""
        return {
            path: {name: dict(zip(("steps", "values"), self.series(path, name), strict=True)) for name in NAMES}
            for path in self.paths
        }

    def __str__(self) -> str:
        header = ["quantizer", "steps", "clipped", "levels used", "scale drift", "oscillating", "not finite"]
        rows = [
            [path, len(self.quantizers[path]), *(self._change(path, name) for name in NAMES)] for path in self.paths
        ]
        return table(header, rows)

    def _change(self, path: str, name: str) -> str:
        """Returns the first and the last value as text."""
        _, values = self.series(path, name)
        if not values:
            return "-"
        first, last = (str(v) if name == "nonfinite" else f"{v:.2%}" for v in (values[0], values[-1]))
        return first if len(values) == 1 else f"{first} to {last}"
