"""Quantizers for each call of a module that is called several times; see `fakequant.nn._call_quantizers`."""

import copy
from collections.abc import Mapping

from torch import nn

from fakequant._prepare.attach import attach_calls
from fakequant._prepare.flow_graph import FlowGraph, Repeated
from fakequant._prepare.plan import Plan
from fakequant.nn._call_quantizers import CallQuantizers, Calls
from fakequant.nn._owners import OwnedProduct
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import find_record


class RepeatedCalls:
    """The modules that are called several times, and the `Calls` of those that quantize each call separately."""

    def __init__(self, repeated: Mapping[str, Repeated]) -> None:
        self.repeated = repeated
        self._made: dict[str, Calls] = {}

    def of(self, path: str) -> Calls:
        """Returns the calls of the module at `path`."""
        if path not in self._made:
            self._made[path] = Calls(self.repeated[path].number)
        return self._made[path]

    def slot(self, path: str, quantizers: Mapping[int | None, Quantizer]) -> nn.Module:
        """Returns the child that quantizes a tensor of a module, from its quantizers by the number of the call.

        If the module is called once, `quantizers` has one for None.
        """
        by_number = {number: quantizer for number, quantizer in quantizers.items() if number is not None}
        return CallQuantizers(self.of(path), by_number) if by_number else quantizers[None]

    def attach(self, model: nn.Module) -> None:
        """Makes the modules count their calls."""
        for path, calls in self._made.items():
            attach_calls(model.get_submodule(path), calls, model.get_submodule(self.repeated[path].scope))


def split_calls(plan: Plan, graph: FlowGraph, repeated: RepeatedCalls) -> None:
    """Gives the layers of a plan that are called several times one quantizer per call, for each of their activations.

    Calls with the same input share the quantizer of the input. Quantizers with dynamic scales need not be split. The
    steps of recurrent layers have one range, whatever their number is.
    """
    inputs = _inputs_of_calls(graph)
    for layer in plan.layers:
        if isinstance(layer.module, OwnedProduct):
            continue
        number = graph.repeated.get(layer.path, Repeated(1, "")).number
        for name, quantizer in layer.quantizers.items():
            if number == 1 or name == "weight_quantizer":
                continue
            if not isinstance(quantizer, Quantizer) or quantizer.is_dynamic:
                continue
            same = inputs.get(layer.path, {}) if name == "input_quantizer" else {}
            firsts = [same.get(turn, turn) for turn in range(number)]
            if len(set(firsts)) > 1:
                layer.quantizers[name] = split(quantizer, firsts, repeated.of(layer.path))


def split(quantizer: Quantizer, firsts: list[int], calls: Calls) -> CallQuantizers:
    """Returns a quantizer like the given one for each call.

    `firsts` has, for each call, the number of the first call with the same tensor.
    """
    made: dict[int, Quantizer] = {}
    for turn, first in enumerate(firsts):
        made[turn] = made[first] if first != turn else copy.deepcopy(quantizer) if turn else quantizer
    return CallQuantizers(calls, made)


def _inputs_of_calls(graph: FlowGraph) -> dict[str, dict[int, int]]:
    """Returns, by path and number of a call, the number of the first call of the module with the same inputs."""
    found: dict[str, dict[int, int]] = {}
    firsts: dict[tuple[str, tuple[object, ...]], int] = {}
    for call in graph.modules():
        if call.turn is not None:
            found.setdefault(call.path, {})[call.turn] = firsts.setdefault((call.path, (*call.inputs,)), call.turn)
    return found


def describe_splits(model: nn.Module) -> dict[str, dict[str, list[int]]]:
    """Returns the activations of layers that have a quantizer for each call, by path and name of the child.

    Each is a list with the number of the first call that has the same quantizer, for every call.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for path, module in model.named_modules():
        for name, slot in module._modules.items() if isinstance(module, QuantizedLayer) else ():
            if isinstance(slot, CallQuantizers):
                every = slot.all()
                found.setdefault(path, {})[name] = [every.index(quantizer) for quantizer in every]
    return found


def describe_repeated(model: nn.Module) -> dict[str, list[int | str]]:
    """Returns the modules that count their calls, by path: how many there are, and the path of the scope."""
    records = {path: record for path, module in model.named_modules() if (record := find_record(module)) is not None}
    scopes = {calls: path for path, record in records.items() for calls in record.counted}
    counting = {path: record.calls for path, record in records.items() if record.calls is not None}
    return {path: [calls.recorded, scopes[calls]] for path, calls in counting.items()}
