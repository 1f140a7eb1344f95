"""Operators of torch: their names, and the groups of them that the code treats alike.

Functions that compute the same have the same name: `x + y`, `x.add_(y)`, `torch.add`.
"""

import dataclasses
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant._moves import TorchFunction as TorchFunction

# What `nn.Linear` and convolutions call, each with a name for messages. Arguments begin with input, weight and bias.
LAYER_FUNCTIONS: dict[TorchFunction, str] = {
    F.linear: "F.linear", F.conv1d: "F.conv1d", F.conv2d: "F.conv2d", F.conv3d: "F.conv3d",
}  # fmt: skip
# The names of convolutions.
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})


@dataclasses.dataclass(frozen=True)
class ConvolutionCall:
    """A convolution with settings, as an operator: a function of input, weight and bias."""

    function: TorchFunction
    # Stride, padding, dilation and groups, as torch's functions take them.
    settings: tuple[Any, Any, Any, int]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = self.function(x, weight, bias, *self.settings)
        return y


def convolution_call(function: TorchFunction, rest: tuple[Any, ...], named: dict[str, Any]) -> ConvolutionCall:
    """Returns a convolution with the arguments that follow the bias, by position and by name.

    >>> convolution_call(F.conv2d, (2,), {"groups": 4}).settings
    (2, 0, 1, 4)
    """
    given = {**dict(zip(("stride", "padding", "dilation", "groups"), rest, strict=False)), **named}
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    stride, padding, dilation, groups = {**defaults, **given}.values()
    return ConvolutionCall(function, (stride, padding, dilation, groups))


# The name of the attention function, which multiplies queries by keys, and then weights by values.
ATTENTION = "scaled_dot_product_attention"
# Products of matrices, by name, with the positions of the two matrices among the tensors that they take.
MATRIX_PRODUCTS = {
    "matmul": (0, 1), "rmatmul": (0, 1), "bmm": (0, 1), "mm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2),
}  # fmt: skip
# Products of activations that integer kernels compute, by name, with the number of tensors that are multiplied.
ACTIVATION_PRODUCTS = {"matmul": 2, "bmm": 2, ATTENTION: 3}

# Where functions are found: modules and classes of torch, and Python's operators, which a compiler sees instead of
# the methods of tensors.
_PLACES = (torch, Tensor, F, operator)
# Spellings of one operation, without underscores.
_SPELLINGS = {
    "add": ("add", "iadd", "radd"),
    "sub": ("sub", "isub", "rsub", "subtract"),
    "mul": ("mul", "imul", "rmul", "multiply"),
    "div": ("div", "truediv", "itruediv", "rtruediv", "divide"),
    "matmul": ("matmul", "imatmul", "rmatmul"),
    "cat": ("cat", "concat", "concatenate"),
}
_CANONICAL = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings}


def function_name(function: TorchFunction | str) -> str:
    """Returns the name of a function, which all spellings of one operation share.

    >>> function_name(torch.add), function_name(Tensor.__radd__), function_name(F.relu)
    ('add', 'add', 'relu')
    """
    given = function if isinstance(function, str) else getattr(function, "__name__", "")
    name = given.strip("_")
    return _CANONICAL.get(name, name)


def functions_named(name: str) -> list[TorchFunction]:
    """Returns the functions that have a name, in all their spellings.

    >>> torch.softmax in functions_named("softmax"), Tensor.__iadd__ in functions_named("add")
    (True, True)
    """
    spellings = [
        form.format(spelling) for spelling in _SPELLINGS.get(name, (name,)) for form in ("{}", "{}_", "_{}", "__{}__")
    ]
    found = [getattr(place, one, None) for place in _PLACES for one in spellings]
    return [function for function in found if callable(function) and function_name(function) == name]
