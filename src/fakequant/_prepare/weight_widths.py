"""Weights with another number of bits: their spec, and their size."""

import dataclasses

from fakequant._targets import Target
from fakequant.spec import QuantSpec


def weight_at(spec: QuantSpec, bits: int, target: Target) -> QuantSpec:
    """Returns the spec of a weight with another number of bits, as far as the target allows.

    Everything else stays, except the narrow range. As in the presets, symmetric weights get one from 8 bits on, so that
    a batch norm with negative factors can be folded, and weights that had at least 8 bits lose it below, where every
    code counts.

    >>> from fakequant import _targets
    >>> print(weight_at(QuantSpec(bits=4, axis=0), 8, _targets.find("generic")))
    int8 narrow, per channel on axis 0
    """
    narrow = spec.narrow_range
    if bits != spec.bits:
        narrow = narrow or spec.symmetric if bits >= 8 else narrow and spec.bits < 8
    return target.fit_weight(dataclasses.replace(spec, bits=bits, narrow_range=narrow))


def weight_bytes(weights: int, bits: int, scales: int) -> int:
    """Returns the size of a quantized weight: its codes, packed, and a float32 per scale.

    >>> weight_bytes(10, 4, 2)
    13
    """
    return -(-weights * bits // 8) + 4 * scales
