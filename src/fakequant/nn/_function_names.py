"""Names of torch's functions. Functions that compute the same have the same name: `x + y`, `x.add_(y)`, `torch.add`."""

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

# A function or method of torch. They differ in what they take and return.
TorchFunction: TypeAlias = Callable[..., Any]

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
