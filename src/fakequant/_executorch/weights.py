"""What rewriting a convolution needs: an input that has a view, and a weight that gets another shape."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import Parameter

from fakequant._executorch.delegation import path_of
from fakequant._executorch.graph import can_view, source_of


def require_one_unknown_length(calls: list[Node], axes: str) -> None:
    """Raises ValueError if an input of a convolution has several axes of unknown length, so that it has no view."""
    for call in calls:
        if not can_view(source_of(call)):
            raise ValueError(
                f"{path_of(call) or 'The model'} is a convolution along {axes}, and XNNPACK computes it only if at "
                "most one axis of its input can have any length.\nUse max_batch, or dynamic_shapes with one axis."
            )


def reshape_weights(
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
