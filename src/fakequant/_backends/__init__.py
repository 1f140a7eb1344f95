"""One folder per array library, and the two functions that choose between them.

Every folder has a module with the functions of `fakequant.functional` and `fakequant.qparams`, which `backend_of(x)`
returns, and one with those of `fakequant.torch_ops`, which `torch_names_of(x)` returns. The public modules document
the functions and call these. Code that the libraries share is in `types`, `checks`, `blocks` and `scale_codes`.
"""

import importlib
import os
import threading
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fakequant._backends.numpy import functions as numpy_functions, torch_names as numpy_torch_names

if TYPE_CHECKING:
    from torch import Tensor

    from fakequant._backends.torch import tensor_functions, tensor_torch_names
    from fakequant._backends.types import Array, Backend, TorchNames

    # Checks that the modules of both folders implement the protocols.
    _functions: tuple[Backend[np.ndarray], Backend[Tensor]] = (numpy_functions, tensor_functions)
    _torch_names: tuple[TorchNames[np.ndarray], TorchNames[Tensor]] = (numpy_torch_names, tensor_torch_names)

# --- importing on demand --------------------------------------------------------------------------
#
# A child process has only the thread that forked. A lock held by any other thread would stay locked in it for ever. All
# locks are created here, when the package is imported: a fork that is already waiting ignores locks registered later.


def _fork_safe_lock() -> "threading.RLock":
    """Returns a reentrant lock. A fork waits until no other thread holds it."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


# Held while a module of the package is imported on demand, because Python's own import locks are not fork-safe.
# A module must not trigger an on-demand import at its top level: it would wait for this lock while the thread
# that holds the lock waits for the module.
_importing = _fork_safe_lock()
# Held while `accelerate` replaces torch's operators.
accelerating = _fork_safe_lock()
_imported: set[str] = set()


def import_whole(module: str) -> bool:
    """Imports a module of the package on demand. A fork in another thread waits until the import has finished."""
    if module not in _imported:
        with _importing:
            importlib.import_module(f"fakequant.{module}")
            _imported.add(module)
    return True


# torch.compile calls the function while tracing and treats its result as a constant, instead of tracing into it.
import_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- choosing a backend ---------------------------------------------------------------------------


@overload
def backend_of(x: "Array", /) -> "Backend[Array]": ...
@overload
def backend_of(x: object, y: object, /, *others: object) -> "Backend[Any]": ...
def backend_of(*values: object) -> "Backend[Any]":
    """Returns the module with the functions for `values`: torch's if one of them is a tensor, otherwise NumPy's.

    Subclasses of tensors, and other objects that torch's functions accept, count as tensors. torch is imported when
    the first of them arrives.

    >>> backend_of(np.zeros(2)).__name__, backend_of(1.0, [2.0]).__name__
    ('fakequant._backends.numpy.functions', 'fakequant._backends.numpy.functions')
    """
    for x in values:
        if type(x) is not np.ndarray and hasattr(x, "__torch_function__"):
            import_whole("_backends.torch")
            from fakequant._backends.torch import tensor_functions

            return tensor_functions
    return numpy_functions


@overload
def torch_names_of(x: np.ndarray) -> "TorchNames[np.ndarray]": ...
@overload
def torch_names_of(x: "Tensor") -> "TorchNames[Tensor]": ...
def torch_names_of(x: object) -> "TorchNames[Any]":
    """Returns the module with torch's names for `x`, like `backend_of`.

    >>> torch_names_of(np.zeros(2)).__name__
    'fakequant._backends.numpy.torch_names'
    """
    if type(x) is np.ndarray or not hasattr(x, "__torch_function__"):
        return numpy_torch_names
    import_whole("_backends.torch")
    from fakequant._backends.torch import tensor_torch_names

    return tensor_torch_names
