"""The target of llama.cpp, and of programs that load its GGUF files.

Its kernels round inputs to blocks of 8-bit codes by a rule of their own, multiply blocks of codes, and sum up in float.
A weight may have any scales that its block type can hold. Inputs must be rounded by the rule of the kernels, or stay in
float in training.
"""

from fakequant._runtimes.target import EngineRules, Runtime, Target
from fakequant.spec import QuantSpec

RUNTIME = Runtime(
    key="llama.cpp",
    name="llama.cpp",
    room="llama_cpp",
    package="cyllama",
    extra="gguf",
    exporter="export_gguf",
    suffix=".gguf",
    takes_example=False,
)
_WEIGHTS = ("q4_0", "q4_1", "q8_0", "tq2_0", "q4_k", "q6_k")
_CACHES = ("q4_0", "q4_1", "q8_0")
_INPUTS = ("q8_0_input", "q8_k_input")


def reason_against_weight(spec: QuantSpec) -> str | None:
    """Returns why a GGUF file cannot hold a weight with this spec, or None if it can.

    >>> from fakequant import presets
    >>> reason_against_weight(presets.q4_0()), reason_against_weight(presets.mxfp4(axis=1))
    (None, None)
    >>> reason_against_weight(QuantSpec(bits=4, axis=-1, group_size=32))
    'int4, per group of 32 on axis -1 is no block type of ggml; those are q4_0, q4_1, q8_0, tq2_0, q4_k, q6_k and mxfp4'
    """
    is_mxfp4 = spec.format == "e2m1" and spec.scale_format == "e8m0" and spec.group_size == 32
    if spec.ggml_type not in _WEIGHTS and not is_mxfp4:
        return f"{spec} is no block type of ggml; those are {', '.join(_WEIGHTS)} and mxfp4"
    if spec.axis not in (1, -1):
        return f"{spec} has blocks along the outputs; there, blocks are along a row of the weight"
    return None


def reason_against_input(spec: QuantSpec) -> str | None:
    """Returns why the kernels do not quantize an input with this spec, or None if they do.

    >>> reason_against_input(QuantSpec())
    'int8, per tensor is not how kernels round inputs: q8_0_input, q8_k_input'
    """
    if spec.ggml_type not in _INPUTS or spec.axis != -1:
        return f"{spec} is not how kernels round inputs: {', '.join(_INPUTS)}"
    return None


def reason_against_cache(spec: QuantSpec) -> str | None:
    """Returns why llama.cpp cannot store keys and values with a spec, or None if it can.

    >>> from fakequant import presets
    >>> reason_against_cache(presets.q8_0()), reason_against_cache(QuantSpec())
    (None, 'its caches have the types q4_0, q4_1, q8_0')
    """
    return None if spec.ggml_type in _CACHES else f"its caches have the types {', '.join(_CACHES)}"


def _unchanged(spec: QuantSpec) -> QuantSpec:
    return spec


TARGET = Target(
    name="llama.cpp",
    runtime=RUNTIME,
    has_float_formats=True,
    has_ggml_types=True,
    engine=EngineRules(
        layers=("Linear", "Embedding", "ExpertProduct"),
        weight_only=(),
        has_short_blocks=False,
        fit_weight=_unchanged,
        fit_input=_unchanged,
        reason_against_weight=reason_against_weight,
        reason_against_input=reason_against_input,
        reason_against_cache=reason_against_cache,
        why_no_cache=(
            "llama.cpp takes the types of its cache from the options --cache-type-k and --cache-type-v, and not from "
            "the file"
        ),
    ),
)
TARGETS = (TARGET,)
