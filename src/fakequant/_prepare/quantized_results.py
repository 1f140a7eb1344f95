"""Which results of modules and functions need a quantizer, so that a target computes in integers what it can.

    operands          of additions, concatenations, products and means
    convolutions      whose result a float operation reads, such as a SiLU

Some targets compute an operation in integers only if its result is quantized too (`Target.needs_results`). For these,
operands are quantized only if all of them can be and the result is, and results of convolutions always are.
"""

from functools import cache

from torch import nn

from fakequant import _targets
from fakequant._moves import TRACED_MODULES, TRACED_NAMES
from fakequant._prepare.data_flow import DataFlow, norm_pairs
from fakequant._prepare.flow_graph import Call, FlowGraph
from fakequant._prepare.plan import Plan
from fakequant.nn._quantizer import Quantizer

_OPERATIONS = {
    "add", "iadd", "radd", "mul", "imul", "rmul", "sub", "isub", "rsub", "cat", "concat", "concatenate", "stack",
    "matmul", "rmatmul", "bmm", "einsum", "scaled_dot_product_attention", "mean",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
}  # fmt: skip
# Those of which one operand may be a number.
_BINARY = {"add", "iadd", "radd", "mul", "imul", "rmul", "sub", "isub", "rsub"}
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


def results_to_quantize(model: nn.Module, flow: DataFlow, plan: Plan, target: _targets.Target) -> list[Call]:
    """Returns the calls whose results need a quantizer, in order.

    Every module appears once, and so does every call of a function.

    Args:
        model: The float model.
        flow: Its data flow.
        plan: The quantizers that layers will have.
        target: What the model will run on.
    """
    found: dict[str, Call] = {}
    norms = dict(norm_pairs(model, flow))
    for graph in flow.graphs:
        search = _Search(model, graph, plan, norms, target)
        for call in graph.calls:
            if search.is_operation(call) and search.runs_in_integers(call):
                for operand in call.inputs:
                    is_computed = operand.kind in ("module", "function")
                    if is_computed and (target.needs_results or not search.is_operation(operand)):
                        found.setdefault(str(operand), operand)
    if target.needs_results and flow.graphs:
        done = {path for call in found.values() for path in (holder(model, call),) if path is not None}
        search = _Search(model, flow.graphs[-1], plan, norms, target)
        for call in flow.graphs[-1].modules():
            end = search.unquantized_end(call, done) if search.is_convolution(call) else None
            if end is not None:
                found.setdefault(str(end), end)
    return list(found.values())


def holder(model: nn.Module, call: Call) -> str | None:
    """Returns the path of a module that can quantize the result of `call`, or None if no module can.

    It is the called module, a module that returns the result of the called function, or the module that computed the
    elements if the function only moves them.
    """
    passed = None
    while True:
        if call.kind == "module":
            if not isinstance(model.get_submodule(call.path), nn.Identity):
                return call.path
            passed = passed or call.path
        own = [path for path in call.returned_by if path]
        if own:
            return own[0]
        moves = call.kind == "module" or (call.kind == "function" and call.function_name in TRACED_NAMES)
        if not moves or not call.inputs or any(user.in_place for user in call.inputs[0].users):
            return passed
        call = call.inputs[0]


class _Search:
    """Questions about the calls of one graph."""

    def __init__(
        self, model: nn.Module, graph: FlowGraph, plan: Plan, norms: dict[str, str], target: _targets.Target
    ) -> None:
        self.model, self.norms, self.target = model, norms, target
        self.number, self.results = graph.count(), set(graph.results)
        self.layers = {layer.path: layer.quantizers for layer in plan.layers}
        self.reads_codes = cache(self._reads_codes)

    def is_operation(self, call: Call) -> bool:
        """Returns True if the operands of a call should be quantized."""
        if call.kind == "module":
            return isinstance(self.model.get_submodule(call.path), _POOLS)
        return call.kind == "function" and call.function_name in _OPERATIONS

    def runs_in_integers(self, operation: Call) -> bool:
        """Returns True if the target computes an operation in integers once its operands are quantized."""
        if not self.target.needs_results:
            return True
        if len(operation.inputs) < 2 and operation.function_name in _BINARY:  # the other operand is a Python number
            return False
        has_holders = all(holder(self.model, operand) is not None for operand in operation.inputs)
        return has_holders and self._is_read_as_codes(operation)

    def is_convolution(self, call: Call) -> bool:
        return isinstance(self.model.get_submodule(call.path), _CONVOLUTIONS) and self._is_static(call)

    def unquantized_end(self, layer: Call, done: set[str]) -> Call | None:
        """Returns the last call that one kernel computes together with a layer, or None if a quantizer follows it.

        Args:
            layer: A call of a layer.
            done: Paths of modules whose results will be quantized anyway.
        """
        end = layer
        while not self._is_quantized(end, done):
            fused = [user for user in end.users if self._is_fused(layer, user)]
            if end in self.results or len(end.users) != 1 or not fused:
                return None if self._is_read_as_codes(end) else end
            end = fused[0]
        return None

    def _is_quantized(self, call: Call, done: set[str]) -> bool:
        if any(path in done for path in call.returned_by):
            return True
        quantizers = self.layers.get(call.path, {})
        return call.kind == "module" and (call.path in done or quantizers.get("output_quantizer") is not None)

    def _is_fused(self, layer: Call, user: Call) -> bool:
        is_norm = user.path == self.norms.get(layer.path)
        if user.kind == "function":
            return is_norm or user.function_name in _RELU_NAMES
        is_own = self.number[user.path] == 1  # the results of a module that is called twice have one quantizer
        return is_own and (is_norm or isinstance(self.model.get_submodule(user.path), (*_RELUS, *_PASSED)))

    def _is_static(self, call: Call) -> bool:
        """Returns True for a call of a layer whose input and weight have fixed scales."""
        quantizers = self.layers.get(call.path)
        if call.kind != "module" or quantizers is None or quantizers["weight_quantizer"] is None:
            return False
        quantizer = quantizers["input_quantizer"]
        return isinstance(quantizer, Quantizer) and not quantizer.is_dynamic and quantizer.spec.axis is None

    def _is_read_as_codes(self, call: Call) -> bool:
        return call not in self.results and bool(call.users) and all(map(self.reads_codes, call.users))

    def _reads_codes(self, user: Call) -> bool:
        """Returns True if a call quantizes its operands, or passes them on to calls that do."""
        if self._is_static(user):
            return True
        if self.is_operation(user):
            return self.runs_in_integers(user)
        if user.kind == "function":
            passes = user.function_name in TRACED_NAMES | _RELU_NAMES
        else:
            passes = isinstance(self.model.get_submodule(user.path), (*TRACED_MODULES, *_RELUS, *_PASSED))
        return passes and self._is_read_as_codes(user)
