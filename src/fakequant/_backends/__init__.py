"""One folder per array library, and the one place that chooses between them.

Every folder implements the names of `fakequant.functional`, `fakequant.qparams` and `fakequant.torch_names` with
the same parameters. The functions there document each name and call `backend_of(x)`. What the libraries share is
beside the folders: `checks`, `blocks`, `kernel_types`, `results`. `backend` is the type of a folder.
"""

import importlib
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fakequant._backends import numpy as numpy_backend
from fakequant._fork_safe_locks import importing

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeIs

    from fakequant._backends import torch as torch_folder
    from fakequant._backends.backend import Backend
    from fakequant._backends.results import Array

    # Both folders offer the same.
    _numpy: Backend[np.ndarray] = numpy_backend
    _torch: Backend[Tensor] = torch_folder

_imported: set[str] = set()


def import_whole(module: str) -> bool:
    """Imports a module of the package, if it is not imported yet, such that no fork falls into that."""
    if module not in _imported:
        with importing:
            importlib.import_module(f"fakequant.{module}")
            _imported.add(module)
    return True


# torch.compile calls it while it traces, and does not look into it.
import_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_tensor(x: object) -> "TypeIs[Tensor]":
    """Whether `x` is a torch tensor, or a subclass or stand-in of one.

    >>> is_tensor(np.zeros(2)), is_tensor(1.0)
    (False, False)
    """
    return type(x) is not np.ndarray and hasattr(x, "__torch_function__")


@overload
def backend_of(x: "Array", /) -> "Backend[Array]": ...
@overload
def backend_of(x: object, y: object, /, *others: object) -> "Backend[Any]": ...
def backend_of(*values: object) -> "Backend[Any]":
    """The folder that implements the functions for `values`, as a module. torch is imported when a tensor arrives.

    Numbers and lists belong to NumPy, but one tensor makes it torch's call.

    >>> backend_of(np.zeros(2)).__name__, backend_of(1.0, [2.0]).__name__
    ('fakequant._backends.numpy', 'fakequant._backends.numpy')
    """
    for x in values:
        if type(x) is not np.ndarray and hasattr(x, "__torch_function__"):
            import_whole("_backends.torch")
            from fakequant._backends import torch as torch_backend

            return torch_backend
    return numpy_backend
