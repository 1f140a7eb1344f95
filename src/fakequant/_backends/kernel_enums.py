"""The kernels' numbers for dtypes, codes, masks and numerics, by name."""

from typing import Literal

from fakequant import _kernels
from fakequant.formats import FLOAT_FORMATS
from fakequant.spec import QuantSpec

MaskForm = Literal["packed", "bool"]
# The straight-through gradient: 0 outside the range, or passed everywhere.
Gradient = Literal["clipped", "pass"]
# How an observed range changes the running range.
Update = Literal["moving_average", "min_max", "dynamic"]

DTYPES = {"float32": _kernels.F32, "float64": _kernels.F64, "bfloat16": _kernels.BF16, "float16": _kernels.F16}
CODE_TYPES = {
    "int8": _kernels.I8,
    "uint8": _kernels.U8,
    "int16": _kernels.I16,
    "uint16": _kernels.U16,
    "int32": _kernels.I32,
    "uint32": _kernels.U32,
}
# By (bits, signed).
PACKED_CODE_TYPES = {
    (4, True): _kernels.I4X2,
    (4, False): _kernels.U4X2,
    (2, True): _kernels.I2X4,
    (2, False): _kernels.U2X4,
    (6, False): _kernels.U6X4,
}
MASK_KINDS: dict[str, int] = {"packed": _kernels.MASK_PACKED, "bool": _kernels.MASK_BYTES}
UPDATES: dict[str, int] = {
    "moving_average": _kernels.RANGE_MOVING_AVERAGE,
    "min_max": _kernels.RANGE_MIN_MAX,
    "dynamic": _kernels.RANGE_DYNAMIC,
}
# Like the numerics of a spec, but torch has one rule per tensor and another per channel. A float format is a rule of
# its own.
NUMERICS = {
    "torch_tensor": _kernels.TORCH_TENSOR,
    "torch_channel": _kernels.TORCH_CHANNEL,
    "onnx": _kernels.ONNX,
    "half_away": _kernels.HALF_AWAY,
    **_kernels.FLOAT_NUMERICS,
}
# What scales may be: any float32 number, a power of two by one of the rules of MX, or NVFP4's.
SCALE_RULES = _kernels.SCALE_RULES

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
    return NUMERICS_NAMES[spec.numerics, spec.axis is None] if spec.format == "int" else spec.format


def scale_rule_name(spec: QuantSpec) -> str:
    """Returns the key of `SCALE_RULES` for a spec.

    >>> scale_rule_name(QuantSpec())
    'any'
    """
    return {"float32": "any", "e8m0": spec.scale_rule, "e4m3fn": "e4m3fn"}[spec.scale_format]


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
