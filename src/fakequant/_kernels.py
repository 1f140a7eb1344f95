"""Loads the compiled kernels and chooses the instruction set, once, at import.

`FAKEQUANT_TARGET` forces an instruction set, `FAKEQUANT_NUM_THREADS` sets the number of threads.
There is no slower Python path behind this: kernels that cannot be loaded are an ImportError.
"""

import os
from numbers import Integral

try:
    from fakequant import _native
except ImportError as error:
    raise ImportError(
        f"fakequant's compiled kernels could not be loaded ({error}).\n"
        "They are built when the package is installed. Reinstall it:\n"
        "    pip install --force-reinstall --no-cache-dir fakequant\n"
        "or, in a source checkout with a C++20 compiler:\n"
        "    pip install ."
    ) from error


# As many as one call ever uses; more would only wait for memory.
MAX_THREADS = 64


def _select_target(name: str) -> None:
    if _native.select_target(name):
        return
    compiled, supported = _native.compiled_targets(), _native.supported_targets()
    reason = "this CPU cannot run it" if name in compiled else "there is no such target in this build"
    raise ImportError(
        f"FAKEQUANT_TARGET={name!r}: {reason}. Accepted here: {', '.join(supported)}.\n"
        "Unset FAKEQUANT_TARGET to use the best one."
    )


def _set_num_threads(text: str) -> None:
    if not text.isdecimal() or int(text) < 1:
        raise ImportError(f"FAKEQUANT_NUM_THREADS={text!r}: expected a whole number of at least 1.")
    _native.set_num_threads(min(int(text), MAX_THREADS))


if target := os.environ.get("FAKEQUANT_TARGET"):
    _select_target(target)
if threads := os.environ.get("FAKEQUANT_NUM_THREADS"):
    _set_num_threads(threads)

# The enumerations of csrc/kernels.h, in its order.
F32, F64, BF16, F16 = range(4)
TORCH_TENSOR, TORCH_CHANNEL, TORCH_CHANNEL_FLOAT, TORCH_CHANNEL_HALF, ONNX, HALF_AWAY = range(6)
MASK_NONE, MASK_PACKED, MASK_BYTES = range(3)
I8, U8, I16, U16, I32, U32, I4X2, U4X2, I2X4, U2X4 = range(10)
ZERO_NONE, ZERO_I32, ZERO_I64, ZERO_F32 = range(4)
RANGE_OWN, RANGE_TORCH_FUSED = range(2)
RANGE_AVERAGE, RANGE_WIDEST, RANGE_LATEST = range(3)


def get_num_threads() -> int:
    """Threads that one call may use, the calling thread included.

    >>> get_num_threads() >= 1
    True
    """
    return _native.get_num_threads()


def set_num_threads(n: int) -> None:
    """Sets how many threads one call may use, for the whole process; more than 64 count as 64.

    Results do not depend on it.

    >>> before = get_num_threads()
    >>> set_num_threads(1)
    >>> get_num_threads()
    1
    >>> set_num_threads(before)
    """
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
        raise ValueError(f"`n` must be a whole number of at least 1, got {n!r}.")
    _native.set_num_threads(min(int(n), MAX_THREADS))
