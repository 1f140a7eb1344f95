"""What the graph passes share: the operators of fakequant, kinds of operators, and new nodes.

Each quantizer is one node of the graph. `graph_forms` moves these nodes. `lowering` then replaces them by the operators
of ExecuTorch, which they call here. These are registered when executorch is imported.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_LIBRARY = torch.library.Library("fakequant_executorch", "DEF")
_LIBRARY.define("grid(Tensor x, float scale, int zero_point, int qmin, int qmax, str name) -> Tensor")
_LIBRARY.define("token_grid(Tensor x, str name) -> Tensor")

# The codes of 8 bits.
LOW, HIGH = -128, 127


def _grid(x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int, name: str) -> Tensor:
    offset = offset_of(qmax)
    settings = (scale, zero_point + offset, qmin + offset, qmax + offset, torch.int8)
    ops = torch.ops.quantized_decomposed
    y: Tensor = ops.dequantize_per_tensor.default(ops.quantize_per_tensor.default(x, *settings), *settings)
    return y


def _token_grid(x: Tensor, name: str) -> Tensor:
    ops = torch.ops.quantized_decomposed
    settings = (*ops.choose_qparams_per_token_asymmetric.default(x, torch.int8), LOW, HIGH, torch.int8)
    codes = ops.quantize_per_token.default(x, *settings)
    y: Tensor = ops.dequantize_per_token.default(codes, *settings, torch.float32)
    return y


_LIBRARY.impl("grid", _grid, "CompositeExplicitAutograd")
_LIBRARY.impl("token_grid", _token_grid, "CompositeExplicitAutograd")
for _name in ("grid", "token_grid"):
    torch.library.register_fake(f"fakequant_executorch::{_name}", lambda x, *_: torch.empty_like(x), lib=_LIBRARY)

# A fixed grid with one scale for the whole tensor.
GRID: Callable[[Tensor, float, int, int, int, str], Tensor] = torch.ops.fakequant_executorch.grid.default
# One grid per token, which is a row along the last axis. Its scale is computed from the range of the token.
TOKEN_GRID: Callable[[Tensor, str], Tensor] = torch.ops.fakequant_executorch.token_grid.default

aten = torch.ops.aten
# Operators that multiply by a weight, which is their second argument.
LAYERS = {
    aten.linear.default, aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding,
    aten.conv_transpose2d.input, aten.conv_transpose1d.default, aten.convolution.default,
}  # fmt: skip
# Operators that XNNPACK computes in integers between quantizers.
OPERATIONS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mean.dim, aten.cat.default}
# Operators that limit values.
CLAMPS = {aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default}
# Operators that only move or select elements, like those of `fakequant._moves` that move codes.
MOVES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.slice.Tensor, aten.select.int, aten.flip.default, aten.max_pool2d.default, aten.clone.default,
    aten.alias.default,
}  # fmt: skip
PADS = {aten.pad.default, aten.constant_pad_nd.default}


def offset_of(qmax: int) -> int:
    """Returns what is added to codes up to `qmax` so that they fit in 8 signed bits.

    >>> offset_of(127), offset_of(255)
    (0, -128)
    """
    return 0 if qmax <= HIGH else LOW


def called(graph: Graph, *targets: Any) -> list[Node]:
    """Returns the calls of some operators, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def is_call(node: object, targets: Any) -> bool:
    """Returns True if `node` calls one of the operators."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def keeps_grid(node: Node) -> bool:
    """Returns True if the elements of the result are elements of the first argument, or zeros."""
    if not is_call(node, PADS):
        return is_call(node, MOVES)
    # The arguments of `pad` are the tensor, the lengths, the mode and the constant. Others have no mode.
    others = list(node.args[2:])
    if node.target is aten.pad.default and others and others.pop(0) != "constant":
        return True
    return not others or others[0] in (0, None)


def source_of(node: Node) -> Node:
    """Returns the node that computes the first argument of a call."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def can_view(x: Node) -> bool:
    """Returns True if XNNPACK has a view for the shape of `x`: at most one length is unknown."""
    return sum(not isinstance(size, int) for size in x.meta["val"].shape) <= 1


def viewed(graph: Graph, x: Node, value: Tensor) -> Node:
    """Inserts a view of `x` with the shape of `value`, of which at most one length is unknown."""
    made = insert(graph, aten.view.default, (x, [size if isinstance(size, int) else -1 for size in value.shape]), x)
    made.meta["val"] = value
    return made


def in_order(graph: Graph, x: Node) -> Node:
    """Inserts operators that return `x`, so that XNNPACK orders its axes as torch does, and does not fuse around them.

    Convolutions of XNNPACK put the channels last, and others may keep this order.
    """
    if can_view(x):
        return viewed(graph, x, x.meta["val"])
    longer = insert(graph, aten.unsqueeze.default, (x, 0), x)
    longer.meta["val"] = x.meta["val"].unsqueeze(0)
    return insert(graph, aten.squeeze.dim, (longer, 0), x)


def insert(graph: Graph, target: Any, args: tuple[Any, ...], like: Node, dtype: torch.dtype | None = None) -> Node:
    """Inserts a call that returns a tensor of the shape of `like`'s, at the current place. Returns the new node."""
    made = graph.call_function(target, args)
    made.meta = {key: like.meta[key] for key in ("nn_module_stack", "stack_trace") if key in like.meta}
    value = like.meta["val"]
    made.meta["val"] = value if dtype is None else value.to(dtype)
    return made
