"""Layers that need no input quantizer, because their input has been quantized already."""

from typing import Any

from torch import nn

from fakequant._prepare.places import Place
from fakequant._prepare.plan import Plan
from fakequant._prepare.plan_results import Results
from fakequant.nn._quantizer import Quantizer


def drop_repeated(plan: Plan, results: Results, sources_of: dict[str, tuple[Place, ...]]) -> dict[str, Quantizer]:
    """Drops input quantizers of a plan that would repeat a quantizer before them.

    Args:
        plan: The quantizers of layers.
        results: The quantizers of results.
        sources_of: Where the input of a layer may have been quantized, nearest first, by the path of the layer.

    Returns:
        The nearest quantizer before the layer, by the path of the layer.
    """
    layers = {layer.path: layer for layer in plan.layers}
    grids: dict[str, Quantizer] = {}
    for path, way in sources_of.items():
        reader = layers[path].quantizers["input_quantizer"] if path in layers else None
        if path in layers and layers[path].changes_input:
            continue
        for place in way:
            writer = results.find(place)
            if place.key is None and place.path in layers:
                writer = layers[place.path].quantizers["output_quantizer"] or writer
            if writer is None:
                continue
            # A dynamic quantizer may choose another grid after a move, for example a transposition of tokens.
            if reader is not None and reader.is_like(writer) and not reader.is_dynamic:
                layers[path].quantizers["input_quantizer"] = None
                grids[path] = writer
            break
    return grids


def share_grids(model: nn.Module, grids: dict[str, Quantizer]) -> None:
    """Makes layers use a quantizer before them instead of their own. `grids` has it by the path of the layer."""
    for path, quantizer in grids.items():
        layer: Any = model.get_submodule(path)
        layer.input_quantizer = None
        # Not registered as a child, because it is already a child of another module.
        layer._fakequant.input_grid = quantizer
