"""Layers with a forward pass of their own: classes that derive from a supported class and override its forward pass.

    class Standardized(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, standardized(self.weight), self.bias)

Such code may compute the weight, pad the input or cast both, and then calls one function that multiplies them. A
quantized layer runs the code, and computes that one call with quantized tensors. The weight that reaches the function
is the one that is quantized.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fakequant.nn._call_quantizers import quantizers_in
from fakequant.nn._layer_kinds import AnyLayer, LayerKind
from fakequant.nn._operators import LAYER_FUNCTIONS
from fakequant.nn._quantized_layer import Arguments, compute_product, input_grid_of, quantize_output, split_arguments
from fakequant.nn._records import float_class_of


@dataclasses.dataclass(eq=False)
class ProductCall:
    """A call of one of `LAYER_FUNCTIONS`."""

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

    With `stop`, it stops at the first call of one of `LAYER_FUNCTIONS`.

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
    """Notes the calls of `LAYER_FUNCTIONS`."""

    def __init__(self, stop: bool) -> None:
        super().__init__()
        self.stop = stop
        self.calls: list[ProductCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in LAYER_FUNCTIONS:
            return func(*args, **kwargs)
        given = split_arguments(args, kwargs)
        call = ProductCall(LAYER_FUNCTIONS[func], given, given.input._version)
        self.calls.append(call)
        if self.stop:
            raise _Stop
        call.result = func(*args, **kwargs)
        call.result_version = call.result._version
        return call.result


class OwnForward(LayerKind):
    """The base of the kinds of layers with a forward pass of their own."""

    runs_float_forward: ClassVar[bool] = True

    @classmethod
    def input_shape(cls, layer: AnyLayer, extra: int) -> tuple[int, ...]:
        """Returns the shape of the smallest input of a layer, with `extra` more elements on all axes but channels."""
        raise NotImplementedError

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Returns what the code of a layer does that cannot be quantized, or None. Runs the code on two small inputs.

        The code must call one function, with a weight that does not depend on the input and with the layer's bias,
        and return its result.
        """
        reason = cls._unsupported_reason(module)
        name = float_class_of(module).__name__
        return None if reason is None else f"{name} overrides the forward pass of a supported layer type: {reason}"

    @classmethod
    def _unsupported_reason(cls, module: AnyLayer) -> str | None:
        if next(module.children(), None) is not None:
            return "it has child modules"
        try:
            runs = [dry_run(module, cls.bias_name, cls._example(module, extra)) for extra in (0, 1)]
            shape = tuple(getattr(module, cls.weight_name).shape)
        except Exception as error:  # the code of the layer can raise anything
            words = str(error).strip().split("\n")[0]
            return f"it fails on a small input with {type(error).__name__}: {words}"
        reason = next((reason for run in runs if (reason := cls._reason_against(run, shape)) is not None), None)
        if reason is not None:
            return reason
        first, second = (run.calls[0].given.weight for run in runs)
        is_same = first.dtype == second.dtype and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
        return None if is_same else "its weight depends on the input"

    @classmethod
    def _reason_against(cls, run: DryRun, shape: tuple[int, ...]) -> str | None:
        if len(run.calls) != 1:
            return f"it calls F.linear and convolutions {len(run.calls)} times instead of once"
        call = run.calls[0]
        if tuple(call.given.weight.shape) != shape:
            return f"{call.function} gets a weight of shape {tuple(call.given.weight.shape)}, not {shape}"
        if not run.has_own_bias:
            return f"{call.function} does not get the layer's bias"
        if not run.returns_result:
            return f"it does not return the result of {call.function}"
        return None

    @classmethod
    def read_weight(cls, layer: AnyLayer) -> Tensor:
        """Returns the weight that the code of a layer multiplies by, without gradient."""
        run = dry_run(layer, cls.bias_name, cls._example(layer, 0), stop=True)
        if not run.calls:
            raise RuntimeError(_changed(layer, 0))
        return run.calls[0].given.weight

    @classmethod
    def changes_input(cls, layer: AnyLayer) -> bool:
        """Returns True unless the code of a layer multiplies the layer's input as it is."""
        runs = [dry_run(layer, cls.bias_name, cls._example(layer, extra), stop=True) for extra in (0, 1)]
        return not all(run.passes_input for run in runs)

    @classmethod
    def _example(cls, layer: AnyLayer, extra: int) -> Tensor:
        """Returns an input for a dry run. Its values depend on `extra`, too."""
        weight: Tensor = getattr(layer, cls.weight_name)
        shape = cls.input_shape(layer, extra)
        steps = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
        return torch.cos(steps + extra).reshape(shape).to(weight.device, weight.dtype)

    @staticmethod
    def forward(layer: AnyLayer, *args: Any, **kwargs: Any) -> Any:
        """Takes and returns the same as the forward pass of the layer's class."""
        product = _Product(layer, (*args, *kwargs.values()))
        with product:
            y = layer._fakequant.float_class.forward(layer, *args, **kwargs)
        if product.calls != 1:
            raise RuntimeError(_changed(layer, product.calls))
        return quantize_output(layer, y)


class OwnForwardLinear(OwnForward):
    """A class derived from `nn.Linear` with a forward pass of its own."""

    can_sum_exactly: ClassVar[bool] = True

    @classmethod
    def input_shape(cls, layer: AnyLayer, extra: int) -> tuple[int, ...]:
        """Returns (batch, features)."""
        return 1 + extra, layer.weight.shape[1]


class OwnForwardConv(OwnForward):
    """A class derived from `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d` with a forward pass of its own."""

    @classmethod
    def input_shape(cls, layer: AnyLayer, extra: int) -> tuple[int, ...]:
        """Returns (batch, channels, ...), where the kernel fits exactly if `extra` is 0."""
        sizes = zip(layer.kernel_size, layer.dilation, strict=True)
        return 1 + extra, layer.in_channels, *((k - 1) * dilation + 1 + extra for k, dilation in sizes)


class _Product(TorchFunctionMode):
    """Computes the call of `F.linear` or a convolution in the code of a layer with quantized tensors."""

    def __init__(self, layer: AnyLayer, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.layer, self.inputs = layer, inputs
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in LAYER_FUNCTIONS:
            return func(*args, **kwargs)
        self.calls += 1
        given = split_arguments(args, kwargs)
        if input_grid_of(self.layer) not in (None, *quantizers_in(self.layer.input_quantizer)):
            self._require_input(given.input)
        return compute_product(self.layer, func, given)

    def _require_input(self, x: Tensor) -> None:
        """Raises RuntimeError if `x` has not the shape of an argument, and so is not what the producer quantized."""
        if not any(isinstance(one, Tensor) and one.shape == x.shape for one in self.inputs):
            name = self.layer._fakequant.float_class.__name__
            raise RuntimeError(
                f"{name} multiplies an input of shape {tuple(x.shape)}, which is not the shape of its own input. It "
                "did not change the small inputs on which `prepare` ran it, so it has no input quantizer of its own.\n"
                f"Register a kind for {name} with @fakequant.nn.register_layer_kind, or leave the layer in float with "
                "a rule."
            )


def _changed(layer: AnyLayer, calls: int) -> str:
    name = float_class_of(layer).__name__
    return (
        f"The forward pass of {name} called F.linear and convolutions {calls} times, but once when the model was "
        "prepared. Its one product is quantized.\n"
        f"Register a kind for {name} with @fakequant.nn.register_layer_kind, or leave the layer in float with a rule."
    )
