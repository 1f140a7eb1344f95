"""A float model and a quantized one that match: both call the same layers, and each layer knows its counterpart."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._convert.fold_batch_norm import Folded, FoldedNorm, normalized
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._paired_models.calls import RecordedCall
from fakequant._paired_models.errors import ErrorSums
from fakequant._prepare.attach import FLOW_BUFFER, attach_layer, detach_layer, find_preparation, link_norms
from fakequant._util.text import listed
from fakequant.nn._call_quantizers import CallQuantizers, current_quantizer
from fakequant.nn._input_factors import has_factors
from fakequant.nn._layer_kinds import AnyLayer, find_kind
from fakequant.nn._model_quantizers import named_quantizers, switch_quantizers, weight_quantizers
from fakequant.nn._owners import is_owner, owner_record, products_of
from fakequant.nn._quantized_layer import (
    ATTENTION_QUANTIZERS,
    QUANTIZERS,
    Quantization,
    QuantizedLayer,
    input_grid_of,
)
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import FACTORS, TOKENS, find_record


@contextmanager
def in_single_steps(model: nn.Module, like: dict[str, nn.Module]) -> Iterator[None]:
    """Makes a float model call the same layers as the quantized modules `like`.

    torch's attention computes without calling its `out_proj`, and its encoder may use nested tensors.
    """
    with ExitStack() as undo:
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.TransformerEncoder):
                undo.callback(setattr, module, "use_nested_tensor", module.use_nested_tensor)
                module.use_nested_tensor = False
            quantized = like.get(path)
            if isinstance(module, nn.MultiheadAttention) and isinstance(quantized, QuantizedLayer):
                _open(module, undo)
        yield


@contextmanager
def with_products(model: nn.Module, like: nn.Module) -> Iterator[None]:
    """Makes a float model call the products of its recurrent layers and experts, as the quantized model `like` does."""
    floats = dict(model.named_modules())
    with ExitStack() as undo:
        for path, quantized in like.named_modules():
            module, record = floats.get(path), find_record(quantized)
            if module is None or type(module) is not getattr(record, "float_class", None) or not is_owner(module):
                continue
            attach_layer(module, owner_record(module), {**products_of(module), "output_quantizer": None})
            undo.callback(detach_layer, module)
        yield


def _open(attention: nn.MultiheadAttention, undo: ExitStack) -> None:
    """Turns an attention into a prepared layer without quantizers."""
    cls = type(attention)
    kind = find_kind(cls)
    if kind is None or kind.unsupported_reason(attention) is not None:
        return
    names = (*QUANTIZERS, *ATTENTION_QUANTIZERS)
    attach_layer(attention, Quantization(kind=kind, float_class=cls), dict.fromkeys(names))
    undo.callback(detach_layer, attention)


def float_copy(model: nn.Module, reference: nn.Module | None) -> nn.Module:
    """Returns a copy of a prepared model that computes in float, with the weights of `reference` if it is given.

    It shares its parameters with `model` or `reference`, and has its own buffers. Only what quantizers have observed of
    weights is shared too, since it may be as large as part of the weights: the quantizers of the copy do not change it.
    """
    own = dict(_named_tensors(model))
    given = own if reference is None else _given(reference, own)
    memo: dict[int, Any] = {
        id(tensor): _like(given.get(name, tensor), tensor)
        for name, tensor in own.items()
        if isinstance(tensor, nn.Parameter)
    }
    for quantizer in weight_quantizers(model):
        if not quantizer.is_own_class:
            memo.update({id(t): t for name, t in quantizer.named_buffers() if name != "switches"})
    made = copy.deepcopy(model, memo)
    link_norms(made)
    switch_quantizers(made, observing=False, quantizing=False, frozen=True)
    with torch.no_grad():
        for name, tensor in _named_tensors(made):
            if name in given and not isinstance(tensor, nn.Parameter):
                tensor.copy_(given[name])
        if reference is not None:
            for layer in made.modules():
                if has_factors(layer):  # its input is multiplied, and the weights of `reference` do not know it
                    _divide_weight(layer)
    return made


def _divide_weight(layer: AnyLayer) -> None:
    name = layer._fakequant.kind.weight_name
    weight: nn.Parameter = layer._parameters[name]
    layer._parameters[name] = nn.Parameter(weight / layer._buffers[FACTORS].to(weight), weight.requires_grad)


def _given(reference: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a float model by name. Raises ValueError if a prepared model has other ones."""
    if not isinstance(reference, nn.Module):
        raise TypeError(f"`reference` must be a float model or None, got {type(reference).__name__}.")
    given = dict(_named_tensors(reference))
    odd = next((name for name, t in given.items() if name not in own or own[name].shape != t.shape), None)
    if odd is not None or not given:
        raise ValueError(
            f"`reference` is not the float model of `model`: {odd or 'a parameter'} has no counterpart of the same "
            "shape.\nPass the model from before fakequant.prepare, or a copy of it."
        )
    return given


def _like(given: Tensor, own: nn.Parameter) -> nn.Parameter:
    """Returns a given value of a parameter, as a parameter of the same type and device."""
    if given.data_ptr() == own.data_ptr():
        return own
    value = given.detach().to(own)
    if isinstance(given, nn.Parameter) and value.data_ptr() == given.data_ptr():
        return given
    return nn.Parameter(value, requires_grad=own.requires_grad)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of a model that do not belong to its quantizers."""
    of_quantizers = {id(t) for _, q in named_quantizers(model) for t in (*q.parameters(), *q.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in of_quantizers and name.rpartition(".")[2] not in (FLOW_BUFFER, TOKENS, FACTORS):
            yield name, tensor


class ComparedLayer:
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
        self.isolated, self.accumulated = ErrorSums(), ErrorSums()

    @property
    def input_grid(self) -> Quantizer | GoldenQuantizer | None:
        """The quantizer of the layer's input, in the running call if there are several. None if there is none."""
        return input_grid_of(self.module) if isinstance(self.module, QuantizedLayer) else None

    @property
    def output_grid(self) -> Quantizer | GoldenQuantizer | None:
        """The quantizer of the module's output, in the running call. None if it has none, or is a layer."""
        found: Quantizer | GoldenQuantizer | None = current_quantizer(self.output_slot)
        return found


def find_layers(float_model: nn.Module, quantized_model: nn.Module) -> list[ComparedLayer]:
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
        raise ValueError(
            f"The models do not match: `float_model` has no {listed(missing)}.\n"
            "Pass the model from which the quantized one was made, both without wrappers such as "
            "DistributedDataParallel or torch.compile."
        )
    layers = [ComparedLayer(path, floats[path], module) for path, module in found.items()]
    is_converted = any(isinstance(module, IntegerLayer) for module in found.values())
    made = find_preparation(quantized_model)
    norms = {} if is_converted or made is None else made.norms
    for compared in layers:
        _check_shapes(compared)
        norm = norms.get(compared.path)
        if norm is not None and norm in floats:
            compared.norm, compared.norm_to_come = norm, quantized_model.get_submodule(norm)
    return layers


def _is_quantized(module: nn.Module) -> bool:
    slot = module._modules.get("output_quantizer")
    return isinstance(module, QuantizedLayer) or isinstance(slot, (Quantizer, GoldenQuantizer, CallQuantizers))


def _check_shapes(compared: ComparedLayer) -> None:
    if not has_quantized_weight(compared.module):
        return
    layer: Any = compared.module
    record, name = layer._fakequant, layer._fakequant.kind.weight_name
    there = getattr(compared.before, name, None)
    shape = record.weight_shape if isinstance(layer, IntegerLayer) else tuple(getattr(layer, name).shape)
    if there is None or tuple(there.shape) != shape:
        has = "no weight" if there is None else f"a weight of shape {tuple(there.shape)}"
        raise ValueError(
            f"The models do not match: {compared.path or 'the layer'} has {has} in `float_model` and one of shape "
            f"{shape} in `quantized_model`.\nPass the model from which the quantized one was made."
        )


def has_quantized_weight(module: nn.Module) -> bool:
    """Returns True if the weight of a layer is quantized."""
    if isinstance(module, IntegerLayer):
        return module._fakequant.weight_spec is not None
    return isinstance(module, QuantizedLayer) and module.weight_quantizer is not None


def float_call(compared: ComparedLayer, calls: dict[str, list[RecordedCall]], number: int) -> RecordedCall:
    """Returns a call of the float model's layer, with the result after its batch norm if it has one."""
    call = calls[compared.path][number]
    if isinstance(compared.module, Folded):  # its input is already normalized
        return RecordedCall((call.result,), {}, call.result)
    if isinstance(compared.module, FoldedNorm):
        return RecordedCall((normalized(compared.before, call.args[0]),), {}, call.result)
    if compared.norm is None or number >= len(calls.get(compared.norm, ())):
        return call
    return dataclasses.replace(call, result=calls[compared.norm][number].result)
