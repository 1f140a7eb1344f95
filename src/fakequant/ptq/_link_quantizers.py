"""The quantizers that see other values after the channels of a link were scaled."""

from torch import nn

from fakequant.nn._call_quantizers import quantizers_in
from fakequant.nn._function_calls import CallingModule
from fakequant.nn._quantized_layer import QuantizedLayer, input_grids_of
from fakequant.nn._quantizer import Quantizer
from fakequant.ptq._links import Link
from fakequant.ptq._ranges import has_stored_range, observe_again, reason_against_new_range


def activation_quantizers(model: nn.Module, link: Link) -> list[Quantizer]:
    """Returns the quantizers of activations that have the factors of a link."""
    layers = [layer for layer in link.users.values() if isinstance(layer, QuantizedLayer)]
    found: list[Quantizer | None] = [grid for layer in layers for grid in input_grids_of(layer)]
    for call in link.calls:
        if call.kind == "function":
            caller = model.get_submodule(call.path)
            functions = caller.function_quantizers._modules if isinstance(caller, CallingModule) else {}
            found += quantizers_in(functions.get(call.key))
        paths = [*call.returned_by, *([call.path] if call.kind == "module" else [])]
        for path in paths:
            found += quantizers_in(model.get_submodule(path)._modules.get("output_quantizer"))
    return list(dict.fromkeys(quantizer for quantizer in found if quantizer is not None))


def weight_quantizers(link: Link) -> dict[QuantizedLayer, Quantizer]:
    """Returns the quantizers of the weights that a link changes, by layer."""
    layers = (link.module, *link.users.values())
    return {
        layer: layer.weight_quantizer
        for layer in layers
        if isinstance(layer, QuantizedLayer) and layer.weight_quantizer is not None
    }


def reason_against_quantizers(model: nn.Module, link: Link) -> str | None:
    """Returns why the quantizers of a link cannot follow its factors, or None if they can."""
    found = [*activation_quantizers(model, link), *weight_quantizers(link).values()]
    return next((reason for q in found if (reason := reason_against_new_range(q)) is not None), None)


def refresh_weights(links: list[Link]) -> None:
    """Finds the ranges of changed weights again, as far as they are stored."""
    for layer, quantizer in {layer: q for link in links for layer, q in weight_quantizers(link).items()}.items():
        scale = None if quantizer.is_dynamic and quantizer._blocks is None else quantizer.scale
        if has_stored_range(quantizer) or (scale is not None and not bool(scale.isnan().any())):
            observe_again(quantizer, layer._fakequant.kind.read_weight(layer))


def stored_ranges(model: nn.Module, links: list[Link]) -> list[Quantizer]:
    """Returns the quantizers of activations of links whose stored ranges no longer fit, each once."""
    found = [q for link in links for q in activation_quantizers(model, link)]
    return [quantizer for quantizer in dict.fromkeys(found) if has_stored_range(quantizer)]
