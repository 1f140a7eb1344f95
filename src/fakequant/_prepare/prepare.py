"""`prepare` adds quantizers to a model, in place. `unprepare` removes them."""

from typing import Any, TypeAlias

import torch
from torch import nn

from fakequant import _targets
from fakequant._convert.fold_batch_norm import can_fold
from fakequant._prepare.attach import (
    Preparation,
    attach_layer,
    attach_output,
    attach_preparation,
    check_name,
    close_shortcuts,
    detach_all,
    find_preparation,
)
from fakequant._prepare.data_flow import DataFlow, call_order, find_flow, norm_pairs, sources
from fakequant._prepare.first_last import adopting_hook, widen_first_and_last
from fakequant._prepare.multiplications import count_multiplications
from fakequant._prepare.plan import OF_RECIPES, Layer, Plan, check_free, make_activation_quantizer, make_plan
from fakequant._prepare.plan_warnings import warn_about_refused, warn_about_rules
from fakequant._prepare.quantized_results import holder, results_to_quantize
from fakequant._train.running import check_module
from fakequant.config import QuantConfig
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._model_quantizers import name_quantizers
from fakequant.nn._quantized_layer import Quantization, QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import NAME, find_record

# A module that is a `QuantizedLayer`, by its path.
PreparedLayer: TypeAlias = Any


def prepare(model: nn.Module, config: QuantConfig, example: Any = None) -> nn.Module:
    """Adds quantizers to the layers of a model as `config` says, in place, and returns the model.

    Each quantized layer gets a class derived from its own class and keeps its parameters, their names, its hooks
    and tied weights. A state_dict of the float model loads strictly.

    If `config.operands` is set, modules also quantize outputs where the target needs codes: operands of additions,
    concatenations, products and means, and for some targets the outputs of convolutions. These places are found by
    running the model once on `example`, in evaluation mode. Without an example the model is traced with torch.fx, which
    fails on much Python code. What was not found is listed by `summary`.

    Scales of weights are known immediately. Scales of activations need data, from `calibrate` or from training.

    Args:
        model: The float model. Prepare it before it is compiled or distributed.
        config: Which layers are quantized, and how.
        example: A batch, as `calibrate` takes them: a tensor, a dict of keyword arguments, or a tuple.

    Raises:
        ValueError: If the model is prepared, compiled or distributed already, is on the meta device, or has no
            layer that `config` quantizes.

    >>> from fakequant import recipes
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model = prepare(model, recipes.int8())
    >>> isinstance(model[0], nn.Linear), model[0].weight_quantizer.spec.bits
    (True, 8)
    """
    _check(model, config)
    plan = make_plan(model, config)
    if not plan.layers:
        raise ValueError(_nothing_to_quantize(plan))
    warn_about_rules(model, config, OF_RECIPES)
    warn_about_refused(plan.refused)
    flow = find_flow(model, example)
    first_last = widen_first_and_last(model, config, plan, call_order(flow))
    outputs, notes = _plan_outputs(model, config, plan, flow)
    on_a_grid = {} if config.operands is None else _drop_repeated(plan, outputs, sources(model, flow))
    for layer in plan.layers:
        attach_layer(layer.module, _record(layer, config), layer.quantizers)
    hooked = []
    for path, quantizer in outputs.items():
        module = model.get_submodule(path)
        if isinstance(module, QuantizedLayer):
            module.output_quantizer = module.output_quantizer or quantizer
        else:
            attach_output(module, quantizer)
            hooked.append(path)
    for path, source in on_a_grid.items():
        # Not registered as a child, because it is already a child of the source.
        reader: PreparedLayer = model.get_submodule(path)
        reader._fakequant.input_grid = model.get_submodule(source).output_quantizer
    norms = {layer: norm for layer, norm in norm_pairs(model, flow) if can_fold(model, layer, norm)}
    close_shortcuts(model)
    name_quantizers(model)
    made = Preparation(config, plan.floats, plan.unmatched, hooked, notes, norms, first_last)
    if flow.is_recorded:
        made.multiplications = count_multiplications(model, flow.graphs[-1])
    attach_preparation(model, made, adopting_hook(first_last))
    link_norms(model)
    return model


def _record(layer: Layer, config: QuantConfig) -> Quantization:
    cls = type(layer.module)
    kind = find_kind(cls)
    assert kind is not None
    return Quantization(kind=kind, float_class=cls, save_codes=config.save_codes, target=config.target)


def unprepare(model: nn.Module) -> nn.Module:
    """Removes everything that `prepare` added to a model, in place, and returns the float model.

    >>> from fakequant import recipes
    >>> model = nn.Sequential(nn.Linear(4, 8))
    >>> keys = list(model.state_dict())
    >>> model = unprepare(prepare(model, recipes.int8()))
    >>> type(model[0]).__name__, list(model.state_dict()) == keys
    ('Linear', True)
    """
    preparation(model)
    detach_all(model)
    return model


def is_prepared(model: nn.Module) -> bool:
    """Returns True if `model` was returned by `prepare`."""
    return find_preparation(model) is not None


def preparation(model: nn.Module) -> Preparation:
    """Returns what `prepare` did to a model. Raises ValueError if the model is not prepared."""
    check_module(model)
    found = find_preparation(model)
    if found is None:
        raise ValueError(
            "The model is not prepared, or it is a part or a wrapper of a prepared model.\n"
            "Pass the module that was given to fakequant.prepare."
        )
    return found


def link_norms(model: nn.Module) -> None:
    """Stores in each layer the batch norm that `convert` will fold into it.

    Call it again before use, because the user may have replaced batch norms, for example by SyncBatchNorm.
    """
    made = find_preparation(model)
    for path, norm in () if made is None else made.norms.items():
        layer: PreparedLayer = model.get_submodule(path)
        layer._fakequant.norm = model.get_submodule(norm)


def _check(model: nn.Module, config: QuantConfig) -> None:
    check_module(model)
    if not isinstance(config, QuantConfig):
        raise TypeError(
            f"`config` must be a QuantConfig, got {type(config).__name__}.\nUse e.g. fakequant.recipes.int8()."
        )
    for path, module in model.named_modules():
        if module is model or isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            check_name(module)
        if isinstance(module, nn.parallel.DistributedDataParallel) or _is_sharded(module):
            raise ValueError(
                f"{path or 'The model'} is distributed already, by {_wrapper(module)}; the quantizers would not be.\n"
                "Use prepare(model, config) first, then distribute the model, then create the optimizer."
            )
        if type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
            raise ValueError(
                f"{path or 'The model'} is compiled already.\n"
                "Use prepare(model, config) first, then torch.compile the prepared model."
            )
        if isinstance(module, QuantizedLayer):
            raise ValueError(  # noqa: TRY004
                f"The model is prepared already: {path or 'it'} has quantizers.\nUse unprepare(model) first."
            )
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{path} is on the meta device: it has no values to quantize.\n"
                'Move the model first, `model.to_empty(device="cpu")`, and load its state.'
            )


def _is_sharded(module: nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") for p in module.parameters(recurse=False))


def _wrapper(module: nn.Module) -> str:
    return "fully_shard" if _is_sharded(module) else type(module).__name__


def _nothing_to_quantize(plan: Plan) -> str:
    reasons = "".join(f"\n  {path or 'the model'}: {reason}" for path, reason in list(plan.floats.items())[:10])
    rules = "".join(
        f"\n  {rule} matches nothing; near: {', '.join(near) or 'nothing'}" for rule, near in plan.unmatched
    )
    return f"Nothing in the model would be quantized.{reasons}{rules}"


def _drop_repeated(plan: Plan, outputs: dict[str, Quantizer], sources_of: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Drops input quantizers that would repeat an output quantizer before them; returns {layer: producer} by path.

    The producer is the nearest module before the layer that quantizes its output.
    """
    layers = {layer.path: layer for layer in plan.layers}
    producers = {}
    for path, way in sources_of.items():
        reader = layers[path].quantizers["input_quantizer"] if path in layers else None
        for source in way:
            writer = layers[source].quantizers["output_quantizer"] if source in layers else None
            writer = writer or outputs.get(source)
            if writer is None:
                continue
            # A dynamic quantizer may choose another grid after a move, for example a transposition of tokens.
            if reader is not None and reader.is_like(writer) and not reader.is_dynamic:
                layers[path].quantizers["input_quantizer"] = None
                producers[path] = source
            break
    return producers


def _plan_outputs(
    model: nn.Module, config: QuantConfig, plan: Plan, flow: DataFlow
) -> tuple[dict[str, Quantizer], list[str]]:
    """Creates the quantizers of outputs, by the path of the module.

    Also returns notes on the results that stay in float.
    """
    if config.operands is None:
        return {}, []
    if flow.problem is not None:
        return {}, [
            f"the model could not be traced ({flow.problem}): operands are not quantized. "
            "Pass an example: prepare(model, config, example)"
        ]
    target = _targets.find(config.target)
    quantized = {layer.path for layer in plan.layers}
    outputs: dict[str, Quantizer] = {}
    notes, in_float = [], []
    for call in results_to_quantize(model, flow, plan, target):
        path = holder(model, call)
        if path is None:
            in_float += [str(call)] if call.kind == "function" else []
            continue
        module = model.get_submodule(path)
        if path in outputs or (isinstance(module, (nn.Embedding, nn.MultiheadAttention)) and path not in quantized):
            continue
        use, _ = config.find(path, module)
        if use is None:
            continue
        if path not in quantized:
            try:
                check_free(module, ["output_quantizer"] if find_record(module) else ["output_quantizer", NAME])
            except ValueError as error:
                notes.append(f"{path} cannot quantize its output: {error}")
                continue
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        quantizer = make_activation_quantizer(use, target.fit_activation(config.operands), f"{path}.output", device)
        outputs[path] = quantizer.train(module.training)
    notes += [
        f"{name} is computed by a function: it stays in float, because no module can hold its quantizer"
        for name in in_float
    ]
    return outputs, notes
