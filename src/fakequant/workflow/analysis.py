"""Which modules' results reach an addition, a concatenation or a product in the model's own code.

torch.fx is used to look at the model, never to replace it. What it cannot trace is left alone.
"""

import copy
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from fakequant.nn.layer import find_forward

_FUNCTIONS = {
    operator.add, operator.iadd, operator.mul, operator.imul, operator.matmul, operator.sub, operator.isub,
    torch.add, torch.mul, torch.sub, torch.cat, torch.concat, torch.stack, torch.matmul, torch.bmm, torch.einsum,
    F.scaled_dot_product_attention,
}  # fmt: skip
_METHODS = {"add", "add_", "mul", "mul_", "sub", "sub_", "matmul", "bmm", "__add__", "__mul__", "__matmul__"}


class Found(NamedTuple):
    """What the analysis found."""

    # Paths of modules whose results are operands, in the order in which they are computed.
    producers: list[str]
    # Operands that are results of functions, where no module is to hold a quantizer.
    without_module: list[str]
    # Why there is no more, if the model could not be traced.
    problem: str | None


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return m.__module__.startswith(("torch.nn", "torch.ao.nn")) or find_forward(type(m)) is not None


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
        # A copy, because a forward pass may leave something behind; with the same parameters, which it does not change.
        shared: dict[int, Any] = {id(p): p for p in model.parameters()}
        with torch.random.fork_rng(devices=[]):
            graph = _Tracer().trace(copy.deepcopy(model, shared))
    except Exception as error:  # whatever a model's own code raises when it is traced
        first = str(error).strip().split("\n")[0]
        return Found([], [], f"{type(error).__name__}: {first}")
    producers: dict[str, None] = {}
    without: dict[str, None] = {}
    for node in graph.nodes:
        if not _is_operation(node):
            continue
        for operand in node.all_input_nodes:
            if operand.op == "call_module":
                producers[str(operand.target)] = None
            elif operand.op in ("call_function", "call_method") and not _is_operation(operand):
                without[f"{operand.name} into {node.name}"] = None
    return Found(list(producers), list(without), None)


def _is_operation(node: Any) -> bool:
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    return node.op == "call_method" and node.target in _METHODS
