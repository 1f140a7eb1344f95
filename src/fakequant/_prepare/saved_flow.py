"""The part of a state_dict that says what a recorded data flow added to a model.

Which results are quantized depends on the data flow, which is seen while the model runs on an example. So that a state
loads into a model that was prepared without one, it describes them: as JSON, in the buffer `fakequant_flow` of the
model that was passed to `prepare`.
"""

import json
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._prepare.attach import FLOW_BUFFER, Preparation, find_preparation, link_norms
from fakequant._prepare.input_rounding import rounded_layers, set_rounding
from fakequant._prepare.places import Place
from fakequant._prepare.plan_results import Results, add_quantizer, attach_results, withdraw_results
from fakequant._prepare.shared_grids import share_grids
from fakequant.nn._function_calls import CallingModule
from fakequant.nn._model_quantizers import name_quantizers
from fakequant.nn._owners import is_owner
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer


def save_flow(model: nn.Module, made: Preparation) -> None:
    """Describes, in a buffer of the model, what `prepare` or `calibrate` added because of a recorded data flow."""
    values = list(json.dumps({**describe_flow(model, made), "notes": made.notes}).encode())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    model.register_buffer(FLOW_BUFFER, torch.tensor(values, dtype=torch.uint8, device=device))


def describe_flow(model: nn.Module, made: Preparation) -> dict[str, Any]:
    """Returns what depends on the data flow of a prepared model, as dicts, lists and strings.

    Nothing in it depends on the sizes of the example, so that all ranks have the same.
    """
    paths = {module: path for path, module in model.named_modules()}
    grids, functions = {}, {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLayer) and module._fakequant.input_grid is not None:
            grids[path] = paths[module._fakequant.input_grid]
        if isinstance(module, CallingModule):
            own = module.function_quantizers
            layers = {key: paths[layer] for key, layer in own.layers.items()}
            functions[path] = {"keys": list(own), "layers": layers, "counts": own.counts, "callees": own.callees}
    outputs = [path for path, module in model.named_modules() if _has_output(made, path, module)]
    described = {
        "outputs": outputs,
        "functions": functions,
        "grids": grids,
        "norms": made.norms,
        "products": made.products,
        "rounded": rounded_layers(model),
    }
    bits = _bits(model, made, [Place(path) for path in outputs], functions)
    return {**described, "bits": bits} if bits else described


def _bits(model: nn.Module, made: Preparation, outputs: list[Place], functions: dict[str, Any]) -> dict[str, int]:
    """Returns the numbers of bits of results that have more bits than the config says, by place."""
    usual = made.config.operands
    found: dict[str, int] = {}
    if usual is not None:
        for place in (*outputs, *(Place(path, key) for path, own in functions.items() for key in own["keys"])):
            module: Any = model.get_submodule(place.path)
            quantizer = module.output_quantizer if place.key is None else module.function_quantizers[place.key]
            if quantizer.spec.bits > usual.bits:
                found[str(place)] = quantizer.spec.bits
    return found


def load_flow(model: nn.Module, state: Any, prefix: str, *others: Any) -> None:
    """A load_state_dict pre-hook: adds to a model what the state describes, if the model was never run.

    A model that knows its data flow keeps it.
    """
    made, name = find_preparation(model), prefix + FLOW_BUFFER
    saved = state.get(name)
    if made is None:
        return
    if not made.is_recorded and isinstance(saved, Tensor) and not saved.is_meta:
        _apply(model, made, saved)
        model.register_buffer(FLOW_BUFFER, saved.detach().clone())
    elif FLOW_BUFFER in model._buffers:
        state[name] = model.get_buffer(FLOW_BUFFER)  # the keys of the quantizers say whether the state fits
    else:
        state.pop(name, None)


def _apply(model: nn.Module, made: Preparation, saved: Tensor) -> None:
    try:
        described = json.loads(bytes(saved.cpu().tolist()))
        results = Results(notes=described["notes"], products=described["products"])
        withdraw_results(model, made)
        bits: dict[str, int] = described.get("bits", {})  # absent in states of older versions
        for path in described["outputs"]:
            is_layer = isinstance(model.get_submodule(path), QuantizedLayer)
            place = Place(path)
            add_quantizer(model, made.config, results, place, is_layer=is_layer, bits=bits.get(str(place), 0))
        for path, functions in described["functions"].items():
            for key in functions["keys"]:
                place = Place(path, key)
                add_quantizer(model, made.config, results, place, is_layer=False, bits=bits.get(str(place), 0))
            plan = results.functions[path]
            plan.layers, plan.counts, plan.callees = functions["layers"], functions["counts"], functions["callees"]
        made.outputs += attach_results(model, results)
        name_quantizers(model)
        share_grids(model, {path: _quantizer_at(model, grid) for path, grid in described["grids"].items()})
        made.norms = described["norms"]
        set_rounding(model, described.get("rounded", []), made.config.target)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The state was saved from another model: {error}.\n"
            "Load it into a model of the same architecture, prepared with the same config."
        ) from error
    made.notes, made.products, made.is_recorded = results.notes, results.products, True
    link_norms(model)


def _has_output(made: Preparation, path: str, module: nn.Module) -> bool:
    """Returns True if a module quantizes its output because of the data flow, not because the config says so."""
    if not isinstance(module._modules.get("output_quantizer"), Quantizer) or is_owner(module):
        return False
    use, _ = made.config.find(path, module)
    return not isinstance(module, QuantizedLayer) or use is None or use.output is None


def _quantizer_at(model: nn.Module, path: str) -> Quantizer:
    found = model.get_submodule(path)
    assert isinstance(found, Quantizer)
    return found
