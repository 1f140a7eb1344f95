"""Rewrites a graph into forms for which XNNPACK has integer kernels, without changing any code.

- A mean over all positions of an image keeps its axes, and a view removes them.
- Quantizers of the same tensor with equal grids become one.
- A ReLU or another clamp before a quantizer becomes limits of its codes.
- A quantizer after an operator that only moves elements is repeated before it, so that a layer ends in codes.
- A quantizer after a concatenation is repeated before it, for each operand: XNNPACK takes one grid for all of them.
- The grid of an operator that moves elements of a grid is repeated after it, so that the next layer starts with codes.
  XNNPACK would move the codes if another quantizer followed, as if its grid were the same.
- A PReLU of other tensors than images becomes relu(x) - weight * relu(-x), which has the same values.
- A stack becomes a concatenation, and one of a single tensor becomes that tensor.
- The length of the batch in the shape of a view becomes -1.
"""

from typing import Any

from torch.fx import Graph, Node

from fakequant._export.executorch.graph import (
    CLAMPS,
    GRID,
    HIGH,
    LAYERS,
    LOW,
    MOVES,
    OPERATIONS,
    PADS,
    aten,
    called,
    insert,
    is_call,
    keeps_grid,
    offset_of,
    source_of,
    viewed,
)
from fakequant._runtimes.reciprocal_rounding import reciprocal_code


def rewrite(graph: Graph) -> None:
    """Applies all rewrites. Runs before lowering, while quantizers are single nodes."""
    for node in called(graph, aten.mean.dim, aten.adaptive_avg_pool2d.default):
        _keep_axes(graph, node)
    for node in called(graph, aten.prelu.default):
        _split_prelu(graph, node)
    for node in called(graph, aten.stack.default):
        _as_concatenation(graph, node)
    for node in called(graph, aten.cat.default):
        if len(node.args[0]) == 1:  # type: ignore[arg-type]
            _replace(graph, node, node.args[0][0])  # type: ignore
    before: list[Node] = []
    while before != list(graph.nodes):  # repeat until nothing changes
        before = list(graph.nodes)
        _merge(graph)
        for node in called(graph, GRID):
            _take_in_clamp(graph, node)
            _repeat_before_moves(graph, node)
            _repeat_before_join(graph, node)
    for node in called(graph, GRID):
        _drop_limits_after_join(node)
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
        code if bound is None else min(max(reciprocal_code(bound, scale, zero_point), qmin), qmax)  # type: ignore
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


def _split_prelu(graph: Graph, node: Node) -> None:
    x, weight = source_of(node), node.args[1]
    assert isinstance(weight, Node)
    axes = x.meta["val"].dim()
    if axes == 4:
        return
    with graph.inserting_before(node):
        if weight.meta["val"].numel() > 1 and axes > 2:
            weight = viewed(graph, weight, weight.meta["val"].reshape(-1, *[1] * (axes - 2)))
        positive = insert(graph, aten.relu.default, (x,), node)
        negative = insert(graph, aten.relu.default, (insert(graph, aten.neg.default, (x,), node),), node)
        scaled = insert(graph, aten.mul.Tensor, (negative, weight), node)
        result = insert(graph, aten.sub.Tensor, (positive, scaled), node)
    _replace(graph, node, result)


def _as_concatenation(graph: Graph, node: Node) -> None:
    axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    with graph.inserting_before(node):
        parts = []
        operands: Any = node.args[0]
        for x in operands:
            value = x.meta["val"].unsqueeze(axis)
            if sum(not isinstance(size, int) for size in value.shape) <= 1:
                parts.append(viewed(graph, x, value))
            else:  # XNNPACK does not add an axis before others
                parts.append(insert(graph, aten.unsqueeze.default, (x, axis), x))
                parts[-1].meta["val"] = value
        joined = insert(graph, aten.cat.default, (parts, axis), node)
    _replace(graph, node, joined)


def _repeat_before_join(graph: Graph, node: Node) -> None:
    join = source_of(node)
    if not is_call(join, {aten.cat.default}) or len(join.users) > 1:
        return
    operands: list[Node] = list(join.args[0])  # type: ignore[arg-type]
    for position, operand in enumerate(operands):
        if not _is_within(operand, node):
            with graph.inserting_before(join):
                operands[position] = insert(graph, GRID, (operand, *node.args[1:]), operand)
    join.args = (operands, *join.args[1:])


def _is_within(node: Node, other: Node) -> bool:
    """Returns True if all codes of a grid are codes of another grid for the same values."""
    if not is_call(node, {GRID}):
        return False
    (scale, zero_point, *limits), (other_scale, other_zero_point, *allowed) = map(_in_file, (node, other))
    same = (scale, zero_point) == (other_scale, other_zero_point)
    return same and allowed[0] <= limits[0] and limits[1] <= allowed[1]


def _in_file(node: Node) -> tuple[Any, ...]:
    """Returns scale, zero point and range of a grid, as they are in the file."""
    scale, zero_point, qmin, qmax = _settings(node)
    offset = offset_of(qmax)
    return scale, zero_point + offset, qmin + offset, qmax + offset


def _drop_limits_after_join(node: Node) -> None:
    """Takes the limits away from the grid of a concatenation, because the grids of its operands have them."""
    join = source_of(node)
    if is_call(join, {aten.cat.default}) and all(_is_within(operand, node) for operand in join.args[0]):  # type: ignore
        scale, zero_point, *_ = _in_file(node)
        node.args = (join, scale, zero_point, LOW, HIGH, node.args[5])


def _repeat_after_move(graph: Graph, move: Node) -> None:
    grid = source_of(move)
    if not is_call(grid, {GRID}) or not keeps_grid(move) or not _leads_to_codes(move):
        return
    users = list(move.users)
    if len(users) == 1 and is_call(users[0], {GRID}) and _in_file(users[0])[:2] == _in_file(grid)[:2]:
        return
    with graph.inserting_after(move):
        copy = insert(graph, GRID, (move, *grid.args[1:]), move)
    for user in users:
        user.replace_input_with(move, copy)


def _leads_to_codes(node: Node) -> bool:
    """Returns True if an integer kernel or a quantizer reads the result, or could after further moves."""
    return any(is_call(user, LAYERS | OPERATIONS | {GRID}) or _moves_on(user) for user in node.users)


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
