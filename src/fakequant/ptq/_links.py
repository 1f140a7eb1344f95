"""Links: a module whose output can be scaled per channel, and the layers that can undo it.

    producer(x) / s  ->  operations that pass on factors  ->  layers with weight * s

The product is the same as before. This holds only if nothing else sees the output of the producer. An operation passes
on factors if f(s * x) = s * f(x) for s > 0, channel by channel.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fakequant._prepare.flow_graph import Call, FlowGraph
from fakequant.nn._quantized_layer import kind_of
from fakequant.ptq._channels import (
    channel_axis,
    input_ranges,
    number_of_inputs,
    number_of_outputs,
    parameters_of,
    reason_against_layer,
    scale_inputs,
    scale_outputs,
)

# Of the same rank before and after, with the channels on the same axis.
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

    axis: int
    repeat: int = 1


@dataclasses.dataclass(eq=False)
class Link:
    """A producer and its users."""

    # The path and the module of the producer: a layer, or a norm with a weight per channel.
    path: str
    module: nn.Module
    channels: int
    # The users by path: each has `repeat` input channels for one of the producer.
    users: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    repeats: dict[str, int] = dataclasses.field(default_factory=dict)
    # The calls whose results have the factors.
    calls: list[Call] = dataclasses.field(default_factory=list)

    @property
    def is_norm(self) -> bool:
        """Whether the producer is a norm."""
        return kind_of(self.module) is None

    @torch.no_grad()
    def rescale(self, factors: Tensor) -> None:
        """Divides the output of the producer by a factor per channel, and multiplies the weights of the users by it."""
        if self.is_norm:
            for parameter in _own_parameters(self.module):
                parameter.div_(factors.to(parameter))
        else:
            scale_outputs(self.module, factors.reciprocal())
        for path, layer in self.users.items():
            scale_inputs(layer, self.factors_of(path, factors))

    def factors_of(self, path: str, factors: Tensor) -> Tensor:
        """Returns the factor of each input channel of a user."""
        return factors.repeat_interleave(self.repeats[path])

    def per_channel(self, path: str, values: Tensor) -> Tensor:
        """Returns the largest of the values that a user has for each channel of the producer."""
        return values.reshape(self.channels, self.repeats[path]).amax(1)

    def user_ranges(self) -> Tensor:
        """Returns the largest magnitude of the users' weights for each channel of the producer, in float64."""
        ranges = [self.per_channel(path, input_ranges(layer).double()) for path, layer in self.users.items()]
        return torch.stack(ranges).amax(0)

    def parameters(self) -> Sequence[Tensor]:
        """Returns all parameters that `rescale` changes."""
        of_users = [parameters_of(layer)[0] for layer in self.users.values()]
        return [*_own_parameters(self.module), *of_users]


@dataclasses.dataclass
class Links:
    """All links of a model, and why layers are in none, by path."""

    links: list[Link]
    reasons: dict[str, str]

    def drop(self, link: Link, reason: str) -> None:
        """Removes a link, and gives its users a reason."""
        self.links.remove(link)
        self.reasons.update(dict.fromkeys(link.users, reason))


def find_links(model: nn.Module, graph: FlowGraph) -> Links:
    """Returns the links of a model. A layer has at most one producer.

    >>> from fakequant._prepare.record_flow import record_flow
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> found = find_links(model, record_flow(model, torch.ones(1, 2)))
    >>> [(link.path, list(link.users)) for link in found.links], found.reasons
    ([('0', ['2'])], {'0': 'its input is an input of the model'})
    """
    finder = Finder(model, graph)
    links: list[Link] = []
    reasons: dict[str, str] = {}
    for path, starts in finder.starts.items():
        link, reason = finder.follow(path, starts)
        if reason is None and any(user in other.users for other in links for user in link.users):
            reason = "another module scales its input already"
        if reason is None and link.users:
            links.append(link)
        elif reason is not None:
            finder.failures[path] = reason
            for user in link.users:
                reasons.setdefault(user, reason)
    linked = {path for link in links for path in link.users}
    layers = {path: module for path, module in model.named_modules() if kind_of(module) is not None}
    reasons = {path: reasons.get(path) or finder.reason_without_producer(path) for path in layers if path not in linked}
    return Links(links, reasons)


class Finder:
    """Follows the results of producers to their users."""

    def __init__(self, model: nn.Module, graph: FlowGraph) -> None:
        self.model, self.graph = model, graph
        self.results = set(graph.results)
        # Why producers cannot be scaled, by path.
        self.failures: dict[str, str] = {}
        self.count = graph.count()
        self.names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        # The functions that read a parameter, by its path.
        self.readers: dict[str, list[Call]] = {}
        for call in graph.calls:
            for source in call.inputs:
                if source.kind == "parameter" and call.kind == "function":
                    self.readers.setdefault(source.path, []).append(call)

        self.starts = self._starts()

    def _starts(self) -> dict[str, list[Call]]:
        """Returns the calls with which the results of each possible producer start, in the order of the calls."""
        found: dict[str, list[Call]] = {}
        for call in self.graph.calls:
            module = self.model.get_submodule(call.path)
            if call.kind == "module":
                if kind_of(module) is not None or is_norm(module):
                    found.setdefault(call.path, []).append(call)
            elif is_norm(module) and any(_is_own(source, call.path) for source in call.inputs):
                found.setdefault(call.path, []).append(call)
        return found

    def follow(self, path: str, starts: list[Call]) -> tuple[Link, str | None]:
        """Returns a producer with the users of its results, and why it cannot be scaled, or None if it can."""
        module = self.model.get_submodule(path)
        is_norm = kind_of(module) is None
        if not is_norm and (reason_against_layer(module) is not None or isinstance(module, nn.MultiheadAttention)):
            return Link(path, module, 0), "its outputs cannot be scaled"
        reason = self.reason_against_parameters(path, module)
        channels = len(_own_parameters(module)[0]) if is_norm else number_of_outputs(module)
        link = Link(path, module, channels)
        layouts: dict[Call, Layout] = {}
        reached: Counter[str] = Counter()
        waiting = list(starts)
        for call in starts:
            layout = _own_layout(module, call, channels)
            if layout is None or call.results != 1:
                return link, f"it is not clear where the channels of {path} are"
            layouts[call] = layout
        while waiting:
            call = waiting.pop(0)
            link.calls.append(call)
            if call in self.results:
                reason = reason or f"the model also returns the result of {path}"
            for user in call.users:
                if user in layouts:
                    continue
                if self._is_user(user):
                    problem = self._add_user(link, user, call, layouts[call])
                    reached[user.path] += 1
                    reason = reason or problem
                    continue
                after = self._next(path, is_norm, user, call, layouts[call], channels)
                if isinstance(after, str):
                    reason = reason or f"the result of {path} cannot be scaled: {after}"
                else:
                    layouts[user] = after
                    waiting.append(user)
        for user_path, number in reached.items():
            if self.count[user_path] != number:
                reason = reason or "it is also called with other inputs"
            reason = reason or self.reason_against_parameters(user_path, link.users[user_path], user=True)
        if any(call.function_name in ("mul", "div") and _operands(call, layouts) > 1 for call in link.calls):
            reason = reason or f"two operands of a product depend on {path}"
        return link, reason

    def _next(self, path: str, is_norm: bool, user: Call, source: Call, layout: Layout, channels: int) -> Layout | str:
        if is_norm and user.kind == "function" and user.path == path:  # the code of the norm itself
            own = _own_layout(self.model.get_submodule(path), user, channels)
            return own or f"it is not clear where the channels of {path} are"
        return passed(self.model, user, user.inputs.index(source), layout, channels)

    def _is_user(self, call: Call) -> bool:
        return call.kind == "module" and kind_of(self.model.get_submodule(call.path)) is not None

    def _add_user(self, link: Link, user: Call, source: Call, layout: Layout) -> str | None:
        """Adds a layer to a link. Returns why it cannot undo factors, or None if it can."""
        layer = self.model.get_submodule(user.path)
        link.users[user.path] = layer
        link.repeats.setdefault(user.path, layout.repeat)
        reason = reason_against_layer(layer)
        if reason is not None:
            return f"{user.path} cannot undo factors: {reason}"
        if user.caller is not None:
            return f"the code of {user.caller[0]} uses the weight of {user.path} in a function"
        is_attention = isinstance(layer, nn.MultiheadAttention)
        if user.inputs.count(source) != (3 if is_attention else len(user.inputs)):
            return f"{user.path} has several inputs"
        expected = channel_axis(layer, len(user.input_shapes[user.inputs.index(source)]))
        fits = layout.repeat * link.channels == number_of_inputs(layer)
        if layout.axis != expected or not fits or link.repeats[user.path] != layout.repeat:
            return f"the channels of {link.path} are not the input channels of {user.path}"
        return None

    def reason_against_parameters(self, path: str, module: nn.Module, *, user: bool = False) -> str | None:
        """Returns why the parameters of a producer or a user cannot be changed, or None if they can."""
        own = _own_parameters(module)[: 1 if user else 2]
        if any(self.names[id(parameter)] > 1 for parameter in own):
            return f"{path} shares its parameters with another module"
        for name in module._parameters:
            readers = self.readers.get(f"{path}.{name}" if path else name, [])
            if any(call.path != path or kind_of(module) is not None for call in readers):
                return f"other code reads the parameters of {path}"
        return None

    def reason_without_producer(self, path: str) -> str:
        """Returns why the input of a layer cannot be scaled."""
        calls = [call for call in self.graph.modules() if call.path == path]
        if not calls:
            return "the example did not reach it, or another layer computes with it"
        if not calls[0].inputs:
            return "it has no input that could be scaled"
        source = calls[0].inputs[0]
        while source.inputs and may_pass(self.model, source):
            source = source.inputs[0]
        if source.kind in ("input", "parameter"):
            return "its input is an input of the model"
        if source.path in self.failures and source in self.starts[source.path]:
            return self.failures[source.path]
        if source.kind == "function":
            return f"its input is a result of {source.function_name}"
        return f"its input is a result of {source.path}, {type(self.model.get_submodule(source.path)).__name__}"


def is_norm(module: nn.Module) -> bool:
    """Returns True if a module may be a norm: it has a weight per channel, and nothing else but a bias."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or weight.dim() != 1 or isinstance(module, nn.PReLU) or kind_of(module) is not None:
        return False
    return set(module._parameters) <= {"weight", "bias"} and (bias is None or bias.shape == weight.shape)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the weight and the bias of a layer or a norm, if they are its own parameters."""
    if kind_of(module) is not None:
        return parameters_of(module)
    own = (module._parameters.get(name) for name in ("weight", "bias"))
    return [parameter for parameter in own if parameter is not None]


def _is_own(source: Call, path: str) -> bool:
    names = {f"{path}.{name}" if path else name for name in ("weight", "bias")}
    return source.kind == "parameter" and source.path in names


def _own_layout(module: nn.Module, call: Call, channels: int) -> Layout | None:
    """Returns the layout of the output of a producer, or None if it is unknown."""
    if call.shape is None:
        return None
    dims = len(call.shape)
    if kind_of(module) is not None:
        return Layout(channel_axis(module, dims))
    normalizes_second = isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm))
    axes = [1, dims - 1] if normalizes_second else [dims - 1, 1]
    return next((Layout(axis) for axis in axes if axis < dims and call.shape[axis] == channels), None)


def _operands(call: Call, layouts: dict[Call, Layout]) -> int:
    return sum(source in layouts for source in call.inputs)


def passed(model: nn.Module, call: Call, position: int, layout: Layout, channels: int) -> Layout | str:
    """Returns the layout of a call's result, or why it does not pass on factors.

    The operand at `position` has the factors, and this `layout`.
    """
    name = call.function_name
    module = model.get_submodule(call.path) if call.kind == "module" else None
    if module is not None:
        name = type(module).__name__
    no = f"{name} does not pass on factors"
    if call.shape is None or (position != 0 and name not in _PRODUCTS):
        return no
    if isinstance(module, _KEEPING_MODULES) if module is not None else name in _KEEPING:
        return layout
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
