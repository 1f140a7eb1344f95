"""Which layers a runtime computes in float, and why."""

from typing import Any

from torch import nn

from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._export.layers import NO_INPUT, reason_for_float
from fakequant._prepare.attach import preparation
from fakequant._runtimes.session import Session
from fakequant.nn._layer_kinds import find_kind, is_known
from fakequant.nn._model_quantizers import unreached_layers
from fakequant.nn._operators import LAYER_FUNCTIONS, function_name
from fakequant.nn._quantized_layer import QuantizedLayer, input_grid_of

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def layers_in_float(model: nn.Module, golden: nn.Module, runtime: Session) -> dict[str, str]:
    """Returns the layers that compute products in float in the runtime, by path, each with the reason.

    Layers that are not quantized are among them. Embeddings compute no products, and are listed only if the runtime
    dequantizes all rows to look up a few.
    """
    found = {}
    for path, module in model.named_modules():
        kernel = runtime.kernels.get(path)
        if path in runtime.whole_tables:
            found[path] = "the whole table becomes floats at every call, because the runtime cannot gather its codes"
        elif path in runtime.integers | runtime.lookups:
            continue
        elif kernel is not None:
            found[path] = _why(path, model, golden, runtime)
        elif isinstance(module, QuantizedLayer):
            if not isinstance(module, _LOOKUPS):
                found[path] = _why_without_codes(path, model)
        elif path in preparation(model).floats and _computes_products(path, module, model):
            found[path] = preparation(model).floats[path]
    return found


def _why(path: str, model: nn.Module, golden: nn.Module, runtime: Session) -> str:
    """Returns the reason why a layer with a quantized weight runs in float."""
    layer: Any = model.get_submodule(path)
    converted: Any = golden.get_submodule(path)
    weight = layer.weight_quantizer.spec
    grid = input_grid_of(converted) if isinstance(converted, IntegerLayer) else None
    reason = reason_for_float(weight, grid if isinstance(grid, GoldenQuantizer) else None)
    if reason == NO_INPUT:
        return _why_without_input(path, model)
    return reason or runtime.why_float(path) or "the runtime chose a float kernel; fakequant does not know why"


def _why_without_input(path: str, model: nn.Module) -> str:
    layer: Any = model.get_submodule(path)
    quantizer = input_grid_of(layer)
    if quantizer is None:
        return NO_INPUT
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
    # Functions that compute what a layer does, in the code of a module that has the weight.
    return any(f"{start}{function_name(f)} 0" in preparation(model).multiplications for f in LAYER_FUNCTIONS)
