"""ggml's own C functions, for tests that compare with them: the libraries in the wheel of pywhispercpp."""

import ctypes
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

# Elements and bytes of a block.
BLOCKS = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q8_0": (32, 34),
    "tq2_0": (256, 66),
    "mxfp4": (32, 17),
    "q8_K": (256, 292),
    "q4_K": (256, 144),
    "q6_K": (256, 210),
}


@cache
def _library() -> ctypes.CDLL:
    pytest.importorskip("pywhispercpp", reason="libggml is in the wheel of pywhispercpp")
    files = [Path(str(f.locate())) for f in metadata.files("pywhispercpp") or ()]
    names = ("libgomp", "libggml-base", "libggml-cpu")
    libraries = [next(f for f in files if f.parent.name == "pywhispercpp.libs" and f.name.startswith(n)) for n in names]
    for library in libraries[:-1]:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(libraries[-1]), mode=ctypes.RTLD_GLOBAL)
    cpu.ggml_cpu_init()  # fills the table of float16 values
    return cpu


def quantize(x: np.ndarray, block_type: str, suffix: str = "_ref") -> np.ndarray:
    """Returns the blocks of float32 data as rows of bytes. Without the suffix "_ref", runs the kernel for this CPU."""
    elements, size = BLOCKS[block_type]
    x = np.ascontiguousarray(x, np.float32).reshape(-1)
    blocks = np.zeros((x.size // elements, size), np.uint8)
    run = getattr(_library(), f"quantize_row_{block_type}{suffix}")
    run(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(blocks.ctypes.data), ctypes.c_int64(x.size))
    return blocks


def dequantize(blocks: np.ndarray, block_type: str) -> np.ndarray:
    """Returns the values of blocks, as float32."""
    blocks = np.ascontiguousarray(blocks)
    y = np.empty(len(blocks) * BLOCKS[block_type][0], np.float32)
    run = getattr(_library(), f"dequantize_row_{block_type}")
    run(ctypes.c_void_p(blocks.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(y.size))
    return y
