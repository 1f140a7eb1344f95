"""How many multiplications a model computes in layers and in products of matrices, and in which calls."""

from math import prod

from torch import nn

from fakequant._prepare.flow_graph import Call, FlowGraph
from fakequant.nn._expert_product import ExpertProduct
from fakequant.nn._owned_product import OwnedProduct, stored_weight
from fakequant.nn._owners import is_owner, products_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Functions that compute a product, by the numbers of the operands that are multiplied.
_PRODUCTS = {"matmul": (0, 1), "rmatmul": (0, 1), "bmm": (0, 1), "mm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
_CONVOLUTION_NAMES = {"conv1d", "conv2d", "conv3d"}


def count_multiplications(model: nn.Module, graph: FlowGraph) -> dict[str, int]:
    """Returns the number of multiplications of every call that computes products, by the name of the call.

    The name of a call of a module is its path. A layer that owns products has one entry for each, by its path.
    Elementwise products, and graphs that were traced without data, do not count.

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
    if name in _PRODUCTS and len(shapes) > _PRODUCTS[name][1]:
        return prod(call.shape) * shapes[_PRODUCTS[name][0]][-1]
    if name == "linear":
        return prod(call.shape) * shapes[0][-1]
    if name in _CONVOLUTION_NAMES:
        return prod(call.shape) * prod(shapes[1][1:])
    if name == "scaled_dot_product_attention":
        return prod(shapes[0]) * shapes[1][-2] + prod(call.shape) * shapes[1][-2]
    return 0
