"""`prepare`: quantizers into a model, in place and without tracing it; `unprepare`: out again."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from fakequant import _targets
from fakequant._convert.fold_batch_norm import find_pairs
from fakequant._prepare.data_flow import Found, find_operands
from fakequant._prepare.first_last import FirstLast, adopt_on_loading, forget_first_and_last, widen_first_and_last
from fakequant._prepare.plan import OF_RECIPES, Layer, Plan, check_free, make_activation_quantizer, make_plan
from fakequant._prepare.plan_warnings import warn_about_refused, warn_about_rules
from fakequant._train.running import check_module
from fakequant._train.schedule import release_norms
from fakequant.config import QuantConfig
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._quantized_layer import Quantization, QuantizedLayer, attach, detach
from fakequant.nn._quantizer import name_quantizers

_HOOK = "_fakequant_output_hook"
_SHORTCUT = "_fakequant_shortcut_hook"


@dataclasses.dataclass
class Preparation:
    """What was done to a model, kept with it."""

    config: QuantConfig
    floats: dict[str, str]
    unmatched: list[tuple[str, list[str]]]
    # Modules that are not layers of ours but whose results are quantized.
    outputs: list[str]
    # What the analysis of the model's own code could not do.
    notes: list[str]
    # Normalizations that will be part of layers, by the paths of those.
    norms: dict[str, str] = dataclasses.field(default_factory=dict)
    # Which layers have the bits of the first and the last; None: the config asks for none.
    first_last: FirstLast | None = None


def prepare(model: nn.Module, config: QuantConfig) -> nn.Module:
    """Gives every layer that `config` speaks of its quantizers, in place, and returns the model.

    Layers stay what they are: of a class derived from theirs, with the same parameters under the same
    names, the same hooks, tied weights still tied. A state of the float model loads strictly. Where a
    result reaches an addition, a concatenation, a product or a mean, the module it
    comes from quantizes it too (`config.between`); torch.fx finds these, and what it cannot trace is in
    the summary.

    Scales of weights are known at once; activations need data, from `calibrate` or from training.

    >>> from fakequant import recipes
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model = prepare(model, recipes.int8())
    >>> isinstance(model[0], nn.Linear), model[0].weight_quantizer.spec.bits
    (True, 8)
    """
    _check(model, config)
    plan = make_plan(model, config)
    if not plan.layers:
        raise ValueError(_nothing(plan))
    warn_about_rules(model, config, OF_RECIPES)
    warn_about_refused(plan.refused)
    first_last = widen_first_and_last(model, config, plan)
    found = Found([], [], {}, None) if config.between is None else find_operands(model)
    outputs, notes = _plan_outputs(model, config, plan, found)
    on_a_grid = _without_repetition(plan, outputs, found)
    for layer in plan.layers:
        for name, quantizer in layer.quantizers.items():
            layer.module.register_module(name, quantizer)
        attach(layer.module, _record(layer, config))
    hooked = []
    for path, quantizer in outputs.items():
        module = model.get_submodule(path)
        if isinstance(module, QuantizedLayer):
            module.output_quantizer = module.output_quantizer or quantizer
        else:
            module.register_module("output_quantizer", quantizer)
            module.__dict__[_HOOK] = module.register_forward_hook(quantize_output)
            hooked.append(path)
    for path, source in on_a_grid.items():
        # Not as a child: it is one of the source.
        reader: Any = model.get_submodule(path)
        reader._fakequant.input_grid = model.get_submodule(source).output_quantizer
    norms = {pair.layer: pair.norm for pair in find_pairs(model)[0]}
    for module in model.modules():
        close_shortcuts(module)
    name_quantizers(model)
    model.__dict__["_fakequant_preparation"] = Preparation(
        config, plan.floats, plan.unmatched, hooked, notes, norms, first_last
    )
    adopt_on_loading(model, first_last)
    link_norms(model)
    return model


def _record(layer: Layer, config: QuantConfig) -> Quantization:
    cls = type(layer.module)
    kind = find_kind(cls)
    assert kind is not None
    return Quantization(kind, cls, save_codes=config.save_codes, target=config.target)


def unprepare(model: nn.Module) -> nn.Module:
    """Takes everything out of a model that `prepare` put in, in place, and returns the float model.

    >>> from fakequant import recipes
    >>> model = nn.Sequential(nn.Linear(4, 8))
    >>> keys = list(model.state_dict())
    >>> model = unprepare(prepare(model, recipes.int8()))
    >>> type(model[0]).__name__, list(model.state_dict()) == keys
    ('Linear', True)
    """
    preparation(model)
    release_norms(model)
    forget_first_and_last(model)
    for module in list(model.modules()):
        if isinstance(module, QuantizedLayer):
            detach(module)
        if _HOOK in module.__dict__:
            module.__dict__.pop(_HOOK).remove()
            module._modules.pop("output_quantizer", None)
        if _SHORTCUT in module.__dict__:
            module.__dict__.pop(_SHORTCUT).remove()
        if "_fakequant_nested" in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop("_fakequant_nested")
    del model.__dict__["_fakequant_preparation"]
    return model


def is_prepared(model: nn.Module) -> bool:
    """Whether it is what `prepare` returned."""
    return "_fakequant_preparation" in model.__dict__


def preparation(model: nn.Module) -> Preparation:
    """What was done to a prepared model."""
    check_module(model)
    found = model.__dict__.get("_fakequant_preparation")
    if found is None:
        raise ValueError(
            "The model is not prepared, or it is a part or a wrapper of one that is.\n"
            "Pass the module that was given to fakequant.prepare."
        )
    return found


def link_norms(model: nn.Module) -> None:
    """Shows layers the normalizations that will be part of them: again, if others are in their places by now."""
    made = model.__dict__.get("_fakequant_preparation")
    for path, norm in () if made is None else made.norms.items():
        layer: Any = model.get_submodule(path)
        layer._fakequant.norm = model.get_submodule(norm)


def quantize_output(module: Any, args: Any, output: Any) -> Any:
    """A hook: the result of a module as its quantizer leaves it."""
    is_number = isinstance(output, Tensor) and output.is_floating_point()
    return module.output_quantizer(output) if is_number and module.output_quantizer is not None else output


def close_shortcuts(module: Any) -> None:
    """torch's encoder computes a layer in one operator in evaluation, past our layers, unless it has a hook."""
    if isinstance(module, nn.TransformerEncoder):
        module.__dict__["_fakequant_nested"] = module.use_nested_tensor
        module.use_nested_tensor = False
    if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, QuantizedLayer) for m in module.modules()):
        module.__dict__[_SHORTCUT] = module.register_forward_pre_hook(_no_shortcut)


def _no_shortcut(module: Any, args: Any) -> None:
    """That it is there is all it does."""


def _check(model: nn.Module, config: QuantConfig) -> None:
    check_module(model)
    if not isinstance(config, QuantConfig):
        raise TypeError(
            f"`config` must be a QuantConfig, got {type(config).__name__}.\nUse e.g. fakequant.recipes.int8()."
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) or _is_sharded(module):
            raise ValueError(
                f"{path or 'The model'} is distributed already, by {_wrapper(module)}; the quantizers would not be.\n"
                "Use prepare(model, config) first, then distribute it, then make the optimizer."
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


def _nothing(plan: Plan) -> str:
    reasons = "".join(f"\n  {path or 'the model'}: {reason}" for path, reason in list(plan.floats.items())[:10])
    rules = "".join(
        f"\n  {rule} matches nothing; near: {', '.join(near) or 'nothing'}" for rule, near in plan.unmatched
    )
    return f"Nothing in the model would be quantized.{reasons}{rules}"


def _without_repetition(plan: Plan, outputs: dict[str, Any], found: Found) -> dict[str, str]:
    """Takes away quantizers of inputs that come from a module which quantizes them alike: whose, by path.

    The module that counts is the last one on the way to the layer that quantizes its result.
    """
    layers = {layer.path: layer for layer in plan.layers}
    whose = {}
    for path, sources in found.sources.items():
        mine = layers[path].quantizers["input_quantizer"] if path in layers else None
        for source in sources:
            there = layers[source].quantizers["output_quantizer"] if source in layers else None
            there = there or outputs.get(source)
            if there is None:
                continue
            # A grid found anew for every tensor may be another one behind a transposition, say.
            if mine is not None and repr(there) == repr(mine) and not mine.is_dynamic:
                layers[path].quantizers["input_quantizer"] = None
                whose[path] = source
            break
    return whose


def _plan_outputs(model: nn.Module, config: QuantConfig, plan: Plan, found: Found) -> tuple[dict[str, Any], list[str]]:
    """Quantizers for results that reach functions, by path, and what could not be found out."""
    if config.between is None:
        return {}, []
    if found.problem is not None:
        return {}, [f"the model's own code could not be traced ({found.problem}): results have no quantizers"]
    notes = [f"{name} is the result of a function: no module holds a quantizer for it" for name in found.without_module]
    quantized = {layer.path: layer for layer in plan.layers}
    outputs = {}
    for path in found.producers:
        module = model.get_submodule(path)
        if isinstance(module, (nn.Embedding, nn.Identity, nn.MultiheadAttention)) and path not in quantized:
            continue
        use, _ = config.find(path, module)
        if use is None:
            continue
        if path not in quantized:
            try:
                check_free(module, ["output_quantizer"])
            except ValueError as error:
                notes.append(f"{path} cannot quantize its result: {error}")
                continue
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        spec = _targets.find(config.target).fit_activation(config.between)
        quantizer = make_activation_quantizer(use, spec, f"{path}.output", device)
        outputs[path] = quantizer.train(module.training)
    return outputs, notes
