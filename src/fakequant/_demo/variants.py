"""The ways in which the demo quantizes its network."""

import dataclasses

import fakequant.recipes as recipes
from fakequant.config import LayerConfig, QuantConfig
from fakequant.spec import QuantSpec

# For any x86 CPU: int8 weights use 7 bits, so that sums of products cannot saturate.
TARGET = "onnxruntime-x86"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    # The name of its ONNX file.
    file: str
    config: QuantConfig
    # Whether it is trained with quantizers. Otherwise it is only calibrated.
    trained: bool


def int4() -> QuantConfig:
    """Returns a config with 4-bit weights per channel and 4-bit activations per tensor, with observed ranges.

    Weights use the narrow range -7 to 7, so that batch norms with negative factors can be folded.

    >>> int4().default.weight.qmin, int4().default.input.bits
    (-7, 4)
    """
    activations = QuantSpec(bits=4, signed=False, symmetric=False)
    layer = LayerConfig(weight=QuantSpec(bits=4, narrow_range=True, axis=0), input=activations)
    return QuantConfig(default=layer, operands=activations, target=TARGET)


def variants() -> list[Variant]:
    """Returns all variants, in the order of the table.

    >>> [variant.name for variant in variants()]
    ['PTQ int8', 'QAT int8', 'QAT int4', 'LSQ 2-bit']
    """
    return [
        Variant("PTQ int8", "ptq-int8.onnx", recipes.int8(target=TARGET), trained=False),
        Variant("QAT int8", "qat-int8.onnx", recipes.int8(target=TARGET), trained=True),
        Variant("QAT int4", "qat-int4.onnx", int4(), trained=True),
        Variant("LSQ 2-bit", "lsq-2bit.onnx", recipes.lsq(2, target=TARGET), trained=True),
    ]
