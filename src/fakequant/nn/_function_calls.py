"""Quantizers of results that functions compute, in the code of a module.

    def forward(self, x):
        return torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)

No module returns the result of `softmax` here, so no module can quantize it. Instead, the module whose code this is has
a child `function_quantizers`. It holds one quantizer per call, named after the function and the number of the call:
`softmax_0`. While the code of the module runs, a `TorchFunctionMode` counts the calls and applies the quantizers. It
ignores the code of other modules that are called meanwhile: these have hooks that pause it.

In the same way, the call of a function with the weight of a layer, such as `F.linear(x, self.query.weight)`, is
computed by that layer, with its quantizers. If the code also calls the layer, the function gets the
quantized weight and the deployed bias. A call of `F.scaled_dot_product_attention` that has a quantizer for its
attention weights, `scaled_dot_product_attention_0_weights`, is computed as two products.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fakequant.nn._attention import scaled_dot_product_attention
from fakequant.nn._operators import TorchFunction, function_name, functions_named
from fakequant.nn._quantized_layer import compute_call, with_quantized_weights
from fakequant.nn._recomputation import Restore, restore_in_recomputations, watch_checkpoints
from fakequant.nn._records import DerivedModule, derived_class

# The name of the child that holds the quantizers.
CHILD = "function_quantizers"
# What follows the key of a call of attention in the key of its weights.
WEIGHTS = "_weights"


class FunctionQuantizers(nn.ModuleDict):
    """The quantizers of function calls in the code of one module.

    Args:
        quantizers: Quantizers by the key of the call, see `call_key`.
        layers: Layers that compute a call, by key. They belong to other modules.
        counts: How often the module's code called each function when it was recorded, by the name of the function.
        callees: The paths, in the whole model, of the modules that the module's code calls.
        readers: Layers whose weights are arguments of a call, by key. The call gets the quantized weights.

    >>> from fakequant import presets, nn as fqnn
    >>> FunctionQuantizers({"softmax_0": fqnn.FakeQuantize(presets.uint8())}, {}, {"softmax": 1}, []).names
    ['softmax']
    """

    def __init__(
        self,
        quantizers: Mapping[str, nn.Module],
        layers: Mapping[str, nn.Module],
        counts: Mapping[str, int],
        callees: Sequence[str],
        readers: Mapping[str, Sequence[nn.Module]] | None = None,
    ) -> None:
        super().__init__(quantizers)
        self.layers, self.counts, self.callees = dict(layers), dict(counts), list(callees)
        self.readers = {key: list(found) for key, found in (readers or {}).items()}
        # Calls beyond those that were recorded, which stay in float: the largest number in one call of the module.
        self.unseen: dict[str, int] = {}
        self._find_functions()

    @property
    def names(self) -> list[str]:
        """The names of the functions that are watched."""
        keys = [key.removesuffix(WEIGHTS) for key in (*self.keys(), *self.layers, *self.readers)]
        return list(dict.fromkeys(key.rpartition("_")[0] for key in keys))

    def _find_functions(self) -> None:
        # Not part of the state: functions cannot be pickled in general.
        self.functions = {function: name for name in self.names for function in functions_named(name)}

    def note(self, numbers: Mapping[str, int]) -> None:
        """Remembers by how much a call of the module exceeded the recorded numbers of calls."""
        for name, number in numbers.items():
            if number > self.counts.get(name, 0):
                self.unseen[name] = max(self.unseen.get(name, 0), number - self.counts.get(name, 0))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "functions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._find_functions()


class CallingModule(DerivedModule):
    """The base of modules with `function_quantizers`, for `isinstance`. Their class derives from their own class."""

    function_quantizers: FunctionQuantizers


def calling_class(cls: type[nn.Module]) -> type[CallingModule]:
    """Returns the class of modules with `function_quantizers` for a class of modules. It has the same name.

    >>> issubclass(calling_class(nn.TransformerEncoderLayer), nn.TransformerEncoderLayer)
    True
    """
    watch_checkpoints()
    plain: TorchFunction = cls.forward

    @wraps(plain)
    def forward(self: CallingModule, *args: Any, **kwargs: Any) -> Any:
        mode = _Calls(self.function_quantizers)
        _running.modes.append(mode)
        try:
            with mode:
                return plain(self, *args, **kwargs)
        finally:
            _running.modes.pop()
            if not torch.compiler.is_compiling():
                mode.quantizers.note(mode.numbers)

    # The same names, which libraries write to files and look up.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return derived_class(CallingModule, cls, cls.__name__, (calling_class, cls), forward=forward, **names)


def call_key(function: TorchFunction | str, number: int) -> str:
    """Returns the key of a call: the name of the function and the number of the call in one call of the module.

    >>> call_key(torch.softmax, 0)
    'softmax_0'
    """
    return f"{function_name(function)}_{number}"


def is_counted(result: Any) -> bool:
    """Returns True if a call with this result is counted: it is, or contains, a float tensor."""
    if isinstance(result, Tensor):
        return result.is_floating_point()
    return isinstance(result, (tuple, list)) and any(is_counted(part) for part in result)


class _Running(threading.local):
    """The modes of the modules whose code runs in this thread, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[_Calls] = []


_running = _Running()


class _Calls(TorchFunctionMode):
    """Counts the calls of functions in the code of a module, and quantizes their results."""

    def __init__(self, quantizers: FunctionQuantizers) -> None:
        super().__init__()
        self.quantizers = quantizers
        self.numbers: dict[str, int] = {}
        # How many calls of other modules are running.
        self.paused = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = None if self.paused else self.quantizers.functions.get(func)
        if name is None:
            return func(*args, **kwargs)
        number = self.numbers.get(name, 0)
        key = f"{name}_{number}"
        readers = self.quantizers.readers.get(key)
        if readers is not None:
            args, kwargs = with_quantized_weights(readers, (args, kwargs))
        result = self._computed(key, func, args, kwargs)
        if not is_counted(result):
            return result
        self.numbers[name] = number + 1
        quantizer = self.quantizers._modules.get(key)
        return result if quantizer is None else quantizer(result)

    def _computed(self, key: str, func: TorchFunction, args: Any, kwargs: Any) -> Any:
        layer = self.quantizers.layers.get(key)
        if layer is not None:
            return compute_call(layer, func, args, kwargs)
        quantize_weights = self.quantizers._modules.get(key + WEIGHTS)
        if quantize_weights is not None:
            return scaled_dot_product_attention(*args, **kwargs, quantize=quantize_weights)
        return func(*args, **kwargs)


def _capture() -> Restore:
    """Returns a function whose context counts calls for the module whose code runs now, from here on."""
    mode = _running.modes[-1] if _running.modes else None
    if mode is None or mode.paused:
        return not_watched  # the code of a module that has no quantizers for function calls
    quantizers, before = mode.quantizers, dict(mode.numbers)

    @contextmanager
    def restore() -> Iterator[None]:
        again = _Calls(quantizers)
        again.numbers.update(before)
        _running.modes.append(again)
        try:
            with again:
                yield
        finally:
            _running.modes.pop()

    return restore


restore_in_recomputations(_capture)


def pause_calls(module: nn.Module, args: Any) -> None:
    """A forward pre-hook: the code of `module` is not the code of the module that calls it."""
    if _running.modes:
        _running.modes[-1].paused += 1


def resume_calls(module: nn.Module, args: Any, result: Any) -> None:
    """A forward hook: undoes `pause_calls`."""
    if _running.modes:
        _running.modes[-1].paused -= 1


@contextmanager
def not_watched() -> Iterator[None]:
    """Context in which calls of functions do not count, for code that runs when a module reads an attribute."""
    mode = _running.modes[-1] if _running.modes else None
    if mode is None:
        yield
        return
    before = mode.paused
    mode.paused += 1
    try:
        yield
    finally:
        mode.paused = before  # also if a call of a module has ended without its hook


def has_pause(module: nn.Module) -> bool:
    """Returns True if a module pauses the mode of the module that calls it."""
    return pause_calls in module._forward_pre_hooks.values()


def unseen_calls(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, int]:
    """Returns how many calls of functions exceeded those that were recorded, by path and name of the function."""
    return {
        f"{path}: {name}" if path else name: number
        for path, module in modules
        if isinstance(module, CallingModule)
        for name, number in module.function_quantizers.unseen.items()
    }
