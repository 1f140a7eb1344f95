"""One folder per array library, and `backend_of`, which chooses between them.

Every folder implements the functions of `fakequant.functional`, `fakequant.qparams` and `fakequant.torch_names` with
the same parameters. Those modules document the functions and call `backend_of(x)`. Code that the libraries share is
in `checks`, `blocks`, `argument_types`, `kernel_enums` and `results`. `backend.Backend` is the type of a folder.
"""

import importlib
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fakequant._backends import numpy as numpy_backend
from fakequant._fork_safe_locks import importing

if TYPE_CHECKING:
    from torch import Tensor

    from fakequant._backends import torch as torch_folder
    from fakequant._backends.backend import Backend
    from fakequant._backends.results import Array

    # Checks that both folders implement the protocol.
    _numpy: Backend[np.ndarray] = numpy_backend
    _torch: Backend[Tensor] = torch_folder

_imported: set[str] = set()


def import_whole(module: str) -> bool:
    """Imports a module of the package on demand. A fork in another thread waits until the import has finished."""
    if module not in _imported:
        with importing:
            importlib.import_module(f"fakequant.{module}")
            _imported.add(module)
    return True


# torch.compile calls the function while tracing and treats its result as a constant, instead of tracing into it.
import_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]


@overload
def backend_of(x: "Array", /) -> "Backend[Array]": ...
@overload
def backend_of(x: object, y: object, /, *others: object) -> "Backend[Any]": ...
def backend_of(*values: object) -> "Backend[Any]":
    """Returns the backend for `values`, which is a module: torch's if one of them is a tensor, otherwise NumPy's.

    Subclasses of tensors, and other objects that torch's functions accept, count as tensors. torch is imported when
    the first of them arrives.

    >>> backend_of(np.zeros(2)).__name__, backend_of(1.0, [2.0]).__name__
    ('fakequant._backends.numpy', 'fakequant._backends.numpy')
    """
    for x in values:
        if type(x) is not np.ndarray and hasattr(x, "__torch_function__"):
            import_whole("_backends.torch")
            from fakequant._backends import torch as torch_backend

            return torch_backend
    return numpy_backend
