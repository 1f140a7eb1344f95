"""Float formats and block scales in a file. Weights have fixed scales; scales of activations are found at run time.

Scales of activations are computed in operations that ONNX has. Every step is exact, so that a file has the bits of
`observe_fake_quantize(..., update="dynamic")`:

    magnitudes      non-finite values count as 0
    powers of two   found by comparing with powers of two, in two steps; no logarithm
    FP8             QuantizeLinear and DequantizeLinear with scale 1
    FP6, FP4        ONNX has no FP6, and few runtimes have FP4: rounded to the spacing of the format, in float32
"""

import dataclasses
from math import frexp

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant._backends.blocks import group_length, normalize_axis
from fakequant._backends.torch import tensor_functions
from fakequant._convert.golden.integer_layer import IntegerLayer, is_packed, weight_levels
from fakequant._export.onnx import operators
from fakequant.formats import FloatFormat
from fakequant.spec import QuantSpec

_SMALLEST_NORMAL = 2.0**-126
_SMALLEST_POWER = 2.0**-127
# Every power of two of a normal number is a product of one of the first and one of the second.
_COARSE = tuple(2.0**e for e in (-126, *range(-112, 113, 16)))
_FINE = tuple(2.0**e for e in range(16))


def dynamic_format_grid(x: Tensor, spec: QuantSpec, eps: float, path: str) -> Tensor:
    """Fake-quantizes `x` with the scales of its own blocks.

    The spec has a float format, block scales, or both. `eps` is the smallest float32 scale, and `path` the path of the
    quantizer, for names.
    """
    if spec.axis is None or spec.granularity != "group":
        axes = tuple(range(x.dim())) if spec.axis is None else (spec.axis,)
        return _on_own_grid(x, axes, spec, eps, path)
    axis = normalize_axis(spec.axis, x.dim())
    length = x.shape[axis]
    size = group_length(length, spec)
    missing = -length % size
    # A shorter last block is filled with zeros, which change no maximum.
    filled = F.pad(x, [0, 0] * (x.dim() - 1 - axis) + [0, missing]) if missing else x
    y = _on_own_grid(filled.unflatten(axis, (-1, size)), (axis + 1,), spec, eps, path).flatten(axis, axis + 1)
    return y.narrow(axis, 0, length) if missing else y


def _on_own_grid(x: Tensor, axes: tuple[int, ...], spec: QuantSpec, eps: float, path: str) -> Tensor:
    magnitude = x.abs()
    magnitude = torch.where(magnitude < torch.inf, magnitude, 0.0)  # NaN is not less
    scale = _scales(magnitude.amax(axes, keepdim=True), spec, eps, path)
    return rounded(x / scale, spec, f"{path}.values") * scale


def rounded(t: Tensor, spec: QuantSpec, name: str) -> Tensor:
    """Returns the nearest values of the grid with scale 1."""
    if spec.float_format is None:
        r = torch.round(t).clamp(spec.qmin, spec.qmax)
        return torch.where(r == 0, 0.0, r)  # integers have no -0
    if spec.bits == 8:
        return operators.rounded_to_format(t, spec.format, name)
    return _rounded_by_steps(t, spec.float_format)


def _rounded_by_steps(t: Tensor, to: FloatFormat) -> Tensor:
    """Returns the nearest values of a format: multiples of the distance between neighbours, half to even."""
    a = t.abs()
    step = torch.full_like(a, to.smallest)
    power = 2 * to.smallest_normal
    while power <= to.largest:
        step = torch.where(a >= power, power * 2.0**-to.mantissa_bits, step)
        power *= 2
    r = (torch.round(a / step) * step).clamp(max=to.largest)
    return torch.where(t < 0, -r, torch.where(t == 0, t, r))  # -0 stays -0


def _scales(absmax: Tensor, spec: QuantSpec, eps: float, path: str) -> Tensor:
    """Returns the scales of blocks with these largest magnitudes. `choose_qparams` has the formulas."""
    if spec.scale_format == "float32":
        return (absmax / spec.largest).clamp(min=eps)
    if spec.scale_format == "e8m0":
        return _power_scales(absmax, spec)
    under = absmax.amax(tuple(range(absmax.dim())), keepdim=True) / 2688.0
    under = torch.where(under == 0, 1.0, under)
    wanted = ((absmax / 6.0) / under).clamp(2.0**-6, 448.0)
    scale = operators.rounded_to_format(wanted, "e4m3fn", f"{path}.block_scales") * under
    return scale.clamp(min=2.0**-149)


def _power_scales(absmax: Tensor, spec: QuantSpec) -> Tensor:
    largest_exponent = frexp(spec.largest)[1] - 1
    mantissa_bits = largest_exponent if spec.float_format is None else spec.float_format.mantissa_bits
    value = absmax / spec.largest if spec.scale_rule == "rceil" else absmax
    power, mantissa = _power_and_mantissa(value)
    scale = power if spec.scale_rule == "rceil" else power * 2.0**-largest_exponent
    if spec.scale_rule in ("ceil", "rceil"):
        # A subnormal has the exponent -127 and a mantissa.
        is_normal = value >= _SMALLEST_NORMAL
        goes_up = (is_normal & (mantissa != 1)) | (~is_normal & (value > 0))
        scale = torch.where(goes_up, scale * 2, scale)
    elif spec.scale_rule in ("even", "even_e2m1"):
        kept = mantissa_bits if spec.scale_rule == "even" else 1
        scale = torch.where(mantissa >= 2 - 2.0 ** -(kept + 1), scale * 2, scale)
    return scale.clamp(min=_SMALLEST_POWER)


def _power_and_mantissa(value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the power of two at or below each value, and the value divided by it. 2^-127 below normal numbers."""
    coarse = _largest_below(value, _COARSE)
    rest = value / coarse
    fine = _largest_below(rest, _FINE)
    return torch.where(value < _SMALLEST_NORMAL, _SMALLEST_POWER, coarse * fine), rest / fine


def _largest_below(value: Tensor, powers: tuple[float, ...]) -> Tensor:
    """Returns the largest power at or below each value, or the first one if all are larger."""
    among = torch.tensor(powers, dtype=torch.float32)
    return torch.where(value.unsqueeze(-1) >= among, among, powers[0]).amax(-1)


# --- weights ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StoredFormat:
    """The codes and scales of a weight in a file. There are no zero points, and the bias is a float."""

    spec: QuantSpec
    # One per element: bit patterns of a float format, or int8.
    codes: Tensor
    # float32, one per block.
    scale: Tensor

    zero_point: None = None
    biases: tuple[()] = ()
    is_transposed: bool = False

    def weight(self, name: str) -> Tensor:
        """Returns the dequantized weight as the result of the operator that stores its codes."""
        spec = self.spec
        axis, block = axis_and_block(spec, tuple(self.codes.shape))
        return operators.stored_format(self.codes, self.scale, spec.format, spec.scale_format, axis, block, name)

    def values(self) -> Tensor:
        """Returns the values of the codes, without the scales."""
        return tensor_functions.dequantize(self.codes, 1.0, 0, _without_scales(self.spec))


def stored_format(layer: IntegerLayer) -> StoredFormat:
    """Returns what a file stores for the weight of a converted layer."""
    spec = layer._fakequant.weight_spec
    codes = layer.weight_codes
    if is_packed(layer):
        codes = tensor_functions.quantize(weight_levels(layer), 1.0, 0, _without_scales(spec))
    return StoredFormat(spec, codes, layer.weight_scale)


def _without_scales(spec: QuantSpec) -> QuantSpec:
    return dataclasses.replace(spec, axis=None, group_size=None, scale_format="float32", scale_rule="floor")


def axis_and_block(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the axis of scales, or 0 without one, and how many elements share a scale along it, or 0 for channels."""
    if spec.axis is None:
        return 0, 0
    axis = spec.axis % len(shape)
    return axis, 0 if spec.group_size is None else group_length(shape[axis], spec)
