"""Which layers a runtime computes in float, and why."""

from typing import Any

from torch import nn

from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._convert.left_in_float import unreached_layers
from fakequant._prepare.prepare import preparation
from fakequant._verify.runtimes.interface import Runtime
from fakequant.nn._layer_kinds import find_kind, is_known
from fakequant.nn._quantized_layer import QuantizedLayer, input_grid_of

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
# Functions that compute what a layer does, in the code of a module that has the weight.
_FUNCTIONS = ("linear", "conv1d", "conv2d", "conv3d")
# The largest number of bits that integer kernels take.
_BITS = 8


def layers_in_float(model: nn.Module, golden: nn.Module, runtime: Runtime) -> dict[str, str]:
    """Returns the layers that compute products in float in the runtime, by path, each with the reason.

    Layers that are not quantized are among them. Embeddings are not, because they compute no products.
    """
    found = {}
    for path, module in model.named_modules():
        kernel = runtime.kernels.get(path)
        if path in runtime.integers | runtime.lookups:
            continue
        if kernel is not None:
            found[path] = _why(path, model, golden, runtime)
        elif isinstance(module, QuantizedLayer):
            if not isinstance(module, _LOOKUPS):
                found[path] = _why_without_codes(path, model)
        elif path in preparation(model).floats and _computes_products(path, module, model):
            found[path] = preparation(model).floats[path]
    return found


def _why(path: str, model: nn.Module, golden: nn.Module, runtime: Runtime) -> str:
    """Returns the reason why a layer with a quantized weight runs in float."""
    layer: Any = model.get_submodule(path)
    converted: Any = golden.get_submodule(path)
    weight = layer.weight_quantizer.spec
    grid = input_grid_of(converted) if isinstance(converted, IntegerLayer) else None
    for name, spec in (("weight", weight), ("input", grid.spec if isinstance(grid, Grid) else None)):
        if spec is not None and spec.format != "int":
            return f"its {name} is {spec.format}; sums of products of floats are floats"
    if weight.group_size is not None:
        return "its weight has groups, for which there is no integer kernel"
    if not isinstance(grid, Grid):
        return _why_without_input(path, model)
    if grid.scale is None:
        return "the scale of its input is computed at run time"
    if not grid.has_one_scale:
        return "its input has more than one scale"
    for name, spec in (("weight", weight), ("input", grid.spec)):
        if spec.bits > _BITS:
            return f"its {name} has {spec.bits} bits; integer kernels take at most {_BITS}"
    return runtime.why_float(path) or "the runtime chose a float kernel; fakequant does not know why"


def _why_without_input(path: str, model: nn.Module) -> str:
    layer: Any = model.get_submodule(path)
    quantizer = input_grid_of(layer)
    if quantizer is None:
        return "its input is not quantized"
    if not quantizer.quantizing:
        return "the quantizer of its input is switched off"
    return "the quantizer of its input has seen no data"


def _why_without_codes(path: str, model: nn.Module) -> str:
    """Returns the reason why the file has no codes of a quantized layer's weight."""
    layer: Any = model.get_submodule(path)
    if layer.weight_quantizer is None:
        return "its weight is not quantized"
    if not layer.weight_quantizer.quantizing:
        return "the quantizer of its weight is switched off"
    if path in unreached_layers(model):
        return "no data has reached it, or other code uses its weight without quantizing it"
    return "the file has no codes of its weight"


def _computes_products(path: str, module: nn.Module, model: nn.Module) -> bool:
    if isinstance(module, _LOOKUPS):
        return False
    if find_kind(type(module)) is not None or is_known(type(module)) or isinstance(module, nn.RNNBase):
        return True
    if any(child in unreached_layers(model).values() for child in module.children()):
        return False  # it computes with the weights of these layers
    start = f"{path}: " if path else ""
    return any(f"{start}{name} 0" in preparation(model).multiplications for name in _FUNCTIONS)
