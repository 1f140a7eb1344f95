"""Everything that fakequant adds to the modules of a user's model, and how it is removed.

    module                             what is added                                             by
    a layer                            a class derived from the layer's class, child quantizers  prepare, convert
    a module that computes an operand  the child `output_quantizer`, a forward hook              prepare
    nn.TransformerEncoderLayer         a forward pre-hook that does nothing                      prepare
    nn.TransformerEncoder              `use_nested_tensor = False`                               prepare
    the model                          its `Preparation`, a load_state_dict pre-hook if needed   prepare
    a batch norm                       a class derived from its class                            Schedule

Each of these modules also gets one attribute, `_fakequant`. It is a record of what is needed to undo the changes.
`detach_all` removes everything. Parameters, buffers, other hooks, attributes and methods are not touched.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fakequant.config import QuantConfig
from fakequant.nn._frozen_norm import FrozenNorm, frozen_class
from fakequant.nn._quantized_layer import QUANTIZERS, Quantization, QuantizedLayer, quantized_class
from fakequant.nn._records import NAME, LayerRecord, Record, find_record

if TYPE_CHECKING:
    from fakequant._prepare.first_last import FirstLast


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
    # The layers with `first_last_bits`. None if the config does not set it.
    first_last: "FirstLast | None" = None
    # Multiplications of each call of a layer or a function on the example. Empty without an example.
    multiplications: dict[str, int] = dataclasses.field(default_factory=dict)


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

    Args:
        layer: A float layer, or a prepared layer that becomes a converted one.
        record: The new record. It takes over the hooks of the previous record.
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
    """Turns a prepared layer back into the float layer, without quantizers and hooks."""
    record = layer.__dict__.pop(NAME)
    for handle in record.hooks:
        handle.remove()
    layer.__class__ = record.float_class
    for name in (*QUANTIZERS, "projection_quantizer"):
        layer._modules.pop(name, None)


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


def attach_preparation(model: nn.Module, made: Preparation, on_loading: Callable[..., None] | None) -> None:
    """Stores in a model what `prepare` did to it.

    Args:
        model: The model that was given to `prepare`.
        made: What `prepare` did.
        on_loading: If not None, a hook to call before the model loads a state_dict.
    """
    record = record_of(model)
    record.preparation = made
    if on_loading is not None:
        register: Callable[[Callable[..., None]], RemovableHandle] = model.register_load_state_dict_pre_hook
        record.hooks.append(register(on_loading))


def find_preparation(model: nn.Module) -> Preparation | None:
    """Returns what `prepare` did to a model, or None if the model is not prepared."""
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
