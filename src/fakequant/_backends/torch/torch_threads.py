"""Runs the kernels on torch's threads if the data is torch's, because two thread pools would compete for the CPUs."""

import ctypes
from pathlib import Path

import torch

from fakequant import _native


def lend_torchs_threads() -> bool:
    """Makes the kernels use torch's threads. Returns False if torch's stable C interface was not found."""
    library = next(Path(torch.__file__).parent.glob("lib/*torch_cpu.*"), None)
    try:
        # The library is already loaded; this only looks it up.
        symbols = ctypes.CDLL(str(library))
        addresses = [
            ctypes.cast(symbols[name], ctypes.c_void_p).value or 0
            for name in ("torch_parallel_for", "torch_get_num_threads")
        ]
    except (OSError, AttributeError):
        return False
    _native.lend_threads(*addresses)
    return True
