"""Running models to look at what passes their layers, and leaving them as they were."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from fakequant._prepare.attach import attach_layer, detach_layer
from fakequant._train.running import copied
from fakequant.nn._layer_kinds import find_kind
from fakequant.nn._quantized_layer import QUANTIZERS, Quantization, QuantizedLayer


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a module: copies, because others may change tensors in place."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # The first tensor of the result; None: there is none.
    result: Tensor | None


def first_tensor(result: Any) -> Tensor | None:
    """The numbers that a module returns; attentions return their weights too."""
    values = result if isinstance(result, (tuple, list)) else (result,)
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


@contextmanager
def recording(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """While it lasts, all calls of the modules are kept."""
    calls: dict[str, list[Call]] = {}
    given: dict[nn.Module, tuple[Any, Any]] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        given[module] = copied(args, kwargs)  # now: the module may change it in place

    def look(path: str, args: Any, kwargs: Any, result: Any) -> None:
        y = first_tensor(result)
        calls.setdefault(path, []).append(Call(*given.pop(modules[path]), None if y is None else y.detach().clone()))

    with ExitStack() as undo, watching(modules, look):
        for module in modules.values():
            undo.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        yield calls


@contextmanager
def watching(modules: dict[str, nn.Module], look: Callable[[str, Any, Any, Any], None]) -> Iterator[None]:
    """While it lasts, `look(path, args, kwargs, result)` is called after every call of the modules."""

    def hook(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs, result: look(path, args, kwargs, result)

    with ExitStack() as undo:
        for path, module in modules.items():
            undo.callback(module.register_forward_hook(hook(path), with_kwargs=True).remove)
        yield


@contextmanager
def in_single_steps(model: nn.Module, like: dict[str, nn.Module]) -> Iterator[None]:
    """While it lasts, a float model computes with its layers one by one, as the quantized layers `like` it do.

    torch's attention does not call the layer that is in it, and its encoder may pack tokens.
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


def _open(attention: nn.MultiheadAttention, undo: ExitStack) -> None:
    """Makes an attention a prepared layer without quantizers."""
    cls = type(attention)
    kind = find_kind(cls)
    if kind is None or kind.unsupported_reason(attention) is not None:
        return
    names = (*QUANTIZERS, "projection_quantizer")
    attach_layer(attention, Quantization(kind=kind, float_class=cls), dict.fromkeys(names))
    undo.callback(detach_layer, attention)
