"""Context managers that observe the calls of modules with temporary hooks."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from fakequant._prepare.attach import attach_layer, detach_layer
from fakequant._train.running import copied
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._owners import is_owner, owner_record, products_of
from fakequant.nn._quantized_layer import ATTENTION_QUANTIZERS, QUANTIZERS, Quantization, QuantizedLayer
from fakequant.nn._records import find_record

# The arguments and the result of a module are any nesting of tensors and constants.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Result: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Call:
    """Copies of the arguments and the result of one call of a module."""

    args: Args
    kwargs: Kwargs
    # The first float tensor of the result. None if there is none.
    result: Tensor | None


def first_tensor(result: Result) -> Tensor | None:
    """Returns the first float tensor of a result, or None. Attentions return their weights as a second one."""
    values = result if isinstance(result, (tuple, list)) else (result,)
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


@contextmanager
def recording(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Records all calls of the modules, by path."""
    calls: dict[str, list[Call]] = {}
    given: dict[nn.Module, tuple[Args, Kwargs]] = {}

    def keep(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        given[module] = copied(args, kwargs)  # before the module can change it in place

    def look(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
        y = first_tensor(result)
        calls.setdefault(path, []).append(Call(*given.pop(modules[path]), None if y is None else y.detach().clone()))

    with ExitStack() as undo, watching(modules, look):
        for module in modules.values():
            undo.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        yield calls


@contextmanager
def watching(modules: dict[str, nn.Module], look: Callable[[str, Args, Kwargs, Result], None]) -> Iterator[None]:
    """Calls `look(path, args, kwargs, result)` after every call of the modules."""

    def hook(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs, result: look(path, args, kwargs, result)

    with ExitStack() as undo:
        for path, module in modules.items():
            undo.callback(module.register_forward_hook(hook(path), with_kwargs=True).remove)
        yield


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
