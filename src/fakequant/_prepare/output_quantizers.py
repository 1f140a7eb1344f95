"""The quantizers of results: outputs of modules, and results of functions that their code calls.

A layer that reads a quantized result needs no input quantizer. It shares the one of the result.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from fakequant import _runtimes
from fakequant._prepare.attach import attach_functions, attach_output, preparation
from fakequant._prepare.flow_graph import FlowGraph, notes_on_weights, weight_readers
from fakequant._prepare.outputs_to_quantize import (
    Place,
    attention_to_quantize,
    can_be_watched,
    find_place,
    places_before,
    quantized_products,
    results_to_quantize,
)
from fakequant._prepare.plan import Plan, check_free, make_activation_quantizer
from fakequant._prepare.repeated_calls import RepeatedCalls
from fakequant.config import QuantConfig
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._function_calls import CHILD, WEIGHTS, FunctionQuantizers, calling_class
from fakequant.nn._model_quantizers import name_quantizers
from fakequant.nn._owners import is_owner
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import NAME, find_record
from fakequant.nn._recurrent import is_recurrent

# A call of a module: its path, and the number of the call. None if the module is called once.
ModuleCall: TypeAlias = tuple[str, int | None]


@dataclasses.dataclass
class FunctionPlan:
    """What `FunctionQuantizers` of one module will be made of besides quantizers. Layers are given by their paths."""

    layers: dict[str, str] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    callees: list[str] = dataclasses.field(default_factory=list)
    readers: dict[str, list[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Results:
    """The quantizers of results that `prepare` will add.

    Attributes:
        quantizers: The quantizers by their places.
        functions: The modules whose code calls functions that are quantized, or computed by a layer, by path.
        notes: Why other results stay in float.
        products: The names of calls that multiply two quantized results.
    """

    quantizers: dict[Place, Quantizer] = dataclasses.field(default_factory=dict)
    functions: dict[str, FunctionPlan] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    products: list[str] = dataclasses.field(default_factory=list)

    def add(self, place: Place, quantizer: Quantizer) -> None:
        """Adds a quantizer."""
        self.quantizers[place] = quantizer
        if place.key is not None:
            self.functions.setdefault(place.path, FunctionPlan())

    def slots(self, repeated: RepeatedCalls) -> dict[tuple[str, str | None], nn.Module]:
        """Returns what quantizes each output (path and None) and each function call (path and key)."""
        found: dict[tuple[str, str | None], dict[int | None, Quantizer]] = {}
        for place, quantizer in self.quantizers.items():
            found.setdefault((place.path, place.key), {})[place.turn] = quantizer
        return {where: repeated.slot(where[0], quantizers) for where, quantizers in found.items()}


def plan_results(model: nn.Module, config: QuantConfig, plan: Plan, graph: FlowGraph) -> Results:
    """Creates the quantizers of results, without changing the model."""
    results = Results()
    if config.operands is not None:
        quantized = {layer.path for layer in plan.layers}
        for place, bits in _find_places(model, config, plan, graph, results).items():
            add_quantizer(model, config, results, place, is_layer=place.path in quantized, bits=bits)
        results.products = [str(call) for call in quantized_products(model, graph, plan, config)]
    weights = {layer.path for layer in plan.layers if layer.quantizers["weight_quantizer"] is not None}
    readers = weight_readers(model, graph, weights)
    results.notes += notes_on_weights(found for found in readers if not can_be_watched(model, found[0]))
    for call, path in readers:
        if can_be_watched(model, call):
            results.functions.setdefault(call.path, FunctionPlan()).readers.setdefault(call.key, []).append(path)
    _describe_calls({layer.path for layer in plan.layers}, results, graph)
    return results


def _find_places(
    model: nn.Module, config: QuantConfig, plan: Plan, graph: FlowGraph, results: Results
) -> dict[Place, int]:
    """Returns where results need a quantizer, and of how many bits at least. Adds notes on those that cannot have one.

    Results that are read as floats get 8 bits, because layers of few bits are not meant to have results of few bits.
    """
    places: dict[Place, int] = {}
    for call, is_read_as_float in results_to_quantize(model, graph, plan, config).items():
        place = find_place(model, call)
        if place is not None:
            places.setdefault(place, 8 if is_read_as_float else 0)
        elif call.kind == "function":
            results.notes.append(
                f"{call} is computed by a function: it stays in float. No module returns it, and its function cannot "
                "be watched"
            )
    for call in attention_to_quantize(model, graph, plan, config):
        places[Place(call.path, call.key + WEIGHTS, call.turn)] = 0
    return places


def add_quantizer(
    model: nn.Module, config: QuantConfig, results: Results, place: Place, *, is_layer: bool, bits: int = 0
) -> None:
    """Adds a new quantizer for a place to `results`, or a note on why there is none.

    It has at least `bits` bits. `is_layer` says whether the place is the output of a quantized layer.
    """
    module = model.get_submodule(place.path)
    use, _ = config.find(place.path, module)
    problem = None if is_layer else _problem(place, module)
    if problem is not None:
        results.notes.append(f"{place} cannot be quantized: {problem}")
    elif use is not None:
        assert config.operands is not None
        spec = dataclasses.replace(config.operands, bits=max(bits, config.operands.bits))
        spec = _runtimes.find(config.target).fit_activation(spec)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        results.add(place, make_activation_quantizer(use, spec, str(place), device).train(module.training))


def _describe_calls(layers: set[str], results: Results, graph: FlowGraph) -> None:
    """Adds to the plans of functions which layers compute calls, and how the code of the modules was seen to run."""
    for call in graph.modules():
        if call.caller is not None and call.path in layers:
            path, key = call.caller
            results.functions.setdefault(path, FunctionPlan()).layers[key] = call.path
    for path, plan in results.functions.items():
        plan.counts, plan.callees = dict(graph.counts[path]), sorted(graph.callees.get(path, ()))


def attach_results(model: nn.Module, results: Results, repeated: RepeatedCalls) -> list[str]:
    """Adds the quantizers of results to a model. Returns the paths of modules that are not layers and have outputs."""
    hooked = []
    of_functions: dict[str, dict[str, nn.Module]] = {}
    for (path, key), slot in results.slots(repeated).items():
        module = model.get_submodule(path)
        if key is not None:
            of_functions.setdefault(path, {})[key] = slot
        elif isinstance(module, QuantizedLayer):
            module.output_quantizer = module.output_quantizer or slot
        else:
            attach_output(module, slot)
            hooked.append(path)
    for path, plan in results.functions.items():
        layers = {key: model.get_submodule(layer) for key, layer in plan.layers.items()}
        readers = {key: [model.get_submodule(layer) for layer in paths] for key, paths in plan.readers.items()}
        made = FunctionQuantizers(of_functions.get(path, {}), layers, plan.counts, plan.callees, readers)
        module = model.get_submodule(path)
        attach_functions(module, made.train(module.training))
    return hooked


def _problem(place: Place, module: nn.Module) -> str | None:
    """Returns why the result of a module that is not a quantized layer cannot be quantized, or None if it can."""
    if isinstance(module, (nn.Embedding, nn.MultiheadAttention)):
        return "its layer stays in float"
    if is_recurrent(module):
        return "it may be a state of a recurrent layer, which stays in float"
    if is_owner(module):
        return "it is a sum over experts, which stays in float"
    name = "output_quantizer" if place.key is None else CHILD
    try:
        check_free(module, [name] if find_record(module) else [name, NAME])
        if place.key is not None:
            calling_class(type(module))
    except Exception as error:  # deriving a class can run user code, such as __init_subclass__
        return str(error).split("\n")[0]
    return None


# --- inputs that are quantized already --------------------------------------------------------------


def shared_inputs(model: nn.Module, plan: Plan, results: Results, graph: FlowGraph) -> dict[ModuleCall, Quantizer]:
    """Returns the quantizers before layers whose input quantizer would only repeat them, by the call of the layer.

    Layers with several inputs are left out.
    """
    ways = {(call.path, call.turn): places_before(model, call) for call in graph.modules() if len(call.inputs) == 1}
    sources_of = {call: way for call, way in ways.items() if way}
    layers = {layer.path: layer for layer in plan.layers}
    grids: dict[ModuleCall, Quantizer] = {}
    for (path, turn), way in sources_of.items():
        if path not in layers or layers[path].changes_input:
            continue
        reader = _at(layers[path].quantizers["input_quantizer"], turn)
        for place in way:
            writer = results.quantizers.get(place)
            if place.key is None and place.path in layers:
                writer = _at(layers[place.path].quantizers["output_quantizer"], place.turn) or writer
            if writer is None:
                continue
            # A dynamic quantizer may choose another grid after a move, for example a transposition of tokens.
            if reader is not None and reader.is_like(writer) and not reader.is_dynamic:
                grids[path, turn] = writer
            break
    # A quantizer that all calls of a layer share stays, unless the same quantizer is before all of them.
    for layer in plan.layers:
        before = {grids.get(call) for call in sources_of if call[0] == layer.path}
        if not isinstance(layer.quantizers["input_quantizer"], CallQuantizers) and len(before) > 1:
            grids = {call: grid for call, grid in grids.items() if call[0] != layer.path}
    return grids


def _at(slot: nn.Module | None, turn: int | None) -> Any:
    """Returns the quantizer of a call."""
    return slot.at(turn) if isinstance(slot, CallQuantizers) and turn is not None else slot


def share_inputs(model: nn.Module, grids: dict[ModuleCall, Quantizer]) -> None:
    """Makes layers use a quantizer before them instead of their own. `grids` has it by the call of the layer."""
    for (path, turn), quantizer in grids.items():
        layer: Any = model.get_submodule(path)
        slot = layer.input_quantizer
        # Not registered as a child, because it is already a child of another module.
        if isinstance(slot, CallQuantizers) and turn is not None:
            slot.lend(turn, quantizer)
        else:
            layer.input_quantizer, layer._fakequant.input_grid = None, quantizer


def give_own_inputs(model: nn.Module, paths: Iterable[str]) -> Callable[[], None]:
    """Undoes `share_inputs` for layers that multiply their input, and removes the quantizer that they shared.

    They are all of its layers, so what else reads the result reads it in float. Returns a function that undoes this.
    """
    outputs = preparation(model).outputs
    layers: list[Any] = [model.get_submodule(path) for path in paths]
    shared = {layer: layer._fakequant.input_grid for layer in layers if layer._fakequant.input_grid is not None}
    children = {module: dict(module._modules) for module in model.modules()}
    before = list(outputs)
    for layer, grid in shared.items():
        layer.input_quantizer, layer._fakequant.input_grid = copy.deepcopy(grid), None
    for path, module in model.named_modules():
        for name, child in children[module].items() if module in children else ():
            if child in shared.values():
                module._modules[name] = None
                if name == "output_quantizer" and path in outputs:
                    outputs.remove(path)
    name_quantizers(model)

    def undo() -> None:
        for module, found in children.items():
            module._modules.update(found)
        for layer, grid in shared.items():
            layer._fakequant.input_grid = grid
        outputs[:] = before

    return undo
