"""Makes the quantizers of a model's inputs round at ties as the target does.

A tie between two codes is rare in computed values, but data can be full of them. There, training must see the codes
that the runtime will compute. Scales that XNNPACK computes for tokens at run time have a rule of their own, which all
their quantizers follow.
"""

from collections.abc import Iterable

from torch import nn

from fakequant import _targets
from fakequant._moves import SELECTING_NAMES, TRACED_MODULES, TRACED_NAMES
from fakequant._prepare.data_flow import DataFlow
from fakequant._prepare.flow_graph import Call
from fakequant.nn._call_quantizers import CallQuantizers, quantizers_in
from fakequant.nn._model_quantizers import quantizers
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer


def round_inputs(model: nn.Module, flow: DataFlow, target: str) -> None:
    """Sets the rounding of the quantizers that read an input of a prepared model, also after a move."""
    rule = _targets.find(target).rounding
    if rule is None:
        return
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    found = {q for layer in layers.values() for q in quantizers_in(layer.input_quantizer) if _is_token_grid(q, rule)}
    for call in (call for graph in flow.graphs for call in graph.modules()):
        if call.path in layers and _reads_input(model, call):
            slot = layers[call.path].input_quantizer
            own = slot.own(call.turn) if isinstance(slot, CallQuantizers) and call.turn is not None else slot
            if isinstance(own, Quantizer) and _is_fixed(own):
                found.add(own)
    for quantizer in found:
        quantizer.rounding = rule


def set_rounding(model: nn.Module, paths: Iterable[str], target: str) -> None:
    """Sets the rounding of quantizers, given by their paths."""
    for path in paths:
        quantizer = model.get_submodule(path)
        if isinstance(quantizer, Quantizer):
            quantizer.rounding = _targets.find(target).rounding


def rounded_quantizers(model: nn.Module) -> list[str]:
    """Returns the paths of the quantizers with a rounding of their own."""
    return [path for path, quantizer in quantizers(model) if quantizer.rounding is not None]


def _is_fixed(quantizer: Quantizer) -> bool:
    spec = quantizer.spec
    return spec.granularity == "tensor" and spec.bits <= 8 and not quantizer.is_dynamic


def _is_token_grid(quantizer: Quantizer, rule: str | None) -> bool:
    """Returns True if XNNPACK computes the scales of the quantizer's tokens."""
    return rule == "xnnpack" and quantizer.spec == _targets.TOKEN_SPEC


def _reads_input(model: nn.Module, call: Call) -> bool:
    while call.inputs:
        call = call.inputs[0]
        if call.kind == "function":
            moves = call.function_name in TRACED_NAMES | SELECTING_NAMES
        else:
            moves = call.kind == "module" and isinstance(model.get_submodule(call.path), TRACED_MODULES)
        if not moves:
            return call.kind == "input"
    return False
