"""`Target`: a runtime that a model can be trained for, and the grids that it computes exactly."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from fakequant._backends.checks import EPS
from fakequant.formats import SCALE_FORMATS
from fakequant.spec import QuantSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fakequant._runtimes.rounding import Rounding

# The grid of a tensor whose scale integer kernels compute at run time, and the smallest scale that training uses for
# it: the kernels have no lower limit.
DYNAMIC_SPEC = QuantSpec(bits=8, signed=False, symmetric=False)
SMALLEST_DYNAMIC_SCALE = 2.0**-126

# Largest |weight code| for which a sum of two products with 8-bit activations fits in 16 bits.
_EXACT_WITHOUT_VNNI = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """A program that runs exported files."""

    # Its name as an argument of `verify`, and in messages.
    key: str
    name: str
    # Its folder in this package.
    room: str
    # The package that runs files, as it is imported, and the extra of fakequant that installs it.
    package: str
    extra: str
    # The function of fakequant that writes its files, and their suffix, which is empty for folders.
    exporter: str = "export_onnx"
    suffix: str = ".onnx"
    # Whether that function runs the model on an example, its third argument.
    takes_example: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightRules:
    """The weights that integer kernels compute with exactly."""

    # The largest number of bits of a weight whose products with 8-bit activations are summed exactly.
    bits: int = 8
    # If True, zero points must be 0.
    is_symmetric: bool = False
    # If True, weights with more bits are not computed in integers.
    is_at_most_8_bits: bool = False
    # Whether it takes biases as floats and quantizes them itself.
    has_float_biases: bool = False
    # Whether it multiplies by 4-bit matrices with an odd number of inputs.
    packs_odd_rows: bool = True

    def fit(self, spec: QuantSpec) -> QuantSpec:
        """Returns `spec` unchanged, with fewer bits, or symmetric."""
        if self.is_symmetric:
            spec = dataclasses.replace(spec, signed=True, symmetric=True)
        if self.is_at_most_8_bits:
            spec = dataclasses.replace(spec, bits=min(spec.bits, 8))
        return dataclasses.replace(spec, bits=self.bits) if self.bits < spec.bits <= 8 else spec

    def reason_against(self, spec: QuantSpec, levels: "Tensor", name: str) -> str | None:
        """Returns why the target called `name` cannot compute with a weight, or None if it can."""
        if self.is_at_most_8_bits and (spec.bits > 8 or not spec.symmetric):
            return f"has weights in {spec}, but {name} needs symmetric weights of at most 8 bits"
        if self.is_symmetric and not spec.symmetric:
            return f"has weights in {spec}, but {name} needs symmetric weights"
        largest = int(levels.abs().max()) if levels.numel() else 0
        limit = 2 ** (self.bits - 1)
        if self.bits < 8 and largest > limit:
            return f"has weights up to {largest}, but {name} sums them exactly only up to {limit}"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationRules:
    """The activations that integer kernels take."""

    # If True, zero points must be 0, and activations have the full range of 8 bits.
    is_symmetric_int8: bool = False
    # If True, activations have at most 8 bits, and one scale per tensor or per token.
    is_at_most_8_bits: bool = False
    # Whether it also has kernels for symmetric activations of 16 bits.
    has_symmetric_int16: bool = False
    # If True, exported activations have unsigned codes, because the kernels of the runtime require them.
    is_stored_unsigned: bool = False
    # Whether there are kernels for scales that are computed at run time, the only grid of these if there is one, and
    # their lower limit in training.
    has_dynamic_scales: bool = True
    dynamic_spec: QuantSpec | None = None
    smallest_dynamic_scale: float = EPS

    def fit(self, spec: QuantSpec) -> QuantSpec:
        """Returns `spec` adapted to the runtime."""
        if spec.granularity == "token" and self.dynamic_spec is not None and (spec.bits == 8 or self.is_at_most_8_bits):
            return dataclasses.replace(self.dynamic_spec, numerics=spec.numerics)
        if self.is_at_most_8_bits and self.has_symmetric_int16 and spec.bits > 8:
            whole = dataclasses.replace(spec, bits=16, signed=True, symmetric=True, narrow_range=False)
            return dataclasses.replace(whole, axis=None, group_size=None)
        if self.is_at_most_8_bits:
            return dataclasses.replace(spec, bits=min(spec.bits, 8), axis=None, group_size=None)
        if self.is_symmetric_int8:
            return dataclasses.replace(spec, bits=8, signed=True, symmetric=True, narrow_range=False)
        return spec

    def reason_against(self, spec: QuantSpec, name: str) -> str | None:
        """Returns why the target called `name` cannot compute with an activation of this spec, or None if it can."""
        if self.is_symmetric_int8 and not spec.symmetric:
            return f"is affine ({spec}), but {name} needs symmetric activations"
        if self.is_symmetric_int8 and (spec.bits != 8 or spec.narrow_range):
            return f"is {spec}, but {name} needs activations with the full range of 8 bits"
        if self.has_symmetric_int16 and spec.bits == 16 and spec.symmetric and spec.signed:
            return None if spec.granularity == "tensor" else f"is {spec}, but {name} needs one scale for 16 bits"
        if self.is_at_most_8_bits and (spec.bits > 8 or spec.granularity not in ("tensor", "token")):
            return f"is {spec}, but {name} needs activations of at most 8 bits per tensor or per token"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fusions:
    """Which operations become one integer kernel, and what must be quantized for that."""

    # It computes additions, means and the like in integers only if their results are quantized too.
    needs_results: bool = False
    # It computes convolutions in integers only if their results are quantized too.
    needs_convolution_results: bool = False
    # It computes every layer and addition in integers only if its result is quantized too, by a single quantizer.
    needs_all_results: bool = False
    # It adds a tensor to the result of a layer in the kernel of that layer, which rounds only once. Then only the
    # other operand is quantized, and so are results of convolutions that are read as codes and as floats.
    adds_in_layers: bool = False
    # It concatenates codes only if all operands are on the grid of the result.
    joins_on_one_grid: bool = False
    # It multiplies two activations, as attention does, in integers.
    has_integer_products: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRules:
    """What an engine that multiplies dequantized weights has a place for. It computes everything else in float."""

    # The classes of layers whose weights it stores as codes, and those whose inputs stay in float.
    layers: tuple[str, ...]
    weight_only: tuple[str, ...]
    # Return a spec with the rules of the engine.
    fit_weight: Callable[[QuantSpec], QuantSpec]
    fit_input: Callable[[QuantSpec], QuantSpec]
    # Return why it cannot hold a weight, or quantize an input, with a spec. None if it can.
    reason_against_weight: Callable[[QuantSpec], str | None]
    reason_against_input: Callable[[QuantSpec], str | None]
    # Returns why it cannot store keys and values with a spec, or None if it can.
    reason_against_cache: Callable[[QuantSpec], str | None]
    # Why files do not tell how keys and values are stored. None if they do.
    why_no_cache: str | None = None
    # The smallest scale that it computes at run time.
    smallest_dynamic_scale: float = EPS
    # Whether the last block of a row may be shorter than the others.
    has_short_blocks: bool = True

    def with_scales_in(self, spec: QuantSpec, dtype: str) -> QuantSpec:
        """Returns the spec with scales in the dtype of the model, in which the engine keeps them."""
        short = next((name for name in SCALE_FORMATS if name == dtype and name != "float32"), None)
        has_float32_scales = spec.scale_format == "float32" and not spec.has_block_scales
        return dataclasses.replace(spec, scale_format=short) if short and has_float32_scales else spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a model is trained for: a runtime, the grids that it computes exactly, and its arithmetic."""

    name: str
    # What `verify` runs a file of this target in.
    runtime: Runtime
    # Whether that is the runtime of the target itself. The runtime of other targets cannot be run here.
    has_own_runtime: bool = True
    weights: WeightRules = WeightRules()
    activations: ActivationRules = ActivationRules()
    fusions: Fusions = Fusions()
    # Which formulas turn accumulators into codes: "reference"; a room, whose arithmetic.py has them; or "room/kernels",
    # if that file has formulas of several kinds of kernels.
    arithmetic: str = "reference"
    # The same for codes of more than 8 bits. None if it is the same.
    wide_arithmetic: str | None = None
    # Whether its kernels quantize floats by a rule of their own, which rounding.py of the room has.
    has_own_rounding: bool = False
    # Whether it computes with float formats and block scales, too.
    has_float_formats: bool = False
    # Whether it computes with the block types of ggml.
    has_ggml_types: bool = False
    # Whether files can say that keys and values in the cache of attention are quantized.
    has_quantized_caches: bool = True
    # Whether it has kernels for transposed convolutions along three axes, in integers or in float.
    has_volumes: bool = True
    # Set for engines that multiply dequantized weights. None for runtimes that compute with codes.
    engine: EngineRules | None = None

    @property
    def rounding(self) -> "Rounding | None":
        """How its kernels quantize floats. None for the rule of ONNX."""
        from fakequant._runtimes.rounding import rounding_of  # needs torch, which the names of targets do not

        return rounding_of(self.arithmetic) if self.has_own_rounding else None

    def arithmetic_of(self, spec: QuantSpec) -> str:
        """Returns how accumulators become codes of a spec."""
        return self.wide_arithmetic if self.wide_arithmetic is not None and spec.bits > 8 else self.arithmetic

    @property
    def multiplies_inputs(self) -> bool:
        """Whether the input of a layer can be multiplied in float before it is quantized, see `nn._input_factors`."""
        return self.engine is None and not self.fusions.needs_all_results

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

        >>> from fakequant import _runtimes
        >>> _runtimes.find("onnxruntime-x86").fit_weight(QuantSpec(narrow_range=True)).qmax
        63
        """
        return spec if self._is_left_alone(spec) else self.weights.fit(spec)

    def fit_activation(self, spec: QuantSpec) -> QuantSpec:
        """Returns `spec` adapted to the activations of this target.

        >>> from fakequant import _runtimes
        >>> print(_runtimes.find("tensorrt").fit_activation(QuantSpec(signed=False, symmetric=False)))
        int8, per tensor
        """
        return spec if self._is_left_alone(spec) else self.activations.fit(spec)

    def _is_left_alone(self, spec: QuantSpec) -> bool:
        """Returns True for float formats and block scales. Raises ValueError if this target computes in integers."""
        if spec.is_integer:
            return False
        if spec.ggml_type is not None and not self.has_ggml_types:
            raise ValueError(
                f"The target {self.name!r} has no block types of ggml, got the spec ({spec}).\n"
                "Use a recipe or a target for GGUF files, or another spec."
            )
        if not self.has_format(spec):
            raise ValueError(
                f"The target {self.name!r} is for the integer kernels of its runtime, got the spec ({spec}).\n"
                "Use target='generic' for float formats, MX and NVFP4."
            )
        return True

    def has_format(self, spec: QuantSpec) -> bool:
        """Returns True if this target computes with the format of a spec and of its scales.

        >>> from fakequant import _runtimes
        >>> _runtimes.find("onnxruntime-x86").has_format(QuantSpec(format="e4m3fn"))
        False
        """
        if spec.ggml_type is not None:
            return self.has_ggml_types
        return self.has_float_formats or spec.is_integer

    def reason_against_weight(self, spec: QuantSpec, levels: "Tensor") -> str | None:
        """Returns why this target cannot compute with a weight, or None if it can.

        `levels` are the codes of the weight minus its zero point.
        """
        return self.weights.reason_against(spec, levels, self.name)

    def reason_against_activation(self, spec: QuantSpec) -> str | None:
        """Returns why this target cannot compute with an activation of this spec, or None if it can."""
        return self.activations.reason_against(spec, self.name)


def weight_shift(spec: QuantSpec) -> int:
    """Returns the largest k for which weight codes times 2^k are summed exactly on every CPU.

    A weight that meets a quantized input is stored in a byte, even if it has fewer bits. Its codes are stored
    times 2^k, with a scale that is 2^k times smaller. This leaves the weights unchanged, but the bias, whose
    scale is that of the products, is rounded 2^k times finer.

    >>> weight_shift(QuantSpec(bits=2))  # -2 * 32 = -64
    5
    """
    if not (spec.symmetric and spec.signed) or spec.group_size is not None or spec.bits > 8:
        return 0
    shift, largest = 0, _EXACT_WITHOUT_VNNI
    while spec.qmin * 2 ** (shift + 1) >= -largest and spec.qmax * 2 ** (shift + 1) < largest:
        shift += 1
    return shift
