"""Results of layers that must be codes for a target to compute the layer in integers.

ONNX Runtime computes a convolution in integers only if a quantizer follows: directly, or behind a batch norm that is
folded and a ReLU. Where a float operation reads the result, such as a SiLU, `prepare` adds that quantizer.
"""

from torch import nn

from fakequant._moves import TRACED_MODULES, TRACED_NAMES
from fakequant._prepare.data_flow import DataFlow
from fakequant._prepare.flow_graph import Call, FlowGraph
from fakequant._prepare.plan import Plan
from fakequant.nn._quantizer import Quantizer

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# What a kernel computes together with a convolution, or what does nothing in evaluation.
_FUSED = (nn.ReLU, nn.ReLU6, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_RELU_NAMES = {"relu", "relu6"}


def results_in_float(model: nn.Module, flow: DataFlow, plan: Plan, norms: dict[str, str], done: set[str]) -> list[Call]:
    """Returns the calls whose results need a quantizer, so that the convolutions before them run in integers.

    Args:
        model: The float model.
        flow: Its data flow.
        plan: The quantizers that layers will have.
        norms: The batch norms that will be folded, by the path of the layer.
        done: Paths of modules whose results will be quantized anyway.
    """
    if not flow.graphs:
        return []
    search = _Search(model, flow.graphs[-1], plan, norms, done)
    found: dict[str, Call] = {}
    for call in flow.graphs[-1].modules():
        if isinstance(model.get_submodule(call.path), _CONVOLUTIONS) and search.is_static(call):
            end = search.end_of_kernel(call)
            if end is not None:
                found.setdefault(str(end), end)
    return list(found.values())


class _Search:
    def __init__(self, model: nn.Module, graph: FlowGraph, plan: Plan, norms: dict[str, str], done: set[str]) -> None:
        self.model, self.norms, self.done = model, norms, done
        self.number, self.results = graph.count(), set(graph.results)
        self.layers = {layer.path: layer.quantizers for layer in plan.layers}

    def is_static(self, call: Call) -> bool:
        """Whether a call is one of a layer that computes with codes of its input and its weight."""
        quantizers = self.layers.get(call.path)
        if call.kind != "module" or quantizers is None or quantizers["weight_quantizer"] is None:
            return False
        quantizer = quantizers["input_quantizer"]
        return isinstance(quantizer, Quantizer) and not quantizer.is_dynamic and quantizer.spec.axis is None

    def end_of_kernel(self, layer: Call) -> Call | None:
        """The last call that one kernel computes together with the layer; None if a quantizer follows already."""
        end = layer
        while not self._is_quantized(end):
            fused = [user for user in end.users if self._is_fused(layer, user)]
            if end in self.results or len(end.users) != 1 or not fused:
                break
            end = fused[0]
        stays_inside = end not in self.results and bool(end.users)
        if self._is_quantized(end) or (stays_inside and all(map(self._reads_codes, end.users))):
            return None
        return end

    def _is_quantized(self, call: Call) -> bool:
        if any(path in self.done for path in call.returned_by):
            return True
        if call.kind != "module":
            return False
        quantizers = self.layers.get(call.path, {})
        return call.path in self.done or quantizers.get("output_quantizer") is not None

    def _is_fused(self, layer: Call, user: Call) -> bool:
        if user.kind == "function":
            return user.function_name in _RELU_NAMES or user.path == self.norms.get(layer.path)
        is_own = self.number[user.path] == 1  # the results of a module that is called twice have one quantizer
        is_fused = isinstance(self.model.get_submodule(user.path), _FUSED)
        return is_own and (is_fused or user.path == self.norms.get(layer.path))

    def _reads_codes(self, user: Call) -> bool:
        if self.is_static(user):
            return True
        is_move = (
            user.function_name in TRACED_NAMES
            if user.kind == "function"
            else isinstance(self.model.get_submodule(user.path), TRACED_MODULES)
        )
        return is_move and user not in self.results and bool(user.users) and all(map(self._reads_codes, user.users))
