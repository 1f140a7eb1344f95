"""Ready-made configs for whole models.

int8               8-bit weights per channel, 8-bit activations per tensor: the fastest in integer runtimes
int8_dynamic       8-bit weights per channel, 8-bit activations per token with ranges determined at run time
int4_weight_only   4-bit weights in groups, activations in float
w4a8               4-bit weights per channel, 8-bit activations; 8-bit weights in the first and the last layer
lsq                weights and activations of few bits with learned scales; 8 bits in the first and the last layer
fp8                FP8 weights per channel, FP8 activations per tensor
fp8_block          FP8 weights in blocks of 128 x 128, FP8 inputs in groups of 128 with ranges determined at run time
mxfp8, nvfp4       weights and inputs in blocks along the axis that products sum over, with block scales
mxfp4_weight_only  MXFP4 weights, activations in float; nvfp4_weight_only the same with NVFP4
gguf               weights in a block type of llama.cpp, inputs as its kernels round them

Recipes for language models take `kv_cache`, the spec of keys and values in the cache; see `QuantConfig.kv_cache`.
"""

from typing import Literal

from fakequant import presets
from fakequant._runtimes import find
from fakequant.config import LayerConfig, QuantConfig
from fakequant.formats import SUPER_BLOCKS, ScaleRule
from fakequant.observers import Dynamic
from fakequant.spec import QuantSpec

__all__ = [
    "fp8", "fp8_block", "gguf", "int4_weight_only", "int8", "int8_dynamic", "lsq", "mxfp4_weight_only", "mxfp8",
    "nvfp4", "nvfp4_weight_only", "w4a8",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def int8(*, activation_bits: int = 8, target: str = "generic") -> QuantConfig:
    """8-bit weights per channel and 8-bit activations per tensor.

    Args:
        activation_bits: 8, or 16 for symmetric activations of 16 bits (16x8). LiteRT has integer kernels for these.
        target: What the model is trained for.

    >>> int8().default.weight.qmin, int8().default.input.qmax, int8(activation_bits=16).default.input.qmax
    (-127, 255, 32767)
    """
    if activation_bits not in (8, 16):
        raise ValueError(
            f"`activation_bits` must be 8 or 16, got {activation_bits!r}.\nUse recipes.lsq for fewer bits."
        )
    activations = presets.uint8() if activation_bits == 8 else presets.int16()
    if find(target).fit_activation(activations).bits != activation_bits:
        raise ValueError(
            f"The target {target!r} has no kernels for activations of {activation_bits} bits.\n"
            "Use activation_bits=8, or a target that has, such as 'litert' or 'onnxruntime-x86'."
        )
    layer = LayerConfig(weight=presets.int8(), input=activations)
    return QuantConfig(default=layer, operands=activations, target=target)


def int8_dynamic(*, target: str = "generic", kv_cache: QuantSpec | None = None) -> QuantConfig:
    """8-bit weights per channel and 8-bit activations with ranges determined at run time.

    Activations are quantized per token. Inputs of convolutions are quantized per tensor, and so are all activations for
    the targets of ONNX Runtime, whose kernels have one scale per tensor.

    >>> int8_dynamic().default.input.granularity
    'token'
    """
    layer = LayerConfig(weight=presets.int8(), input=presets.int8_per_token(), activation_observer=Dynamic())
    return QuantConfig(default=layer, target=target, kv_cache=kv_cache).rule(type="_ConvNd", input=presets.uint8())


def int4_weight_only(
    group_size: int | None = 32, *, target: str = "generic", kv_cache: QuantSpec | None = None
) -> QuantConfig:
    """4-bit weights and float activations.

    `group_size` neighbouring weights along the last axis share a scale. Convolutions have one scale per output channel.

    >>> int4_weight_only(64).default.weight.group_size
    64
    """
    config = QuantConfig(
        default=LayerConfig(weight=presets.int4(group_size=group_size)), target=target, kv_cache=kv_cache
    )
    return config.rule(type="_ConvNd", weight=presets.int4(group_size=None))


def w4a8(*, target: str = "generic", first_last_bits: int | None = 8) -> QuantConfig:
    """4-bit weights per channel and 8-bit activations per tensor.

    The first and the last layer have 8-bit weights. With `first_last_bits=None` they have 4-bit weights too.

    >>> w4a8().default.weight.bits, w4a8().default.input.bits, w4a8().first_last_bits
    (4, 8, 8)
    """
    layer = LayerConfig(weight=presets.int4(group_size=None), input=presets.uint8())
    return QuantConfig(default=layer, operands=presets.uint8(), target=target, first_last_bits=first_last_bits)


def lsq(
    bits: int, *, activation_bits: int | None = None, target: str = "generic", first_last_bits: int | None = 8
) -> QuantConfig:
    """Few-bit weights per channel and activations per tensor, with learned scales (LSQ) and zero points (LSQ+).

    Args:
        bits: The number of bits of weights.
        activation_bits: The number of bits of activations. If None, `bits`.
        target: The runtime that the model is trained for.
        first_last_bits: The minimum number of bits in the first and the last layer. If None, `bits` and
            `activation_bits` apply to them too.

    >>> lsq(2).default.learned, lsq(2).default.weight.bits, lsq(2).first_last_bits
    (True, 2, 8)
    """
    activations = QuantSpec(bits=activation_bits or bits, signed=False, symmetric=False)
    layer = LayerConfig(weight=QuantSpec(bits=bits, axis=0), input=activations, learned=True)
    return QuantConfig(default=layer, operands=activations, target=target, first_last_bits=first_last_bits)


def fp8(
    *, format: Literal["e4m3fn", "e5m2"] = "e4m3fn", target: str = "generic", kv_cache: QuantSpec | None = None
) -> QuantConfig:
    """FP8 weights per channel and FP8 activations per tensor.

    `format` is used for activations and weights: "e4m3fn" has more precision, "e5m2" more range.

    >>> print(fp8().default.weight)
    e4m3fn, per channel on axis 0
    """
    activations = QuantSpec(format=format)
    layer = LayerConfig(weight=QuantSpec(format=format, axis=0), input=activations)
    return QuantConfig(default=layer, operands=activations, target=target, kv_cache=kv_cache)


def fp8_block(size: int = 128, *, target: str = "generic", kv_cache: QuantSpec | None = None) -> QuantConfig:
    """FP8 weights with a scale per block of `size` x `size`, and FP8 inputs with a scale per `size` neighbours.

    This is DeepSeek's scheme. Inputs follow the data: nothing has to be calibrated. Convolutions have one scale per
    output channel, and their inputs one per tensor.

    >>> print(fp8_block().default.weight)
    e4m3fn, per block of 128 x 128 on axis -1
    >>> print(fp8_block().default.input)
    e4m3fn, per group of 128 on axis -1
    """
    layer = LayerConfig(
        weight=presets.fp8_e4m3(group_size=size, group_rows=size), input=presets.fp8_e4m3(group_size=size)
    )
    config = QuantConfig(default=layer, target=target, kv_cache=kv_cache)
    return config.rule(type="_ConvNd", weight=presets.fp8_e4m3(axis=0), input=presets.fp8_e4m3())


def mxfp8(
    *, scale_rule: ScaleRule = "floor", target: str = "generic", kv_cache: QuantSpec | None = None
) -> QuantConfig:
    """MXFP8 weights and inputs: e4m3fn in blocks of 32 along the axis that products sum over.

    Inputs follow the data: nothing has to be calibrated. Products of two activations, as in attention, stay in float.

    >>> print(mxfp8().default.input)
    e4m3fn, per group of 32 on axis -1, scales e8m0 (floor)
    """
    spec = presets.mxfp8(scale_rule=scale_rule)
    return QuantConfig(default=LayerConfig(weight=spec, input=spec), target=target, kv_cache=kv_cache)


def mxfp4_weight_only(
    *, scale_rule: ScaleRule = "floor", target: str = "generic", kv_cache: QuantSpec | None = None
) -> QuantConfig:
    """MXFP4 weights, e2m1 in blocks of 32 along the axis that products sum over, and float activations.

    >>> mxfp4_weight_only().default.weight.bits, mxfp4_weight_only().default.input
    (4, None)
    """
    return QuantConfig(
        default=LayerConfig(weight=presets.mxfp4(scale_rule=scale_rule)), target=target, kv_cache=kv_cache
    )


def nvfp4(*, target: str = "generic", kv_cache: QuantSpec | None = None) -> QuantConfig:
    """NVFP4 weights and inputs: e2m1 in blocks of 16 along the axis that products sum over.

    Inputs follow the data: nothing has to be calibrated. Products of two activations, as in attention, stay in float.

    >>> print(nvfp4().default.weight)
    e2m1, per group of 16 on axis -1, scales e4m3fn
    """
    return QuantConfig(
        default=LayerConfig(weight=presets.nvfp4(), input=presets.nvfp4()), target=target, kv_cache=kv_cache
    )


def nvfp4_weight_only(*, target: str = "generic", kv_cache: QuantSpec | None = None) -> QuantConfig:
    """NVFP4 weights, e2m1 in blocks of 16 along the axis that products sum over, and float activations.

    >>> nvfp4_weight_only().default.weight.bits, nvfp4_weight_only().default.input
    (4, None)
    """
    return QuantConfig(default=LayerConfig(weight=presets.nvfp4()), target=target, kv_cache=kv_cache)


def gguf(
    type: Literal["q4_0", "q4_1", "q8_0", "tq2_0", "mxfp4", "q4_k", "q6_k"] = "q4_0",
    *,
    learned: bool = False,
    activations: bool = True,
    target: str = "llama.cpp",
    kv_cache: QuantSpec | None = None,
) -> QuantConfig:
    """Weights in a block type of GGUF files, and inputs of linear layers as the kernels of llama.cpp round them.

    Embeddings, and the head if it is called `lm_head`, have Q8_0 weights, or Q6_K weights beside K-quants, as
    llama.cpp gives its heads. Nothing has to be calibrated.

    Args:
        type: The block type of linear layers.
        learned: Whether the scales of linear layers are trained with the weights (LSQ), starting with the least squared
            error, instead of following the range of each block. With few bits this is much better.
        activations: Whether inputs are rounded to 8 bits, in training and evaluation, as llama.cpp does on CPUs.
        target: The runtime that the model is trained for.
        kv_cache: The block type of keys and values, such as `presets.q8_0()`. llama.cpp must be told so when it runs,
            with --cache-type-k and --cache-type-v. Files do not tell: export with these quantizers switched off.

    >>> gguf("q4_0").default.weight.ggml_type, gguf("q4_0").default.input.ggml_type
    ('q4_0', 'q8_0_input')
    >>> gguf("q8_0", activations=False).default.input is None
    True
    >>> gguf("tq2_0", learned=True).default.learned
    True
    """
    if type not in _GGUF_TYPES:
        raise ValueError(f"`type` must be one of {', '.join(_GGUF_TYPES)}, got {type!r}.")
    weight, rounded = _GGUF_TYPES[type]
    if learned and not weight.has_learnable_scales:
        raise ValueError(
            f"The scales of {type!r} are powers of two, which follow every tensor; they cannot be learned.\n"
            "Use learned=False, or another type, such as 'q4_0'."
        )
    table, of_table = _GGUF_TYPES["q6_k" if type in SUPER_BLOCKS else "q8_0"]
    layer = LayerConfig(weight=weight, input=rounded if activations else None, learned=learned)
    config = QuantConfig(default=layer, target=target, kv_cache=kv_cache)
    return config.rule(type="Embedding", weight=table, input=None, learned=False).rule(
        "*lm_head", weight=table, input=of_table if activations else None, learned=False
    )


# The specs of weights and of inputs by type.
_GGUF_TYPES = {
    "q4_0": (presets.q4_0(), presets.q8_0_input()),
    "q4_1": (presets.q4_1(), presets.q8_0_input()),
    "q8_0": (presets.q8_0(), presets.q8_0_input()),
    "tq2_0": (presets.tq2_0(), presets.q8_k_input()),
    "mxfp4": (presets.mxfp4(), presets.q8_0_input()),
    "q4_k": (presets.q4_k(), presets.q8_k_input()),
    "q6_k": (presets.q6_k(), presets.q8_k_input()),
}
