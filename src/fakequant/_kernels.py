"""Loads the compiled kernels and chooses the instruction set, once, at import.

`FAKEQUANT_TARGET` forces an instruction set, `FAKEQUANT_NUM_THREADS` sets the number of threads.
There is no Python fallback: if the kernels cannot be loaded, importing fakequant raises ImportError.
"""

import os
from numbers import Integral

from fakequant.formats import FLOAT_FORMATS

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


# One call never uses more threads: they would only wait for memory.
MAX_THREADS = 64


def _select_target(name: str) -> None:
    if _native.select_target(name):
        return
    compiled, supported = _native.compiled_targets(), _native.supported_targets()
    reason = "this CPU cannot run it" if name in compiled else "this build has no such target"
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

# The enumerations of csrc/kernels.h as plain ints, which the kernels take.
F32: int = _native.DType.f32.value
F64: int = _native.DType.f64.value
BF16: int = _native.DType.bf16.value
F16: int = _native.DType.f16.value

TORCH_TENSOR: int = _native.Numerics.torch_tensor.value
TORCH_CHANNEL: int = _native.Numerics.torch_channel.value
TORCH_CHANNEL_FLOAT: int = _native.Numerics.torch_channel_float.value
TORCH_CHANNEL_HALF: int = _native.Numerics.torch_channel_half.value
ONNX: int = _native.Numerics.onnx.value
HALF_AWAY: int = _native.Numerics.half_away.value
# Those of float formats, by the name of the format.
FLOAT_NUMERICS: dict[str, int] = {name: getattr(_native.Numerics, name).value for name in FLOAT_FORMATS}

MASK_NONE: int = _native.MaskKind.none.value
MASK_PACKED: int = _native.MaskKind.packed.value
MASK_BYTES: int = _native.MaskKind.bytes.value

I8: int = _native.CodeType.i8.value
U8: int = _native.CodeType.u8.value
I16: int = _native.CodeType.i16.value
U16: int = _native.CodeType.u16.value
I32: int = _native.CodeType.i32.value
U32: int = _native.CodeType.u32.value
I4X2: int = _native.CodeType.i4x2.value
U4X2: int = _native.CodeType.u4x2.value
I2X4: int = _native.CodeType.i2x4.value
U2X4: int = _native.CodeType.u2x4.value
U6X4: int = _native.CodeType.u6x4.value

ZERO_NONE: int = _native.ZeroKind.none.value
ZERO_I32: int = _native.ZeroKind.i32.value
ZERO_I64: int = _native.ZeroKind.i64.value
ZERO_F32: int = _native.ZeroKind.f32.value

RANGE_OWN: int = _native.RangeRule.own.value
RANGE_TORCH_FUSED: int = _native.RangeRule.torch_fused.value
RANGE_MOVING_AVERAGE: int = _native.RangeUpdate.moving_average.value
RANGE_MIN_MAX: int = _native.RangeUpdate.min_max.value
RANGE_DYNAMIC: int = _native.RangeUpdate.dynamic.value

SCALE_RULES: dict[str, int] = {
    name: getattr(_native.ScaleRule, name).value for name in ("any", "floor", "ceil", "even", "rceil", "e4m3fn")
}


def get_num_threads() -> int:
    """Returns how many threads one call may use, including the calling thread.

    >>> get_num_threads() >= 1
    True
    """
    return _native.get_num_threads()


def set_num_threads(n: int) -> None:
    """Sets how many threads one call may use, for the whole process. More than 64 has the effect of 64.

    Results do not depend on the number of threads. Raises ValueError if `n` is not an integer of at least 1.

    >>> before = get_num_threads()
    >>> set_num_threads(1)
    >>> get_num_threads()
    1
    >>> set_num_threads(before)
    """
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
        raise ValueError(f"`n` must be a whole number of at least 1, got {n!r}.")
    _native.set_num_threads(min(int(n), MAX_THREADS))
