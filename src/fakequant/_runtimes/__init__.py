"""Runtimes: one room (folder) for each, with files of fixed names, and the table of all targets.

    target.py        its targets: the grids that its integer kernels compute exactly
    rounding.py      `ROUNDING`: how it quantizes floats. Rooms without this file follow the rule of ONNX
    arithmetic.py    `ARITHMETIC`: how its kernels compute codes, for the golden model
    onnx_forms.py    `rewrite`: the forms of ONNX graphs that only it needs
    running.py       loads and runs a file once
    session.py       `SESSION`: runs files for `verify`, and says which kernels they use

Files with these names in this folder have what the rooms share, onnx_session.py has what the sessions with ONNX files
share, and reciprocal_rounding.py and reciprocal_arithmetic.py have what the runtimes with XNNPACK share.
tests/test_package_order.py has the order of the files: training uses the first two, `convert` the third, and so on.
target.py does not import torch, so that the command line knows the names of runtimes without it.

The targets:

    generic             any grid; computed as the ONNX graph says, operator by operator
    onnxruntime-vnni    ONNX Runtime on x86 CPUs with VNNI: full 8-bit weights
    onnxruntime-x86     ONNX Runtime on all x86 CPUs: at most 7-bit weights with 8-bit activations
    openvino-vnni       OpenVINO on x86 CPUs with VNNI: symmetric weights of at most 8 bits
    openvino            OpenVINO on all x86 CPUs: symmetric weights of at most 7 bits with 8-bit activations
    tensorrt            symmetric 8-bit activations; symmetric weights of at most 8 bits, stored in bytes
    xnnpack             ExecuTorch with XNNPACK: activations of at most 8 bits per tensor, symmetric weights likewise
    litert              LiteRT (.tflite): activations of at most 8 bits or of 16, symmetric weights of at most 8
    litert-builtin      the same, with LiteRT's own optimized kernels instead of XNNPACK's
    litert-reference    the same, with its plain kernels, which microcontrollers have
    compressed-tensors  transformers, vLLM, SGLang: weights of linear layers and inputs, in the grids of that format
    llama.cpp           llama.cpp: weights of linear layers and embeddings in the block types of ggml, inputs likewise

x86 CPUs without VNNI add pairs of 8-bit products in 16 bits and saturate. 255 * w + 255 * w fits in 16 bits if |w| is
at most 64. With larger weights the sums are silently wrong.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from fakequant._runtimes.litert import target as litert
from fakequant._runtimes.llama_cpp import target as llama_cpp
from fakequant._runtimes.onnxruntime import target as onnxruntime
from fakequant._runtimes.openvino import target as openvino
from fakequant._runtimes.target import ActivationRules, Target, WeightRules
from fakequant._runtimes.transformers import target as transformers
from fakequant._runtimes.xnnpack import target as xnnpack

# Targets without a room. `verify` runs their files in ONNX Runtime.
_GENERIC = Target(name="generic", runtime=onnxruntime.RUNTIME, has_float_formats=True)
_TENSORRT = Target(
    name="tensorrt",
    runtime=onnxruntime.RUNTIME,
    has_own_runtime=False,
    weights=WeightRules(is_symmetric=True, is_at_most_8_bits=True),
    activations=ActivationRules(is_symmetric_int8=True),
)
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _GENERIC,
        *onnxruntime.TARGETS,
        *openvino.TARGETS,
        _TENSORRT,
        *xnnpack.TARGETS,
        *litert.TARGETS,
        *transformers.TARGETS,
        *llama_cpp.TARGETS,
    )
}
# By the name that `verify` takes.
RUNTIMES = {target.runtime.key: target.runtime for target in TARGETS.values()}


def find(name: str) -> Target:
    """Returns the target called `name`. Raises ValueError if there is no such target.

    >>> find("onnxruntime-x86").weights.bits
    7
    """
    if not isinstance(name, str) or name not in TARGETS:
        raise ValueError(f"`target` must be one of {', '.join(TARGETS)}, got {name!r}.{_similar(name)}")
    return TARGETS[name]


def part(room: str, file: str) -> Any:
    """Returns a module of a room. It is imported when it is first used: most need packages that may be missing.

    >>> part("openvino", "rounding").ROUNDING.name
    'openvino'
    """
    return import_module(f"fakequant._runtimes.{room}.{file}")


# What other names may mean.
_ALIASES = {
    "onnxruntime-x86, or onnxruntime-vnni for a CPU with VNNI": ("onnxruntime", "ort", "onnx", "cpu", "x86"),
    "onnxruntime-vnni": ("vnni", "ort-vnni", "avx512-vnni"),
    "openvino, or openvino-vnni for a CPU with VNNI": ("ov", "intel", "openvino-x86"),
    "xnnpack": ("executorch", "pte", "qnnpack", "arm", "android", "ios"),
    "compressed-tensors": ("transformers", "vllm", "sglang", "llm-compressor", "huggingface", "hf"),
    "llama.cpp": ("gguf", "ggml", "llama-cpp", "llamacpp", "ollama", "lm-studio", "lmstudio"),
    "tensorrt": ("trt", "nvidia", "cuda", "gpu"),
    "litert": ("tflite", "tensorflow-lite", "ai-edge-litert"),
    "litert-reference": ("tflm", "tflite-micro", "cmsis-nn", "microcontroller"),
    "generic": ("coreml", "qnn", "tvm"),
}


def _similar(name: object) -> str:
    """Returns which target a name may mean, as a sentence, or nothing."""
    key = str(name)[:40].lower().replace("_", "-")
    meant = [advice for advice, names in _ALIASES.items() if key in names]
    meant += get_close_matches(key, list(TARGETS), n=1)
    return f"\nDid you mean {meant[0]}?" if meant else ""
