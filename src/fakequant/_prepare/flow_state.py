"""The part of a state_dict that says what a recorded data flow added to a model.

Which results are quantized depends on the data flow, which is seen while the model runs on an example. So that a state
loads into a model that was prepared without one, it describes them: as JSON, in the buffer `fakequant_flow` of the
model that was passed to `prepare`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._prepare.attach import FLOW_BUFFER, Preparation, find_preparation, link_norms
from fakequant._prepare.bit_widths import widen
from fakequant._prepare.flow_graph import Repeated
from fakequant._prepare.input_rounding import rounded_quantizers, set_rounding
from fakequant._prepare.output_quantizers import (
    FunctionPlan,
    Results,
    add_quantizer,
    attach_results,
    give_own_inputs,
    share_inputs,
)
from fakequant._prepare.outputs_to_quantize import Place
from fakequant._prepare.repeated_calls import RepeatedCalls, describe_repeated, describe_splits, split
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._function_calls import CallingModule
from fakequant.nn._input_factors import attach_factors, has_factors
from fakequant.nn._model_quantizers import name_quantizers
from fakequant.nn._owners import is_owner
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer


def save_flow(model: nn.Module, made: Preparation) -> None:
    """Describes, in a buffer of the model, what `prepare` added because of a recorded data flow."""
    values = list(json.dumps(_describe_flow(model, made)).encode())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    model.register_buffer(FLOW_BUFFER, torch.tensor(values, dtype=torch.uint8, device=device))


def _describe_flow(model: nn.Module, made: Preparation) -> dict[str, Any]:
    """Returns what depends on the data flow of a prepared model, as dicts, lists and strings.

    Nothing in it depends on the sizes of the example, so that all ranks have the same.
    """
    paths = {module: path for path, module in model.named_modules()}
    grids: list[tuple[str, int | None, str]] = []
    functions, places = {}, []
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            slot, shared = module.input_quantizer, module._fakequant.input_grid
            lent = slot.borrowed if isinstance(slot, CallQuantizers) else {} if shared is None else {None: shared}
            grids += [(path, turn, paths[quantizer]) for turn, quantizer in lent.items()]
        if isinstance(module, CallingModule):
            own = module.function_quantizers
            layers = {key: paths[layer] for key, layer in own.layers.items()}
            readers = {key: [paths[layer] for layer in found] for key, found in own.readers.items()}
            functions[path] = {"layers": layers, "counts": own.counts, "callees": own.callees, "readers": readers}
            places += [found for key, slot in own.items() for found in _described(made, Place(path, key), slot)]
        if _has_output(made, path, module):
            places += _described(made, Place(path), module._modules["output_quantizer"])
    return {
        "places": places,
        "functions": functions,
        "grids": grids,
        "norms": made.norms,
        "first_last": made.first_last,
        "notes": made.notes,
        "products": made.products,
        "rounded": rounded_quantizers(model),
        "repeated": describe_repeated(model),
        "splits": describe_splits(model),
        "multiplied": [path for path, module in model.named_modules() if has_factors(module)],
    }


def _described(made: Preparation, place: Place, slot: Any) -> list[list[Any]]:
    """Returns the quantizers of an output or a function call: path, key, number of the call, and number of bits.

    The number of bits is 0 if it is the usual one.
    """
    by_turn: dict[Any, Any] = {**slot._modules} if isinstance(slot, CallQuantizers) else {None: slot}
    usual = made.config.operands
    found = []
    for turn, quantizer in by_turn.items():
        bits = 0 if usual is None or quantizer.spec.bits <= usual.bits else quantizer.spec.bits
        found.append([place.path, place.key, None if turn is None else int(turn), bits])
    return found


def load_flow(model: nn.Module, state: Any, prefix: str, *others: Any) -> None:
    """A load_state_dict pre-hook: adds to a model what the state describes, if it was prepared without an example.

    A model that knows its data flow keeps it.
    """
    made, name = find_preparation(model), prefix + FLOW_BUFFER
    saved = state.get(name)
    if made is None:
        return
    is_described = isinstance(saved, Tensor) and not saved.is_meta
    if FLOW_BUFFER in model._buffers:
        if is_described:
            with _from_same_model():
                _multiply_inputs(model, made, _described_in(saved))
        state[name] = model.get_buffer(FLOW_BUFFER)  # the keys of the quantizers say whether the state fits
    elif is_described:
        with _from_same_model():
            _apply(model, made, _described_in(saved))
        model.register_buffer(FLOW_BUFFER, saved.detach().clone())
    else:
        state.pop(name, None)


def _described_in(saved: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(saved.cpu().tolist()))
    return found


@contextmanager
def _from_same_model() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The state was saved from another model: {error}.\n"
            "Load it into a model of the same architecture, prepared with the same config."
        ) from error


def _multiply_inputs(model: nn.Module, made: Preparation, described: dict[str, Any]) -> None:
    """Makes the layers multiply their inputs that did so in the saved model, by 1 until the state is loaded."""
    paths = [path for path in described.get("multiplied", ()) if not has_factors(model.get_submodule(path))]
    if paths:
        give_own_inputs(model, paths)
        for path in paths:
            attach_factors(model.get_submodule(path))
        save_flow(model, made)


def _apply(model: nn.Module, made: Preparation, described: dict[str, Any]) -> None:
    results = Results(notes=described["notes"], products=described["products"])
    for path in described["first_last"]:
        layer = model.get_submodule(path)
        widen(layer, layer._modules, made.config)
    repeated = RepeatedCalls({path: Repeated(*found) for path, found in described["repeated"].items()})
    for path, splits in described["splits"].items():
        for name, firsts in splits.items():
            slots = model.get_submodule(path)._modules
            quantizer = slots[name]
            if isinstance(quantizer, Quantizer):
                slots[name] = split(quantizer, firsts, repeated.of(path))
    for path, key, turn, bits in described["places"]:
        is_layer = key is None and isinstance(model.get_submodule(path), QuantizedLayer)
        add_quantizer(model, made.config, results, Place(path, key, turn), is_layer=is_layer, bits=bits)
    for path, functions in described["functions"].items():
        results.functions[path] = FunctionPlan(**functions)
    made.outputs += attach_results(model, results, repeated)
    repeated.attach(model)
    name_quantizers(model)
    share_inputs(model, {(path, turn): _quantizer_at(model, grid) for path, turn, grid in described["grids"]})
    made.norms, made.first_last = described["norms"], described["first_last"]
    set_rounding(model, described["rounded"], made.config.target)
    made.notes, made.products = results.notes, results.products
    _multiply_inputs(model, made, described)
    link_norms(model)


def _has_output(made: Preparation, path: str, module: nn.Module) -> bool:
    """Returns True if a module quantizes its output because of the data flow, not because the config says so."""
    slot = module._modules.get("output_quantizer")
    if not isinstance(slot, (Quantizer, CallQuantizers)) or is_owner(module):
        return False
    use, _ = made.config.find(path, module)
    return not isinstance(module, QuantizedLayer) or use is None or use.output is None


def _quantizer_at(model: nn.Module, path: str) -> Quantizer:
    found = model.get_submodule(path)
    assert isinstance(found, Quantizer)
    return found
