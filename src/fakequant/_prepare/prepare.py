"""`prepare` adds quantizers to a model, in place. `unprepare` removes them."""

import dataclasses
from typing import Any

from torch import nn

from fakequant import _runtimes
from fakequant._model.running import check_module, describing_call, evaluating, warn_about_dropped
from fakequant._prepare.adapters import allow_merging, protect_merging, without_adapters
from fakequant._prepare.attach import (
    Preparation,
    attach_cache,
    attach_layer,
    attach_preparation,
    check_name,
    close_shortcuts,
    detach_all,
    link_norms,
    preparation,
)
from fakequant._prepare.bit_widths import first_and_last, widen
from fakequant._prepare.cache import plan_cache
from fakequant._prepare.flow_graph import FlowGraph, count_multiplications, foldable_norms
from fakequant._prepare.flow_state import load_flow, save_flow
from fakequant._prepare.input_rounding import round_inputs
from fakequant._prepare.output_quantizers import attach_results, plan_results, share_inputs, shared_inputs
from fakequant._prepare.plan import Layer, Plan, make_plan, warn_about_refused, warn_about_rules
from fakequant._prepare.record_flow import record_flow
from fakequant._prepare.repeated_calls import RepeatedCalls, split_calls
from fakequant.config import QuantConfig
from fakequant.nn._call_quantizers import quantizers_in
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._model_quantizers import name_quantizers
from fakequant.nn._owners import owner_record
from fakequant.nn._quantized_layer import Quantization, QuantizedLayer


class MissingExampleError(ValueError):
    """A config needs an example."""


def prepare(model: nn.Module, config: QuantConfig, example: Any = None) -> nn.Module:
    """Adds quantizers to the layers of a model as `config` says, in place, and returns the model.

    Each quantized layer gets a class derived from its own class and keeps its parameters, their names, its hooks
    and tied weights. A state_dict of the float model loads strictly.

    The model is run once on `example`, in evaluation mode, to see how data flows through it:

    - `config.operands`: modules also quantize outputs where the target needs codes: operands of additions,
      concatenations, products and means, and for some targets outputs of convolutions.
    - `config.first_last_bits`: which layers are first and last.
    - The target: some runtimes round the model's inputs at ties in their own way.

    A config with one of these needs the example; `recipes.int8`, `w4a8`, `lsq` and `fp8` are such configs. Any other
    config can do without it. Then batch norms do not fold, a layer that is called several times has one range for all
    calls, and weights that functions read, as in `F.linear(x, layer.weight)`, are not quantized there.

    Scales of weights are known immediately. Scales of activations need data, from `calibrate` or from training.

    Args:
        model: The float model. Prepare it before it is compiled or distributed.
        config: Which layers are quantized, and how.
        example: One batch, as `calibrate` takes them: a tensor, a dict of keyword arguments, or a tuple, of which only
            the arguments that `forward` requires are passed.

    Raises:
        ValueError: If the model is prepared, compiled or distributed already, is on the meta device, or has no
            layer that `config` quantizes; or if the config needs an example and there is none.

    >>> import torch
    >>> from fakequant import recipes
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model = prepare(model, recipes.int8(), example=torch.ones(1, 4))
    >>> isinstance(model[0], nn.Linear), model[0].weight_quantizer.spec.bits
    (True, 8)
    """
    _check(model, config)
    config = _for_engine(without_adapters(model, config))
    plan = make_plan(model, config)
    if not plan.layers and config.kv_cache is None:
        raise ValueError(_nothing_to_quantize(plan))
    if example is None:
        _require_no_flow(config, plan)
    warn_about_rules(model, plan, config)
    warn_about_refused(plan.refused)
    warn_about_dropped(model, example)
    with describing_call(model, example, "`example`"):
        graph = None if example is None else record_flow(model, example)
    return _attach(model, config, plan, graph)


def prepare_for_loading(model: nn.Module, config: QuantConfig) -> nn.Module:
    """Prepares a model without an example, whatever the config. A state that is loaded next brings the data flow."""
    _check(model, config)
    config = _for_engine(without_adapters(model, config))
    return _attach(model, config, make_plan(model, config), None)


def _for_engine(config: QuantConfig) -> QuantConfig:
    """Returns the config without what an engine that multiplies dequantized weights computes in float."""
    if _runtimes.find(config.target).engine is None:
        return config
    return dataclasses.replace(config, operands=None, attention=False)


def _attach(model: nn.Module, config: QuantConfig, plan: Plan, recorded: FlowGraph | None) -> nn.Module:
    """Adds the quantizers of a plan to a model, and those that its data flow needs, if it is known."""
    graph = recorded or FlowGraph([])
    cache = plan_cache(model, config)
    first_last = first_and_last(model, config, plan, graph)
    for layer in plan.layers:
        if layer.path in first_last:
            widen(layer.module, layer.quantizers, config)
    repeated = RepeatedCalls(graph.repeated)
    split_calls(plan, graph, repeated)
    results = plan_results(model, config, plan, graph)
    shared = {} if config.operands is None else shared_inputs(model, plan, results, graph)
    for owner in plan.owners:
        attach_layer(owner.module, owner_record(owner.module), owner.children)
    for layer in plan.layers:
        attach_layer(layer.module, _record(layer, config), layer.quantizers)
    for path, quantizers in cache.items():
        attach_cache(model.get_submodule(path), quantizers)
    hooked = [owner.path for owner in plan.owners if owner.children["output_quantizer"] is not None]
    hooked += attach_results(model, results, repeated)
    repeated.attach(model)
    share_inputs(model, shared)
    round_inputs(model, graph, config.target)
    close_shortcuts(model)
    name_quantizers(model)
    made = Preparation(config, plan.floats, plan.unmatched, hooked, results.notes, first_last=first_last)
    made.products = results.products
    with evaluating(model):  # in training, parametrizations such as spectral_norm change when a weight is read
        made.multiplications = count_multiplications(model, graph)
        if _runtimes.find(config.target).engine is None:  # other runtimes compute batch norms in their layers
            made.norms = foldable_norms(model, graph)
    attach_preparation(model, made, load_flow)
    if recorded is not None:
        save_flow(model, made)
    link_norms(model)
    protect_merging(model)
    return model


def _require_no_flow(config: QuantConfig, plan: Plan) -> None:
    """Raises an error if what `config` asks for depends on the data flow, which only an example shows."""
    reasons = []
    if config.operands is not None:
        reasons.append("`operands` is set: results that additions, products and other operations read are quantized")
    if config.first_last_bits is not None:
        reasons.append("`first_last_bits` is set: the layers that are called first and last get more bits")
    target = _runtimes.find(config.target)
    inputs = [q for layer in plan.layers for q in quantizers_in(layer.quantizers["input_quantizer"])]
    if target.rounding is not None and not all(quantizer.is_dynamic for quantizer in inputs):
        reasons.append(f"{target.name} rounds the inputs of the model at ties in its own way")
    if reasons:
        raise MissingExampleError(
            "This config needs an example, because only a run shows how data flows through the model:"
            + "".join(f"\n  {reason}" for reason in reasons)
            + "\nUse fq.prepare(model, config, example=x), where x is one batch, as the model takes it."
        )


def _record(layer: Layer, config: QuantConfig) -> Quantization:
    cls = type(layer.module)
    kind = find_kind(cls)
    assert kind is not None
    adds_floats = _runtimes.find(config.target).engine is not None
    return Quantization(
        kind=kind,
        float_class=cls,
        save_codes=config.save_codes,
        exact_sums=config.sums == "exact" and not adds_floats,
        has_float_bias=adds_floats,
    )


def unprepare(model: nn.Module) -> nn.Module:
    """Removes everything that `prepare` added to a model, in place, and returns the float model.

    >>> from fakequant import recipes
    >>> model = nn.Sequential(nn.Linear(4, 8))
    >>> keys = list(model.state_dict())
    >>> model = unprepare(prepare(model, recipes.int8_dynamic()))
    >>> type(model[0]).__name__, list(model.state_dict()) == keys
    ('Linear', True)
    """
    preparation(model)
    detach_all(model)
    allow_merging(model)
    return model


def _check(model: nn.Module, config: QuantConfig) -> None:
    check_module(model)
    if not isinstance(config, QuantConfig):
        raise TypeError(
            f"`config` must be a QuantConfig, got {type(config).__name__}.\nUse e.g. fakequant.recipes.int8()."
        )
    _runtimes.find(config.target).require_layers(model)
    for path, module in model.named_modules():
        if module is model or isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            check_name(module)
        if hasattr(module, "fake_quant_enabled") and hasattr(module, "activation_post_process"):
            raise ValueError(
                f"The model is prepared by torch.ao already: {path or 'it'} is its {type(module).__name__}.\n"
                "Prepare the float model, and use fakequant.load_torch_ao_state(model, state, example) to keep weights "
                "and ranges; docs/guides/migrate-from-torch-ao.md has all ways."
            )
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or _is_sharded(module):
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
