"""What a network will run on, as data: what a grid must be like to run there as it was trained.

    generic             any grid; computed as the graph says
    onnxruntime-vnni    ONNX Runtime on x86 with VNNI: 8-bit weights in full
    onnxruntime-x86     ONNX Runtime on any x86: weights of at most 7 bits beside 8-bit activations
    tensorrt            8 bits, symmetric, for weights and activations; weights may have fewer, in bytes

Without VNNI an x86 adds pairs of products of 8-bit numbers in 16 bits and saturates: 255 * w + 255 * w
fits as long as |w| is at most 64. With more the sums are wrong, silently.
"""

import dataclasses
from typing import Any

from fakequant.spec import QuantSpec

# Weights up to here, times two 8-bit activations, are summed exactly in 16 bits.
_EXACT_WITHOUT_VNNI = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a runtime can compute exactly, and how it does it."""

    name: str
    # The most bits of a weight whose products with 8-bit activations are summed exactly.
    weight_bits: int = 8
    # Grids have zero point 0: weights of at most 8 bits, activations of 8 bits in full.
    symmetric_int8: bool = False
    # How it goes from sums of products to codes, see _convert/golden/sums_to_codes.py.
    arithmetic: str = "reference"
    # Codes of activations are stored as unsigned numbers, which its kernels take.
    unsigned_activations: bool = False
    # It computes convolutions, additions and the like in integers only if their results are quantized too.
    needs_results: bool = False

    def fit_weight(self, spec: QuantSpec) -> QuantSpec:
        """The spec of weights for this target: as given, or with fewer bits, or symmetric.

        >>> TARGETS["onnxruntime-x86"].fit_weight(QuantSpec(narrow_range=True)).qmax
        63
        """
        if self.symmetric_int8:
            return dataclasses.replace(spec, bits=min(spec.bits, 8), signed=True, symmetric=True)
        return dataclasses.replace(spec, bits=self.weight_bits) if self.weight_bits < spec.bits <= 8 else spec

    def fit_activation(self, spec: QuantSpec) -> QuantSpec:
        """The spec of activations for this target.

        >>> print(TARGETS["tensorrt"].fit_activation(QuantSpec(signed=False, symmetric=False)))
        int8, per tensor
        """
        if not self.symmetric_int8:
            return spec
        return dataclasses.replace(spec, bits=8, signed=True, symmetric=True, narrow_range=False)

    def weight_shift(self, spec: QuantSpec) -> int:
        """The largest k for which codes of a weight times 2^k are summed exactly on every CPU.

        A weight beside a quantized input is stored in a byte, also if it has fewer bits. Its codes are stored times
        2^k at a scale that is 2^k smaller. The weights are the same. The bias, which has the scale of the products,
        is rounded 2^k times finer.

        >>> TARGETS["onnxruntime-x86"].weight_shift(QuantSpec(bits=2))  # -2 * 32 = -64
        5
        """
        if not (spec.symmetric and spec.signed) or spec.group_size is not None or spec.bits > 8:
            return 0
        shift, largest = 0, _EXACT_WITHOUT_VNNI
        while spec.qmin * 2 ** (shift + 1) >= -largest and spec.qmax * 2 ** (shift + 1) < largest:
            shift += 1
        return shift

    def reason_against_weight(self, spec: QuantSpec, levels: Any) -> str | None:
        """What is wrong with weights beside 8-bit activations, if anything is; `levels` are codes minus zero point."""
        if self.symmetric_int8 and (spec.bits > 8 or not spec.symmetric):
            return f"has weights in {spec}, and {self.name} has symmetric ones of at most 8 bits"
        largest = int(levels.abs().max()) if levels.numel() else 0
        limit = 2 ** (self.weight_bits - 1)
        if self.weight_bits < 8 and largest > limit:
            return f"has weights up to {largest}, and {self.name} sums them exactly only up to {limit}"
        return None

    def reason_against_activation(self, spec: QuantSpec) -> str | None:
        """What is wrong with the spec of an activation, if anything is."""
        if self.symmetric_int8 and not spec.symmetric:
            return f"is affine ({spec}), and {self.name} has symmetric activations only"
        if self.symmetric_int8 and (spec.bits != 8 or spec.narrow_range):
            return f"is {spec}, and {self.name} has activations of 8 bits in full only"
        return None


TARGETS = {
    target.name: target
    for target in (
        Target(name="generic"),
        Target(name="onnxruntime-vnni", arithmetic="onnxruntime", unsigned_activations=True, needs_results=True),
        Target(
            name="onnxruntime-x86",
            weight_bits=7,
            arithmetic="onnxruntime",
            unsigned_activations=True,
            needs_results=True,
        ),
        Target(name="tensorrt", symmetric_int8=True),
    )
}


def find(name: str) -> Target:
    """The target of that name.

    >>> find("onnxruntime-x86").weight_bits
    7
    """
    if not isinstance(name, str) or name not in TARGETS:
        raise ValueError(f"`target` must be one of {', '.join(TARGETS)}, got {name!r}.")
    return TARGETS[name]
