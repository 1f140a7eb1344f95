"""What all post-training methods have in common: the table that they return, the order of layers, and undoing."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import nn

from fakequant._model.shelf import Shelf
from fakequant._model.snapshot import Snapshot
from fakequant._prepare.flow_graph import FlowGraph
from fakequant._util.shown import Shown
from fakequant._util.text import counted, table
from fakequant.nn._model_quantizers import named_quantizers
from fakequant.nn._owners import is_owner
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._records import float_class_of


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

    @classmethod
    def of(cls, path: str, layer: nn.Module, sqnr: tuple[Any, Any] = (None, None), reason: str | None = None) -> Self:
        """Returns the row of a prepared layer, with the SQNR before and after."""
        before, after = sqnr
        return cls(path=path, kind=float_class_of(layer).__name__, before=before, after=after, reason=reason)


@dataclasses.dataclass(frozen=True, repr=False)
class Changes(Shown):
    """The result of a post-training method, in the order in which the layers run. Prints as a table.

    >>> print(Changes("gptq", "SQNR dB", [LayerChange("0", "Linear", 18.3, 21.9)]))
    layer | kind   | SQNR dB before | after
    ------+--------+----------------+------
    0     | Linear | 18.30          | 21.90
    <BLANKLINE>
    gptq changed 1 of 1 layer.
    """

    # The name of the method.
    method: str
    # What `before` and `after` of the layers are.
    measure: str
    layers: list[LayerChange]
    # What else to know about it.
    note: str | None = None

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
        words = f"{self.method} changed {len(self.changed)} of {counted(len(self.layers), 'layer')}."
        words += "" if self.note is None else f"\n{self.note}"
        return f"{table(header + ['not changed because'] * with_reasons, rows)}\n\n{words}"


def _words(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def layers_in_order(model: nn.Module, graph: FlowGraph) -> dict[str, QuantizedLayer]:
    """Returns the quantized layers that multiply an input by a weight, in the order of their calls, by path."""
    found = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, QuantizedLayer) and module._fakequant.kind.has_input and not is_owner(module)
    }
    called = [call.path for call in graph.modules() if call.path in found]
    return {path: found[path] for path in dict.fromkeys([*called, *found])}


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Context that restores parameters, buffers, and the switches of quantizers if the body raises.

    The body may change values, but must not replace parameters.
    """
    switches = [(q, q.observing, q.quantizing, q.frozen) for _, q in named_quantizers(model)]
    with Shelf() as shelf:
        before = Snapshot(model, shelf=shelf)
        values = [(parameter, shelf.put(parameter)) for parameter in model.parameters()]
        try:
            yield
        except BaseException:
            for quantizer, *states in switches:
                for name, on in zip(("observing", "quantizing", "frozen"), states, strict=True):
                    if getattr(quantizer, name) != on:
                        setattr(quantizer, name, on)
            with torch.no_grad():
                for parameter, value in values:
                    parameter.copy_(value())
            before.restore()
            raise


def check_switch(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def layer_filter(name: str, patterns: str | Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that tells whether a path matches one of the patterns given as the argument `name`."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"`{name}` must be a pattern of paths, such as 'encoder.*', or several, got {pattern!r}.")
    return lambda path: any(fnmatchcase(path, pattern) for pattern in patterns)
