"""Rewrites a graph into forms for which XNNPACK has integer kernels, without changing any code.

- A mean over all positions of an image keeps its axes, and a view removes them.
- Quantizers of the same tensor with equal grids become one.
- A ReLU or another clamp before a quantizer becomes limits of its codes.
- A quantizer after an operator that only moves elements is repeated before it, so that a layer ends in codes.
- The grid of an operator that moves elements of a grid is repeated after it, so that the next layer starts with codes.
- The length of the batch in the shape of a view becomes -1.
"""

from typing import Any

from torch.fx import Graph, Node

from fakequant._executorch.graph import (
    CLAMPS,
    GRID,
    LAYERS,
    MOVES,
    OPERATIONS,
    PADS,
    aten,
    called,
    insert,
    is_call,
    keeps_grid,
    source_of,
)


def rewrite(graph: Graph) -> None:
    """Applies all rewrites. Runs before lowering, while quantizers are single nodes."""
    for node in called(graph, aten.mean.dim, aten.adaptive_avg_pool2d.default):
        _keep_axes(graph, node)
    before = -1
    while before != len(graph.nodes):  # repeat until nothing changes
        before = len(graph.nodes)
        _merge(graph)
        for node in called(graph, GRID):
            _take_in_clamp(graph, node)
            _repeat_before_moves(graph, node)
    for node in called(graph, *MOVES, *PADS):
        _repeat_after_move(graph, node)
    for node in called(graph, aten.view.default):
        _infer_length(node)
    graph.eliminate_dead_code()


def _keep_axes(graph: Graph, node: Node) -> None:
    x, value = source_of(node), source_of(node).meta["val"]
    if value.dim() != 4:
        return
    if node.target is aten.mean.dim:
        axes = node.args[1]
        is_image = isinstance(axes, (tuple, list)) and sorted(int(str(axis)) % 4 for axis in axes) == [2, 3]
        if not is_image or node.kwargs.get("dtype") is not None:
            return
    elif any(size != 1 for size in node.args[1]):  # type: ignore[union-attr]
        return
    with graph.inserting_before(node):
        pooled = insert(graph, aten.mean.dim, (x, [2, 3], True), node)
        pooled.meta["val"] = value.mean((2, 3), True)
        result = pooled
        if node.meta["val"].dim() == 2:
            result = insert(graph, aten.view.default, (pooled, [-1, int(value.shape[1])]), node)
    _replace(graph, node, result)


def _merge(graph: Graph) -> None:
    seen: dict[Any, Node] = {}
    for node in called(graph, GRID):
        first = seen.setdefault((source_of(node), _settings(node)), node)
        if first is not node:
            _replace(graph, node, first)


def _settings(node: Node) -> tuple[Any, ...]:
    """Returns scale, zero point and range of a grid."""
    return tuple(node.args[1:5])


def _take_in_clamp(graph: Graph, node: Node) -> None:
    """Removes a clamp before a quantizer. Clamping and rounding can be exchanged, because rounding is monotonic."""
    clamp = source_of(node)
    if not is_call(clamp, CLAMPS) or len(clamp.users) > 1:
        return
    low, high = _bounds(clamp)
    _, scale, zero_point, qmin, qmax, name = node.args
    limits = [
        code if bound is None else min(max(round(bound * (1.0 / scale)) + zero_point, qmin), qmax)  # type: ignore
        for code, bound in ((qmin, low), (qmax, high))
    ]
    node.args = (source_of(clamp), scale, zero_point, *limits, name)
    graph.erase_node(clamp)


def _bounds(clamp: Node) -> tuple[float | None, float | None]:
    if clamp.target is aten.relu.default:
        return 0.0, None
    if clamp.target is aten.relu6.default:
        return 0.0, 6.0
    defaults: tuple[Any, ...] = (-1.0, 1.0) if clamp.target is aten.hardtanh.default else (None, None)
    given = (*clamp.args[1:3], *defaults[len(clamp.args) - 1 :])
    return given[0], given[1]


def _repeat_before_moves(graph: Graph, node: Node) -> None:
    at = node
    while True:
        move = source_of(at)
        if not is_call(move, MOVES) or len(move.users) > 1 or is_call(source_of(move), {GRID}):
            return
        with graph.inserting_before(move):
            copy = insert(graph, GRID, (source_of(move), *node.args[1:]), source_of(move))
        move.replace_input_with(source_of(move), copy)
        at = copy


def _repeat_after_move(graph: Graph, move: Node) -> None:
    grid = source_of(move)
    if not is_call(grid, {GRID}) or not keeps_grid(move) or not _leads_to_codes(move):
        return
    users = list(move.users)
    if len(users) == 1 and is_call(users[0], {GRID}):
        return
    with graph.inserting_after(move):
        copy = insert(graph, GRID, (move, *grid.args[1:]), move)
    for user in users:
        user.replace_input_with(move, copy)


def _leads_to_codes(node: Node) -> bool:
    """Returns True if an integer kernel reads the result, or could after further moves."""
    return any(is_call(user, LAYERS | OPERATIONS) or _moves_on(user) for user in node.users)


def _moves_on(user: Node) -> bool:
    return keeps_grid(user) and _leads_to_codes(user)


def _infer_length(view: Node) -> None:
    shape = view.args[1]
    assert isinstance(shape, (tuple, list))
    unknown = [isinstance(size, Node) for size in shape]
    if sum(unknown) == 1 and -1 not in shape:
        view.args = (view.args[0], [-1 if is_node else size for size, is_node in zip(shape, unknown, strict=True)])


def _replace(graph: Graph, node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)
