"""Pairs the quantized layers of a model with the layers of the float model."""

import dataclasses
from typing import Any

from torch import nn

from fakequant._convert.folded_norm import Folded, FoldedNorm, normalized
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._diagnosis.inputs import input_grid_of
from fakequant._diagnosis.sums import Sums
from fakequant._diagnosis.watching import Call
from fakequant._prepare.attach import find_preparation
from fakequant.nn._call_quantizers import CallQuantizers, current_quantizer
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer


class Pair:
    """A layer in both models, with the sums of its errors."""

    def __init__(self, path: str, before: nn.Module, module: nn.Module) -> None:
        self.path, self.kind, self.before, self.module = path, type(before).__name__, before, module
        # What quantizes the output of a module that quantizes nothing else.
        self.output_slot = None if isinstance(module, QuantizedLayer) else module._modules.get("output_quantizer")
        # The path of the batch norm that is or will be folded into the layer.
        self.norm: str | None = None
        # The batch norm to apply to the layer's result, if it is not folded yet.
        self.norm_to_come: nn.Module | None = None
        # The number of axes of the layer's input.
        self.input_dims: int | None = None
        self.isolated, self.accumulated = Sums(), Sums()

    @property
    def input_grid(self) -> Quantizer | Grid | None:
        """The quantizer of the layer's input, in the running call if there are several. None if there is none."""
        return input_grid_of(self.module)

    @property
    def output_grid(self) -> Quantizer | Grid | None:
        """The quantizer of the module's output, in the running call. None if it has none, or is a layer."""
        found: Quantizer | Grid | None = current_quantizer(self.output_slot)
        return found


def find_pairs(float_model: nn.Module, quantized_model: nn.Module) -> list[Pair]:
    """Returns the quantized modules with their float counterparts. Raises ValueError if the models do not match."""
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
            "`quantized_model` has no quantized layers.\n"
            "Use compare(float_model, fakequant.prepare(model, config), data), in this order."
        )
    missing = [path for path in found if path not in floats]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"The models do not match: `float_model` has no {', '.join(missing[:3])}{more}.\n"
            "Pass the model from which the quantized one was made, both without wrappers such as "
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
    slot = module._modules.get("output_quantizer")
    return isinstance(module, QuantizedLayer) or isinstance(slot, (Quantizer, Grid, CallQuantizers))


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
            f"The models do not match: {pair.path or 'the layer'} has {has} in `float_model` and one of shape "
            f"{shape} in `quantized_model`.\nPass the model from which the quantized one was made."
        )


def has_quantized_weight(module: nn.Module) -> bool:
    """Returns True if the weight of a layer is quantized."""
    if isinstance(module, IntegerLayer):
        return module._fakequant.weight_spec is not None
    return isinstance(module, QuantizedLayer) and module.weight_quantizer is not None


def reference(pair: Pair, calls: dict[str, list[Call]], number: int) -> Call:
    """Returns a call of the float model's layer, with the result after its batch norm if it has one."""
    call = calls[pair.path][number]
    if isinstance(pair.module, Folded):  # its input is already normalized
        return Call((call.result,), {}, call.result)
    if isinstance(pair.module, FoldedNorm):
        return Call((normalized(pair.before, call.args[0]),), {}, call.result)
    if pair.norm is None or number >= len(calls.get(pair.norm, ())):
        return call
    return dataclasses.replace(call, result=calls[pair.norm][number].result)
