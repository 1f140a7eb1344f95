"""What `torch.utils.checkpoint` computes again is not observed again.

A checkpoint runs a function in the forward pass, and again in the backward pass. Quantizers that observe would count
the same tensor twice, and meanwhile their scales may have changed. So the first run keeps, on a tape, what each call of
such a quantizer has used. Later runs use it again, and leave no trace in the quantizers. Compiled code keeps no tape.
It observes once too, but uses the current scale when it runs again.

Other state that a forward pass counts on is captured when a checkpoint begins, and restored while it runs again:
`restore_in_recomputations` registers it.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, Protocol, TypeAlias, cast

from torch import Tensor

from fakequant._backends.torch.torch_private import on_checkpoint, without_modes

# Returns a context in which captured state is restored. It may be entered several times, in another thread.
Restore: TypeAlias = Callable[[], AbstractContextManager[Any]]

AHEAD = object()

_captures: list[Callable[[], Restore]] = []


class Replayed(Protocol):
    """Something that calls in a recomputation change, until it ends."""

    def end_replay(self, before: Any) -> None:
        """Undoes the changes. `before` is what was passed to `_Replay.until_the_end`."""


class _Segment:
    """One call of `torch.utils.checkpoint`: its tape, and the state when it began."""

    def __init__(self) -> None:
        self.tape: dict[Hashable, list[Any]] = {}
        self.is_complete = False
        self.restores = [capture() for capture in _captures]

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """The context of the function in the forward pass."""
        runs.stack.append(self)
        try:
            yield
        finally:
            runs.stack.pop()
            self.is_complete = True

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """The context of the function in the backward pass."""
        replay = _Replay(self)
        with ExitStack() as contexts:
            for restore in self.restores:
                contexts.enter_context(restore())
            runs.stack.append(replay)
            before, in_compiled_code.recomputes = in_compiled_code.recomputes, True
            try:
                yield
            finally:
                in_compiled_code.recomputes = before
                runs.stack.pop()
                replay.end()


class _Replay:
    """One recomputation of a segment."""

    def __init__(self, segment: _Segment) -> None:
        self.segment = segment
        # How many notes of each key have been used.
        self.used: dict[Hashable, int] = {}
        self.changed: dict[Replayed, Any] = {}

    def next(self, key: Hashable) -> Any:
        """Returns the next note of a key.

        Returns `AHEAD` if the first run has not got there. It then asks for a gradient inside the checkpoint, and what
        runs again beyond this point is not used.
        """
        number = self.used.get(key, 0)
        notes = self.segment.tape.get(key, ())
        if number >= len(notes):
            if not self.segment.is_complete:
                return AHEAD
            raise RuntimeError(
                f"a checkpoint calls the quantizer {len(notes)} times in the forward pass, and more often when it runs "
                "again in the backward pass.\nBoth must run the same code: check what its function depends on, and "
                "the mode and the switches of the model between both."
            )
        self.used[key] = number + 1
        return notes[number]

    def until_the_end(self, what: Replayed, before: Callable[[], Any]) -> None:
        """Calls `what.end_replay(before())` when the recomputation ends; `before` is called now, and only once."""
        if what not in self.changed:
            self.changed[what] = before()

    def end(self) -> None:
        """Undoes all changes."""
        for what, before in self.changed.items():
            what.end_replay(before)


class _Runs(threading.local):
    """The checkpoints whose function runs in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Segment | _Replay] = []


runs = _Runs()


class _InCompiledCode:
    """What compiled code depends on: it is compiled once for the forward pass, and once to run again."""

    # In any thread: compilers cannot read what belongs to a thread.
    recomputes = False


in_compiled_code = _InCompiledCode()


@cache
def watch_checkpoints() -> None:
    """Lets checkpoints keep and use tapes, once and for all."""
    on_checkpoint(_Segment)


def restore_in_recomputations(capture: Callable[[], Restore]) -> None:
    """Registers state that a forward pass counts on. Whoever has such state also calls `watch_checkpoints`.

    `capture` is called when a checkpoint begins. It returns a function that returns a context, in which the function of
    the checkpoint runs when it runs again.
    """
    _captures.append(capture)


def current_replay() -> _Replay | None:
    """Returns the innermost recomputation that runs in this thread, or None."""
    return next((run for run in reversed(runs.stack) if isinstance(run, _Replay)), None)


def note(key: Hashable, value: Any) -> None:
    """Appends to the tapes of all checkpoints that run, up to the innermost recomputation."""
    for run in reversed(runs.stack):
        if isinstance(run, _Replay):
            return  # the tapes outside have it, or belong to the code that has started the recomputation
        run.tape.setdefault(key, []).append(value)


def as_first(key: Hashable, *values: Tensor) -> tuple[Tensor, ...]:
    """Returns values, inside a checkpoint. In a recomputation, returns the values of the first run.

    `key` says what they are the values of. Later they may change in place.
    """
    replay = current_replay()
    first: Any = AHEAD if replay is None else replay.next(key)
    if first is AHEAD:
        with without_modes():
            first = tuple(value.clone() for value in values)
    note(key, first)
    return cast("tuple[Tensor, ...]", first)
