"""The ways in which the demo quantizes its network."""

import dataclasses

import fakequant.recipes as recipes
from fakequant.config import LayerConfig, QuantConfig
from fakequant.spec import QuantSpec

# Integer kernels of any x86: 8-bit weights have 7 bits, so that sums of products cannot saturate.
TARGET = "onnxruntime-x86"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    # Of its ONNX file.
    file: str
    config: QuantConfig
    # After training in float only calibrated, or trained with quantizers.
    trained: bool


def int4() -> QuantConfig:
    """Weights per channel and activations per tensor in 4 bits, with observed ranges.

    Codes of weights are -7 to 7: a range that is its own mirror image, so that a batch norm becomes part of a
    layer without a change.

    >>> int4().default.weight.qmin, int4().default.input.bits
    (-7, 4)
    """
    activations = QuantSpec(bits=4, signed=False, symmetric=False)
    layer = LayerConfig(weight=QuantSpec(bits=4, narrow_range=True, axis=0), input=activations)
    return QuantConfig(default=layer, operands=activations, target=TARGET)


def variants() -> list[Variant]:
    """In the order of the table.

    >>> [variant.name for variant in variants()]
    ['PTQ int8', 'QAT int8', 'QAT int4', 'LSQ 2-bit']
    """
    return [
        Variant("PTQ int8", "ptq-int8.onnx", recipes.int8(target=TARGET), trained=False),
        Variant("QAT int8", "qat-int8.onnx", recipes.int8(target=TARGET), trained=True),
        Variant("QAT int4", "qat-int4.onnx", int4(), trained=True),
        Variant("LSQ 2-bit", "lsq-2bit.onnx", recipes.lsq(2, target=TARGET), trained=True),
    ]
