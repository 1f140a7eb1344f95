"""Completes a model that was prepared without an example, when `calibrate` sees its first batch.

`prepare` without an example knows the data flow only as far as torch.fx can trace it. A run on the first batch shows
all of it. What `prepare` would have added with that batch as its example is added then.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._convert.fold_batch_norm import can_fold
from fakequant._prepare.attach import Preparation, find_preparation, link_norms
from fakequant._prepare.data_flow import find_flow, norm_pairs, repeated_modules, sources
from fakequant._prepare.input_rounding import round_inputs
from fakequant._prepare.multiplications import count_multiplications
from fakequant._prepare.plan import Layer, Plan
from fakequant._prepare.plan_results import attach_results, plan_results, withdraw_results
from fakequant._prepare.repeated_calls import RepeatedCalls, split_calls
from fakequant._prepare.saved_flow import describe_flow, save_flow
from fakequant._prepare.shared_grids import find_repeated, share_grids
from fakequant._train.running import Data, describing_call
from fakequant.nn._model_quantizers import has_scale, name_quantizers, quantizers
from fakequant.nn._quantized_layer import ATTENTION_QUANTIZERS, QUANTIZERS, QuantizedLayer
from fakequant.nn._records import find_record

Undo = Callable[[], None]


def completed(model: nn.Module, data: Data) -> tuple[Data, Undo]:
    """Completes a model with the first batch of `data`, if it was prepared without an example and has no scales yet.

    Returns:
        Data that has all batches, and a function that undoes the completion.
    """
    made = find_preparation(model)
    is_iterable = isinstance(data, (Iterable, Tensor)) and not isinstance(data, Mapping)
    if made is None or made.is_recorded or not is_iterable or _has_scales(model) or _is_sharded(model):
        return data, _nothing
    first, data = _first_batch(data)
    if first is None or _is_empty(first):
        return data, _nothing
    undo = _snapshot(model)
    _complete(model, made, first)
    return data, undo


def _nothing() -> None:
    pass


def _has_scales(model: nn.Module) -> bool:
    of_weights = {module.weight_quantizer for module in model.modules() if isinstance(module, QuantizedLayer)}
    activations = [quantizer for _, quantizer in quantizers(model) if quantizer not in of_weights]
    return any(has_scale(quantizer) and not quantizer.is_dynamic for quantizer in activations)


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def _is_empty(batch: Any) -> bool:
    return isinstance(batch, Tensor) and batch.numel() == 0


def _first_batch(data: Any) -> tuple[Any, Any]:
    """Returns the first batch, or None if there is none, and data that still has it."""
    if isinstance(data, Tensor):
        return (data if data.dim() > 0 else None), data
    with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed whenever it is iterated
        batches: Iterator[Any] = iter(data)
        first = next(batches, None)
    if batches is not data or first is None:
        return first, data
    return first, chain([first], batches)


def _complete(model: nn.Module, made: Preparation, example: Any) -> None:
    switches = [(quantizer, quantizer.observing, quantizer.quantizing) for _, quantizer in quantizers(model)]
    try:
        for quantizer, observing, _ in switches:
            quantizer.quantizing = False
            if observing:
                quantizer.observing = False
        with describing_call(model, example, "batch 1 of `data`"):
            flow = find_flow(model, example)
    finally:
        for quantizer, observing, quantizing in switches:
            quantizer.quantizing = quantizing
            if observing:
                quantizer.observing = True
    before = describe_flow(model, made)
    withdraw_results(model, made)
    plan = _existing_plan(model)
    repeated = RepeatedCalls(repeated_modules(flow))
    split_calls(plan, flow, repeated)
    for layer in plan.layers:
        layer.module._modules.update(layer.quantizers)
    results = plan_results(model, made.config, plan, flow)
    grids = {} if made.config.operands is None else find_repeated(plan, results, sources(model, flow))
    made.outputs += attach_results(model, results, repeated)
    repeated.attach(model)
    share_grids(model, grids)
    round_inputs(model, flow, made.config.target)
    name_quantizers(model)
    made.notes, made.products, made.is_recorded = results.notes, results.products, True
    made.norms = {layer: norm for layer, norm in norm_pairs(model, flow) if can_fold(model, layer, norm)}
    made.multiplications = count_multiplications(model, flow.graphs[-1])
    if describe_flow(model, made) != before:  # else a state needs no description: `prepare` finds the same by tracing
        save_flow(model, made)
    link_norms(model)


def _existing_plan(model: nn.Module) -> Plan:
    """Returns the layers of a prepared model as a plan."""
    layers = []
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            names = [name for name in (*QUANTIZERS, *ATTENTION_QUANTIZERS) if name in module._modules]
            own: dict[str, Any] = {name: module._modules[name] for name in names}
            layers.append(Layer(path, module, own, module._fakequant.kind.changes_input(module)))
    return Plan(layers, {}, [])


def _snapshot(model: nn.Module) -> Undo:
    """Returns a function that restores the classes, children, hooks and records of all modules."""
    made = find_preparation(model)
    assert made is not None
    classes = [(module, type(module)) for module in model.modules()]
    records = [record for module in model.modules() for record in (find_record(module),) if record is not None]
    before = [(vars(thing), _copied(vars(thing))) for thing in (*model.modules(), *records, made)]

    def undo() -> None:
        for module, cls in classes:
            module.__class__ = cls
        for fields, old in before:
            fields.clear()
            fields.update(old)

    return undo


def _copied(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of attributes in which containers are copies too."""
    return {name: copy.copy(value) if isinstance(value, (dict, list, set)) else value for name, value in fields.items()}
