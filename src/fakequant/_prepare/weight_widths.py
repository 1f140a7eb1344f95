"""Weights with another number of bits: their spec, and their size."""

import dataclasses

from fakequant._targets import Target
from fakequant.formats import ScaleFormat
from fakequant.spec import QuantSpec

# The size of a scale.
_SCALE_BYTES: dict[ScaleFormat, int] = {"float32": 4, "e8m0": 1, "e4m3fn": 1}


def weight_at(spec: QuantSpec, bits: int, target: Target) -> QuantSpec:
    """Returns the spec of a weight with another number of bits, as far as the target allows.

    Everything else stays, except the narrow range. As in the presets, symmetric weights get one from 8 bits on, so that
    a batch norm with negative factors can be folded, and weights that had at least 8 bits lose it below, where every
    code counts. Weights in a float format, or with block scales, have no other width and stay as they are.

    >>> from fakequant import _targets
    >>> print(weight_at(QuantSpec(bits=4, axis=0), 8, _targets.find("generic")))
    int8 narrow, per channel on axis 0
    """
    if not spec.is_integer:
        return spec
    narrow = spec.narrow_range
    if bits != spec.bits:
        narrow = narrow or spec.symmetric if bits >= 8 else narrow and spec.bits < 8
    return target.fit_weight(dataclasses.replace(spec, bits=bits, narrow_range=narrow))


def weight_bytes(weights: int, bits: int, scales: int, scale_format: ScaleFormat = "float32") -> int:
    """Returns the size of a quantized weight: its codes, packed, and its scales.

    >>> weight_bytes(10, 4, 2), weight_bytes(64, 4, 2, "e8m0")
    (13, 34)
    """
    above = 4 if scale_format == "e4m3fn" else 0  # the scale of the whole tensor
    return -(-weights * bits // 8) + _SCALE_BYTES[scale_format] * scales + above
