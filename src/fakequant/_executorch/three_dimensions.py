"""Turns convolutions along three axes into convolutions along two axes, for which XNNPACK has kernels.

The slices of the input that meet the `k` taps of a kernel along the first of the three axes become channels:

    x         (n, c, d, h, w) -> (n * d', c * k, h, w), where d' is the number of positions of the kernel
    weight    (o, c, k, h, w) -> (o, c * k, h, w)
    result    (n * d', o, h', w') -> (n, o, d', h', w')

The products are the same, so the sums of codes are equal.
"""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from fakequant._executorch.graph import GRID, aten, called, insert, is_call, source_of, viewed
from fakequant._executorch.weights import require_one_unknown_length, reshape_weights

_FORMS = {aten.conv3d.default: aten.conv2d.default, aten.conv3d.padding: aten.conv2d.padding}


def use_images(program: ExportedProgram) -> None:
    """Rewrites a program, in place. Raises ValueError if the lengths of two axes of an input are unknown."""
    calls = called(program.graph, *_FORMS)
    require_one_unknown_length(calls, "three axes")
    taps = [call.args[1].meta["val"].shape[2] for call in calls]  # type: ignore[union-attr]
    if reshape_weights(program, calls, axes=5, change=lambda weight: weight.flatten(1, 2)):
        for call, number in zip(calls, taps, strict=True):
            _rewrite(program.graph, call, number)


def _rewrite(graph: Graph, call: Any, taps: int) -> None:
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
        target = _FORMS[call.target]
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
