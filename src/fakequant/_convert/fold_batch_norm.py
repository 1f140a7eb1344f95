"""Folds a batch norm into the layer before it: the layer gets new scales per channel and a new bias.

    y = (x w + b - mean) * factor + beta        factor = gamma / sqrt(variance + eps)

    weight_scale' = weight_scale * |factor|     codes' = -codes where factor < 0
    b'            = (b - mean) * factor + beta

Codes of a symmetric grid with narrow range can change their sign, so the weights are not rounded again.
"""

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn

from fakequant._convert.golden.integer_layer import IntegerLayer, set_levels, weight_levels
from fakequant._prepare.data_flow import copy_for_tracing
from fakequant.nn._batch_norm import factor_of, folded_bias, folded_scale, lacks_opposite
from fakequant.nn._layer_kinds import LayerKind
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm


class Pair(NamedTuple):
    """The paths of a layer and of the batch norm that is the only consumer of its output."""

    layer: str
    norm: str


class Folded(nn.Module):
    """The identity that replaces a folded batch norm. It keeps the batch norm's output quantizer."""

    output_quantizer: Any

    def __init__(self, output_quantizer: nn.Module | None = None) -> None:
        super().__init__()
        self.register_module("output_quantizer", output_quantizer)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.output_quantizer is None else self.output_quantizer(x)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (QuantizedLayer, Quantizer)):
            return True
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return m.__module__.startswith(("torch.nn", "torch.ao.nn"))


def find_pairs(model: nn.Module) -> tuple[list[Pair], str | None]:
    """Returns the layers whose output is only used by a batch norm that can be folded into them.

    Also returns why the model could not be traced, or None if it was. Without tracing, only neighbours in an
    `nn.Sequential` are found.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            graph = _Tracer().trace(copy_for_tracing(model).eval())
    except Exception as error:  # tracing runs the model's code, which can raise anything
        first = str(error).strip().split("\n")[0]
        return _pairs_in_sequentials(model), f"{type(error).__name__}: {first}"
    calls: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    found = []
    for node in graph.nodes:
        if node.op != "call_module" or not _is_norm(model.get_submodule(str(node.target))):
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
            continue
        pair = Pair(str(source.target), str(node.target))
        if calls[pair.layer] == calls[pair.norm] == 1 and _can_fold(model, pair):
            found.append(pair)
    return found, None


def _pairs_in_sequentials(model: nn.Module) -> list[Pair]:
    """Returns the pairs that are neighbours in an `nn.Sequential` and are not used anywhere else."""
    found = []
    places = Counter(child for module in model.modules() for child in module._modules.values())
    for path, module in model.named_modules():
        if type(module).forward is nn.Sequential.forward:
            names = [f"{path}.{name}" if path else name for name in module._modules]
            pairs = [Pair(a, b) for a, b in pairwise(names)]
            for pair in pairs:
                both = [model.get_submodule(path) for path in pair]
                if all(places[module] == 1 for module in both) and _is_norm(both[1]) and _can_fold(model, pair):
                    found.append(pair)
    return found


def _is_norm(module: nn.Module) -> bool:
    if not isinstance(module, BatchNorm) or module.running_mean is None:
        return False
    return type(module).forward in (BatchNorm.forward, nn.SyncBatchNorm.forward)


def _can_fold(model: nn.Module, pair: Pair) -> bool:
    """Returns True if the weight has, or can be given, one scale or group of scales per channel of the batch norm."""
    layer = model.get_submodule(pair.layer)
    norm = find_norm(model, pair)
    if not isinstance(layer, QuantizedLayer) or layer.output_quantizer is not None or layer.weight_quantizer is None:
        return False
    kind: type[LayerKind] = layer._fakequant.kind
    weight: Tensor = getattr(layer, kind.weight_name)
    spec, axis = layer.weight_quantizer.spec, kind.channel_axis
    is_grouped = getattr(layer, "groups", 1) != 1 and axis != 0
    if not spec.symmetric or is_grouped or norm.num_features != weight.shape[axis]:
        return False
    if spec.axis is None:
        return True
    scale_axis = spec.axis % weight.dim()
    return scale_axis == axis if spec.group_size is None else scale_axis != 0 and axis == 0


def find_norm(model: nn.Module, pair: Pair) -> BatchNorm:
    """Returns the batch norm of a pair."""
    norm = model.get_submodule(pair.norm)
    assert isinstance(norm, BatchNorm)
    return norm


def reason_not_foldable(layer: IntegerLayer, norm: BatchNorm, has_tokens: bool) -> str | None:
    """Returns why a batch norm cannot be folded into an integer layer, or None if it can.

    `has_tokens` says whether the layer was given inputs with more than two axes.
    """
    record = layer._fakequant
    spec = record.weight_spec
    if len(record.weight_shape) == 2 and has_tokens:
        return "with inputs of more than two axes, it normalizes another axis than the layer's channels"
    if spec.qmin == -spec.qmax:
        return None
    lowest = weight_levels(layer).movedim(record.kind.channel_axis, 0).flatten(1).amin(1) / 2**record.weight_shift
    if bool(lacks_opposite(lowest, spec.qmin, factor_of(norm))):
        return (
            f"a channel with a negative factor has the code {spec.qmin}, which cannot change its sign; "
            "use narrow_range=True"
        )
    return None


def fold(layer: IntegerLayer, bias: Tensor | None, norm: BatchNorm) -> Tensor:
    """Folds a batch norm into the codes and the scale of an integer layer. Returns the new bias in float64."""
    factor, record = factor_of(norm), layer._fakequant
    axis, dims = record.kind.channel_axis, len(record.weight_shape)
    channels = record.weight_shape[axis]
    if record.weight_spec.axis is None:
        record.weight_spec = dataclasses.replace(record.weight_spec, axis=axis)
        layer.weight_scale = layer.weight_scale.expand(channels).clone()
    per_scale = factor.reshape(-1, *[1] * (layer.weight_scale.dim() - 1))
    layer.weight_scale = folded_scale(layer.weight_scale, per_scale)
    sign = factor.sign().reshape([-1 if a == axis else 1 for a in range(dims)])
    set_levels(layer, weight_levels(layer) * sign.float())
    # A batch norm normalizes axis 1. After a linear layer these are the channels only if inputs have two axes.
    record.takes_vectors = dims == 2
    return folded_bias(bias, norm)
