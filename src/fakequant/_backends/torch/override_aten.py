"""The implementation of `accelerate`.

It replaces the CPU kernels of aten operators in torch's dispatcher, below autograd. torch.ao, torchao and all other
callers then run on fakequant's kernels, with the same bits, saved masks and errors.
"""

import threading
import warnings
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fakequant._backends import accelerating
from fakequant._backends.torch.compare_with_aten import REPLACED, disagreements
from fakequant._backends.torch.gradients import is_differentiating
from fakequant._backends.torch.torch_annotations import Library, Operator, Results
from fakequant._backends.torch.torch_private import destroy

# A kernel of torch's dispatcher, and a set of dispatch keys. torch has no public types for them.
Kernel: TypeAlias = Any
Keys: TypeAlias = Any


class _Switch:
    """On between `accelerate()` and `decelerate()`, and within a context.

    A kernel must not be removed from torch's dispatcher while another thread may be about to call it. While there are
    other threads, kernels that are switched off therefore stay registered and call torch's kernels.
    """

    def __init__(self) -> None:
        self.lock = accelerating
        self.library: Library | None = None
        self.on = False
        self.left: frozenset[str] | None = None  # operators that are not replaced; None before the comparison
        self.for_good = False
        self.calls = 0  # of accelerate()
        self.contexts = 0

    def set(self, *, for_good: bool, contexts: int) -> None:
        wanted = for_good or contexts > 0
        if wanted and self.library is None:
            self.library = _replace_kernels(self.left or frozenset())
        self.for_good, self.contexts, self.on = for_good, contexts, wanted
        if not wanted and self.library is not None and threading.active_count() == 1:
            destroy(self.library)
            self.library = None


_switch = _Switch()


class Acceleration:
    """The result of `accelerate`: lists the replaced operators, and is a context manager."""

    def __init__(self, call: int | None) -> None:
        # The number of the accelerate() call that switched it on, or None if it was on before.
        self._call = call

    @property
    def replaced(self) -> tuple[str, ...]:
        """The operators that currently run on fakequant's kernels."""
        left = _switch.left or ()
        return tuple(f"aten::{name}" for name in REPLACED if name not in left) if is_accelerated() else ()

    @property
    def left(self) -> tuple[str, ...]:
        """The operators that are not replaced, because the installed torch has other bits or errors."""
        return tuple(f"aten::{name}" for name in REPLACED if name in (_switch.left or ()))

    def undo(self) -> None:
        """Restores torch's own kernels, like `decelerate`."""
        decelerate()

    def __enter__(self) -> "Acceleration":
        with _switch.lock:
            # If this call switched it on, it ends with the context, unless accelerate() was called again since.
            mine = self._call == _switch.calls
            _switch.set(for_good=_switch.for_good and not mine, contexts=_switch.contexts + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _switch.lock:
            _switch.set(for_good=_switch.for_good, contexts=_switch.contexts - 1)

    def __repr__(self) -> str:
        return f"Acceleration(replaced={list(self.replaced)})"


def accelerate() -> Acceleration:
    """See `fakequant.accelerate`."""
    with _switch.lock:
        if _switch.left is None:
            _switch.left = _compare()
        was_on = _switch.for_good
        _switch.set(for_good=True, contexts=_switch.contexts)
        _switch.calls += 1
        return Acceleration(None if was_on else _switch.calls)


def decelerate() -> None:
    """See `fakequant.decelerate`."""
    with _switch.lock:
        _switch.set(for_good=False, contexts=_switch.contexts)


def is_accelerated() -> bool:
    """Returns True if torch's operators currently run on fakequant's kernels."""
    return _switch.on


def _compare() -> frozenset[str]:
    """Returns the operators that must not be replaced. Warns if there are any, raises RuntimeError if all differ."""
    found = disagreements()
    if not found:
        return frozenset()
    what = f"torch {torch.__version__} and fakequant's kernels differ in {', '.join(found)}"
    why = "The kernels have the bits of torch 2.12 to 2.15 on x86-64 with AVX2."
    if REPLACED.keys() <= set(found):
        raise RuntimeError(f"{what}; nothing was replaced.\n{why} Use fakequant's own functions instead.")
    warnings.warn(f"{what}; these stay torch's. {why}", RuntimeWarning, stacklevel=4)
    return frozenset(found)


def _replace_kernels(left: frozenset[str]) -> Library:
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # torch warns that a kernel is overridden, which is intended.
            warnings.filterwarnings("ignore", category=UserWarning, message="(?s).*[Oo]verrid")
            for name, function in REPLACED.items():
                if name in left:
                    continue
                original = torch.library.get_kernel(f"aten::{name}", "CPU")
                kernel = _or_original(function, original)
                library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
                if name.endswith("cachemask_backward"):
                    # torch implements this operator with differentiable operations. A kernel has no derivative.
                    kernel = _unless_differentiating(kernel, original)
                    library.impl(name, kernel, "AutogradCPU", with_keyset=True, allow_override=True)
    except BaseException:
        destroy(library)
        raise
    return library


def _or_original(function: Operator, original: Kernel) -> Operator:
    """Returns a kernel that calls `function`, or torch's kernel if that returns None or is switched off."""

    def kernel(keys: Keys, *args: Any) -> Results:
        result = function(*args) if _switch.on else None
        return original.call_boxed(keys, *args) if result is None else result

    return kernel


def _unless_differentiating(kernel: Operator, original: Kernel) -> Operator:
    def differentiable(keys: Keys, grad: Tensor, *rest: Any) -> Results:
        return (original.call_boxed if is_differentiating(grad) else kernel)(keys, grad, *rest)

    return differentiable
