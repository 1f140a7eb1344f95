"""Makes the quantizers of a model's inputs round at ties as the target does.

A tie between two codes is rare in computed values, but data can be full of them, and so can results of functions such
as softmax, which often returns 0.5. There, training must see the codes that the runtime will compute. Scales that
a runtime computes for tokens may have a rule of their own, which all their quantizers follow.
"""

from collections.abc import Iterable

from torch import nn

from fakequant import _runtimes
from fakequant._moves import SELECTING_NAMES, TRACED_MODULES, TRACED_NAMES
from fakequant._prepare.flow_graph import Call, FlowGraph
from fakequant.nn._call_quantizers import CallQuantizers, quantizers_in
from fakequant.nn._model_quantizers import named_quantizers
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer

# Functions and modules whose results are often exactly 0.5 or another simple fraction.
_FRACTIONS = {"softmax", "sigmoid", "hardsigmoid"}
_FRACTION_MODULES = (nn.Softmax, nn.Softmax2d, nn.Sigmoid, nn.Hardsigmoid)


def round_inputs(model: nn.Module, graph: FlowGraph, target: str) -> None:
    """Sets the rounding of the layers' quantizers that read an input of the model or fractions, also after a move."""
    rule = _runtimes.find(target).rounding
    if rule is None:
        return
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    found = {q for layer in layers.values() for q in quantizers_in(layer.input_quantizer) if q.spec == rule.token_spec}
    for call in graph.modules():
        if call.path in layers and _reads_ties(model, call):
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
            quantizer.rounding = _runtimes.find(target).rounding


def rounded_quantizers(model: nn.Module) -> list[str]:
    """Returns the paths of the quantizers with a rounding of their own."""
    return [path for path, quantizer in named_quantizers(model) if quantizer.rounding is not None]


def _is_fixed(quantizer: Quantizer) -> bool:
    spec = quantizer.spec
    return spec.granularity == "tensor" and spec.bits <= 8 and not quantizer.is_dynamic


def _reads_ties(model: nn.Module, call: Call) -> bool:
    while call.inputs:
        call = call.inputs[0]
        module = model.get_submodule(call.path) if call.kind == "module" else None
        if call.function_name in _FRACTIONS or isinstance(module, _FRACTION_MODULES):
            return True
        if not (call.function_name in TRACED_NAMES | SELECTING_NAMES or isinstance(module, TRACED_MODULES)):
            return call.kind == "input"
    return False
