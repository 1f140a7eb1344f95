"""Dead calls: what a model computes and does not use. Exporters leave it out of files.

A decision about a result, such as whether a quantizer is needed, depends on what reads it. Dead calls must not count:
the golden model and the file would differ, because the file has no such reader.
"""

from collections.abc import Iterable

from fakequant._prepare.flow_graph import Call, FlowGraph


def drop_dead_calls(graph: FlowGraph, others: Iterable[Call] = ()) -> None:
    """Removes dead calls from the readers of results, and dead calls of functions from the graph.

    Dead calls of modules stay: modules count their calls when they run. Functions that read parameters stay too: they
    get the quantized weights of layers.

    Args:
        graph: A graph with all calls of a forward pass. It is changed in place.
        others: Calls that are used although no call in the graph reads their results.
    """
    changing = [call for call in graph.calls if call.in_place]  # other code may read the changed tensor
    pending, live = [*graph.results, *others, *changing], set[Call]()
    while pending:
        call = pending.pop()
        if call not in live:
            live.add(call)
            pending += call.inputs
    for call in live:
        call.users = [user for user in call.users if user in live]
    graph.calls = [call for call in graph.calls if call in live or call.kind == "module" or _reads_parameter(call)]


def _reads_parameter(call: Call) -> bool:
    return any(source.kind == "parameter" for source in call.inputs)
