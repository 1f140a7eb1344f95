"""Turns layers into forms that XNNPACK has kernels for. The products are the same, so the accumulators are equal.

Convolutions along one axis become convolutions along two axes, of which the second has length 1. XNNPACK's own pass
does so too, but takes a layer with floats for one with codes if its input was quantized. It has no form for transposed
convolutions with codes.

Convolutions along three axes become convolutions along two axes. The slices of the input that meet the `k` taps of a
kernel along the first of the three axes become channels:

    x         (n, c, d, h, w) -> (n * d', c * k, h, w), where d' is the number of positions of the kernel
    weight    (o, c, k, h, w) -> (o, c * k, h, w)
    result    (n * d', o, h', w') -> (n, o, d', h', w')

Batch norms become a product and a sum: y = x * factor + added, as torch computes them in evaluation. XNNPACK folds a
batch norm into a linear layer as if it scaled the layer's outputs, although it scales the second axis.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.nn import Parameter

from fakequant._export.executorch.delegation import path_of
from fakequant._export.executorch.graph import GRID, aten, called, can_view, insert, is_call, source_of, viewed

# --- convolutions along one axis

_ONE_AXIS = {
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
    calls = called(program.graph, *_ONE_AXIS)
    _require_one_unknown_length(calls, "one axis")
    if _reshape_weights(program, calls, axes=3, change=lambda weight: weight.unsqueeze(-1)):
        for call in calls:
            _as_image(program.graph, call)


def _as_image(graph: Graph, call: Node) -> None:
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
        made = insert(graph, _ONE_AXIS[target], (image, *call.args[1:3], *settings, *rest), call)
        made.meta["val"] = call.meta["val"].unsqueeze(-1)
        result = viewed(graph, made, call.meta["val"])
    call.replace_all_uses_with(result)
    graph.erase_node(call)


# --- convolutions along three axes

_THREE_AXES = {aten.conv3d.default: aten.conv2d.default, aten.conv3d.padding: aten.conv2d.padding}


def use_images(program: ExportedProgram) -> None:
    """Rewrites a program, in place. Raises ValueError if the lengths of two axes of an input are unknown."""
    calls = called(program.graph, *_THREE_AXES)
    _require_one_unknown_length(calls, "three axes")
    taps = [call.args[1].meta["val"].shape[2] for call in calls]  # type: ignore[union-attr]
    if _reshape_weights(program, calls, axes=5, change=lambda weight: weight.flatten(1, 2)):
        for call, number in zip(calls, taps, strict=True):
            _as_images(program.graph, call, number)


def _as_images(graph: Graph, call: Any, taps: int) -> None:
    x, result = source_of(call), call.meta["val"]
    defaults: tuple[Any, ...] = ([1, 1, 1], [0, 0, 0], [1, 1, 1], 1)
    rest: Any
    given: tuple[Any, ...] = call.args[3:]
    stride, padding, dilation, groups = (*given, *defaults[len(given) :])
    stride, dilation = ([one] * 3 if len(one) == 1 else list(one) for one in (stride, dilation))
    reach, (depth, *images) = dilation[0] * (taps - 1), x.meta["val"].shape[2:]
    if isinstance(padding, str):
        before, rest = (reach // 2, padding) if padding == "same" else (0, padding)
        after = reach - before if padding == "same" else 0
    else:
        padding = [*padding] * 3 if len(padding) == 1 else padding
        before = after = padding[0]
        rest = padding[1:]
    with graph.inserting_before(call):
        made = x
        if before or after:
            made = insert(graph, aten.constant_pad_nd.default, (x, [0, 0, 0, 0, before, after]), x)
            batch, channels = x.meta["val"].shape[:2]
            made.meta["val"] = x.meta["val"].new_empty(batch, channels, before + depth + after, *images)
        made = _call(graph, made, aten.permute.default, [0, 2, 1, 3, 4])
        places = range(0, before + depth + after - reach, stride[0])
        parts = []
        for start in range(0, reach + 1, dilation[0]):
            part = made
            if len(places) < made.meta["val"].shape[1]:
                part = _call(graph, made, aten.slice.Tensor, 1, start, start + places[-1] + 1, stride[0])
            part = _call(graph, part, aten.clone.default, memory_format=torch.contiguous_format)
            parts.append(_call(graph, part, aten.view.default, [-1, x.meta["val"].shape[1], 1, *images]))
        made = parts[0]
        if taps > 1:
            made = insert(graph, aten.cat.default, (parts, 2), call)
            made.meta["val"] = torch.cat([part.meta["val"] for part in parts], 2)
            if is_call(x, {GRID}):  # so that the layer starts with codes
                made = insert(graph, GRID, (made, *x.args[1:]), made)
        made = viewed(graph, made, made.meta["val"].flatten(1, 2))
        target = _THREE_AXES[call.target]
        made = insert(graph, target, (made, *call.args[1:3], stride[1:], rest, dilation[1:], groups), call)
        _, outputs, _, *sizes = result.shape
        made.meta["val"] = result.transpose(1, 2).reshape(-1, outputs, *sizes)
        made = viewed(graph, made, result.transpose(1, 2))
        made = _call(graph, made, aten.permute.default, [0, 2, 1, 3, 4])
    call.replace_all_uses_with(made)
    graph.erase_node(call)


def _call(graph: Graph, x: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    made = insert(graph, target, (x, *args), x)
    made.kwargs = kwargs
    made.meta["val"] = target(x.meta["val"], *args, **kwargs)
    return made


# --- what both need: an input that has a view, and a weight that gets another shape


def _require_one_unknown_length(calls: list[Node], axes: str) -> None:
    """Raises ValueError if an input of a convolution has several axes of unknown length, so that it has no view."""
    for call in calls:
        if not can_view(source_of(call)):
            raise ValueError(
                f"{path_of(call) or 'The model'} is a convolution along {axes}, and XNNPACK computes it only if at "
                "most one axis of its input can have any length.\nUse max_batch, or dynamic_shapes with one axis."
            )


def _reshape_weights(
    program: ExportedProgram, calls: list[Node], *, axes: int, change: Callable[[Tensor], Tensor]
) -> bool:
    """Gives the weights of layers another shape, in place, before the layers get another form.

    Returns False, and changes nothing, if something else reads a weight, or if a call has another form: its weight is
    computed, its input has another number of axes, or it has keyword arguments.
    """
    weights = {_holder(call) for call in calls}
    readers = {reader for weight in weights for reader in _readers(weight)}
    if not readers <= set(calls) or not all(_is_known(call, axes) for call in calls):
        return False
    for weight in weights:
        _reshape(program, weight, change)
    return True


def _holder(call: Node) -> Node:
    """Returns the placeholder of a layer's weight, or of its codes."""
    node: Any = call.args[1]
    while node.op == "call_function":
        node = node.args[0]
    assert isinstance(node, Node)
    return node


def _readers(weight: Node) -> list[Node]:
    """Returns the calls that read a weight, or its dequantized codes."""
    found: list[Node] = []
    for user in weight.users:
        found += list(user.users) if _dequantizes(user) else [user]
    return found


def _dequantizes(node: Node) -> bool:
    return node.op == "call_function" and "dequantize" in str(node.target)


def _is_known(call: Node, axes: int) -> bool:
    x: Any = call.args[0]
    return _holder(call).op == "placeholder" and x.meta["val"].dim() == axes and not call.kwargs


def _reshape(program: ExportedProgram, weight: Node, change: Callable[[Tensor], Tensor]) -> None:
    signature = program.graph_signature
    for names, tensors in (
        (signature.inputs_to_parameters, program.state_dict),
        (signature.inputs_to_buffers, program.state_dict),
        (signature.inputs_to_lifted_tensor_constants, program.constants),
    ):
        if weight.name in names:
            value: Tensor = tensors[names[weight.name]]
            changed = change(value.detach())
            tensors[names[weight.name]] = Parameter(changed, False) if isinstance(value, Parameter) else changed
    for node in (weight, *filter(_dequantizes, weight.users)):
        node.meta["val"] = change(node.meta["val"])


# --- batch norms

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
            _as_product(program, call)


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


def _as_product(program: ExportedProgram, call: Node) -> None:
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
