"""Layers that need no input quantizer, because their input has been quantized already."""

from typing import Any

from torch import nn

from fakequant._prepare.data_flow import ModuleCall
from fakequant._prepare.places import Place
from fakequant._prepare.plan import Plan
from fakequant._prepare.plan_results import Results
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._quantizer import Quantizer


def find_repeated(
    plan: Plan, results: Results, sources_of: dict[ModuleCall, tuple[Place, ...]]
) -> dict[ModuleCall, Quantizer]:
    """Returns the quantizers before layers whose input quantizer would only repeat them, by the call of the layer.

    Args:
        plan: The quantizers of layers.
        results: The quantizers of results.
        sources_of: Where the input of a call of a layer may have been quantized, nearest first.
    """
    layers = {layer.path: layer for layer in plan.layers}
    grids: dict[ModuleCall, Quantizer] = {}
    for (path, turn), way in sources_of.items():
        if path not in layers or layers[path].changes_input:
            continue
        reader = _at(layers[path].quantizers["input_quantizer"], turn)
        for place in way:
            writer = results.quantizers.get(place)
            if place.key is None and place.path in layers:
                writer = _at(layers[place.path].quantizers["output_quantizer"], place.turn) or writer
            if writer is None:
                continue
            # A dynamic quantizer may choose another grid after a move, for example a transposition of tokens.
            if reader is not None and reader.is_like(writer) and not reader.is_dynamic:
                grids[path, turn] = writer
            break
    # A quantizer that all calls of a layer share stays, unless the same quantizer is before all of them.
    for layer in plan.layers:
        ways = {grids.get(call) for call in sources_of if call[0] == layer.path}
        if not isinstance(layer.quantizers["input_quantizer"], CallQuantizers) and len(ways) > 1:
            grids = {call: grid for call, grid in grids.items() if call[0] != layer.path}
    return grids


def _at(slot: nn.Module | None, turn: int | None) -> Any:
    """Returns the quantizer of a call."""
    return slot.at(turn) if isinstance(slot, CallQuantizers) and turn is not None else slot


def share_grids(model: nn.Module, grids: dict[ModuleCall, Quantizer]) -> None:
    """Makes layers use a quantizer before them instead of their own. `grids` has it by the call of the layer."""
    for (path, turn), quantizer in grids.items():
        layer: Any = model.get_submodule(path)
        slot = layer.input_quantizer
        # Not registered as a child, because it is already a child of another module.
        if isinstance(slot, CallQuantizers) and turn is not None:
            slot.lend(turn, quantizer)
        else:
            layer.input_quantizer, layer._fakequant.input_grid = None, quantizer
