"""The part of `prepare` that quantizes results: outputs of modules, and results of functions that their code calls."""

import dataclasses

import torch
from torch import nn

from fakequant import _targets
from fakequant._prepare.attach import Preparation, attach_functions, attach_output, detach_calls, detach_output
from fakequant._prepare.data_flow import DataFlow
from fakequant._prepare.flow_graph import FlowGraph
from fakequant._prepare.layer_calls import notes_on_weights, weight_readers
from fakequant._prepare.places import Place, can_be_watched, find_place
from fakequant._prepare.plan import Plan, check_free, make_activation_quantizer
from fakequant._prepare.quantized_results import attention_to_quantize, quantized_products, results_to_quantize
from fakequant._prepare.repeated_calls import RepeatedCalls
from fakequant.config import QuantConfig
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._function_calls import CHILD, WEIGHTS, FunctionQuantizers, calling_class
from fakequant.nn._owners import is_owner
from fakequant.nn._quantized_layer import ATTENTION_QUANTIZERS, QUANTIZERS, QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import NAME, find_record
from fakequant.nn._recurrent import is_recurrent


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


def plan_results(model: nn.Module, config: QuantConfig, plan: Plan, flow: DataFlow) -> Results:
    """Creates the quantizers of results, without changing the model.

    Args:
        model: The float model.
        config: Says whether operands are quantized, and how.
        plan: The quantizers that layers will have.
        flow: The data flow of the model.
    """
    results = Results()
    if config.operands is not None and flow.problem is not None:
        results.notes.append(
            f"the model could not be traced ({flow.problem}): operands are not quantized. "
            "Pass an example: prepare(model, config, example)"
        )
    elif config.operands is not None:
        quantized = {layer.path for layer in plan.layers}
        for place, bits in _find_places(model, config, plan, flow, results).items():
            add_quantizer(model, config, results, place, is_layer=place.path in quantized, bits=bits)
        results.products = [str(call) for call in quantized_products(model, flow, plan, config)]
    if flow.graphs:
        weights = {layer.path for layer in plan.layers if layer.quantizers["weight_quantizer"] is not None}
        readers = weight_readers(model, flow.graphs[-1], weights)
        results.notes += notes_on_weights(found for found in readers if not can_be_watched(model, found[0]))
        for call, path in readers:
            if can_be_watched(model, call):
                results.functions.setdefault(call.path, FunctionPlan()).readers.setdefault(call.key, []).append(path)
    if flow.is_recorded:
        _describe_calls({layer.path for layer in plan.layers}, results, flow.graphs[-1])
    return results


def _find_places(
    model: nn.Module, config: QuantConfig, plan: Plan, flow: DataFlow, results: Results
) -> dict[Place, int]:
    """Returns where results need a quantizer, and of how many bits at least. Adds notes on those that cannot have one.

    Results that are read as floats get 8 bits, because layers of few bits are not meant to have results of few bits.
    """
    places: dict[Place, int] = {}
    for call, is_read_as_float in results_to_quantize(model, flow, plan, config).items():
        place = find_place(model, call)
        if place is not None:
            places.setdefault(place, 8 if is_read_as_float else 0)
        elif call.kind == "function":
            results.notes.append(f"{call} is computed by a function: it stays in float. {_advice(flow)}")
    for call in attention_to_quantize(model, flow, plan, config):
        places[Place(call.path, call.key + WEIGHTS, call.turn)] = 0
    return places


def add_quantizer(
    model: nn.Module, config: QuantConfig, results: Results, place: Place, *, is_layer: bool, bits: int = 0
) -> None:
    """Adds a new quantizer for a place to `results`, or a note on why there is none.

    Args:
        model: The model.
        config: Says how the result is quantized.
        results: What to add to.
        place: Where the result is quantized.
        is_layer: Whether the place is the output of a quantized layer.
        bits: The lowest number of bits.
    """
    module = model.get_submodule(place.path)
    use, _ = config.find(place.path, module)
    problem = None if is_layer else _problem(place, module)
    if problem is not None:
        results.notes.append(f"{place} cannot be quantized: {problem}")
    elif use is not None:
        assert config.operands is not None
        spec = dataclasses.replace(config.operands, bits=max(bits, config.operands.bits))
        spec = _targets.find(config.target).fit_activation(spec)
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
    """Adds the quantizers of results to a model. Returns the paths of modules that are no layers and have outputs."""
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
        attach_functions(model.get_submodule(path), made)
    return hooked


def withdraw_results(model: nn.Module, made: Preparation) -> None:
    """Removes the quantizers of results from a model, so that a new plan can be made for them.

    Layers that shared the grid of such a quantizer get an input quantizer of their own, and those with quantizers for
    each call get a single one.
    """
    for path, module in model.named_modules():
        if path in made.outputs and not is_owner(module):
            detach_output(module)
        if isinstance(module, QuantizedLayer):
            use, _ = made.config.find(path, module)
            assert use is not None
            record = module._fakequant
            for name in (*QUANTIZERS, *ATTENTION_QUANTIZERS):
                slot = module._modules.get(name)
                before = record.input_grid if name == "input_quantizer" and slot is None else None
                if isinstance(slot, CallQuantizers):
                    before = next(quantizer for quantizer in slot.all() if quantizer is not None)
                if before is not None:
                    where = ".".join(part for part in (path, name.removesuffix("_quantizer")) if part)
                    own = make_activation_quantizer(use, before.spec, where, before.grid.device)
                    module._modules[name] = own.train(module.training)
            record.input_grid = None
            if use.output is None:
                module.output_quantizer = None
    detach_calls(model)
    made.outputs = [path for path in made.outputs if is_owner(model.get_submodule(path))]


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


def _advice(flow: DataFlow) -> str:
    if flow.is_recorded:
        return "No module returns it, and its function cannot be watched"
    return "Pass an example: prepare(model, config, example)"
