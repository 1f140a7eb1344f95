"""Turning a quantized layer into an integer layer: codes, scales and the bias of its weight."""

import dataclasses
from math import gcd
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fakequant._backends.blocks import block_lengths
from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.tensor_checks import block_shape
from fakequant._convert.fold_batch_norm import BatchNorm, fold, reason_not_foldable
from fakequant._convert.golden.integer_layer import (
    IntegerLayer,
    Integers,
    bias_scales,
    has_call_grids,
    is_integer,
    set_levels,
    set_weight,
    weight_levels,
)
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._prepare.attach import attach_layer
from fakequant._runtimes.arithmetic import find_arithmetic
from fakequant._runtimes.target import Target, weight_shift
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._folding import bias_codes, widened_scale
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._owners import release_from_owner
from fakequant.nn._quantized_layer import Quantization, input_grids_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import TOKENS, has_tokens
from fakequant.spec import QuantSpec

# A layer whose class changes, from `QuantizedLayer` to `IntegerLayer`.
ChangingLayer: TypeAlias = Any


@torch.no_grad()
def make_integer(
    layer: ChangingLayer, path: str, input_grid: GoldenQuantizer | None, norm: BatchNorm | None, target: Target
) -> str | None:
    """Turns a quantized layer into an integer layer, and folds its batch norm if possible.

    `input_grid` is the grid of the module that computes the input, if the layer has no input quantizer. `norm` is the
    batch norm that follows the layer, or None.

    Returns:
        Why the batch norm could not be folded. None if it was folded, or if `norm` is None.
    """
    before: Quantization = layer._fakequant
    kind, quantizer = before.kind, layer.weight_quantizer
    weight = kind.read_weight(layer).detach()
    bias = getattr(layer, kind.bias_name, None)
    layer._modules.pop("weight_quantizer", None)
    saw_tokens = has_tokens(layer)
    layer._buffers.pop(TOKENS, None)
    cls = before.float_class
    if parametrize.is_parametrized(layer):
        cls = cls.__bases__[0]
        del layer._modules["parametrizations"]
        layer._parameters[kind.weight_name] = nn.Parameter(weight, requires_grad=False)
    record = Integers(kind=kind, float_class=cls, path=path, input_grid=input_grid)
    attach_layer(layer, record, {})
    layer.register_buffer("bias_codes", None)
    if quantizer is None:
        return None
    if not quantizer.has_equal_steps:
        quantized = nn.Parameter(quantizer.eval()(weight), requires_grad=False)
        release_from_owner(layer, kind.weight_name)
        layer._parameters[kind.weight_name] = quantized
        return "its weight is stored as floats"
    if quantizer.is_own_class:
        weight = _values_on_grid(quantizer.eval(), weight, path)
    spec, scale, zero_point = _scales_of(quantizer.eval(), weight)
    layer._parameters.pop(kind.weight_name, None)
    release_from_owner(layer, kind.weight_name)
    record.weight_shape, record.weight_spec = tuple(weight.shape), spec
    if is_integer(layer):
        record.weight_shift = weight_shift(spec)
    layer.register_buffer("weight_scale", scale * 2.0**-record.weight_shift)
    layer.register_buffer("weight_zero_point", None if spec.symmetric else zero_point)
    layer.register_buffer("weight_codes", None)
    set_weight(layer, weight)
    reason = None if norm is None else reason_not_foldable(layer, norm, saw_tokens)
    if norm is not None and reason is None:
        bias = fold(layer, bias, norm)
    _set_bias(layer, bias, target)
    return reason


def _values_on_grid(quantizer: Quantizer, weight: Tensor, path: str) -> Tensor:
    """Returns what a quantizer of the user makes of a weight. Raises ValueError if its spec cannot express it."""
    values = quantizer.without_rounding_errors(quantizer(weight))
    if values is None:
        raise ValueError(
            f"{path} has a quantizer of the class {type(quantizer).__name__}, which returns weights that are no "
            f"codes of its spec ({quantizer.spec}) times its scale.\n"
            "Set its scale so that they are, or has_equal_steps = False in the class, to store them as floats."
        )
    return values


def _scales_of(quantizer: FakeQuantize | LearnedFakeQuantize, weight: Tensor) -> tuple[QuantSpec, Tensor, Tensor]:
    """Returns the spec, the scale and the zero point of a weight."""
    spec, shape = quantizer.spec, tuple(weight.shape)
    if spec.granularity != "token":
        if not quantizer.is_own_class:  # whose scale is of the weight before it was quantized
            quantizer(weight)  # a dynamic quantizer computes its scale now
        found = quantizer.qparams()
        return (spec, *found) if spec.granularity != "block" else _in_groups(spec, *found, shape)
    # One scale per whole axis is the same as one per channel if there is only one other axis. Otherwise it is the
    # same as groups as long as the axis.
    seen = tensor_functions.min_max(weight, spec)
    scale, zero_point = tensor_functions.choose_qparams(seen.min, seen.max, spec, eps=quantizer.eps)
    assert spec.axis is not None
    axis = spec.axis % len(shape)
    others = sorted((a for a in range(len(shape)) if a != axis), key=lambda a: shape[a] == 1)
    if all(shape[a] == 1 for a in others[1:]):
        return dataclasses.replace(spec, axis=others[0], group_size=None), scale.reshape(-1), zero_point.reshape(-1)
    spec = dataclasses.replace(spec, group_size=shape[axis])
    blocks = block_shape(shape, spec)
    return spec, scale.reshape(blocks), zero_point.reshape(blocks)


def _in_groups(
    spec: QuantSpec, scale: Tensor, zero_point: Tensor, shape: tuple[int, ...]
) -> tuple[QuantSpec, Tensor, Tensor]:
    """Returns blocks of rows as groups along each row, which runtimes have."""
    (_, rows), (_, columns) = block_lengths(shape, spec)
    *_, height, width = shape
    size = gcd(columns, width)  # divides the shorter last block too

    def spread(value: Tensor) -> Tensor:
        by_row = value.repeat_interleave(rows, -2)[..., :height, :]
        return by_row.repeat_interleave(columns // size, -1)[..., : width // size].contiguous()

    return dataclasses.replace(spec, group_size=size, group_rows=None), spread(scale), spread(zero_point)


def _set_bias(layer: IntegerLayer, bias: Tensor | None, target: Target) -> None:
    """Stores the bias of a layer, as integers if the scale of the sums is known and otherwise as floats."""
    name = layer._fakequant.kind.bias_name
    release_from_owner(layer, name)
    if name in layer._parameters:
        layer._parameters[name] = None
    if bias is None:
        return
    if is_integer(layer):
        layer._parameters.pop(name, None)  # it is computed from the codes when it is read
        _widen(layer, min(grid.scale for grid in input_grids_of(layer)), bias.detach())
        codes = [_rounded_bias(bias.detach(), scale, target) for scale in bias_scales(layer)]
        layer.bias_codes = torch.stack(codes) if has_call_grids(layer) else codes[0]
    else:
        layer._parameters[name] = nn.Parameter(bias.detach().float(), requires_grad=False)


def _rounded_bias(bias: Tensor, scale: Tensor, target: Target) -> Tensor:
    """Returns the codes of a bias at the scale of the sums."""
    codes = bias_codes(bias, scale).to(torch.int32)
    return find_arithmetic(target.arithmetic).bias_in_file(codes, scale)


def _widen(layer: IntegerLayer, x_scale: Tensor, bias: Tensor) -> None:
    """Increases the weight scale of channels whose bias would not fit in 32 bits.

    Only needed if the bias is so much larger than the weights that losing bits of them makes no difference.
    """
    record = layer._fakequant
    if record.kind.channel_axis != 0:
        return
    needed = widened_scale(layer.weight_scale, x_scale, bias)
    if not bool((needed > layer.weight_scale).any()):
        return
    if layer.weight_zero_point is not None:
        raise ValueError(
            f"The bias of {record.path} does not fit in 32 bits at the scale of its sums.\nUse symmetric weights."
        )
    before = layer.weight_scale.expand_as(needed)
    levels = weight_levels(layer) * (before / needed).reshape(-1, *[1] * (len(record.weight_shape) - 1))
    record.weight_spec, record.is_widened = dataclasses.replace(record.weight_spec, axis=0), True
    layer.weight_scale = needed
    set_levels(layer, levels.round())
