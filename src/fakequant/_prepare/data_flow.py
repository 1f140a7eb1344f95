"""The data flow of a model: where inputs of layers come from, which batch norms fold, the order of layers.

All of it is read from flow graphs. With an example the model is run, and every call is recorded. Without one the model
is traced with torch.fx. If that fails, batch norms are only found in `nn.Sequential`.
"""

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Any, TypeAlias

from torch import nn

from fakequant._prepare.flow_graph import Call, FlowGraph, Repeated
from fakequant._prepare.places import Place, places_before
from fakequant._prepare.record_flow import record_flow
from fakequant._prepare.trace_flow import trace_flow


@dataclasses.dataclass
class DataFlow:
    """The data flow of a model.

    Attributes:
        graphs: Flow graphs: one of a recorded run, or one per mode if the model was traced.
        problem: Why the model could not be traced. None if there are graphs.
        is_recorded: True if the model was run on an example.
    """

    graphs: list[FlowGraph]
    problem: str | None = None
    is_recorded: bool = False


def find_flow(model: nn.Module, example: Any = None) -> DataFlow:
    """Returns the data flow of `model`, from a run on `example` if it is given."""
    if example is not None:
        return DataFlow([record_flow(model, example)], is_recorded=True)
    try:
        return DataFlow(trace_flow(model))
    except Exception as error:  # tracing runs the model's code, which can raise anything
        first = str(error).strip().split("\n")[0]
        return DataFlow([], f"{type(error).__name__}: {first}")


# A call of a module: its path, and the number of the call. None if the module is called once.
ModuleCall: TypeAlias = tuple[str, int | None]


def sources(model: nn.Module, flow: DataFlow) -> dict[ModuleCall, tuple[Place, ...]]:
    """Returns where the input of each call of a module may have been quantized, nearest first.

    Modules with several inputs are left out.
    """
    if not flow.graphs:
        return {}
    found = [_sources(model, graph) for graph in flow.graphs]
    return {call: way for call, way in found[0].items() if all(other.get(call) == way for other in found)}


def repeated_modules(flow: DataFlow) -> dict[str, Repeated]:
    """Returns the modules that are called several times in evaluation, by path."""
    return flow.graphs[-1].repeated if flow.graphs else {}


def call_order(flow: DataFlow) -> list[str]:
    """Returns the modules in the order in which they are called in evaluation. Empty if it is unknown."""
    return [call.path for call in flow.graphs[-1].modules()] if flow.graphs else []


def norm_pairs(model: nn.Module, flow: DataFlow) -> list[tuple[str, str]]:
    """Returns (layer, batch norm) for layers whose result is only used by a batch norm.

    Other code that uses the weight or the bias of such a layer would get the folded one, so the layer is left out.
    """
    if not flow.graphs:
        return _neighbours_in_sequences(model)
    graph = flow.graphs[-1]
    modules = graph.count()
    # A batch norm class that overrides the forward pass is not one call: its code calls F.batch_norm.
    norms = [call for call in graph.calls if _is_norm(model, call)]
    number = Counter(call.path for call in norms)
    operands = [source for call in graph.calls if call.kind == "function" for source in call.inputs]
    read = {source.path.rpartition(".")[0] for source in operands if source.kind == "parameter"}
    found = []
    for call in norms:
        source = call.inputs[0]
        is_only_user = source.kind == "module" and source.users == [call] and source not in graph.results
        if is_only_user and modules[source.path] == number[call.path] == 1 and source.path not in read:
            found.append((source.path, call.path))
    return found


def _is_norm(model: nn.Module, call: Call) -> bool:
    """Returns True for a call of a batch norm, or of `F.batch_norm` in the code of one."""
    if not call.inputs or not isinstance(model.get_submodule(call.path), nn.modules.batchnorm._BatchNorm):
        return False
    return call.kind == "module" or call.function_name == "batch_norm"


def _neighbours_in_sequences(model: nn.Module) -> list[tuple[str, str]]:
    """Returns the pairs that are neighbours in an `nn.Sequential` and are not used anywhere else."""
    found = []
    places = Counter(child for module in model.modules() for child in module._modules.values())
    for path, module in model.named_modules():
        if type(module).forward is nn.Sequential.forward:
            names = [f"{path}.{name}" if path else name for name in module._modules]
            for pair in pairwise(names):
                layer, norm = (model.get_submodule(path) for path in pair)
                is_norm = isinstance(norm, nn.modules.batchnorm._BatchNorm)
                if is_norm and places[layer] == places[norm] == 1:
                    found.append(pair)
    return found


def _sources(model: nn.Module, graph: FlowGraph) -> dict[ModuleCall, tuple[Place, ...]]:
    ways = {(call.path, call.turn): places_before(model, call) for call in graph.modules() if len(call.inputs) == 1}
    return {call: tuple(way) for call, way in ways.items() if way}
