"""Layers that are in two models: in float in one, quantized in the other."""

import dataclasses
from typing import Any

from torch import nn

from fakequant._convert.fold_batch_norm import Folded
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._diagnosis.inputs import input_grid_of
from fakequant._diagnosis.sums import Sums
from fakequant._diagnosis.watching import Call
from fakequant._prepare.attach import find_preparation
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer


class Pair:
    """A layer in both models, and what is summed up about it."""

    def __init__(self, path: str, before: nn.Module, module: nn.Module) -> None:
        self.path, self.kind, self.before, self.module = path, type(before).__name__, before, module
        self.input_grid = input_grid_of(module)
        is_layer = isinstance(module, QuantizedLayer)
        # Of a module that has nothing else.
        self.output_grid: Any = None if is_layer else module._modules["output_quantizer"]
        # The batch norm that is part of the layer, or will be.
        self.norm: str | None = None
        # Where it is not yet, it has to be applied to the layer's result.
        self.norm_to_come: nn.Module | None = None
        # How many axes its input has.
        self.input_dims: int | None = None
        self.isolated, self.accumulated = Sums(), Sums()


def find_pairs(float_model: nn.Module, quantized_model: nn.Module) -> list[Pair]:
    """What is quantized in one model, with what it is in the other; an error if they are not the same model."""
    floats = dict(float_model.named_modules())
    for path, module in floats.items():
        if _is_quantized(module):
            raise ValueError(
                f"`float_model` is quantized: {path or 'it'} has a quantizer.\n"
                "Use a copy of the model from before prepare, or fakequant.unprepare(copy.deepcopy(model))."
            )
    found = {path: module for path, module in quantized_model.named_modules() if _is_quantized(module)}
    if not found:
        raise ValueError(
            "`quantized_model` has no quantized layers to look at.\n"
            "Use compare(float_model, fakequant.prepare(model, config), data), in this order."
        )
    missing = [path for path in found if path not in floats]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"The models are not the same: `float_model` has no {', '.join(missing[:3])}{more}.\n"
            "Pass the model that the quantized one was made from, both without wrappers such as "
            "DistributedDataParallel or torch.compile."
        )
    pairs = [Pair(path, floats[path], module) for path, module in found.items()]
    is_converted = any(isinstance(module, IntegerLayer) for module in found.values())
    made = find_preparation(quantized_model)
    norms = {} if is_converted or made is None else made.norms
    for pair in pairs:
        _check_shapes(pair)
        norm = norms.get(pair.path)
        if norm is not None and norm in floats:
            pair.norm, pair.norm_to_come = norm, quantized_model.get_submodule(norm)
    return pairs


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module, QuantizedLayer) or isinstance(module._modules.get("output_quantizer"), (Quantizer, Grid))


def _check_shapes(pair: Pair) -> None:
    if not has_quantized_weight(pair.module):
        return
    layer: Any = pair.module
    record, name = layer._fakequant, layer._fakequant.kind.weight_name
    there = getattr(pair.before, name, None)
    shape = record.weight_shape if isinstance(layer, IntegerLayer) else tuple(getattr(layer, name).shape)
    if there is None or tuple(there.shape) != shape:
        has = "no weight" if there is None else f"a weight of shape {tuple(there.shape)}"
        raise ValueError(
            f"The models are not the same: {pair.path or 'the layer'} has {has} in `float_model` and one of shape "
            f"{shape} in `quantized_model`.\nPass the model that the quantized one was made from."
        )


def has_quantized_weight(module: Any) -> bool:
    """Whether a layer computes with codes of its weight, or with what they stand for."""
    if isinstance(module, IntegerLayer):
        return module._fakequant.weight_spec is not None
    return isinstance(module, QuantizedLayer) and module.weight_quantizer is not None


def reference(pair: Pair, calls: dict[str, list[Call]], number: int) -> Call:
    """What the float model's layer was given and made of it; with the batch norm that belongs to it."""
    call = calls[pair.path][number]
    if isinstance(pair.module, Folded):  # which gets what was normalized already
        return Call((call.result,), {}, call.result)
    if pair.norm is None or number >= len(calls.get(pair.norm, ())):
        return call
    return dataclasses.replace(call, result=calls[pair.norm][number].result)
