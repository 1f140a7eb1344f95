"""Checks that a model and a file are deterministic: that they return the same whenever they run on the same batch.

`verify` measures rounding by repeating a computation, so a model that is not deterministic would raise its own
tolerance. Codes and results decide. Random numbers and state that have no effect on them, such as a counter of calls,
are allowed. They only lead to more passes, some with extreme random numbers, and are named if results change.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._model.running import Args, Kwargs
from fakequant._runtimes.session import Array, Session
from fakequant._util.text import listed
from fakequant._verify.side_effects import Draws, changed_state, extreme_draws, state_of
from fakequant.nn._quantized_layer import QuantizedLayer

# What a pass returned, by a description: codes, results and constants.
Outcome = dict[Any, Any]
# Further passes of a model that draws random numbers or changes its state.
_PASSES = 12
# The same of a model that only has other kernels while random numbers are watched.
_PASSES_OF_KERNELS = 2
_MOST_NAMES = 3


def require_repeating(name: str, model: nn.Module, first: Outcome, run: Callable[[], Outcome]) -> None:
    """Raises ValueError if a model is not deterministic.

    `first` is what it has returned for a batch, and `run` runs it on that batch again. Messages call it `name`.
    """
    before = state_of(model)
    with Draws(model) as draws:
        second = run()
    changed = changed_state(before, state_of(model))
    if _change(first, second) is None and not (draws.found or draws.others or changed):
        return
    with Draws(model) as again:
        third = run()
    # A model may seed its generator in every pass.
    drawn = [op for op, states in draws.found.items() if again.found.get(op) != states]
    is_by_kernels = _has_exact_sums(model) and _change(second, third) is None
    if draws.found or draws.others or again.found or again.others or changed:
        is_by_kernels = False
    # The second pass is not among these: in its mode, torch may choose other kernels.
    number = _PASSES_OF_KERNELS if is_by_kernels else _PASSES
    passes = _more_passes(model, run, number, has_draws=bool(drawn or draws.others))
    change = next((found for a, b in passes if (found := _change(a or first, b)) is not None), None)
    if change is None:
        return
    raise _refusal(name, change, [*drawn, *draws.others], changed)


def require_same(name: str, first: list[Tensor], again: list[Tensor]) -> None:
    """Raises ValueError if the results of two passes of a model are not equal."""
    change = _change(dict(enumerate(first)), dict(enumerate(again)))
    if change is not None:
        raise _refusal(name, "a result", [], [])


def _refusal(name: str, change: str, drawn: list[str], changed: list[str]) -> ValueError:
    return ValueError(
        f"The {name} is not deterministic: {change} differs between two passes on the same batch. "
        f"{_reason(drawn, changed)}"
    )


def _has_exact_sums(model: nn.Module) -> bool:
    """Returns True if layers add up integers, and add up floats in a mode."""
    layers = (module for module in model.modules() if isinstance(module, QuantizedLayer))
    return any(getattr(layer._fakequant, "exact_sums", False) for layer in layers)


def _more_passes(
    model: nn.Module, run: Callable[[], Outcome], number: int, *, has_draws: bool
) -> Iterator[tuple[Outcome | None, Outcome]]:
    """Yields pairs of outcomes that must be equal. None stands for the first outcome."""
    for _ in range(number):
        yield None, run()
    if has_draws:
        with extreme_draws(model, "low"):
            low = run()
        with extreme_draws(model, "high"):
            yield low, run()


def _reason(drawn: list[str], changed: list[str]) -> str:
    if drawn:
        return (
            f"Its forward pass draws random numbers ({_named(drawn)}).\n"
            "Draw none in evaluation mode, e.g. F.dropout(x, p, training=self.training): a file has no randomness."
        )
    if changed:
        return (
            f"Its forward pass changes state that results may depend on ({_named(changed)}).\n"
            "Make the results a function of the inputs only: a file has no state."
        )
    return (
        "It draws no random numbers, and no attribute or buffer of its modules changes.\n"
        "Look for other state that its forward pass reads: the time, variables of other files, addresses of objects. "
        "If a kernel depends on the number of threads, use torch.set_num_threads(1)."
    )


def _named(names: Sequence[str]) -> str:
    return listed(names, _MOST_NAMES)


def require_repeating_file(runtime: Session, first: list[Array], args: Args, kwargs: Kwargs) -> None:
    """Raises ValueError if a file does not return the results `first` of a batch again, or draws random numbers."""
    again = runtime.run_unwatched(args, kwargs)
    is_same = all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(first, again, strict=True))
    if is_same and not runtime.random_operators:
        return
    difference = "" if is_same else ": its results differ between two runs on the same batch"
    reason = f"It draws random numbers ({_named(runtime.random_operators)}).\n" if runtime.random_operators else ""
    raise ValueError(
        f"The file is not deterministic{difference}. {reason}"
        "Export a model that draws no random numbers in evaluation mode."
    )


def _change(first: Outcome, second: Outcome) -> Any:
    """Returns the first part of an outcome that differs in another one, or None if all are equal bit by bit."""
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second or not _is_same(first[name], second[name]):
            return name
    return None


def _is_same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return repr(a) == repr(b)  # in which NaN equals NaN
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
