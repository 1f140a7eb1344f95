"""Turns batch norms into a product and a sum: y = x * factor + added, as torch computes them in evaluation.

XNNPACK folds a batch norm into a linear layer as if it scaled the layer's outputs, although it scales the second axis.
"""

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from fakequant._executorch.graph import aten, called, insert, is_call, source_of

_BATCH_NORM = aten._native_batch_norm_legit_no_training.default
# Layers that XNNPACK folds a batch norm into. Those along one axis get a view behind them.
_FOLDING = {aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input}


def use_products(program: ExportedProgram) -> None:
    """Rewrites a program, in place, except where XNNPACK folds a batch norm into the layer that it alone reads."""
    calls: dict[Any, list[Node]] = {}  # by the constants, which change for all calls of a module
    for node in called(program.graph, _BATCH_NORM):
        calls.setdefault((*node.args[1:5], node.args[6], source_of(node).meta["val"].dim()), []).append(node)
    for (*holders, eps, axes), group in calls.items():
        weight, bias, mean, variance = (_value(program, holder) for holder in holders)
        is_own = all(set(holder.users) == set(group) for holder in holders[2:])
        if mean is None or variance is None or not is_own or all(map(_is_folded, group)):
            continue
        factor = 1 / torch.sqrt(variance + eps)
        factor = factor if weight is None else factor * weight
        added = -mean * factor if bias is None else bias - mean * factor
        for holder, value in zip(holders[2:], (added, factor), strict=True):
            _set(program, holder, value.detach().reshape(1, -1, *[1] * (axes - 2)))
        for call in group:
            _rewrite(program, call)


def _is_folded(norm: Node) -> bool:
    layer = source_of(norm)
    return is_call(layer, _FOLDING) and len(layer.users) == 1


def _name(program: ExportedProgram, holder: Node) -> str | None:
    """Returns the name of a parameter or buffer in the state of the program."""
    signature = program.graph_signature
    return {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.get(holder.name)


def _value(program: ExportedProgram, holder: Node | None) -> Tensor | None:
    """Returns a parameter or a buffer."""
    name = None if holder is None else _name(program, holder)
    return None if name is None else program.state_dict.get(name)


def _set(program: ExportedProgram, holder: Node, value: Tensor) -> None:
    name = _name(program, holder)
    assert name is not None
    program.state_dict[name] = value
    holder.meta["val"] = holder.meta["val"].new_empty(value.shape)


def _rewrite(program: ExportedProgram, call: Node) -> None:
    _, _, _, added, factor, *_ = call.args
    x, graph = source_of(call), program.graph
    with graph.inserting_before(call):
        product = insert(graph, aten.mul.Tensor, (x, factor), x)
        result = insert(graph, aten.add.Tensor, (product, added), x)
    result.meta["nn_module_stack"] = product.meta["nn_module_stack"] = call.meta.get("nn_module_stack")
    for part in list(call.users):
        part.replace_all_uses_with(result)
        graph.erase_node(part)
    graph.erase_node(call)
