"""Which results of modules and functions need a quantizer, so that a target computes in integers what it can.

    operands          of additions, concatenations, products and means
    convolutions      whose result a float operation reads, such as a SiLU

Some targets compute an operation in integers only if its result is quantized too (`Fusions.needs_results`). For these,
operands are quantized only if all of them can be and the result is. Some compute convolutions only in this way too
(`Fusions.needs_convolution_results`). With `Fusions.needs_all_results`, the results of all layers and operations with
codes are quantized, each by one quantizer.

Some targets concatenate codes only if all operands are on the grid of the result (`Fusions.joins_on_one_grid`).
Rounding the result is the same as rounding each operand, so the quantizer of the result is also the operands' one. An
operand that is read elsewhere too has a quantizer of its own, and its codes become codes of the result's grid.

Some targets add a tensor to the result of a layer in the kernel of the layer (`Fusions.adds_in_layers`). That result is
not quantized.

A `Place` is where the result of a call is quantized: at the output of the called module, or of a module that returns
the result of a function; or at the call of a function in the code of a module, see `fakequant.nn._function_calls`. The
result of an operation that only moves or selects elements is on the grid of its operand, so that is quantized.
"""

import dataclasses
from functools import cache

from torch import nn

from fakequant import _runtimes
from fakequant._moves import SELECTING_NAMES, SPLITTING_NAMES, TRACED_MODULES, TRACED_NAMES
from fakequant._prepare.flow_graph import Call, FlowGraph, norm_pairs
from fakequant._prepare.plan import Plan
from fakequant.config import QuantConfig
from fakequant.nn._call_quantizers import quantizers_in
from fakequant.nn._function_calls import CHILD
from fakequant.nn._operators import ACTIVATION_PRODUCTS, ATTENTION, functions_named

_OPERATIONS = {
    *ACTIVATION_PRODUCTS, "add", "mul", "sub", "cat", "stack", "einsum", "mean", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
}  # fmt: skip
# Those of which one operand may be a number.
_BINARY = {"add", "mul", "sub"}
_JOINS = {"cat", "stack"}
_POOLS = (
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Modules that return their input in evaluation.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_PASSED = (nn.Identity, *_DROPOUTS)
# What a kernel computes together with the operation before it.
_RELUS = (nn.ReLU, nn.ReLU6)
_RELU_NAMES = {"relu", "relu6"}


# --- where ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """The output of the module at `path`, or, if there is a key, the result of a function that its code calls.

    If the module is called several times, each of its calls has places of its own. `turn` is the number of the call.
    """

    path: str
    key: str | None = None
    turn: int | None = None

    @classmethod
    def of(cls, call: Call) -> "Place":
        """Returns where the result of a call of a module or a function arises."""
        return cls(call.path, call.key if call.kind == "function" else None, call.turn)

    def __str__(self) -> str:
        name = "output" if self.key is None else f"{CHILD}.{self.key}"
        return ".".join(part for part in (self.path, name, "" if self.turn is None else str(self.turn)) if part)


def find_place(model: nn.Module, call: Call) -> Place | None:
    """Returns where the result of a call can be quantized, or None if it cannot be."""
    passed = None
    while True:
        own = [Place(path) for path in call.returned_by if path and not _is_container(model.get_submodule(path))]
        if call.kind == "module":
            if not isinstance(model.get_submodule(call.path), nn.Identity):
                # A module that is called once need not count its calls.
                return own[0] if own and call.turn is not None else Place.of(call)
            passed = passed or Place.of(call)
        if own:
            return own[0]
        is_function = call.kind == "function"
        moves = call.kind == "module" or (is_function and call.function_name in TRACED_NAMES | SELECTING_NAMES)
        if not moves:
            return passed or (Place.of(call) if is_function and can_be_watched(model, call) else None)
        if not call.inputs or any(user.in_place for user in call.inputs[0].users):
            return passed
        call = call.inputs[0]


def places_before(model: nn.Module, call: Call) -> list[Place]:
    """Returns where the operand of a call with one operand may have been quantized, the nearest first.

    The elements were only moved between these places. The last one is where they were computed, if that is known.
    """
    found: list[Place] = []
    while call.inputs:
        source = call.inputs[0]
        if any(user.in_place and user.inputs[0] is source for user in source.users):
            break
        found += [Place(path) for path in reversed(source.returned_by) if path]
        if source.kind not in ("module", "function"):
            break
        found.append(Place.of(source))
        moves = (
            source.function_name in TRACED_NAMES
            if source.kind == "function"
            else isinstance(model.get_submodule(source.path), TRACED_MODULES)
        )
        if not moves:
            break
        call = source
    return found


def _is_container(module: nn.Module) -> bool:
    """Returns True for modules that would call a quantizer that is added to them as if it were one of their layers."""
    return isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def can_be_watched(model: nn.Module, call: Call) -> bool:
    """Returns True if the result of a function can be replaced by a quantized one while the module's code runs."""
    if call.shape is None or call.results != 1 or call.function not in functions_named(call.function_name):
        return False  # the function is unknown
    if isinstance(model.get_submodule(call.path), nn.modules.batchnorm._BatchNorm):
        return False  # it changes its class when it is frozen or folded
    return not call.in_place  # the code may ignore the result, and read the tensor that was changed


# --- which results ----------------------------------------------------------------------------------


def results_to_quantize(model: nn.Module, graph: FlowGraph, plan: Plan, config: QuantConfig) -> dict[Call, bool]:
    """Returns the calls whose results need a quantizer, in order.

    The value is True for results that only the target needs as codes: they are read as floats, or returned by the
    model.
    """
    found: dict[Call, bool] = {}
    fusions = _runtimes.find(config.target).fusions
    search = _Search(model, graph, plan, config)
    for call in graph.calls:
        if search.is_operation(call) and search.runs_in_integers(call):
            for operand in search.operands_to_quantize(call):
                is_computed = operand.kind in ("module", "function")
                if is_computed and (fusions.needs_results or not search.is_operation(operand)):
                    found[operand] = False
    if fusions.adds_in_layers:
        found |= {call: False for call in graph.calls if search.is_read_in_both_ways(call)}
    if fusions.needs_convolution_results or fusions.needs_all_results:
        done = {place for call in found if (place := find_place(model, call)) is not None}
        for call in graph.calls:
            end = search.unquantized_end(call, done) if search.needs_result(call) else None
            if end is not None:
                found[end] = fusions.needs_all_results
    return found


def quantized_products(model: nn.Module, graph: FlowGraph, plan: Plan, config: QuantConfig) -> list[Call]:
    """Returns the calls of functions that multiply two results, and whose operands `results_to_quantize` covers."""
    search = _Search(model, graph, plan, config)
    calls = [call for call in graph.calls if call.function_name in ACTIVATION_PRODUCTS]
    # Attention as one operator has weights inside, which are not quantized.
    calls = [call for call in calls if call.function_name != ATTENTION or config.attention]
    return [call for call in calls if search.runs_in_integers(call) and search.has_places(call)]


def attention_to_quantize(model: nn.Module, graph: FlowGraph, plan: Plan, config: QuantConfig) -> list[Call]:
    """Returns the calls of `F.scaled_dot_product_attention` whose attention weights need a quantizer."""
    if not config.attention or not _runtimes.find(config.target).fusions.has_integer_products:
        return []
    search = _Search(model, graph, plan, config)
    return [call for call in graph.calls if call.function_name == ATTENTION and search.runs_in_integers(call)]


def operands_of(operation: Call) -> list[Call]:
    """Returns the operands of an operation that should be quantized: all but masks."""
    return operation.inputs[: ACTIVATION_PRODUCTS.get(operation.function_name)]


class _Search:
    """Questions about the calls of one graph."""

    def __init__(self, model: nn.Module, graph: FlowGraph, plan: Plan, config: QuantConfig) -> None:
        self.model, self.config = model, config
        self.norms, self.fusions = dict(norm_pairs(model, graph)), _runtimes.find(config.target).fusions
        self.results = set(graph.results)
        self.layers = {layer.path: layer.quantizers for layer in plan.layers}
        self.changing = {layer.path for layer in plan.layers if layer.changes_input}
        self.reads_codes, self.gives_codes = cache(self._reads_codes), cache(self._gives_codes)

    def is_operation(self, call: Call) -> bool:
        """Returns True if the operands of a call should be quantized."""
        if call.kind == "module":
            return isinstance(self.model.get_submodule(call.path), _POOLS)
        is_product = call.function_name in ACTIVATION_PRODUCTS or call.function_name == "einsum"
        if is_product and not self.fusions.has_integer_products:
            return False
        return call.kind == "function" and call.function_name in _OPERATIONS

    def runs_in_integers(self, operation: Call) -> bool:
        """Returns True if the target computes an operation in integers once its operands are quantized."""
        if not self.fusions.needs_results:
            return True
        if len(operation.inputs) < 2 and operation.function_name in _BINARY:  # the other operand is a Python number
            return False
        if operation.function_name == ATTENTION and not self.config.attention:
            return False
        if not self.has_places(operation) and not self._is_join_of_inputs(operation):
            return False
        if operation.function_name in ACTIVATION_PRODUCTS:  # their results may be floats
            return True
        has_codes = any(map(self.gives_codes, operation.inputs))
        if self.fusions.needs_all_results:
            return has_codes and find_place(self.model, operation) is not None
        return has_codes and self._is_read_as_codes(operation)

    def operands_to_quantize(self, operation: Call) -> list[Call]:
        """Returns the operands of an operation that need a quantizer of their own.

        One to which a kernel adds the other needs none, and neither does one that the quantizer of a join quantizes.
        """
        operands = operands_of(operation)
        if self._is_join(operation):
            return [operand for operand in operands if self.gives_codes(operand) and not self._is_joined(operand)]
        if self.fusions.adds_in_layers and operation.function_name == "add":
            inside = next((operand for operand in operands if self._is_layer_result(operand)), None)
            return [operand for operand in operands if operand is not inside]
        return operands

    def _is_join(self, call: Call) -> bool:
        """Returns True for a concatenation whose operands must be on the grid of its result."""
        return self.fusions.joins_on_one_grid and call.kind == "function" and call.function_name in _JOINS

    def _is_join_of_inputs(self, call: Call) -> bool:
        """Returns True for a join of results that can be quantized, and of inputs of the model."""
        return self._is_join(call) and all(
            find_place(self.model, operand) is not None or self._is_input(operand) for operand in call.inputs
        )

    def _is_input(self, call: Call) -> bool:
        return call.kind == "input" or (self._passes(call) and self._is_input(call.inputs[0]))

    def _is_joined(self, call: Call) -> bool:
        """Returns True if the quantizer of a join quantizes a result: nothing else reads it."""
        if call in self.results or len(call.users) != 1:
            return False
        (user,) = call.users
        if self._is_join(user):
            return self.runs_in_integers(user)
        return self._passes(user) and not self._splits(user) and self._is_joined(user)

    def is_read_in_both_ways(self, call: Call) -> bool:
        """Returns True if the result of a convolution, or of its norm, is read as codes and as floats.

        A runtime may multiply such a result by its scale twice. If it is quantized, all readers read codes.
        """
        layer = call.inputs[0] if self._is_norm(call) else call
        if not (self._is_static(layer) and isinstance(self.model.get_submodule(layer.path), _CONVOLUTIONS)):
            return False
        return any(map(self.reads_codes, call.users)) and not self._is_read_as_codes(call)

    def _is_layer_result(self, call: Call) -> bool:
        """Returns True if a call computes the result of a layer, or normalizes it, and has no other use."""
        if call in self.results or len(call.users) != 1:
            return False
        if self._is_static(call):
            return True
        return (self._is_norm(call) or self._returns_input(call)) and self._is_layer_result(call.inputs[0])

    def _returns_input(self, call: Call) -> bool:
        return call.kind == "module" and isinstance(self.model.get_submodule(call.path), _PASSED)

    def needs_result(self, call: Call) -> bool:
        """Returns True for calls that are computed in integers only if their result is quantized."""
        if self.fusions.needs_all_results:
            return self._is_static(call) or (self.is_operation(call) and self.runs_in_integers(call))
        is_convolution = call.kind == "module" and isinstance(self.model.get_submodule(call.path), _CONVOLUTIONS)
        return is_convolution and self._is_static(call)

    def unquantized_end(self, layer: Call, done: set[Place]) -> Call | None:
        """Returns the last call that one kernel computes together with a layer, or None if a quantizer follows it.

        `done` has the places where results will be quantized anyway.
        """
        end = layer
        while not self._is_quantized(end, done):
            fused = [user for user in end.users if self._is_fused(layer, user)]
            if end in self.results or len(end.users) != 1 or not fused:
                is_read = (
                    self._has_one_quantizer(end) if self.fusions.needs_all_results else self._is_read_as_codes(end)
                )
                return None if is_read else end
            end = fused[0]
        return None

    def _has_one_quantizer(self, call: Call) -> bool:
        """Returns True if a single quantizer reads a result: the one of a layer's input, or of a join."""
        if call in self.results or len(call.users) != 1:
            return False
        (user,) = call.users
        if self._is_joined(call):
            return True
        if self._is_static(user):
            return user.path not in self.changing
        return self._passes(user) and not self._splits(user) and self._has_one_quantizer(user)

    def _is_quantized(self, call: Call, done: set[Place]) -> bool:
        if any(Place(path) in done for path in call.returned_by):
            return True
        own = self.layers.get(call.path, {}) if call.kind == "module" else {}
        return Place.of(call) in done or own.get("output_quantizer") is not None

    def _is_fused(self, layer: Call, user: Call) -> bool:
        is_norm = user.path == self.norms.get(layer.path)
        if user.kind == "function":
            return is_norm or user.function_name in _RELU_NAMES
        return is_norm or isinstance(self.model.get_submodule(user.path), (*_RELUS, *_PASSED))

    def _is_static(self, call: Call) -> bool:
        """Returns True for a call of a layer whose input and weight have fixed scales."""
        quantizers = self.layers.get(call.path)
        if call.kind != "module" or quantizers is None or quantizers["weight_quantizer"] is None:
            return False
        own = quantizers_in(quantizers["input_quantizer"])
        return bool(own) and not own[0].is_dynamic and own[0].spec.axis is None

    def _gives_codes(self, call: Call) -> bool:
        """Returns True if a kernel computes a result in integers, unless its operands are floats.

        An operation on results of float operations would need a quantizer for each of them, and gain nothing.
        """
        if self._is_static(call):
            return True
        is_quantizable = self.is_operation(call) and self.has_places(call)
        passes = is_quantizable or self._passes(call) or self._is_norm(call)
        return passes and any(map(self.gives_codes, call.inputs))

    def has_places(self, operation: Call) -> bool:
        return all(find_place(self.model, operand) is not None for operand in operands_of(operation))

    def _is_norm(self, call: Call) -> bool:
        return call.path in self.norms.values() and (call.kind == "module" or call.function_name == "batch_norm")

    def _passes(self, call: Call) -> bool:
        """Returns True for calls that move elements, return their input, or are computed together with the kernel."""
        if call.kind == "function":
            return call.function_name in TRACED_NAMES | SELECTING_NAMES | _RELU_NAMES
        is_module = call.kind == "module"
        return is_module and isinstance(self.model.get_submodule(call.path), (*TRACED_MODULES, *_RELUS, *_PASSED))

    def _splits(self, call: Call) -> bool:
        """Returns True for functions before which targets do not quantize the results of layers."""
        return call.kind == "function" and call.function_name in SPLITTING_NAMES

    def _is_read_as_codes(self, call: Call) -> bool:
        return call not in self.results and bool(call.users) and all(map(self.reads_codes, call.users))

    def _reads_codes(self, user: Call) -> bool:
        """Returns True if a call quantizes its operands, or passes them on to calls that do."""
        if self._is_static(user):
            return user.path not in self.changing
        if self.is_operation(user):
            return self.runs_in_integers(user)
        return self._passes(user) and self._is_read_as_codes(user)
