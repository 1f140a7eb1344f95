"""What a network will run on, as data: what a grid must be like to run there as it was trained.

    generic             any grid
    onnxruntime-vnni    x86 with VNNI: 8-bit weights in full
    onnxruntime-x86     any x86: weights of at most 7 bits beside 8-bit activations

Without VNNI an x86 adds pairs of products of 8-bit numbers in 16 bits and saturates: 255 * w + 255 * w
fits as long as |w| is at most 64. With more the sums are wrong, silently.
"""

import dataclasses

from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a runtime can compute exactly."""

    name: str
    # The most bits of a weight whose products with 8-bit activations are summed exactly.
    weight_bits: int = 8
    # How it goes from sums of products to codes, see fakequant/integer/arithmetic.py.
    arithmetic: str = "reference"

    def fit_weight(self, spec: QuantSpec) -> QuantSpec:
        """The spec of weights for this target: as given, or with fewer bits.

        >>> TARGETS["onnxruntime-x86"].fit_weight(QuantSpec(narrow=True)).qmax
        63
        """
        return dataclasses.replace(spec, bits=self.weight_bits) if self.weight_bits < spec.bits <= 8 else spec


TARGETS = {
    target.name: target
    for target in (
        Target(name="generic"),
        Target(name="onnxruntime-vnni", arithmetic="onnxruntime"),
        Target(name="onnxruntime-x86", weight_bits=7, arithmetic="onnxruntime"),
    )
}


def find(name: str) -> Target:
    """The target of that name.

    >>> find("generic")
    Target(name='generic', weight_bits=8, arithmetic='reference')
    """
    if not isinstance(name, str) or name not in TARGETS:
        raise ValueError(f"`target` must be one of {', '.join(TARGETS)}, got {name!r}.")
    return TARGETS[name]
