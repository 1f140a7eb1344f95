"""How the functions tell a torch tensor from an array; the torch front end is imported when one arrives."""

import importlib
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fakequant._fork_safe_locks import importing

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeIs

# What goes in comes out: arrays for arrays, tensors for tensors.
Array = TypeVar("Array", np.ndarray, "Tensor")

_imported: set[str] = set()


def is_tensor(x: object) -> "TypeIs[Tensor]":
    """Whether `x` is a torch tensor, or a subclass or stand-in of one.

    >>> is_tensor(np.zeros(2)), is_tensor(1.0)
    (False, False)
    """
    return type(x) is not np.ndarray and hasattr(x, "__torch_function__")


def import_whole(module: str) -> bool:
    """Imports a module of the package, if it is not imported yet, such that no fork falls into that."""
    if module not in _imported:
        with importing:
            importlib.import_module(f"fakequant.{module}")
            _imported.add(module)
    return True


# torch.compile calls it while it traces, and does not look into it.
import_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]


def own_on_tensors() -> Any:
    """The library's own functions on tensors, under the same names."""
    import_whole("_backends.torch.tensor_functions")
    from fakequant._backends.torch import tensor_functions

    return tensor_functions


def aten_on_tensors() -> Any:
    """The functions with torch's names on tensors."""
    import_whole("_backends.torch.tensor_torch_names")
    from fakequant._backends.torch import tensor_torch_names

    return tensor_torch_names
