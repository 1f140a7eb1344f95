"""torch tensors.

Importing this package registers the operators `torch.ops.fakequant`.
"""

import ctypes
from pathlib import Path

import torch

from fakequant import _native
from fakequant._torch_releases import check_release

check_release(torch.__version__)  # before the imports below, which fail with old releases

# All modules that tensors need, so that importing this package on demand leaves nothing to import later.
from fakequant._backends.torch import (  # noqa: E402
    grouped_linear as grouped_linear,
    operators as operators,
    tensor_functions as tensor_functions,
    tensor_torch_names as tensor_torch_names,
)


def _lend_torchs_threads() -> None:
    """Makes the kernels use torch's threads, if torch's stable C interface is found.

    Two thread pools would compete for the CPUs.
    """
    library = next(Path(torch.__file__).parent.glob("lib/*torch_cpu.*"), None)
    try:
        # The library is already loaded; this only looks it up.
        symbols = ctypes.CDLL(str(library))
        addresses = [
            ctypes.cast(symbols[name], ctypes.c_void_p).value or 0
            for name in ("torch_parallel_for", "torch_get_num_threads")
        ]
    except (OSError, AttributeError):
        return
    _native.lend_threads(*addresses)


_lend_torchs_threads()
