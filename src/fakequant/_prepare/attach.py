"""Everything that fakequant adds to the modules of a user's model, and how it is removed.

    module                             what is added                                             by
    a layer                            a class derived from the layer's class, child quantizers  prepare, convert
    a recurrent layer, experts         the same, and a child layer for each of its products      prepare
    a module that computes an operand  the child `output_quantizer`, a forward hook              prepare
    a module whose code calls          the child `function_quantizers`, a derived class          prepare
      functions that are quantized
    modules that it calls              hooks that pause the watching of functions                prepare
    a module that is called several    hooks that count its calls, also on the module in which   prepare
      times                            these take place
    attention that takes a cache       quantizers of keys and values, a forward pre-hook and a      prepare
                                       forward hook
    nn.TransformerEncoderLayer         a forward pre-hook that does nothing                      prepare
    nn.TransformerEncoder              `use_nested_tensor = False`                               prepare
    the model                          its `Preparation`, a load_state_dict pre-hook, the        prepare
                                       buffer `fakequant_flow` if there was an example
    a layer whose inputs have tokens   the buffer `fakequant_tokens`                             calibrate
    a layer whose input is multiplied  the buffer `fakequant_factors`, a forward pre-hook        ptq.smooth
    an adapter of PEFT                 another `merge`, which `allow_merging` undoes             prepare
    a batch norm                       a class derived from its class                            Schedule

Each of these modules also gets one attribute, `_fakequant`. It is a record of what is needed to undo the changes.
`unprepare` removes everything. Parameters, other buffers, hooks, attributes and methods are not touched.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fakequant._model.running import check_module
from fakequant.config import QuantConfig
from fakequant.nn._call_quantizers import Calls, count_call, start_counting, stop_counting
from fakequant.nn._folding import FrozenNorm, frozen_class
from fakequant.nn._function_calls import (
    CHILD,
    CallingModule,
    FunctionQuantizers,
    calling_class,
    has_pause,
    pause_calls,
    resume_calls,
)
from fakequant.nn._input_factors import has_factors, merge_factors
from fakequant.nn._kv_cache import CACHE_QUANTIZERS, place_of_cache, replace_cache, require_quantized
from fakequant.nn._owners import OwnedProduct
from fakequant.nn._packed_weights import PackedLayer, unpack
from fakequant.nn._quantized_layer import (
    ATTENTION_QUANTIZERS,
    QUANTIZERS,
    Quantization,
    QuantizedLayer,
    quantized_class,
)
from fakequant.nn._records import NAME, TOKENS, LayerRecord, Record, find_record, float_class_of

# The buffer of the model that describes what a recorded data flow added; see `fakequant._prepare.flow_state`.
FLOW_BUFFER = "fakequant_flow"


@dataclasses.dataclass
class Preparation:
    """What `prepare` did to a model. It is stored in the record of the model."""

    config: QuantConfig
    # Why modules stay in float, by path.
    floats: dict[str, str]
    # Rules that matched nothing, each with similar paths.
    unmatched: list[tuple[str, list[str]]]
    # Paths of modules that are not quantized layers but have quantized outputs.
    outputs: list[str]
    # Operands that could not be quantized, and why.
    notes: list[str]
    # Batch norms that `convert` will fold: {path of the layer: path of the batch norm}.
    norms: dict[str, str] = dataclasses.field(default_factory=dict)
    # Paths of the layers that have `first_last_bits`.
    first_last: list[str] = dataclasses.field(default_factory=list)
    # Multiplications of each call of a layer or a function on the example. Empty without an example.
    multiplications: dict[str, int] = dataclasses.field(default_factory=dict)
    # The names of calls of functions that multiply two quantized results.
    products: list[str] = dataclasses.field(default_factory=list)


def record_of(module: nn.Module) -> Record:
    """Returns the record of a module, and creates an empty one if it has none."""
    found = find_record(module)
    if found is None:
        check_name(module)
        found = module.__dict__[NAME] = Record()
    return found


def check_name(module: nn.Module) -> None:
    """Raises ValueError if a module has a different attribute with the name of the record."""
    if hasattr(module, NAME) and find_record(module) is None:
        raise ValueError(
            f"{type(module).__name__} has an attribute `{NAME}`, a name that fakequant reserves.\nRename the attribute."
        )


# --- layers ---------------------------------------------------------------------------------------


def attach_layer(layer: nn.Module, record: LayerRecord, quantizers: Mapping[str, nn.Module | None]) -> None:
    """Turns a layer into a prepared or a converted layer, depending on the type of its new record.

    The new record takes over the hooks of the previous one. `quantizers` are children to add, by name.
    """
    before = find_record(layer)
    if before is not None:
        record.hooks, record.nested, record.preparation = before.hooks, before.nested, before.preparation
        record.calls, record.counted = before.calls, before.counted
    for name, quantizer in quantizers.items():
        layer.register_module(name, quantizer)
    layer.__dict__[NAME] = record
    layer.__class__ = quantized_class(record.float_class, record.base)


def detach_layer(layer: nn.Module) -> None:
    """Turns a prepared layer back into the float layer, without quantizers and hooks."""
    if isinstance(layer, PackedLayer):
        unpack(layer)
    if has_factors(layer):
        merge_factors(layer)
    record = layer.__dict__.pop(NAME)
    for handle in record.hooks:
        handle.remove()
    layer.__class__ = record.float_class
    products = [name for name, child in layer._modules.items() if isinstance(child, OwnedProduct)]
    for name in (*QUANTIZERS, *ATTENTION_QUANTIZERS, *products):
        layer._modules.pop(name, None)
    layer._buffers.pop(TOKENS, None)


# --- modules that are not layers ------------------------------------------------------------------


def attach_output(module: nn.Module, quantizer: nn.Module) -> None:
    """Adds a quantizer as a child of a module, and a forward hook that applies it to the module's output."""
    record = record_of(module)
    module.register_module("output_quantizer", quantizer)
    record.hooks.append(module.register_forward_hook(quantize_output))
    record.has_output_hook = True


def quantize_output(module: Any, args: Any, output: Any) -> Any:
    """The forward hook of `attach_output`. Outputs that are not float tensors pass unchanged."""
    is_float = isinstance(output, Tensor) and output.is_floating_point()
    return module.output_quantizer(output) if is_float and module.output_quantizer is not None else output


def attach_cache(module: nn.Module, quantizers: Mapping[str, nn.Module]) -> None:
    """Makes an attention module quantize the keys and values that it stores in a cache."""
    record = record_of(module)
    record.cache = place_of_cache(float_class_of(module))
    for name, quantizer in quantizers.items():
        module.register_module(name, quantizer)
    record.hooks.append(module.register_forward_pre_hook(replace_cache, with_kwargs=True))
    record.hooks.append(module.register_forward_hook(require_quantized, with_kwargs=True))


def attach_functions(module: nn.Module, quantizers: FunctionQuantizers) -> None:
    """Makes a module quantize the results of functions that its code calls. Call `watch_callees` after it."""
    record_of(module).calling_class = type(module)
    module.register_module(CHILD, quantizers)
    module.__class__ = calling_class(type(module))


def attach_calls(module: nn.Module, calls: Calls, scope: nn.Module) -> None:
    """Makes a module count its calls, from 0 on whenever `scope` is called."""
    record, outer = record_of(module), record_of(scope)
    record.calls = calls
    # Before the hooks that were added earlier: these may quantize.
    record.hooks.append(module.register_forward_pre_hook(count_call, prepend=True))
    if not outer.counted:
        outer.hooks.append(scope.register_forward_pre_hook(start_counting, prepend=True))
        outer.hooks.append(scope.register_forward_hook(stop_counting, always_call=True))
    outer.counted.append(calls)


def watch_callees(model: nn.Module) -> None:
    """Adds hooks to modules whose code must not be taken for the code of the module that calls them.

    Call it again after modules were replaced. The hooks must come after those of `attach_output`.
    """
    modules = dict(model.named_modules())
    own = [module.function_quantizers for module in modules.values() if isinstance(module, CallingModule)]
    for path in dict.fromkeys(callee for quantizers in own for callee in quantizers.callees):
        callee = modules.get(path)
        if callee is not None and not has_pause(callee):
            before = callee.register_forward_pre_hook(pause_calls)
            after = callee.register_forward_hook(resume_calls, always_call=True)
            record_of(callee).hooks += [before, after]


def close_shortcuts(model: nn.Module) -> None:
    """Disables the fused evaluation path of torch's transformer encoders, which bypasses their layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            record_of(module).nested = module.use_nested_tensor
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(part, QuantizedLayer) for part in module.modules()
        ):
            record_of(module).hooks.append(module.register_forward_pre_hook(_no_shortcut))


def _no_shortcut(module: Any, args: Any) -> None:
    """Does nothing. Any forward pre-hook disables the fused path of nn.TransformerEncoderLayer."""


# --- the model itself -----------------------------------------------------------------------------


def attach_preparation(model: nn.Module, made: Preparation, on_loading: Callable[..., None]) -> None:
    """Stores in a model what `prepare` did to it.

    `on_loading` is a hook to call before the model loads a state_dict.
    """
    record = record_of(model)
    record.preparation = made
    register: Callable[[Callable[..., None]], RemovableHandle] = model.register_load_state_dict_pre_hook
    record.hooks.append(register(on_loading))


def find_preparation(model: nn.Module) -> Preparation | None:
    """Returns what `prepare` did to a model, or None if the model is not prepared."""
    record = find_record(model)
    return None if record is None else record.preparation


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


def forget_preparation(model: nn.Module) -> None:
    """Removes what `attach_preparation` added."""
    record = record_of(model)
    record.preparation = None
    model._buffers.pop(FLOW_BUFFER, None)
    for handle in list(record.hooks):
        if handle.id in model._load_state_dict_pre_hooks:
            handle.remove()
            record.hooks.remove(handle)
    _drop_if_empty(model, record)


def link_norms(model: nn.Module) -> None:
    """Stores in each layer the batch norm that `convert` will fold into it.

    Also adds the hooks that the module calls need, see `watch_callees`. Call it again before use, because the user may
    have replaced batch norms, for example by SyncBatchNorm.
    """
    watch_callees(model)
    made = find_preparation(model)
    for path, norm in () if made is None else made.norms.items():
        layer: Any = model.get_submodule(path)
        layer._fakequant.set_norm(layer, model.get_submodule(norm))


# --- batch norms -------------------------------------------------------------------------------


def freeze_norm(norm: nn.Module) -> None:
    """Puts a batch norm in evaluation mode permanently, so that `model.train()` has no effect on it."""
    if not isinstance(norm, FrozenNorm):
        # Not a hook, because code that is compiled already would ignore it.
        record_of(norm).float_class = type(norm)
        norm.__class__ = frozen_class(type(norm))
    norm.training = False


def release_norms(model: nn.Module) -> None:
    """Undoes `freeze_norm` for all batch norms of a model, and lets layers train with float biases again."""
    deploy_biases(model, on=False)
    for module in model.modules():
        if isinstance(module, FrozenNorm):
            record = record_of(module)
            assert record.float_class is not None
            module.__class__ = record.float_class  # type: ignore[assignment]
            record.float_class = None
            module.training = model.training
            _drop_if_empty(module, record)


def deploy_biases(model: nn.Module, *, on: bool) -> None:
    """Sets whether layers add their biases in training as they will be deployed, rounded to the scale of the sums."""
    for module in model.modules():
        record = find_record(module)
        if isinstance(record, Quantization):
            record.deploys_bias = on


# --- all of it ------------------------------------------------------------------------------------


def detach_all(model: nn.Module) -> None:
    """Removes everything that this file adds to a prepared model."""
    release_norms(model)
    model._buffers.pop(FLOW_BUFFER, None)
    for module in list(model.modules()):
        record = find_record(module)
        if record is not None and record.calling_class is not None:
            module.__class__ = record.calling_class
            del module._modules[CHILD]
        if isinstance(record, LayerRecord):
            detach_layer(module)
        elif record is not None:
            for handle in record.hooks:
                handle.remove()
            if record.has_output_hook:
                module._modules.pop("output_quantizer", None)
            if record.cache is not None:
                for name in CACHE_QUANTIZERS:
                    del module._modules[name]
            del module.__dict__[NAME]
        if record is not None and record.nested is not None:
            module.use_nested_tensor = record.nested  # type: ignore[assignment]


def _drop_if_empty(module: nn.Module, record: Record) -> None:
    if not isinstance(record, LayerRecord) and record.is_empty():
        del module.__dict__[NAME]
