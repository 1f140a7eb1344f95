"""Finds the modules whose outputs are operands of additions, concatenations, products and means, or inputs of layers.

The model is traced with torch.fx for analysis only and never replaced by the traced graph.
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

# The operations whose operands `QuantConfig.operands` quantizes.
_FUNCTIONS = {
    operator.add, operator.iadd, operator.mul, operator.imul, operator.matmul, operator.sub, operator.isub,
    torch.add, torch.mul, torch.sub, torch.cat, torch.concat, torch.stack, torch.matmul, torch.bmm, torch.einsum,
    F.scaled_dot_product_attention, torch.mean, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
}  # fmt: skip
_METHODS = {"add", "add_", "mul", "mul_", "sub", "sub_", "matmul", "bmm", "__add__", "__mul__", "__matmul__", "mean"}
_MODULES = (
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip


class DataFlow(NamedTuple):
    """The result of `find_operands`."""

    # Paths of modules whose outputs are operands, in the order of computation.
    producers: list[str]
    # Operands computed by functions. They stay in float, because no module can hold their quantizer.
    without_module: list[str]
    # For each module with a single input: the paths of the modules that the input comes through, nearest first.
    # All of them only move elements, except the last, which may compute them.
    sources: dict[str, tuple[str, ...]]
    # Why the model could not be traced. None if it was traced.
    problem: str | None


class LayerTracer(fx.Tracer):
    """A tracer that enters containers, but neither torch's other modules nor layers that can be quantized."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Returns True if a call of the module is one node of the graph."""
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return m.__module__.startswith(("torch.nn", "torch.ao.nn")) or find_kind(type(m)) is not None


def find_operands(model: nn.Module) -> DataFlow:
    """Returns the modules of a model whose outputs are operands. Both modes, training and evaluation, are traced.

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
            graphs = [LayerTracer().trace(traced.train(mode)) for mode in (not model.training, model.training)]
    except Exception as error:  # tracing runs the model's code, which can raise anything
        first = str(error).strip().split("\n")[0]
        return DataFlow([], [], {}, f"{type(error).__name__}: {first}")
    producers: dict[str, None] = {}
    without_module: dict[str, None] = {}
    for node in (node for graph in graphs for node in graph.nodes):
        if not _takes_operands(model, node):
            continue
        for operand in node.all_input_nodes:
            if operand.op == "call_module":
                producers[str(operand.target)] = None
            elif operand.op in ("call_function", "call_method") and not _takes_operands(model, operand):
                without_module[f"{operand.name} into {node.name}"] = None
    sources = [_input_sources(traced, graph) for graph in graphs]
    return DataFlow(list(producers), list(without_module), dict(sources[0].items() & sources[1].items()), None)


def copy_for_tracing(model: nn.Module) -> nn.Module:
    """Returns a copy that shares the parameters: tracing may change buffers and attributes, but not parameters."""
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared)


def _input_sources(model: nn.Module, graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    calls = [node for node in graph.nodes if node.op == "call_module"]
    times_called = Counter(str(node.target) for node in calls)
    found: dict[str, set[tuple[str, ...]]] = {}
    for node in calls:
        inputs = node.all_input_nodes
        sources: tuple[str, ...] = ()
        for path in _modules_behind(model, inputs[0]) if len(inputs) == 1 else ():
            if times_called[path] > 1:  # called several times: it is unknown which of its outputs this is
                break
            sources = (*sources, path)
        found.setdefault(str(node.target), set()).add(sources)
    return {target: next(iter(ways)) for target, ways in found.items() if len(ways) == 1 and () not in ways}


def _modules_behind(model: nn.Module, node: fx.Node) -> Iterator[str]:
    """Yields the modules that a value came through, back to the one that computed its elements.

    Stops early at a value that is modified in place.
    """
    while not any(_changes_input_in_place(model, user) for user in node.users):
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


def _changes_input_in_place(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else node.target.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("iadd", "imul", "isub", "setitem") or bool(node.kwargs.get("inplace"))


def _takes_operands(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), _MODULES)
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    return node.op == "call_method" and node.target in _METHODS
