"""`FlowGraph`: which modules and functions a forward pass called, in order, and on whose results.

The graph only describes a model. It is never run, and never replaces the model. `record_flow` makes it, in a run of the
model on an example.

Two patterns in it matter. A batch norm that follows a layer may be folded into it. Code such as
`F.linear(x, self.query.weight)` does what a call of the layer does, so it becomes one in the graph, if

    the layer itself is not called, and no other code uses its weight
    the bias is that of the layer, or the layer has no bias
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from fakequant.nn._experts import ExpertProduct
from fakequant.nn._function_calls import call_key
from fakequant.nn._layer_kinds import LayerKind
from fakequant.nn._operators import ATTENTION, CONVOLUTIONS, MATRIX_PRODUCTS, function_name
from fakequant.nn._owners import OwnedProduct, is_owner, products_of, stored_weight
from fakequant.nn._quantized_layer import QuantizedLayer, is_layer, kind_of

_FUNCTIONS = {
    "linear": nn.Linear, "conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d,
}  # fmt: skip
_READ = "other code also uses its weight"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

Kind = Literal["module", "function", "parameter", "input"]


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a module or a function, or a value that no call computed.

    Attributes:
        kind: "module", "function", "parameter" (of the model), or "input" for anything else.
        path: The path of the module or the parameter. Of a function: the path of the module whose code calls it.
        function: The function that was called; None unless `kind` is "function".
        number: The number of this call among the calls of functions of the same name in one call of the module.
        inputs: The calls whose results are operands, in the order of the arguments.
        users: The calls that have this one among their inputs.
        in_place: Whether the call changes its first input.
        shape: The shape of the first result; None if there is no tensor.
        input_shapes: The shapes of the operands.
        returned_by: Paths of modules that returned the result of this call as theirs, the innermost first. Modules that
            are called several times are left out.
        turn: The number of the call of the module at `path`, in which a function was called or which this is. None if
            the module is called once.
        results: The number of tensors that the call returned.
        caller: For a function that was called with the weight of a layer: the path of the module whose code calls
            it, and the key of the call. `kind` is then "module", and `path` is that of the layer.
    """

    kind: Kind
    path: str
    function: Any = None
    number: int = 0
    inputs: "list[Call]" = dataclasses.field(default_factory=list)
    users: "list[Call]" = dataclasses.field(default_factory=list)
    in_place: bool = False
    shape: tuple[int, ...] | None = None
    input_shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    returned_by: list[str] = dataclasses.field(default_factory=list)
    turn: int | None = None
    results: int = 1
    caller: tuple[str, str] | None = None

    @property
    def function_name(self) -> str:
        """The name of the function. All spellings of one operation have the same."""
        return "" if self.function is None else function_name(self.function)

    @property
    def key(self) -> str:
        """The name of the function and the number of the call."""
        return call_key(self.function, self.number)

    def __str__(self) -> str:
        name = f"{self.function_name} {self.number}"
        return self.path if self.kind != "function" else f"{self.path}: {name}" if self.path else name


class Repeated(NamedTuple):
    """How often a module is called, and the path of the innermost module in which all these calls take place."""

    number: int
    scope: str


@dataclasses.dataclass
class FlowGraph:
    """The calls of one forward pass, in order."""

    calls: list[Call]
    # The calls whose results the model returned or stored, so that they are visible outside.
    results: list[Call] = dataclasses.field(default_factory=list)
    # How often the code of a module calls each function in one call of the module, by path.
    counts: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    # The modules that the code of a module calls, by path.
    callees: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    # The modules that are called several times, by path.
    repeated: dict[str, Repeated] = dataclasses.field(default_factory=dict)

    def modules(self) -> list[Call]:
        """Returns the calls of modules, in order."""
        return [call for call in self.calls if call.kind == "module"]

    def count(self) -> Counter[str]:
        """Returns how often every module was called, by path."""
        return Counter(call.path for call in self.modules())


def is_leaf(module: nn.Module) -> bool:
    """Returns True if a graph has one call for `module`, and not the calls that its code makes.

    This can run the code of the module. Call it before the model is recorded.
    """
    if is_layer(module):
        return True
    has_children = next(module.children(), None) is not None
    return not has_children and module.__module__.startswith(("torch.nn", "torch.ao.nn"))


def drop_dead_calls(graph: FlowGraph, others: Iterable[Call] = ()) -> None:
    """Removes dead calls from the readers of results, and dead calls of functions from the graph.

    A dead call computes what the model does not use. Exporters leave it out of files. A decision about a result, such
    as whether a quantizer is needed, depends on what reads it: a dead call must not count, because the golden model and
    the file would differ.

    Dead calls of modules stay: modules count their calls when they run. Functions that read parameters stay too: they
    get the quantized weights of layers.

    Args:
        graph: A graph with all calls of a forward pass. It is changed in place.
        others: Calls that are used although no call in the graph reads their results.
    """
    changing = [call for call in graph.calls if call.in_place]  # other code may read the changed tensor
    pending, live = [*graph.results, *others, *changing], set[Call]()
    while pending:
        call = pending.pop()
        if call not in live:
            live.add(call)
            pending += call.inputs
    for call in live:
        call.users = [user for user in call.users if user in live]
    graph.calls = [call for call in graph.calls if call in live or call.kind == "module" or _reads_parameter(call)]


def _reads_parameter(call: Call) -> bool:
    return any(source.kind == "parameter" for source in call.inputs)


# --- functions that get the weight of a layer ---------------------------------------------------------


def find_layer_calls(model: nn.Module, graph: FlowGraph) -> None:
    """Turns calls of functions with the weight of a layer into calls of the layer, in place."""
    called = graph.count()
    readers = Counter(source.path for call in graph.calls for source in call.inputs if source.kind == "parameter")
    # The layers that one call in the code of a module uses: a module that is called several times may use several.
    sites: dict[tuple[str, str], Counter[str | None]] = {}
    found = [(call, _layer_of(model, call)) for call in graph.calls if call.kind == "function"]
    for call, path in found:
        sites.setdefault((call.path, call.key), Counter())[path] += 1
    for call, path in found:
        used = sites[call.path, call.key]
        if path is None or called[path] or len(used) > 1 or readers[call.inputs[1].path] != used[path]:
            continue
        call.caller = call.path, call.key
        if call.path in graph.repeated:
            graph.repeated[path] = graph.repeated[call.path]
        call.kind, call.path, call.function = "module", path, None
        # Other operands are parameters, or values of the calling code that a layer does not read.
        call.inputs, call.input_shapes = call.inputs[:1], call.input_shapes[:1]


def weight_readers(model: nn.Module, graph: FlowGraph, quantized: set[str]) -> list[tuple[Call, str]]:
    """Returns the calls of functions with the weights of quantized layers that are called too, and the layers' paths.

    `graph` is changed by `find_layer_calls` already. `quantized` has the paths of the layers with a quantized weight.
    """
    found = []
    called = graph.count()
    for call in graph.calls:
        for source in call.inputs if call.kind == "function" else ():
            path, _, name = source.path.rpartition(".")
            if source.kind == "parameter" and path in quantized and called[path]:
                kind = kind_of(model.get_submodule(path))
                if kind is not None and name == kind.weight_name:
                    found.append((call, path))
    return found


def notes_on_weights(readers: Iterable[tuple[Call, str]]) -> list[str]:
    """Returns notes on quantized layers whose weights other code uses in float."""
    found = {path: str(call) for call, path in reversed(list(readers))}
    return [
        f"{path}: {_READ} ({call}), which is a float in training and quantized after the conversion, so `verify` will "
        f"find a difference. Use config.skip({path!r}), or a layer with its own weight"
        for path, call in found.items()
    ]


def is_note_on_weights(note: str) -> bool:
    """Returns True for the notes of `notes_on_weights`."""
    return _READ in note


def _layer_of(model: nn.Module, call: Call) -> str | None:
    """Returns the path of the layer whose weight a function is called with, or None."""
    cls = _FUNCTIONS.get(call.function_name) if call.kind == "function" else None
    if cls is None or len(call.inputs) < 2 or call.inputs[1].kind != "parameter":
        return None
    path, _, name = call.inputs[1].path.rpartition(".")
    layer = model.get_submodule(path)
    kind = kind_of(layer)
    if kind is None or not isinstance(layer, cls) or name != kind.weight_name:
        return None
    if kind.runs_float_forward:  # its code may compute another weight than the one that is used here
        return None
    own_bias = getattr(layer, kind.bias_name, None) is not None
    given = call.inputs[2].path if len(call.inputs) > 2 else None
    if own_bias and given != f"{path}.{kind.bias_name}".lstrip("."):
        return None
    return path


# --- batch norms ------------------------------------------------------------------------------------


def norm_pairs(model: nn.Module, graph: FlowGraph) -> list[tuple[str, str]]:
    """Returns (layer, batch norm) for layers whose result is only used by a batch norm.

    Other code that uses the weight or the bias of such a layer would get the folded one, so the layer is left out.
    """
    modules = graph.count()
    # A batch norm class that overrides the forward pass is not one call: its code calls F.batch_norm.
    norms = [call for call in graph.calls if _is_norm(model, call)]
    number = Counter(call.path for call in norms)
    operands = [source for call in graph.calls if call.kind == "function" for source in call.inputs]
    read = {source.path.rpartition(".")[0] for source in operands if source.kind == "parameter"}
    found = []
    for call in norms:
        source = call.inputs[0]
        is_only_user = source.kind == "module" and source.users == [call] and source not in graph.results
        if is_only_user and modules[source.path] == number[call.path] == 1 and source.path not in read:
            found.append((source.path, call.path))
    return found


def foldable_norms(model: nn.Module, graph: FlowGraph) -> dict[str, str]:
    """Returns the paths of the batch norms that can be folded, by the paths of the layers before them."""
    return {layer: norm for layer, norm in norm_pairs(model, graph) if can_fold(model, layer, norm)}


def can_fold(model: nn.Module, path: str, norm_path: str) -> bool:
    """Returns True if the batch norm at `norm_path` can be folded into the layer at `path`.

    The weight must have, or can be given, one scale or group of scales per channel of the batch norm.
    """
    layer, norm = model.get_submodule(path), model.get_submodule(norm_path)
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.running_mean is None:
        return False
    if not isinstance(layer, QuantizedLayer) or layer.output_quantizer is not None or layer.weight_quantizer is None:
        return False
    if not layer.weight_quantizer.has_equal_steps:
        return False
    kind: type[LayerKind] = layer._fakequant.kind
    weight: Tensor = getattr(layer, kind.weight_name)
    spec, axis = layer.weight_quantizer.spec, kind.channel_axis
    is_grouped = getattr(layer, "groups", 1) != 1 and axis != 0
    if not spec.symmetric or is_grouped or norm.num_features != weight.shape[axis]:
        return False
    if spec.axis is None:
        return True
    scale_axis = spec.axis % weight.dim()
    return scale_axis == axis if spec.group_size is None else scale_axis != 0 and axis == 0


def _is_norm(model: nn.Module, call: Call) -> bool:
    """Returns True for a call of a batch norm, or of `F.batch_norm` in the code of one."""
    if not call.inputs or not isinstance(model.get_submodule(call.path), nn.modules.batchnorm._BatchNorm):
        return False
    return call.kind == "module" or call.function_name == "batch_norm"


# --- multiplications --------------------------------------------------------------------------------


def count_multiplications(model: nn.Module, graph: FlowGraph) -> dict[str, int]:
    """Returns the number of multiplications of every call that computes products, by the name of the call.

    The name of a call of a module is its path. A layer that owns products has one entry for each, by its path.
    Elementwise products do not count.

    >>> import torch
    >>> from fakequant._prepare.record_flow import record_flow
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))
    >>> count_multiplications(model, record_flow(model, torch.ones(1, 3, 4, 4)))
    {'0': 864, '3': 320}
    """
    found: dict[str, int] = {}
    for call in graph.calls:
        module = model.get_submodule(call.path) if call.kind == "module" else None
        if module is not None and is_owner(module):
            for path, number in _of_owner(module, call).items():
                found[path] = found.get(path, 0) + number
            continue
        number = _of_function(call) if module is None else _of_module(module, call)
        if number:
            found[str(call)] = found.get(str(call), 0) + number
    return found


def _of_module(module: nn.Module, call: Call) -> int:
    if call.shape is None or not call.input_shapes:
        return 0
    if isinstance(module, nn.MultiheadAttention):
        return _of_attention(module, call.input_shapes)
    if isinstance(module, _CONVOLUTIONS):
        return prod(call.shape) * prod(module.weight.shape[1:])
    if isinstance(module, _TRANSPOSED):
        return prod(call.input_shapes[0]) * prod(module.weight.shape[1:])
    has_matrix = getattr(getattr(module, "weight", None), "ndim", 0) == 2
    is_product = has_matrix and bool(call.input_shapes[0]) and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return prod(call.shape) * call.input_shapes[0][-1] if is_product else 0


def _of_owner(module: nn.Module, call: Call) -> dict[str, int]:
    """Returns the multiplications of every product of a recurrent layer or of experts."""
    if not call.input_shapes or not call.input_shapes[0]:
        return {}
    start = f"{call.path}." if call.path else ""
    return {f"{start}{name}": _of_product(part, call.input_shapes) for name, part in _products(module).items()}


def _products(module: nn.Module) -> dict[str, OwnedProduct]:
    """Returns the products of a prepared layer, or new ones of a float layer."""
    own = {name: child for name, child in module.named_children() if isinstance(child, OwnedProduct)}
    return own or products_of(module)


def _of_product(product: OwnedProduct, shapes: list[tuple[int, ...]]) -> int:
    """Returns the multiplications of a product. Its weight is used once per step of a sequence, or per routed token."""
    numbers = stored_weight(product, "weight").numel()
    if not isinstance(product, ExpertProduct):
        return prod(shapes[0][:-1]) * numbers
    pairs = prod(shapes[1]) if len(shapes) > 1 else 0
    return pairs * numbers // int(product.owner.num_experts)


def _of_attention(module: nn.MultiheadAttention, shapes: list[tuple[int, ...]]) -> int:
    query, key, value = (*shapes[:3], *[shapes[-1]] * 3)[:3]
    width: int = module.embed_dim
    batch, length = (prod(query[:-2]), query[-2]) if module.batch_first else (prod(query[1:-1]), query[0])
    seen = key[-2] if module.batch_first else key[0]
    inputs = sum(prod(shape) for shape in (query, key, value))
    return inputs * width + prod(query[:-1]) * width * width + 2 * batch * length * seen * width


def _of_function(call: Call) -> int:
    name, shapes = call.function_name, call.input_shapes
    if call.shape is None or len(shapes) < 2:
        return 0
    if name in MATRIX_PRODUCTS and len(shapes) > MATRIX_PRODUCTS[name][1]:
        return prod(call.shape) * shapes[MATRIX_PRODUCTS[name][0]][-1]
    if name == "linear":
        return prod(call.shape) * shapes[0][-1]
    if name in CONVOLUTIONS:
        return prod(call.shape) * prod(shapes[1][1:])
    if name == ATTENTION:
        return prod(shapes[0]) * shapes[1][-2] + prod(call.shape) * shapes[1][-2]
    return 0
