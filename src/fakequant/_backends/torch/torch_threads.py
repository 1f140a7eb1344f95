"""Runs the kernels on torch's threads where the data is torch's: two pools would compete for the CPUs."""

import ctypes
from pathlib import Path

import torch

from fakequant import _native


def lend_torchs_threads() -> bool:
    """Whether torch's stable C interface was found; without it the kernels keep their own threads."""
    library = next(Path(torch.__file__).parent.glob("lib/*torch_cpu.*"), None)
    try:
        # Already in the process: this only finds it.
        symbols = ctypes.CDLL(str(library))
        addresses = [
            ctypes.cast(symbols[name], ctypes.c_void_p).value or 0
            for name in ("torch_parallel_for", "torch_get_num_threads")
        ]
    except (OSError, AttributeError):
        return False
    _native.lend_threads(*addresses)
    return True
