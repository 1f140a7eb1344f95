"""The kernels' numbers for dtypes, codes, masks and numerics, by the names that every array library uses."""

from typing import Literal

from fakequant import _kernels
from fakequant.spec import QuantSpec

MaskForm = Literal["packed", "bool"]
# What autograd makes of a tensor: 0 outside the range, or everything passed through.
Gradient = Literal["clipped", "pass"]
# How a range that is seen changes the running one.
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
# By bits, and whether codes are signed.
PACKED_CODE_TYPES = {
    (4, True): _kernels.I4X2,
    (4, False): _kernels.U4X2,
    (2, True): _kernels.I2X4,
    (2, False): _kernels.U2X4,
}
MASK_KINDS: dict[str, int] = {"packed": _kernels.MASK_PACKED, "bool": _kernels.MASK_BYTES}
UPDATES: dict[str, int] = {
    "moving_average": _kernels.RANGE_MOVING_AVERAGE,
    "min_max": _kernels.RANGE_MIN_MAX,
    "dynamic": _kernels.RANGE_DYNAMIC,
}
# The numerics of a spec, where those of torch are two: one rule per tensor and one per channel.
NUMERICS = {
    "torch_tensor": _kernels.TORCH_TENSOR,
    "torch_channel": _kernels.TORCH_CHANNEL,
    "onnx": _kernels.ONNX,
    "half_away": _kernels.HALF_AWAY,
}


# The key of `NUMERICS` by the numerics of a spec, and whether it has one scale for the tensor.
NUMERICS_NAMES = {
    ("torch", True): "torch_tensor",
    ("torch", False): "torch_channel",
    ("onnx", True): "onnx",
    ("onnx", False): "onnx",
    ("half_away", True): "half_away",
    ("half_away", False): "half_away",
}


def numerics_name(spec: QuantSpec) -> str:
    """The key of `NUMERICS` for a spec.

    >>> numerics_name(QuantSpec(numerics="torch", axis=0)), numerics_name(QuantSpec())
    ('torch_channel', 'onnx')
    """
    return NUMERICS_NAMES[spec.numerics, spec.axis is None]


def is_own(numerics: str) -> bool:
    """Whether the rules are fakequant's: one for all special values, scales in the compute dtype."""
    return not numerics.startswith("torch")


def has_wide_scale(is_f64: bool, numerics: str) -> bool:
    """Whether scales are float64: those of float64 data, but torch's rules know float32 scales only."""
    return is_f64 and is_own(numerics)
