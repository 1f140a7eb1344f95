"""Targets: the runtimes that a model can be trained for, and the grids that each computes exactly.

    generic             any grid; computed as the ONNX graph says, operator by operator
    onnxruntime-vnni    ONNX Runtime on x86 CPUs with VNNI: full 8-bit weights
    onnxruntime-x86     ONNX Runtime on all x86 CPUs: at most 7-bit weights with 8-bit activations
    openvino-vnni       OpenVINO on x86 CPUs with VNNI: symmetric weights of at most 8 bits
    openvino            OpenVINO on all x86 CPUs: symmetric weights of at most 7 bits with 8-bit activations
    tensorrt            symmetric 8-bit activations; symmetric weights of at most 8 bits, stored in bytes
    xnnpack             ExecuTorch with XNNPACK: activations of at most 8 bits per tensor, symmetric weights likewise

x86 CPUs without VNNI add pairs of 8-bit products in 16 bits and saturate. 255 * w + 255 * w fits in 16 bits if |w| is
at most 64. With larger weights the sums are silently wrong.
"""

import dataclasses
from difflib import get_close_matches
from typing import TYPE_CHECKING

from fakequant.spec import WHOLE_AXIS, QuantSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

# The grid of a tensor whose scale integer kernels compute at run time, and the smallest scale that training uses for
# it: the kernels have no lower limit.
DYNAMIC_SPEC = QuantSpec(bits=8, signed=False, symmetric=False)
SMALLEST_DYNAMIC_SCALE = 2.0**-126
# The grid of a token whose scale XNNPACK's kernels compute at run time.
TOKEN_SPEC = QuantSpec(bits=8, signed=True, symmetric=False, axis=-1, group_size=WHOLE_AXIS)

# Largest |weight code| for which a sum of two products with 8-bit activations fits in 16 bits.
_EXACT_WITHOUT_VNNI = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A runtime: the grids that it computes exactly, and its arithmetic."""

    name: str
    # The largest number of bits of a weight whose products with 8-bit activations are summed exactly.
    weight_bits: int = 8
    # If True, zero points must be 0, weights have at most 8 bits, and activations have the full range of 8 bits.
    symmetric_int8: bool = False
    # If True, the zero points of weights must be 0.
    symmetric_weights: bool = False
    # How sums of products become codes: a key of `ARITHMETICS` in _convert/golden/arithmetics.py.
    arithmetic: str = "reference"
    # How its kernels round floats at ties: a key of `runtime_rounding.RULES`, or None for the rule of ONNX.
    rounding: str | None = None
    # The runtime that `verify` runs a file of this target in.
    runtime: str = "onnxruntime"
    # Whether that is the runtime of the target itself. The runtime of other targets cannot be run here.
    has_own_runtime: bool = True
    # If True, exported activations have unsigned codes, because the kernels of the runtime require them.
    unsigned_activations: bool = False
    # It computes additions, means and the like in integers only if their results are quantized too.
    needs_results: bool = False
    # It computes convolutions in integers only if their results are quantized too.
    needs_convolution_results: bool = False
    # It adds a tensor to the result of a layer in the kernel of that layer, which rounds only once. Then only the
    # other operand is quantized.
    adds_in_layers: bool = False
    # It has kernels for scales that are computed at run time.
    has_dynamic_scales: bool = True
    # Scales that its integer kernels compute at run time are those of a whole tensor; see `DYNAMIC_SPEC`.
    has_one_dynamic_scale: bool = False
    # Weights are symmetric, activations have one scale per tensor, both have at most 8 bits. Scales that are computed
    # at run time are those of tokens; see `TOKEN_SPEC`.
    at_most_int8: bool = False
    # It computes every layer and addition in integers only if its result is quantized too, by a single quantizer.
    needs_all_results: bool = False
    # It concatenates codes only if all operands are on the grid of the result.
    joins_on_one_grid: bool = False
    # It multiplies two activations, as attention does, in integers.
    has_integer_products: bool = True
    # It has kernels for transposed convolutions along three axes, in integers or in float.
    has_volumes: bool = True
    # It takes biases as floats and quantizes them itself; see `_convert/float_biases.py`.
    has_float_biases: bool = False

    def require_layers(self, model: "nn.Module") -> None:
        """Raises ValueError if the runtime cannot compute a layer of a model at all."""
        for path, module in model.named_modules():
            if not self.has_volumes and any(cls.__name__ == "ConvTranspose3d" for cls in type(module).__mro__):
                raise ValueError(
                    f"{path or 'The model'} is a ConvTranspose3d, and the runtime of the target {self.name!r} has no "
                    "kernel for transposed convolutions along three axes, in integers or in float.\n"
                    "Use another target, such as 'onnxruntime-x86', or other layers."
                )

    def fit_weight(self, spec: QuantSpec) -> QuantSpec:
        """Returns `spec` adapted to the weights of this target: unchanged, with fewer bits, or symmetric.

        >>> TARGETS["onnxruntime-x86"].fit_weight(QuantSpec(narrow_range=True)).qmax
        63
        """
        if self._is_left_alone(spec):
            return spec
        if self.symmetric_int8 or self.at_most_int8:
            return dataclasses.replace(spec, bits=min(spec.bits, 8), signed=True, symmetric=True)
        if self.symmetric_weights:
            spec = dataclasses.replace(spec, signed=True, symmetric=True)
        return dataclasses.replace(spec, bits=self.weight_bits) if self.weight_bits < spec.bits <= 8 else spec

    def fit_activation(self, spec: QuantSpec) -> QuantSpec:
        """Returns `spec` adapted to the activations of this target.

        >>> print(TARGETS["tensorrt"].fit_activation(QuantSpec(signed=False, symmetric=False)))
        int8, per tensor
        """
        if self._is_left_alone(spec):
            return spec
        if self.has_one_dynamic_scale and spec.granularity == "token" and spec.bits == 8:
            return dataclasses.replace(DYNAMIC_SPEC, numerics=spec.numerics)
        if self.at_most_int8:
            if spec.granularity == "token":
                return dataclasses.replace(TOKEN_SPEC, numerics=spec.numerics)
            return dataclasses.replace(spec, bits=min(spec.bits, 8), axis=None, group_size=None)
        if not self.symmetric_int8:
            return spec
        return dataclasses.replace(spec, bits=8, signed=True, symmetric=True, narrow_range=False)

    def _is_left_alone(self, spec: QuantSpec) -> bool:
        """Returns True for float formats and block scales. Raises ValueError if this target computes in integers."""
        if spec.is_integer:
            return False
        if not self.has_format(spec):
            raise ValueError(
                f"The target {self.name!r} is for the integer kernels of its runtime, got the spec ({spec}).\n"
                "Use target='generic' for float formats, MX and NVFP4."
            )
        return True

    def has_format(self, spec: QuantSpec) -> bool:
        """Returns True if this target computes with the format of a spec and of its scales.

        >>> TARGETS["openvino"].has_format(QuantSpec(format="e4m3fn"))
        False
        """
        return self.name == "generic" or spec.is_integer

    def weight_shift(self, spec: QuantSpec) -> int:
        """Returns the largest k for which weight codes times 2^k are summed exactly on every CPU.

        A weight that meets a quantized input is stored in a byte, even if it has fewer bits. Its codes are stored
        times 2^k, with a scale that is 2^k times smaller. This leaves the weights unchanged, but the bias, whose
        scale is that of the products, is rounded 2^k times finer.

        >>> TARGETS["onnxruntime-x86"].weight_shift(QuantSpec(bits=2))  # -2 * 32 = -64
        5
        """
        if not (spec.symmetric and spec.signed) or spec.group_size is not None or spec.bits > 8:
            return 0
        shift, largest = 0, _EXACT_WITHOUT_VNNI
        while spec.qmin * 2 ** (shift + 1) >= -largest and spec.qmax * 2 ** (shift + 1) < largest:
            shift += 1
        return shift

    def reason_against_weight(self, spec: QuantSpec, levels: "Tensor") -> str | None:
        """Returns why this target cannot compute with a weight, or None if it can.

        `levels` are the codes of the weight minus its zero point.
        """
        if (self.symmetric_int8 or self.at_most_int8) and (spec.bits > 8 or not spec.symmetric):
            return f"has weights in {spec}, but {self.name} needs symmetric weights of at most 8 bits"
        if self.symmetric_weights and not spec.symmetric:
            return f"has weights in {spec}, but {self.name} needs symmetric weights"
        largest = int(levels.abs().max()) if levels.numel() else 0
        limit = 2 ** (self.weight_bits - 1)
        if self.weight_bits < 8 and largest > limit:
            return f"has weights up to {largest}, but {self.name} sums them exactly only up to {limit}"
        return None

    def reason_against_activation(self, spec: QuantSpec) -> str | None:
        """Returns why this target cannot compute with an activation of this spec, or None if it can."""
        if self.symmetric_int8 and not spec.symmetric:
            return f"is affine ({spec}), but {self.name} needs symmetric activations"
        if self.symmetric_int8 and (spec.bits != 8 or spec.narrow_range):
            return f"is {spec}, but {self.name} needs activations with the full range of 8 bits"
        if self.at_most_int8 and (spec.bits > 8 or spec.granularity not in ("tensor", "token")):
            return f"is {spec}, but {self.name} needs activations of at most 8 bits per tensor or per token"
        return None


TARGETS = {
    target.name: target
    for target in (
        Target(name="generic"),
        Target(
            name="onnxruntime-vnni",
            arithmetic="onnxruntime",
            unsigned_activations=True,
            needs_results=True,
            needs_convolution_results=True,
            has_one_dynamic_scale=True,
        ),
        Target(
            name="onnxruntime-x86",
            weight_bits=7,
            arithmetic="onnxruntime",
            unsigned_activations=True,
            needs_results=True,
            needs_convolution_results=True,
            has_one_dynamic_scale=True,
        ),
        Target(
            name="openvino-vnni",
            runtime="openvino",
            arithmetic="openvino",
            rounding="openvino",
            symmetric_weights=True,
            unsigned_activations=True,
            needs_results=True,
            adds_in_layers=True,
            has_integer_products=False,
            has_dynamic_scales=False,
        ),
        Target(
            name="openvino",
            runtime="openvino",
            weight_bits=7,
            arithmetic="openvino",
            rounding="openvino",
            symmetric_weights=True,
            unsigned_activations=True,
            needs_results=True,
            adds_in_layers=True,
            has_integer_products=False,
            has_dynamic_scales=False,
        ),
        Target(name="tensorrt", symmetric_int8=True, has_own_runtime=False),
        Target(
            name="xnnpack",
            runtime="executorch",
            at_most_int8=True,
            arithmetic="xnnpack",
            rounding="xnnpack",
            needs_results=True,
            needs_all_results=True,
            joins_on_one_grid=True,
            has_integer_products=False,
            has_volumes=False,
            has_float_biases=True,
        ),
    )
}


def find(name: str) -> Target:
    """Returns the target called `name`. Raises ValueError if there is no such target.

    >>> find("onnxruntime-x86").weight_bits
    7
    """
    if not isinstance(name, str) or name not in TARGETS:
        raise ValueError(f"`target` must be one of {', '.join(TARGETS)}, got {name!r}.{_similar(name)}")
    return TARGETS[name]


# What other names may mean.
_ALIASES = {
    "onnxruntime-x86, or onnxruntime-vnni for a CPU with VNNI": ("onnxruntime", "ort", "onnx", "cpu", "x86"),
    "onnxruntime-vnni": ("vnni", "ort-vnni", "avx512-vnni"),
    "openvino, or openvino-vnni for a CPU with VNNI": ("ov", "intel", "openvino-x86"),
    "xnnpack": ("executorch", "pte", "qnnpack", "arm", "android", "ios"),
    "tensorrt": ("trt", "nvidia", "cuda", "gpu"),
    "generic": ("tflite", "litert", "coreml", "qnn", "tvm"),
}


def _similar(name: object) -> str:
    """Returns which target a name may mean, as a sentence, or nothing."""
    key = str(name)[:40].lower().replace("_", "-")
    meant = [advice for advice, names in _ALIASES.items() if key in names]
    meant += get_close_matches(key, list(TARGETS), n=1)
    return f"\nDid you mean {meant[0]}?" if meant else ""
