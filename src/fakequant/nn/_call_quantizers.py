"""Quantizers of a module that is called several times in one forward pass: one for each call.

    def forward(self, x):
        return self.conv2(self.relu(self.conv1(self.relu(x))))

The two results of `relu` are different tensors with different ranges. So `relu` has a child `output_quantizer` that
holds two quantizers, `output_quantizer.0` and `output_quantizer.1`. Hooks count the calls: the module in which all
calls take place (here the whole model) starts counting at 0, and each call of `relu` is the next one.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fakequant.nn._recomputation import Restore, restore_in_recomputations, watch_checkpoints

_keys = count()


# The number of the last call that has begun, by `Calls.key`. A hook may run a model within a call of it, so there may
# be several numbers, the innermost last.
Counted: TypeAlias = dict[int, tuple[int, ...]]


class _Counts(threading.local):
    """How far calls are counted in this thread."""

    def __init__(self) -> None:
        self.numbers: Counted = {}


_counts = _Counts()


class Calls:
    """The calls of one module in a forward pass.

    `recorded` is their number when the data flow was recorded.

    >>> calls = Calls(2)
    >>> calls.start(), calls.next(), calls.next()
    (None, None, None)
    >>> calls.current
    1
    """

    def __init__(self, recorded: int) -> None:
        self.recorded = recorded
        # By how much a forward pass exceeded the recorded number of calls.
        self.unseen = 0
        self.key = next(_keys)
        watch_checkpoints()

    @property
    def current(self) -> int:
        """The number of the running call. Calls beyond the recorded ones count as the last one."""
        number = _counts.numbers[self.key][-1] if self.key in _counts.numbers else 0
        return min(max(number, 0), self.recorded - 1)

    def start(self) -> None:
        """Starts counting."""
        _counts.numbers[self.key] = (*_counts.numbers.get(self.key, ()), -1)

    def stop(self) -> None:
        """Stops counting. Calls count as the first one until counting starts again."""
        *outer, number = _counts.numbers.pop(self.key, (-1,))
        if outer:
            _counts.numbers[self.key] = tuple(outer)
        if number >= self.recorded and not torch.compiler.is_compiling():
            self.unseen = max(self.unseen, number + 1 - self.recorded)

    def next(self) -> None:
        """Counts a call."""
        if self.key in _counts.numbers:
            *outer, number = _counts.numbers[self.key]
            _counts.numbers[self.key] = (*outer, number + 1)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "key"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, key=next(_keys))
        watch_checkpoints()


def counted_calls() -> Counted:
    """Returns how far the calls of all modules are counted in this thread, for `counting_from`."""
    return dict(_counts.numbers)


@contextmanager
def counting_from(numbers: Counted) -> Iterator[None]:
    """Context in which a part of a forward pass can run again: calls are counted from where they were then."""
    before, _counts.numbers = _counts.numbers, dict(numbers)
    try:
        yield
    finally:
        _counts.numbers = before


def before_call(module: nn.Module, number: int) -> Counted:
    """Returns what `counted_calls` returns right before a call of a module, which calls each module inside it once."""
    found = (getattr(part.__dict__.get("_fakequant"), "calls", None) for part in module.modules())
    return {calls.key: (number - 1,) for calls in found if calls is not None}


def _capture() -> Restore:
    numbers = counted_calls()
    return lambda: counting_from(numbers)


restore_in_recomputations(_capture)


class CallQuantizers(nn.Module):
    """The quantizers of one tensor of a module, by the number of the call.

    Args:
        calls: The calls of the module.
        quantizers: Quantizers, or grids of a converted model, by the number of the call. Tensors of other calls are not
            quantized here. Calls that see the same tensor have the same quantizer.
        borrowed: Quantizers of other modules that have quantized the tensor already, by the number of the call.

    >>> from fakequant import presets, nn as fqnn
    >>> made = CallQuantizers(Calls(2), {1: fqnn.FakeQuantize(presets.uint8())})
    >>> made.current is None, [name for name, _ in made.named_children()]
    (True, ['1'])
    """

    def __init__(
        self, calls: Calls, quantizers: Mapping[int, nn.Module], borrowed: Mapping[int, nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.calls = calls
        for number, quantizer in sorted(quantizers.items()):
            self.register_module(str(number), quantizer)
        # Not registered as children, because they are children of other modules.
        self.borrowed: dict[int, Any] = dict(borrowed or {})

    def own(self, number: int) -> Any:
        """Returns the quantizer of a call, or None if it has none of its own."""
        return self._modules.get(str(number))

    def at(self, number: int) -> Any:
        """Returns the quantizer of a call, its own or a borrowed one. None if there is none."""
        own = self.own(number)
        return self.borrowed.get(number) if own is None else own

    @property
    def current(self) -> Any:
        """The quantizer of the running call, its own or a borrowed one. None if there is none."""
        return self.at(self.calls.current)

    def lend(self, number: int, quantizer: nn.Module) -> None:
        """Makes a call use the quantizer of another module instead of its own."""
        self._modules.pop(str(number), None)
        self.borrowed[number] = quantizer

    def all(self) -> list[Any]:
        """Returns the quantizers of all calls, with None for calls that have none."""
        return [self.at(number) for number in range(self.calls.recorded)]

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, quantized by the quantizer of the running call if it has its own."""
        own = self.own(self.calls.current)
        y: Tensor = x if own is None else own(x)
        return y


# Hooks do not name their other arguments: torch.compile would look at these, and warn about their gradients.
def count_call(module: Any, *others: Any) -> None:
    """A forward pre-hook of a module with `CallQuantizers`."""
    module._fakequant.calls.next()


def start_counting(module: Any, *others: Any) -> None:
    """A forward pre-hook of the module in which all calls of other modules take place."""
    for calls in module._fakequant.counted:
        calls.start()


def stop_counting(module: Any, *others: Any) -> None:
    """A forward hook: undoes `start_counting`."""
    for calls in module._fakequant.counted:
        calls.stop()


def current_quantizer(quantizer: Any) -> Any:
    """Returns the quantizer of the running call, if there is one for each call.

    >>> current_quantizer(None) is None
    True
    """
    return quantizer.current if isinstance(quantizer, CallQuantizers) else quantizer


def quantizers_in(slot: Any) -> Sequence[Any]:
    """Returns the quantizers that a child of a module holds: itself, or the quantizers of all calls. Empty for None."""
    if isinstance(slot, CallQuantizers):
        return [quantizer for quantizer in slot._modules.values() if quantizer is not None]
    return [] if slot is None else [slot]


def further_calls(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, int]:
    """Returns by how much the number of calls of modules exceeded the recorded one, by path."""
    found = ((path, getattr(module.__dict__.get("_fakequant"), "calls", None)) for path, module in modules)
    return {path: calls.unseen for path, calls in found if calls is not None and calls.unseen}
