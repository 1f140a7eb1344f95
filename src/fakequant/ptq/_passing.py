"""Operations that pass on factors of channels: f(s * x) = s * f(x) for s > 0, channel by channel.

A layout says where the channels are in a tensor. Operations that move elements move the channels with them.
"""

import math
from typing import NamedTuple

from torch import nn

from fakequant._prepare.flow_graph import Call

# Of the same rank before and after, with the channels on the same axis. They are known without sizes.
_KEEPING = {
    "relu", "leaky_relu", "prelu", "dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone", "detach",
    *(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)),
}  # fmt: skip
_KEEPING_MODULES = (
    nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
# Where the arguments decide whether factors pass. The sizes show the axis, and the check on an example the rest.
_SIZED = {"mean", "sum", "amax", "pad", "to", "float", "type_as", "narrow", "getitem", "roll", "flip", "interpolate"}
_PRODUCTS = {"mul", "div"}
_RESHAPING = {"flatten", "reshape", "view", "unflatten", "squeeze", "unsqueeze"}
_RESHAPING_MODULES = (nn.Flatten, nn.Unflatten)
_PERMUTING = {"permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "T", "mT"}


class Layout(NamedTuple):
    """The channels of a tensor: channel c is at the positions c * repeat to c * repeat + repeat - 1 of an axis."""

    # Counted from 0 if the shape is known. If not, -1 is the last axis, and 1 the second.
    axis: int
    repeat: int = 1


def passed(model: nn.Module, call: Call, position: int, layout: Layout, channels: int) -> Layout | str:
    """Returns the layout of a call's result, or why it does not pass on factors.

    Args:
        model: The model.
        call: The call.
        position: Which of its operands has the factors.
        layout: The layout of that operand.
        channels: The number of channels.
    """
    name = call.function_name
    module = model.get_submodule(call.path) if call.kind == "module" else None
    if module is not None:
        name = type(module).__name__
    no = f"{name} does not pass on factors"
    if position != 0 and name not in _PRODUCTS:
        return no
    if isinstance(module, _KEEPING_MODULES) if module is not None else name in _KEEPING:
        return layout
    if call.shape is None:
        moves = name in _RESHAPING | _PERMUTING or isinstance(module, _RESHAPING_MODULES)
        return f"the sizes at {name} are only known with an example" if moves else no
    before, after = call.input_shapes[position], call.shape
    found: Layout | None = None
    if name in _RESHAPING or isinstance(module, _RESHAPING_MODULES):
        found = _reshaped(before, after, layout, channels)
    elif name in _PERMUTING or (name in _SIZED and len(before) != len(after)):
        found = _only_axis(before, after, layout)
    elif name in _SIZED:
        found = layout if before[layout.axis] == after[layout.axis] else None
    elif name in _PRODUCTS:
        found = layout if before == after else None
    else:
        return no
    return found or f"it is not clear where {name} moves the channels"


def may_pass(model: nn.Module, call: Call) -> bool:
    """Returns True if a call passes on factors for some sizes and arguments."""
    if call.kind == "module":
        return isinstance(model.get_submodule(call.path), (*_KEEPING_MODULES, *_RESHAPING_MODULES))
    return call.function_name in _KEEPING | _SIZED | _RESHAPING | _PERMUTING


def _reshaped(before: tuple[int, ...], after: tuple[int, ...], layout: Layout, channels: int) -> Layout | None:
    """Returns the layout after the elements were given another shape, in the same order."""
    block = layout.repeat * math.prod(before[layout.axis + 1 :])  # neighbours that belong to one channel
    for axis, size in enumerate(after):
        stride = math.prod(after[axis + 1 :])
        if stride and block % stride == 0 and size == block // stride * channels:
            return Layout(axis, block // stride)
    return None


def _only_axis(before: tuple[int, ...], after: tuple[int, ...], layout: Layout) -> Layout | None:
    """Returns the layout after axes were moved or removed, if only one axis has the size of the channels'."""
    size = before[layout.axis]
    found = [axis for axis, other in enumerate(after) if other == size]
    return Layout(found[0], layout.repeat) if len(found) == 1 and before.count(size) == 1 else None
