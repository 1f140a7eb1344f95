"""`trace_flow`: the flow graphs of a model as torch.fx sees its code, without data."""

import copy
from collections import Counter
from typing import Any

import torch
from torch import fx, nn

from fakequant._prepare.dead_calls import drop_dead_calls
from fakequant._prepare.flow_graph import Call, FlowGraph, Repeated, is_leaf


class _Tracer(fx.Tracer):
    def __init__(self, leaves: set[nn.Module]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return m.__module__.startswith(("torch.nn", "torch.ao.nn")) or m in self.leaves


def trace_flow(model: nn.Module) -> list[FlowGraph]:
    """Returns the flow graph of `model` in training mode and the one in evaluation mode.

    Raises whatever the model's own code raises when it is traced.
    """
    # A forward pass may store attributes. It does not change parameters, which are not copied.
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    with torch.random.fork_rng(devices=[]):
        copied = copy.deepcopy(model, shared)
        leaves = {module for module in copied.modules() if is_leaf(module)}
        graphs = [_flow_graph(copied, _Tracer(leaves).trace(copied.train(mode))) for mode in (True, False)]
    _number_calls(graphs)  # dead ones too: they are made
    for graph in graphs:
        drop_dead_calls(graph)
    return graphs


def _number_calls(graphs: list[FlowGraph]) -> None:
    """Numbers the calls of modules that are called several times in one of the modes."""
    most: Counter[str] = Counter()
    for graph in graphs:
        most |= graph.count()
    repeated = {path: Repeated(number, "") for path, number in most.items() if number > 1}
    for graph in graphs:
        graph.repeated = repeated
        turns: Counter[str] = Counter()
        for call in graph.modules():
            if call.path in repeated:
                call.turn = turns[call.path]
                turns[call.path] += 1


def _flow_graph(model: nn.Module, graph: fx.Graph) -> FlowGraph:
    made: dict[fx.Node, Call] = {}
    calls: list[Call] = []
    results: list[Call] = []
    numbers: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        inputs = [made[source] for source in node.all_input_nodes]
        if node.op == "output":
            results = inputs
            continue
        call = made[node] = _call(model, node, inputs)
        if call.kind in ("module", "function"):
            call.number = numbers[call.path, call.function_name]
            numbers[call.path, call.function_name] += 1
            for source in inputs:
                source.users.append(call)
            calls.append(call)
    return FlowGraph(calls, results)


def _call(model: nn.Module, node: fx.Node, inputs: list[Call]) -> Call:
    if node.op == "call_module":
        path = str(node.target)
        in_place = bool(getattr(model.get_submodule(path), "inplace", False))
        return Call("module", path, inputs=inputs, in_place=in_place)
    if node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        in_place = in_place or name in ("iadd", "imul", "isub", "setitem") or bool(node.kwargs.get("inplace"))
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        return Call("function", path, node.target, inputs=inputs, in_place=in_place)
    return Call("parameter" if node.op == "get_attr" else "input", str(node.target))
