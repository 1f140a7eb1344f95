"""A check of `convert`: derives the golden model's parameters a second time and compares them.

weight                   scale * code equals the prepared model's quantized weight, bit by bit
with a folded norm       scale * |factor| and code * sign(factor)
bias                     rint(bias / (x_scale * weight_scale)), within rounding if the runtime takes floats
"""

import torch
from torch import Tensor, nn

from fakequant import _runtimes
from fakequant._convert.convert import conversion
from fakequant._convert.golden.integer_layer import IntegerLayer, biases, float_weight, is_integer
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant.nn._bounded_parameters import whole
from fakequant.nn._folding import factor_of, folded_bias
from fakequant.nn._quantized_layer import QuantizedLayer, quantized_weight
from fakequant.nn._quantizer import Quantizer

# For a larger bias, `convert` increases the scale of the channel, which changes its codes.
_LARGE_BIAS = 2**29
# The relative error of a product that is rounded once to float32.
_ONE_ROUNDING = 2.0**-24


@torch.no_grad()
def require_converted(model: nn.Module, golden: nn.Module, norms: dict[str, str]) -> None:
    """Raises RuntimeError if the golden model's parameters do not follow from those of the prepared model.

    `norms` maps the paths of layers to the paths of the batch norms that were folded into them.
    """
    converted = dict(golden.named_modules())
    has_float_biases = _runtimes.find(conversion(golden).target).weights.has_float_biases
    for path, module in model.named_modules():
        made = converted.get(path)
        if isinstance(module, Quantizer) and isinstance(made, GoldenQuantizer):
            _require_grid(path, module, made)
        if isinstance(module, QuantizedLayer) and isinstance(made, IntegerLayer):
            norm = model.get_submodule(norms[path]) if path in norms else None
            _require_layer(path, module, made, norm, 4 * _ONE_ROUNDING if has_float_biases else 0.0)


def _require_grid(path: str, quantizer: Quantizer, made: GoldenQuantizer) -> None:
    if made.scale is not None and made.zero_point is not None:
        scale, zero_point = quantizer.qparams()
        _demand(torch.equal(scale, made.scale), path, "scale")
        _demand(torch.equal(zero_point, made.zero_point), path, "zero point")


def _require_layer(
    path: str, layer: QuantizedLayer, made: IntegerLayer, norm: nn.Module | None, rounding: float
) -> None:
    kind = made._fakequant.kind
    axis: int = kind.channel_axis
    bias = getattr(layer, kind.bias_name, None)
    bias = None if bias is None else whole(bias)
    if norm is not None:
        bias = folded_bias(bias, norm)
    usual = torch.ones((), dtype=torch.bool)
    for codes, step in biases(made):
        is_usual = codes.abs() < _LARGE_BIAS
        assert bias is not None
        expected = (bias.double() / step.double()).round()
        near = (expected - codes).abs() <= (expected.abs() * rounding).floor()
        _demand(bool(near[is_usual].all()), path, "bias")
        usual = usual & is_usual
    if made.bias_codes is None and bias is not None and not is_integer(made):
        _demand(torch.equal(bias.float(), getattr(made, kind.bias_name)), path, "bias")
    if made._fakequant.weight_spec is None:
        return
    here, there = quantized_weight(layer).detach(), float_weight(made)
    if norm is None:
        _demand(bool((_along(usual, here, axis).logical_not() | (here == there)).all()), path, "weight")
        return
    factor, tiny = factor_of(norm), torch.finfo(torch.float32).tiny
    exact = here.double() * _along(factor, here, axis)
    close = (there.double() - exact).abs() <= exact.abs() * 4 * _ONE_ROUNDING + tiny
    _demand(bool((_along(usual, here, axis).logical_not() | close).all()), path, "weight")
    scale = None if layer.weight_quantizer is None else layer.weight_quantizer.scale
    if isinstance(scale, Tensor):  # None if every token has its own scale
        exact = scale.double() * 2.0**-made._fakequant.weight_shift * factor.abs().reshape(-1, *[1] * (scale.dim() - 1))
        same = exact.clamp(min=tiny).float() == made.weight_scale
        _demand(bool((usual.reshape(-1, *[1] * (same.dim() - 1)).logical_not() | same).all()), path, "scale")


def _along(value: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Reshapes values per output channel so that they broadcast with the weight."""
    channels = weight.shape[axis]
    if value.dim() == 0 or value.numel() != channels:  # transposed convolution: its groups share the channel axis
        return value.all() if value.dtype == torch.bool else value
    return value.reshape([-1 if a == axis else 1 for a in range(weight.dim())])


def _demand(condition: bool, path: str, what: str) -> None:
    if not condition:
        raise RuntimeError(
            f"The {what} of {path} differs between the converted and the prepared model. This is a bug in fakequant.\n"
            "Please report it with the model's config."
        )
