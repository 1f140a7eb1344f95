"""Functions that model code calls with the weight of a layer, such as `F.linear(x, self.query.weight)`.

Such a call does what a call of the layer does, so it becomes one in the flow graph, if

    the layer itself is not called, and no other code uses its weight
    the bias is that of the layer, or the layer has no bias
"""

from collections import Counter
from collections.abc import Iterable

from torch import nn

from fakequant._prepare.flow_graph import Call, FlowGraph
from fakequant.nn._quantized_layer import kind_of

_FUNCTIONS = {
    "linear": nn.Linear, "conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d,
}  # fmt: skip


def find_layer_calls(model: nn.Module, graph: FlowGraph) -> None:
    """Turns calls of functions with the weight of a layer into calls of the layer, in place."""
    called = graph.count()
    readers = Counter(source.path for call in graph.calls for source in call.inputs if source.kind == "parameter")
    # The layers that one call in the code of a module uses: a module that is called several times may use several.
    sites: dict[tuple[str, str], Counter[str | None]] = {}
    found = [(call, _layer_of(model, call)) for call in graph.calls if call.kind == "function"]
    for call, path in found:
        sites.setdefault((call.path, call.key), Counter())[path] += 1
    for call, path in found:
        used = sites[call.path, call.key]
        if path is None or called[path] or len(used) > 1 or readers[call.inputs[1].path] != used[path]:
            continue
        call.caller = call.path, call.key
        if call.path in graph.repeated:
            graph.repeated[path] = graph.repeated[call.path]
        call.kind, call.path, call.function = "module", path, None
        # Other operands are parameters, or values of the calling code that a layer does not read.
        call.inputs, call.input_shapes = call.inputs[:1], call.input_shapes[:1]


_READ = "other code also uses its weight"


def weight_readers(model: nn.Module, graph: FlowGraph, quantized: set[str]) -> list[tuple[Call, str]]:
    """Returns the calls of functions with the weights of quantized layers that are called too, and the layers' paths.

    Args:
        model: The float model.
        graph: Its calls, after `find_layer_calls`.
        quantized: The paths of the layers with a quantized weight.
    """
    found = []
    called = graph.count()
    for call in graph.calls:
        for source in call.inputs if call.kind == "function" else ():
            path, _, name = source.path.rpartition(".")
            if source.kind == "parameter" and path in quantized and called[path]:
                kind = kind_of(model.get_submodule(path))
                if kind is not None and name == kind.weight_name:
                    found.append((call, path))
    return found


def notes_on_weights(readers: Iterable[tuple[Call, str]]) -> list[str]:
    """Returns notes on quantized layers whose weights other code uses in float."""
    found = {path: str(call) for call, path in reversed(list(readers))}
    return [
        f"{path}: {_READ} ({call}), which is a float in training and quantized after the conversion, so `verify` will "
        f"find a difference. Use config.skip({path!r}), or a layer with its own weight"
        for path, call in found.items()
    ]


def is_note_on_weights(note: str) -> bool:
    """Returns True for the notes of `notes_on_weights`."""
    return _READ in note


def _layer_of(model: nn.Module, call: Call) -> str | None:
    """Returns the path of the layer whose weight a function is called with, or None."""
    cls = _FUNCTIONS.get(call.function_name) if call.kind == "function" else None
    if cls is None or len(call.inputs) < 2 or call.inputs[1].kind != "parameter":
        return None
    path, _, name = call.inputs[1].path.rpartition(".")
    layer = model.get_submodule(path)
    kind = kind_of(layer)
    if kind is None or not isinstance(layer, cls) or name != kind.weight_name:
        return None
    if kind.runs_float_forward:  # its code may compute another weight than the one that is used here
        return None
    own_bias = getattr(layer, kind.bias_name, None) is not None
    given = call.inputs[2].path if len(call.inputs) > 2 else None
    if own_bias and given != f"{path}.{kind.bias_name}".lstrip("."):
        return None
    return path
