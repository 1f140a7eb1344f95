"""Calls of modules: the inputs that a layer quantizes, and recording and watching calls with temporary hooks."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._model.running import copied
from fakequant.nn._call_quantizers import Counted, counted_calls
from fakequant.nn._input_factors import changed_inputs as changed_inputs

# The arguments and the result of a module are any nesting of tensors and constants.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Result: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """Copies of the arguments and of the result of one call of a module."""

    args: Args
    kwargs: Kwargs
    # What `recording` was asked to keep of the result.
    result: Any
    # How far calls were counted before it, see `counted_calls`.
    counted: Counted = dataclasses.field(default_factory=dict)


def first_tensor(result: Result) -> Tensor | None:
    """Returns the first float tensor of a result, or None. Attentions return their weights as a second one."""
    values = result if isinstance(result, (tuple, list)) else (result,)
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


def float_tensors(result: Result) -> list[Tensor]:
    """Returns the float tensors in a result, which may be any nesting of tensors."""
    leaves: list[Any] = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def inputs_of(layer: nn.Module, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the tensors that the layer quantizes, each once."""
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    changed_inputs(layer, args, kwargs, keep)
    return found


@contextmanager
def recording(
    modules: dict[str, nn.Module], keep: Callable[[Result], Any] = first_tensor, *, before_hooks: bool = False
) -> Iterator[dict[str, list[RecordedCall]]]:
    """Records all calls of the modules, by path.

    Args:
        modules: The modules, by path.
        keep: Returns the tensors of a result to copy: `first_tensor` or `float_tensors`.
        before_hooks: Whether to record arguments before other hooks see them, and count them as calls.
    """
    calls: dict[str, list[RecordedCall]] = {}
    given: dict[nn.Module, list[tuple[Args, Kwargs, Counted]]] = {}

    def before(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        # Copied before the module can change them in place.
        given.setdefault(module, []).append((*copied(args, kwargs), counted_calls()))

    def after(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
        args, kwargs, counted = given[modules[path]].pop()
        (kept,), _ = copied((keep(result),), {})
        calls.setdefault(path, []).append(RecordedCall(args, kwargs, kept, counted))

    with ExitStack() as undo, watching(modules, after):
        for module in modules.values():
            hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=before_hooks)
            undo.callback(hook.remove)
        yield calls


@contextmanager
def watching_inputs(modules: Iterable[nn.Module], look: Callable[[Any, Tensor], None]) -> Iterator[None]:
    """Calls `look(module, x)` before every call of the modules, which take a tensor `x`."""
    with ExitStack() as undo:
        for module in modules:
            undo.callback(module.register_forward_pre_hook(lambda module, args: look(module, args[0])).remove)
        yield


@contextmanager
def watching(modules: dict[str, nn.Module], look: Callable[[str, Args, Kwargs, Result], None]) -> Iterator[None]:
    """Calls `look(path, args, kwargs, result)` after every call of the modules."""

    def hook(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs, result: look(path, args, kwargs, result)

    with ExitStack() as undo:
        for path, module in modules.items():
            undo.callback(module.register_forward_hook(hook(path), with_kwargs=True).remove)
        yield
