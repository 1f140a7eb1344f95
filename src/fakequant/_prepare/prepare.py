"""`prepare` adds quantizers to a model, in place. `unprepare` removes them."""

from typing import Any

from torch import nn

from fakequant import _targets
from fakequant._convert.fold_batch_norm import can_fold
from fakequant._prepare.adapters import allow_merging, protect_merging, without_adapters
from fakequant._prepare.attach import (
    Preparation,
    attach_layer,
    attach_preparation,
    check_name,
    close_shortcuts,
    detach_all,
    find_preparation,
    link_norms,
)
from fakequant._prepare.data_flow import call_order, find_flow, norm_pairs, repeated_modules, sources
from fakequant._prepare.first_last import adopting_hooks, widen_first_and_last
from fakequant._prepare.input_rounding import round_inputs
from fakequant._prepare.multiplications import count_multiplications
from fakequant._prepare.plan import OF_RECIPES, Layer, Plan, make_plan
from fakequant._prepare.plan_results import attach_results, plan_results
from fakequant._prepare.plan_warnings import warn_about_refused, warn_about_rules
from fakequant._prepare.repeated_calls import RepeatedCalls, split_calls
from fakequant._prepare.saved_flow import load_flow, save_flow
from fakequant._prepare.shared_grids import find_repeated, share_grids
from fakequant._train.running import check_module, describing_call
from fakequant.config import QuantConfig
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._model_quantizers import name_quantizers
from fakequant.nn._owners import owner_record
from fakequant.nn._quantized_layer import Quantization, QuantizedLayer


def prepare(model: nn.Module, config: QuantConfig, example: Any = None) -> nn.Module:
    """Adds quantizers to the layers of a model as `config` says, in place, and returns the model.

    Each quantized layer gets a class derived from its own class and keeps its parameters, their names, its hooks
    and tied weights. A state_dict of the float model loads strictly.

    If `config.operands` is set, modules also quantize outputs where the target needs codes: operands of additions,
    concatenations, products and means, and for some targets the outputs of convolutions. These places are found by
    running the model once on `example`, in evaluation mode. Without an example the model is traced with torch.fx, which
    fails on much Python code and does not show results of functions. `summary` lists what is missing, and `calibrate`
    adds it when it sees its first batch. Pass the example if you load a state_dict instead.

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
    config = without_adapters(model, config)
    plan = make_plan(model, config)
    if not plan.layers:
        raise ValueError(_nothing_to_quantize(plan))
    warn_about_rules((*model.named_modules(), *plan.products.items()), config, OF_RECIPES)
    warn_about_refused(plan.refused)
    with describing_call(model, example, "`example`"):
        flow = find_flow(model, example)
    first_last = widen_first_and_last(model, config, plan, call_order(flow))
    repeated = RepeatedCalls(repeated_modules(flow))
    split_calls(plan, flow, repeated)
    results = plan_results(model, config, plan, flow)
    on_a_grid = {} if config.operands is None else find_repeated(plan, results, sources(model, flow))
    for owner in plan.owners:
        attach_layer(owner.module, owner_record(owner.module), owner.children)
    for layer in plan.layers:
        attach_layer(layer.module, _record(layer, config), layer.quantizers)
    hooked = [owner.path for owner in plan.owners if owner.children["output_quantizer"] is not None]
    hooked += attach_results(model, results, repeated)
    repeated.attach(model)
    share_grids(model, on_a_grid)
    round_inputs(model, flow, config.target)
    norms = {layer: norm for layer, norm in norm_pairs(model, flow) if can_fold(model, layer, norm)}
    close_shortcuts(model)
    name_quantizers(model)
    made = Preparation(config, plan.floats, plan.unmatched, hooked, results.notes, norms, first_last)
    made.is_recorded, made.products = flow.is_recorded, results.products
    if flow.is_recorded:
        made.multiplications = count_multiplications(model, flow.graphs[-1])
    attach_preparation(model, made, [load_flow, *adopting_hooks(first_last)])
    if flow.is_recorded:
        save_flow(model, made)
    link_norms(model)
    protect_merging(model)
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
    allow_merging(model)
    return model


def is_prepared(model: nn.Module) -> bool:
    """Returns True if `model` was returned by `prepare`."""
    return find_preparation(model) is not None


def preparation(model: nn.Module) -> Preparation:
    """Returns what `prepare` did to a model. Raises ValueError if the model is not prepared."""
    check_module(model)
    found = find_preparation(model)
    if found is None:
        layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
        if layers and not any(isinstance(layer._fakequant, Quantization) for layer in layers):
            raise ValueError(
                "The model is converted: it has codes instead of weights and quantizers.\n"
                "Pass the prepared model that was converted. To save a converted model, use fakequant.save_converted."
            )
        raise ValueError(
            "The model is not prepared, or it is a part or a wrapper of a prepared model.\n"
            "Pass the module that was given to fakequant.prepare."
        )
    return found


def _check(model: nn.Module, config: QuantConfig) -> None:
    check_module(model)
    if not isinstance(config, QuantConfig):
        raise TypeError(
            f"`config` must be a QuantConfig, got {type(config).__name__}.\nUse e.g. fakequant.recipes.int8()."
        )
    _targets.find(config.target).require_layers(model)
    for path, module in model.named_modules():
        if module is model or isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            check_name(module)
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
