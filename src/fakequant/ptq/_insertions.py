"""Insertions: layers that read the same tensor, and multiply it where no producer can take factors.

    layers with weight * s of x / s, quantized after the division

Each of these layers has a quantizer of its own behind the multiplication. If they shared the one of the result that
they read, it is removed, and other readers, such as the residual addition of a post-norm transformer, get floats.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from fakequant import _runtimes
from fakequant._prepare.attach import preparation
from fakequant._prepare.flow_graph import Call, FlowGraph
from fakequant._prepare.flow_state import save_flow
from fakequant.nn._attention import MultiheadAttention
from fakequant.nn._input_factors import attach_factors, has_factors, remove_factors
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._layers import Conv, Linear
from fakequant.nn._own_forward import OwnForwardConv, OwnForwardLinear
from fakequant.nn._quantized_layer import QuantizedLayer, input_grid_of, kind_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import FACTORS
from fakequant.ptq._channels import number_of_inputs, parameters_of, reason_against_layer, scale_inputs
from fakequant.ptq._links import Finder, Link, Links, is_norm
from fakequant.ptq._rescaling import reason_against_new_range

# Kinds whose weights have their inputs on axis 1.
_KINDS = (Linear, OwnForwardLinear, MultiheadAttention, Conv, OwnForwardConv)
# What may read floats instead of a quantized result: no runtime gains from codes there.
_FLOAT_READERS = {"add", "sub", "layer_norm", "rms_norm"}


@dataclasses.dataclass(eq=False)
class Insertion(Link):
    """Layers that multiply the same tensor by the same factors. They have no producer: `module` is one of them."""

    @property
    def layers(self) -> list[AnyLayer]:
        """The layers that multiply."""
        return list(self.users.values())

    @torch.no_grad()
    def rescale(self, factors: Tensor) -> None:
        """Divides the inputs of the layers by a factor per channel, and multiplies their weights by it."""
        for layer in self.layers:
            own = layer._buffers[FACTORS]
            own.div_(factors.to(own).reshape(own.shape))
            scale_inputs(layer, factors)

    def parameters(self) -> list[Tensor]:
        """Returns all tensors that `rescale` changes."""
        return [t for layer in self.layers for t in (parameters_of(layer)[0], layer._buffers[FACTORS])]


def find_insertions(model: nn.Module, graph: FlowGraph, found: Links) -> list[Insertion]:
    """Returns the insertions for layers that are in no link. Adds to their reasons why there is none."""
    finder = Finder(model, graph)
    linked = {path for link in found.links for path in link.users}
    target = _runtimes.find(preparation(model).config.target)
    groups: dict[Call, dict[str, AnyLayer]] = {}
    for call in graph.modules():
        layer: AnyLayer = model.get_submodule(call.path)
        if call.path in linked or not isinstance(layer, QuantizedLayer):
            continue
        reason = f"{target.name} cannot multiply its input" if not target.multiplies_inputs else None
        reason = reason or _reason_against(finder, call, layer)
        if reason is None:
            groups.setdefault(call.inputs[0], {})[call.path] = layer
        else:
            _explain(found, call.path, reason)
    insertions = []
    for source, layers in groups.items():
        reason = _reason_against_group(model, source, layers)
        if reason is None:
            first = next(iter(layers.values()))
            made = Insertion("", first, number_of_inputs(first), dict(layers), dict.fromkeys(layers, 1))
            insertions.append(made)
        for path in layers if reason is not None else ():
            _explain(found, path, reason)
    return insertions


def _explain(found: Links, path: str, reason: str | None) -> None:
    before = found.reasons.get(path)
    found.reasons[path] = f"{before}; no multiplication: {reason}" if before else str(reason)


def _reason_against(finder: Finder, call: Call, layer: AnyLayer) -> str | None:
    """Returns why a layer cannot multiply its input, or None if it can."""
    kind = kind_of(layer)
    if kind is None or not issubclass(kind, _KINDS) or getattr(layer, "groups", 1) != 1:
        return "only linear layers, attention and convolutions without groups have a place for it"
    reason = reason_against_layer(layer)
    if reason is not None:
        return reason
    if call.caller is not None or finder.count[call.path] != 1 or not call.inputs:
        return "it is not called as a module, once"
    if any(source is not call.inputs[0] for source in call.inputs):
        return "it has several inputs"
    grid = input_grid_of(layer)
    if not isinstance(grid, Quantizer):
        return "its input is not quantized"
    if grid.rounding is not None and not grid.is_dynamic:
        return "the runtime rounds inputs of the model in its own way"
    weight = layer.weight_quantizer
    reason = next((r for q in (grid, weight) if q is not None and (r := reason_against_new_range(q)) is not None), None)
    return reason or finder.reason_against_parameters(call.path, layer, user=True)


def _reason_against_group(model: nn.Module, source: Call, layers: dict[str, AnyLayer]) -> str | None:
    """Returns why layers that read the same result cannot have quantizers of their own, or None if they can."""
    shared = {layer._fakequant.input_grid for layer in layers.values()} - {None}
    if not shared:
        return None
    if len(shared) > 1 or any(layer._fakequant.input_grid is None for layer in layers.values()):
        return "it shares the quantizer of its input with some of the layers that read it"
    (grid,) = shared
    others = [m for m in model.modules() if isinstance(m, QuantizedLayer) and m not in layers.values()]
    if any(layer._fakequant.input_grid is grid for layer in others):
        return f"other layers also read what {grid.path} quantizes"
    holder = next(path for path, module in model.named_modules() if grid in module._modules.values())
    if holder not in (*source.returned_by, source.path, f"{source.path}.function_quantizers".lstrip(".")):
        return f"its input was moved after {grid.path} had quantized it"
    for user in source.users:
        if user.path in layers and user.kind == "module":
            continue
        if user.function_name not in _FLOAT_READERS and not is_norm(model.get_submodule(user.path)):
            return f"{user} also reads what {grid.path} quantizes"
    return None


@contextmanager
def inserting(model: nn.Module, insertions: list[Insertion]) -> Iterator[ExitStack]:
    """Context in which layers multiply their inputs. Afterwards those still do whose factors are not all 1.

    Yields what undoes everything if the body raises.
    """
    with ExitStack() as undo:
        for insertion in insertions:
            for layer in insertion.layers:
                if not has_factors(layer):
                    attach_factors(layer)
                    undo.callback(remove_factors, layer)
        yield undo
        undo.pop_all()
    for layer in (layer for insertion in insertions for layer in insertion.layers):
        if bool((layer._buffers[FACTORS] == 1).all()):
            remove_factors(layer)
    if insertions:
        save_flow(model, preparation(model))
