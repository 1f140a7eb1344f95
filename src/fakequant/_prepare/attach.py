"""Everything that fakequant adds to modules of a user's model, and how it leaves again.

    module                           what is added                                               by
    a layer                          a class derived from its own, quantizers as children        prepare, convert
    a module whose result is added   the child `output_quantizer`, a forward hook                prepare
    nn.TransformerEncoderLayer       a forward pre-hook that does nothing                        prepare
    nn.TransformerEncoder            `use_nested_tensor = False`                                 prepare
    the model itself                 its `Preparation`, a hook on loading a state if needed      prepare
    a batch norm            a class derived from its own                                Schedule

Every one of these modules has one more attribute, the record `_fakequant`, which holds what is needed to undo this.
`detach_all` removes everything. Parameters, buffers, other hooks, attributes and methods are not touched.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fakequant.config import QuantConfig
from fakequant.nn._frozen_norm import FrozenNorm, frozen_class
from fakequant.nn._quantized_layer import QUANTIZERS, Quantization, QuantizedLayer, quantized_class
from fakequant.nn._records import NAME, LayerRecord, Record, find_record

if TYPE_CHECKING:
    from fakequant._prepare.first_last import FirstLast


@dataclasses.dataclass
class Preparation:
    """What was done to a model, kept with it."""

    config: QuantConfig
    # Paths of modules that stay in float, and why.
    floats: dict[str, str]
    # Rules that matched nothing, and paths that are like theirs.
    unmatched: list[tuple[str, list[str]]]
    # Modules that are not prepared layers but whose results are quantized.
    outputs: list[str]
    # What the analysis of the model's own code could not do.
    notes: list[str]
    # Batch norms that will be part of layers, by the paths of those.
    norms: dict[str, str] = dataclasses.field(default_factory=dict)
    # Which layers have the bits of the first and the last; None: the config asks for none.
    first_last: "FirstLast | None" = None


def record_of(module: nn.Module) -> Record:
    """The record of a module; an empty one is made if there is none."""
    found = find_record(module)
    if found is None:
        check_name(module)
        found = module.__dict__[NAME] = Record()
    return found


def check_name(module: nn.Module) -> None:
    """Raises an error if a module uses the name of the record for something else."""
    if hasattr(module, NAME) and find_record(module) is None:
        raise ValueError(
            f"{type(module).__name__} has an attribute `{NAME}` of its own, which fakequant needs.\nRename it."
        )


# --- layers ---------------------------------------------------------------------------------------


def attach_layer(layer: nn.Module, record: LayerRecord, quantizers: Mapping[str, nn.Module | None]) -> None:
    """Makes a layer a prepared or a converted one, by the type of its record.

    Args:
        layer: A float layer; or a prepared one, which becomes a converted one.
        record: The new record. It takes over the hooks of the record before it.
        quantizers: Children to add, by name.
    """
    before = find_record(layer)
    if before is not None:
        record.hooks, record.nested, record.preparation = before.hooks, before.nested, before.preparation
    for name, quantizer in quantizers.items():
        layer.register_module(name, quantizer)
    layer.__dict__[NAME] = record
    layer.__class__ = quantized_class(record.float_class, record.base)


def detach_layer(layer: nn.Module) -> None:
    """Makes a prepared layer the float layer it was. Its quantizers and its hooks go too."""
    record = layer.__dict__.pop(NAME)
    for handle in record.hooks:
        handle.remove()
    layer.__class__ = record.float_class
    for name in (*QUANTIZERS, "projection_quantizer"):
        layer._modules.pop(name, None)


# --- modules that are not layers ------------------------------------------------------------------


def attach_output(module: nn.Module, quantizer: nn.Module) -> None:
    """Lets a hook pass the results of a module through a quantizer, which becomes a child."""
    record = record_of(module)
    module.register_module("output_quantizer", quantizer)
    record.hooks.append(module.register_forward_hook(quantize_output))
    record.has_output_hook = True


def quantize_output(module: Any, args: Any, output: Any) -> Any:
    """The forward hook of `attach_output`."""
    is_number = isinstance(output, Tensor) and output.is_floating_point()
    return module.output_quantizer(output) if is_number and module.output_quantizer is not None else output


def close_shortcuts(model: nn.Module) -> None:
    """Makes torch's encoders call their layers in evaluation, where they would compute each in one operator."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            record_of(module).nested = module.use_nested_tensor
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(part, QuantizedLayer) for part in module.modules()
        ):
            record_of(module).hooks.append(module.register_forward_pre_hook(_no_shortcut))


def _no_shortcut(module: Any, args: Any) -> None:
    """Does nothing. A layer that has any hook does not take torch's shortcut."""


# --- the model itself -----------------------------------------------------------------------------


def attach_preparation(model: nn.Module, made: Preparation, on_loading: Callable[..., None] | None) -> None:
    """Keeps with a model what was done to it.

    Args:
        model: The model that was given to `prepare`.
        made: What was done.
        on_loading: A hook to call before the model loads a state.
    """
    record = record_of(model)
    record.preparation = made
    if on_loading is not None:
        record.hooks.append(model.register_load_state_dict_pre_hook(on_loading))


def find_preparation(model: nn.Module) -> Preparation | None:
    """What was done to a prepared model; None if it is not one."""
    record = find_record(model)
    return None if record is None else record.preparation


def forget_preparation(model: nn.Module) -> None:
    """Removes what `attach_preparation` added."""
    record = record_of(model)
    record.preparation = None
    for handle in list(record.hooks):
        if handle.id in model._load_state_dict_pre_hooks:
            handle.remove()
            record.hooks.remove(handle)
    _drop_if_empty(model, record)


# --- batch norms -------------------------------------------------------------------------------


def freeze_norm(norm: nn.Module) -> None:
    """Puts a batch norm in evaluation mode for good. `model.train()` does not change that."""
    if not isinstance(norm, FrozenNorm):
        # Neither a hook, which compiled code ignores if it comes later, nor another `train` for this one object.
        record_of(norm).float_class = type(norm)
        norm.__class__ = frozen_class(type(norm))
    norm.training = False


def release_norms(model: nn.Module) -> None:
    """Lets batch norms that `freeze_norm` froze follow their batches again, and biases be floats in training."""
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
    """Makes layers add, in training too, the biases that will run; or, with `on=False`, those they have."""
    for module in model.modules():
        record = find_record(module)
        if isinstance(record, Quantization):
            record.deploys_bias = on


# --- all of it ------------------------------------------------------------------------------------


def detach_all(model: nn.Module) -> None:
    """Removes everything from a prepared model that is listed above."""
    release_norms(model)
    for module in list(model.modules()):
        record = find_record(module)
        if isinstance(record, LayerRecord):
            detach_layer(module)
        elif record is not None:
            for handle in record.hooks:
                handle.remove()
            if record.has_output_hook:
                module._modules.pop("output_quantizer", None)
            del module.__dict__[NAME]
        if record is not None and record.nested is not None:
            module.use_nested_tensor = record.nested  # type: ignore[assignment]


def _drop_if_empty(module: nn.Module, record: Record) -> None:
    if not isinstance(record, LayerRecord) and record.is_empty():
        del module.__dict__[NAME]
