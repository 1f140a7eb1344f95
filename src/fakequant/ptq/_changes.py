"""`Changes`: what a post-training method did to each layer."""

import dataclasses
from typing import Any

from fakequant._util.text_table import table


@dataclasses.dataclass(frozen=True)
class LayerChange:
    """What a method did to one layer.

    >>> LayerChange("head", "Linear", 21.0, 24.5).reason is None
    True
    """

    path: str
    kind: str
    # What `Changes.measure` says, before and after. None if the layer was not changed or cannot be measured.
    before: float | None = None
    after: float | None = None
    # Why the layer was not changed. None if it was.
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Changes:
    """The result of a post-training method, in the order in which the layers run. Prints as a table.

    >>> print(Changes("gptq", "SQNR dB", [LayerChange("0", "Linear", 18.3, 21.9)]))
    layer | kind   | SQNR dB before | after
    ------+--------+----------------+------
    0     | Linear | 18.30          | 21.90
    <BLANKLINE>
    gptq changed 1 of 1 layers.
    """

    # The name of the method.
    method: str
    # What `before` and `after` of the layers are.
    measure: str
    layers: list[LayerChange]

    @property
    def changed(self) -> list[str]:
        """The paths of the layers that were changed."""
        return [layer.path for layer in self.layers if layer.reason is None]

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        header = ["layer", "kind", f"{self.measure} before", "after"]
        with_reasons = any(layer.reason for layer in self.layers)
        rows = [
            [x.path or "the model", x.kind, *map(_words, (x.before, x.after)), *([x.reason or ""] * with_reasons)]
            for x in self.layers
        ]
        words = f"{self.method} changed {len(self.changed)} of {len(self.layers)} layers."
        return f"{table(header + ['not changed because'] * with_reasons, rows)}\n\n{words}"


def _words(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
