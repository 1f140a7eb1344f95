"""Which modules' results reach an addition, a concatenation, a product or a mean, or a layer.

torch.fx is used to look at the model, never to replace it. What it cannot trace is left alone.
"""

import copy
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from fakequant._moves import TRACED_FUNCTIONS, TRACED_METHODS, TRACED_MODULES
from fakequant.nn._layer_kinds import find_kind

_FUNCTIONS = {
    operator.add, operator.iadd, operator.mul, operator.imul, operator.matmul, operator.sub, operator.isub,
    torch.add, torch.mul, torch.sub, torch.cat, torch.concat, torch.stack, torch.matmul, torch.bmm, torch.einsum,
    F.scaled_dot_product_attention, torch.mean, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
}  # fmt: skip
_METHODS = {"add", "add_", "mul", "mul_", "sub", "sub_", "matmul", "bmm", "__add__", "__mul__", "__matmul__", "mean"}
_POOLS = (
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip


class Found(NamedTuple):
    """What the analysis found."""

    # Paths of modules whose results are operands, in the order in which they are computed.
    producers: list[str]
    # Operands that are results of functions, where no module is to hold a quantizer.
    without_module: list[str]
    # Modules whose only input comes from other modules, by path: those that it passes through, the last one first.
    # They only move elements, but for the one at the end, which computes them.
    sources: dict[str, tuple[str, ...]]
    # Why there is no more, if the model could not be traced.
    problem: str | None


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return m.__module__.startswith(("torch.nn", "torch.ao.nn")) or find_kind(type(m)) is not None


def find_operands(model: nn.Module) -> Found:
    """The modules whose results are operands of functions.

    >>> class Residual(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return x + self.fc(x)
    >>> find_operands(Residual()).producers
    ['fc']
    """
    try:
        with torch.random.fork_rng(devices=[]):
            traced = copy_for_tracing(model)
            graphs = [_Tracer().trace(traced.train(mode)) for mode in (not model.training, model.training)]
    except Exception as error:  # whatever a model's own code raises when it is traced
        first = str(error).strip().split("\n")[0]
        return Found([], [], {}, f"{type(error).__name__}: {first}")
    producers: dict[str, None] = {}
    without: dict[str, None] = {}
    for node in (node for graph in graphs for node in graph.nodes):
        if not _is_operation(model, node):
            continue
        for operand in node.all_input_nodes:
            if operand.op == "call_module":
                producers[str(operand.target)] = None
            elif operand.op in ("call_function", "call_method") and not _is_operation(model, operand):
                without[f"{operand.name} into {node.name}"] = None
    sources = [_sources(traced, graph) for graph in graphs]
    return Found(list(producers), list(without), dict(sources[0].items() & sources[1].items()), None)


def copy_for_tracing(model: nn.Module) -> nn.Module:
    """A forward pass may leave something behind, but does not change parameters: these are the same."""
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared)


def _sources(model: nn.Module, graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    calls = [node for node in graph.nodes if node.op == "call_module"]
    number = Counter(str(node.target) for node in calls)
    found: dict[str, set[tuple[str, ...]]] = {}
    for node in calls:
        inputs = node.all_input_nodes
        sources: tuple[str, ...] = ()
        for path in _moved_from(model, inputs[0]) if len(inputs) == 1 else ():
            if number[path] > 1:  # which of its results this is would have to be known
                break
            sources = (*sources, path)
        found.setdefault(str(node.target), set()).add(sources)
    return {target: next(iter(ways)) for target, ways in found.items() if len(ways) == 1 and () not in ways}


def _moved_from(model: nn.Module, node: fx.Node) -> Iterator[str]:
    """The modules that a value passes through, back to the one that computes its elements.

    It ends early where the value is changed on the way.
    """
    while not any(_changes_its_input(model, user) for user in node.users):
        if node.op == "call_module":
            yield str(node.target)
            moves = isinstance(model.get_submodule(str(node.target)), TRACED_MODULES)
        else:
            moves = (node.op == "call_function" and node.target in TRACED_FUNCTIONS) or (
                node.op == "call_method" and node.target in TRACED_METHODS
            )
        if not moves or not node.args or not isinstance(node.args[0], fx.Node):
            return
        node = node.args[0]


def _changes_its_input(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else node.target.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("iadd", "imul", "isub", "setitem") or bool(node.kwargs.get("inplace"))


def _is_operation(model: nn.Module, node: Any) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), _POOLS)
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    return node.op == "call_method" and node.target in _METHODS
