"""Loads the compiled kernels, chooses the instruction set, once, at import, and has the numbers of their enumerators.

`FAKEQUANT_TARGET` forces an instruction set, `FAKEQUANT_NUM_THREADS` sets the number of threads.
There is no Python fallback: if the kernels cannot be loaded, importing fakequant raises ImportError.
"""

import os
from numbers import Integral

from fakequant.formats import FLOAT_FORMATS, GGML_TYPES
from fakequant.spec import QuantSpec

try:
    from fakequant import _native
except ImportError as error:
    raise ImportError(
        f"fakequant's compiled kernels could not be loaded ({error}).\n"
        "They are built when the package is installed. Install it again, in a clone of the repository:\n"
        "    pip install --force-reinstall --no-deps .\n"
        "It needs GCC or Clang, with C++20."
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

# --- enumerators ----------------------------------------------------------------------------------
#
# The enumerators of csrc/kernels.h as plain ints, which the kernels take.

F32: int = _native.DType.f32.value
F64: int = _native.DType.f64.value
DTYPES: dict[str, int] = {
    "float32": F32,
    "float64": F64,
    "bfloat16": _native.DType.bf16.value,
    "float16": _native.DType.f16.value,
}

# Like the numerics of a spec, but torch has one rule per tensor and another per channel. A float format is a rule of
# its own, and so is a block type of ggml.
NUMERICS: dict[str, int] = {
    name: getattr(_native.Numerics, name).value
    for name in ("torch_tensor", "torch_channel", "onnx", "half_away", *FLOAT_FORMATS, *GGML_TYPES)
}
TORCH_TENSOR, TORCH_CHANNEL = NUMERICS["torch_tensor"], NUMERICS["torch_channel"]
TORCH_CHANNEL_FLOAT: int = _native.Numerics.torch_channel_float.value
TORCH_CHANNEL_HALF: int = _native.Numerics.torch_channel_half.value

MASK_NONE: int = _native.MaskKind.none.value
MASK_PACKED: int = _native.MaskKind.packed.value
MASK_BYTES: int = _native.MaskKind.bytes.value
MASK_KINDS: dict[str, int] = {"packed": MASK_PACKED, "bool": MASK_BYTES}

CODE_TYPES: dict[str, int] = {
    "int8": _native.CodeType.i8.value,
    "uint8": _native.CodeType.u8.value,
    "int16": _native.CodeType.i16.value,
    "uint16": _native.CodeType.u16.value,
    "int32": _native.CodeType.i32.value,
    "uint32": _native.CodeType.u32.value,
}
# By (bits, signed).
PACKED_CODE_TYPES: dict[tuple[int, bool], int] = {
    (4, True): _native.CodeType.i4x2.value,
    (4, False): _native.CodeType.u4x2.value,
    (2, True): _native.CodeType.i2x4.value,
    (2, False): _native.CodeType.u2x4.value,
    (6, False): _native.CodeType.u6x4.value,
}

ZERO_NONE: int = _native.ZeroKind.none.value
ZERO_I32: int = _native.ZeroKind.i32.value
ZERO_I64: int = _native.ZeroKind.i64.value
ZERO_F32: int = _native.ZeroKind.f32.value

RANGE_OWN: int = _native.RangeRule.own.value
RANGE_TORCH_FUSED: int = _native.RangeRule.torch_fused.value
# How an observed range changes the running range.
UPDATES: dict[str, int] = {
    name: getattr(_native.RangeUpdate, name).value for name in ("moving_average", "min_max", "dynamic")
}
# What scales may be: any float32 number, a power of two by one of the rules of MX, NVFP4's, or ggml's.
SCALE_RULES: dict[str, int] = {
    name: getattr(_native.ScaleRule, name).value
    for name in (
        "any", "floor", "ceil", "even", "rceil", "e4m3fn", "e4m3fn_divided", "float16", "bfloat16", "even_e2m1",
        *GGML_TYPES,
    )
}  # fmt: skip

# The key of `NUMERICS` by (numerics of a spec, whether it has one scale per tensor).
NUMERICS_NAMES = {
    ("torch", True): "torch_tensor",
    ("torch", False): "torch_channel",
    ("onnx", True): "onnx",
    ("onnx", False): "onnx",
    ("half_away", True): "half_away",
    ("half_away", False): "half_away",
}


def numerics_name(spec: QuantSpec) -> str:
    """Returns the key of `NUMERICS` for a spec.

    >>> numerics_name(QuantSpec(numerics="torch", axis=0)), numerics_name(QuantSpec())
    ('torch_channel', 'onnx')
    """
    if spec.ggml_type is not None:
        return spec.ggml_type
    return NUMERICS_NAMES[spec.numerics, spec.axis is None] if spec.format == "int" else spec.format


def scale_rule_name(spec: QuantSpec) -> str:
    """Returns the key of `SCALE_RULES` for a spec.

    >>> scale_rule_name(QuantSpec())
    'any'
    """
    if spec.scale_rule == "divided":
        return "e4m3fn_divided"
    if spec.ggml_type is not None:
        return spec.ggml_type
    return {"float32": "any", "e8m0": spec.scale_rule}.get(spec.scale_format, spec.scale_format)


def is_per_block(scale_rule: str) -> bool:
    """Returns True for rules that choose each scale from the range of its block alone, with two ends.

    >>> is_per_block("bfloat16"), is_per_block("floor")
    (True, False)
    """
    return scale_rule in ("any", "float16", "bfloat16")


# The rules of ggml with offsets, and those in which the sign of the largest magnitude of a block matters.
OFFSET_RULES = ("q4_1", "q4_k")
SIGNED_RULES = ("q4_0", "q8_k_input", "q6_k")


def is_ggml(rule: str) -> bool:
    """Returns True for the numerics and scale rules of ggml's block types, whose scales may be negative or 0."""
    return rule in GGML_TYPES


def zero_point_dtype(scale_rule: str) -> str:
    """Returns the dtype of zero points: int32, or float32 for the offsets of ggml.

    >>> zero_point_dtype("any"), zero_point_dtype("q4_1")
    ('int32', 'float32')
    """
    return "float32" if scale_rule in OFFSET_RULES else "int32"


def largest_level(qmax: int, numerics: str) -> float:
    """Returns the largest value of a grid in units of its scale.

    >>> largest_level(127, "onnx"), largest_level(255, "e4m3fn")
    (127, 448.0)
    """
    float_format = FLOAT_FORMATS.get(numerics)
    return qmax if float_format is None else float_format.largest


def is_own(numerics: str) -> bool:
    """Returns True for fakequant's own rules, "onnx" and "half_away", and False for torch's."""
    return not numerics.startswith("torch")


def has_wide_scale(is_f64: bool, numerics: str) -> bool:
    """Returns True if scales are float64, i.e. for float64 data. torch's rules round them to float32 even then."""
    return is_f64 and is_own(numerics)


# --- threads --------------------------------------------------------------------------------------


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
