"""The layers of the tables that post-training methods return."""

from torch import nn

from fakequant._prepare.flow_graph import FlowGraph
from fakequant.nn._owners import is_owner
from fakequant.nn._quantized_layer import QuantizedLayer


def layers_in_order(model: nn.Module, graph: FlowGraph) -> dict[str, QuantizedLayer]:
    """Returns the quantized layers that multiply an input by a weight, in the order of their calls, by path."""
    found = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, QuantizedLayer) and module._fakequant.kind.has_input and not is_owner(module)
    }
    called = [call.path for call in graph.modules() if call.path in found]
    return {path: found[path] for path in dict.fromkeys([*called, *found])}
