"""Turns convolutions along one axis into convolutions along two axes, of which the second has length 1.

XNNPACK's own pass does so too, but takes a layer with floats for one with codes if its input was quantized. It has no
form for transposed convolutions with codes.
"""

from typing import Any

from torch.export import ExportedProgram
from torch.fx import Graph, Node

from fakequant._executorch.graph import aten, called, insert, viewed
from fakequant._executorch.weights import require_one_unknown_length, reshape_weights

_FORMS = {
    aten.conv1d.default: aten.conv2d.default,
    aten.conv1d.padding: aten.conv2d.padding,
    aten.conv_transpose1d.default: aten.conv_transpose2d.input,
}
# What the lists of settings have for the second axis, in the order of the arguments after the bias: strides, paddings
# and dilations; strides, paddings, paddings of the result, the number of groups and dilations.
_SETTINGS = {aten.conv_transpose1d.default: (1, 0, 0, None, 1)}
_USUAL = (1, 0, 1)


def use_two_dimensions(program: ExportedProgram) -> None:
    """Rewrites a program, in place. Raises ValueError if the lengths of two axes of an input are unknown."""
    calls = called(program.graph, *_FORMS)
    require_one_unknown_length(calls, "one axis")
    if reshape_weights(program, calls, axes=3, change=lambda weight: weight.unsqueeze(-1)):
        for call in calls:
            _rewrite(program.graph, call)


def _rewrite(graph: Graph, call: Node) -> None:
    x: Any = call.args[0]
    target: Any = call.target
    extra = _SETTINGS.get(target, _USUAL)
    settings = [
        [*given, more] if isinstance(given, (list, tuple)) else given
        for given, more in zip(call.args[3:], extra[: len(call.args) - 3], strict=False)
    ]
    rest = call.args[3 + len(settings) :]
    with graph.inserting_before(call):
        image = viewed(graph, x, x.meta["val"].unsqueeze(-1))
        made = insert(graph, _FORMS[target], (image, *call.args[1:3], *settings, *rest), call)
        made.meta["val"] = call.meta["val"].unsqueeze(-1)
        result = viewed(graph, made, call.meta["val"])
    call.replace_all_uses_with(result)
    graph.erase_node(call)
