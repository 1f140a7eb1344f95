"""The target of engines that load folders of compressed-tensors. transformers is the one that `verify` runs.

They multiply dequantized weights. The values of codes are `(code - zero_point) * scale`, whatever rule has chosen the
scale, so weights may have any grid that fits the codes. Inputs are quantized by the engine with its own rule, so their
spec must be that rule.
"""

import dataclasses

from fakequant._runtimes.target import EngineRules, Runtime, Target
from fakequant.spec import QuantSpec

RUNTIME = Runtime(
    key="transformers",
    name="transformers",
    room="transformers",
    package="transformers",
    extra="llm",
    exporter="export_compressed_tensors",
    suffix="",
    takes_example=False,
)
_MOST_BITS = 8
_INPUTS = (
    "8-bit integers or e4m3fn per tensor or per token, e4m3fn per group, or blocks of MXFP4, MXFP6, MXFP8 and NVFP4"
)


def reason_against_weight(spec: QuantSpec) -> str | None:
    """Returns why compressed-tensors cannot hold a weight with this spec, or None if it can.

    >>> reason_against_weight(QuantSpec(bits=4, axis=-1, group_size=32)) is None
    True
    >>> reason_against_weight(QuantSpec(format="e5m2"))
    'e5m2, per tensor has no type there; its floats are e4m3fn, and e2m1 and e2m3 in blocks'
    """
    if spec.format == "int" and spec.has_block_scales:
        return f"{spec} has no type there; scales that are powers of two belong to floats"
    if spec.format == "int" and spec.bits > _MOST_BITS:
        return f"{spec} has more than {_MOST_BITS} bits"
    if spec.format not in ("int", "e4m3fn") and (spec.format not in ("e2m1", "e2m3") or not spec.has_block_scales):
        return f"{spec} has no type there; its floats are e4m3fn, and e2m1 and e2m3 in blocks"
    if spec.granularity == "channel" and spec.axis not in (0, -2):
        return f"{spec} has scales along the inputs; there, scales are per row of the weight or along a row"
    if spec.granularity in ("group", "token", "block") and spec.axis not in (1, -1):
        return f"{spec} has groups along the outputs; there, groups are along a row of the weight"
    if not spec.has_block_scales and spec.format != "int" and spec.granularity == "group":
        return f"{spec} has a float scale per group; there, floats have one per tensor, row or block of rows"
    if spec.granularity == "block" and spec.format == "int":
        return f"{spec} has blocks of rows; there, integers have groups along a row"
    return None


def reason_against_input(spec: QuantSpec) -> str | None:
    """Returns why engines cannot quantize an input with this spec, or None if they can.

    >>> reason_against_input(QuantSpec().per_token()) is None
    True
    >>> reason_against_input(QuantSpec(narrow_range=True))
    'int8 narrow, per tensor has a narrow range; engines use -128 too'
    """
    if spec.has_block_scales:
        fits = spec == _fit_input(spec) and spec.format in ("e2m1", "e2m3", "e4m3fn") and spec.axis == -1
        return None if fits else f"{spec} is none of the grids of inputs: {_INPUTS}"
    if spec.format not in ("int", "e4m3fn") or spec.bits not in (4, 8):
        return f"{spec} is none of the grids of inputs: {_INPUTS}"
    if spec.narrow_range:
        return f"{spec} has a narrow range; engines use {spec.qmin - 1} too"
    is_group = spec.granularity == "group" and spec.format != "int"
    if spec.granularity != "tensor" and ((spec.granularity != "token" and not is_group) or spec.axis != -1):
        return f"{spec} has scales along another axis; engines have one per tensor, per token or, of floats, per group"
    if spec.numerics != "onnx":
        return f"{spec} rounds in another way than engines do, which is numerics='onnx'"
    return None


def reason_against_cache(spec: QuantSpec) -> str | None:
    """Returns why a folder cannot say that keys and values have this spec, or None if it can.

    >>> reason_against_cache(QuantSpec(format="e4m3fn")), reason_against_cache(QuantSpec(axis=1))
    (None, None)
    """
    is_known = spec.format in ("int", "e4m3fn") and spec.bits == 8 and spec.symmetric and spec.numerics == "onnx"
    if not is_known or spec.narrow_range:
        return "folders have symmetric 8-bit integers with the full range, or e4m3fn"
    if spec.granularity not in ("tensor", "channel"):
        return "folders have one calibrated scale per tensor, or per head (axis=1)"
    return None


def _fit_weight(spec: QuantSpec) -> QuantSpec:
    return dataclasses.replace(spec, scale_rule="divided") if spec.scale_format == "e4m3fn" else spec


def _fit_input(spec: QuantSpec) -> QuantSpec:
    """Returns the spec with the rule by which compressed-tensors chooses the scales of inputs."""
    if spec.scale_format != "e8m0":
        return _fit_weight(spec)
    return dataclasses.replace(spec, scale_rule="even_e2m1" if spec.bits == 8 else "even")


TARGET = Target(
    name="compressed-tensors",
    runtime=RUNTIME,
    has_float_formats=True,
    engine=EngineRules(
        layers=("Linear", "ExpertProduct"),
        weight_only=("ExpertProduct",),
        fit_weight=_fit_weight,
        fit_input=_fit_input,
        reason_against_weight=reason_against_weight,
        reason_against_input=reason_against_input,
        reason_against_cache=reason_against_cache,
        smallest_dynamic_scale=2.0**-126,  # only a scale of 0 is replaced
    ),
)
TARGETS = (TARGET,)
