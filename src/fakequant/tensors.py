"""How the functions tell a torch tensor from an array; torch is imported when one arrives."""

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeIs

# What goes in comes out: arrays for arrays, tensors for tensors.
Array = TypeVar("Array", np.ndarray, "Tensor")


def is_tensor(x: object) -> "TypeIs[Tensor]":
    """Whether `x` is a torch tensor, or a subclass or stand-in of one.

    >>> is_tensor(np.zeros(2)), is_tensor(1.0)
    (False, False)
    """
    return type(x) is not np.ndarray and hasattr(x, "__torch_function__")


def own_on_tensors() -> Any:
    """The library's own functions on tensors, under the same names."""
    from fakequant.torch import functional

    return functional


def aten_on_tensors() -> Any:
    """The functions with torch's names on tensors."""
    from fakequant.torch import aten

    return aten
