"""Dry runs of layers with a forward pass of their own, to find out what their code does.

The code runs on a stand-in, a copy of the layer in evaluation mode. So neither the layer nor the random numbers change.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fakequant.nn._layer_calls import PRODUCTS, Arguments, split_arguments
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._records import float_class_of


@dataclasses.dataclass(eq=False)
class ProductCall:
    """A call of one of the functions `PRODUCTS`."""

    # The name of the function.
    function: str
    given: Arguments
    # How often the memory of the input had been changed before the call.
    input_version: int
    # None if the run was stopped at the call.
    result: Tensor | None = None
    result_version: int = 0


@dataclasses.dataclass(eq=False)
class DryRun:
    """What the code of a layer did with an input."""

    calls: list[ProductCall]
    # Whether the code passed the layer's own bias, or None if it has none, to every call.
    has_own_bias: bool
    # Whether the code returned the result of its last call, and nothing else.
    returns_result: bool
    # Whether the input of its first call is the input of the layer.
    passes_input: bool


def dry_run(layer: AnyLayer, bias_name: str, x: Tensor, *, stop: bool = False) -> DryRun:
    """Runs the float forward pass of a layer, without gradients, and returns what it did.

    Raises whatever the code of the layer raises.

    Args:
        layer: A float or prepared layer.
        bias_name: The name of its bias.
        x: The input.
        stop: Whether to stop at the first call of one of the functions `PRODUCTS`.

    >>> found = dry_run(nn.Linear(2, 3), "bias", torch.ones(1, 2))
    >>> [call.function for call in found.calls], found.returns_result
    (['F.linear'], True)
    """
    result: Any = None
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        stand_in, x = _stand_in(layer), x.clone(memory_format=torch.preserve_format)
        before = x._version
        watch = _Watch(stop)
        with _stopping(), watch:
            result = type(stand_in).forward(stand_in, x)
    calls, bias = watch.calls, getattr(stand_in, bias_name, None)
    is_result = isinstance(result, Tensor) and bool(calls) and result is calls[-1].result
    return DryRun(
        calls=calls,
        has_own_bias=all(call.given.bias is bias for call in calls),
        returns_result=is_result and result._version == calls[-1].result_version,
        passes_input=bool(calls) and calls[0].given.input is x and calls[0].input_version == before,
    )


def _stand_in(layer: AnyLayer) -> nn.Module:
    """Returns a copy of a layer, of its float class, in evaluation mode and without children."""
    cls = float_class_of(layer)
    made = cls.__new__(cls)
    made.__dict__.update(layer.__dict__)
    made.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(p.detach().clone(), p.requires_grad)
        for name, p in layer._parameters.items()
    }
    made.__dict__["_buffers"] = {name: None if b is None else b.clone() for name, b in layer._buffers.items()}
    made.__dict__["_modules"] = {}
    made.training = False
    return made


class _Stop(BaseException):
    """Ends a dry run. Not an Exception, which the code of the layer might catch."""


@contextmanager
def _stopping() -> Iterator[None]:
    try:
        yield
    except _Stop:
        return


class _Watch(TorchFunctionMode):
    """Notes the calls of the functions `PRODUCTS`."""

    def __init__(self, stop: bool) -> None:
        super().__init__()
        self.stop = stop
        self.calls: list[ProductCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **kwargs)
        given = split_arguments(args, kwargs)
        call = ProductCall(PRODUCTS[func], given, given.input._version)
        self.calls.append(call)
        if self.stop:
            raise _Stop
        call.result = func(*args, **kwargs)
        call.result_version = call.result._version
        return call.result
