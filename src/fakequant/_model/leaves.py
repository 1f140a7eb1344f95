"""Finds the tensors in a model's result: any nesting of tuples, lists, dicts, named tuples and dataclasses."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.SymInt, torch.SymFloat,
    torch.SymBool,
)  # fmt: skip


def tensors(result: Any) -> list[Tensor]:
    """Returns all tensors of a result, in its order.

    >>> tensors({"logits": torch.ones(1), "states": (torch.zeros(1), None)})
    [tensor([1.]), tensor([0.])]
    """
    return [leaf for _, leaf in _leaves(result, "") if isinstance(leaf, Tensor)]


def names(result: Any) -> list[str]:
    """Returns the names of all tensors of a result: the keys of dicts and fields, joined by dots.

    >>> names({"logits": torch.ones(1), "states": (torch.zeros(1), None)}), names(torch.ones(1))
    (['logits', 'states.0'], ['output'])
    >>> names((torch.ones(1), [torch.zeros(1)]))
    ['output_0', 'output_1.0']
    """
    return [name or "output" for name, leaf in _leaves(result, "") if isinstance(leaf, Tensor)]


def constants(result: Any) -> list[Any]:
    """Returns all leaves of a result that are not tensors: numbers, strings and None."""
    return [leaf for _, leaf in _leaves(result, "") if not isinstance(leaf, Tensor)]


def with_tensors(result: Any, values: Iterator[Tensor]) -> Any:
    """Returns a result with the same structure and constants, and other tensors. It has no caches.

    >>> with_tensors({"logits": torch.ones(1), "states": (torch.zeros(1), None)}, iter([torch.ones(2), torch.ones(3)]))
    {'logits': tensor([1., 1.]), 'states': (tensor([1., 1., 1.]), None)}
    """
    if isinstance(result, Tensor):
        return next(values)
    if is_cache(result):
        return None
    if isinstance(result, _CONSTANTS):
        return result
    if isinstance(result, Mapping):
        changed: Any = copy.copy(result)
        for key, value in result.items():
            changed[key] = with_tensors(value, values)
        return changed
    if isinstance(result, (tuple, list)):
        parts = [with_tensors(value, values) for value in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        fields = [field.name for field in dataclasses.fields(result)]
        return dataclasses.replace(result, **{name: with_tensors(getattr(result, name), values) for name in fields})
    return pytree.tree_map(lambda leaf: with_tensors(leaf, values), result)


def return_tensors(model: nn.Module) -> None:
    """Makes a model return a tuple of the tensors in its result, in place. Files have no other results."""

    def flatten(module: nn.Module, args: Any, kwargs: Any, result: Any) -> tuple[Tensor, ...]:
        inputs = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        # A copy, because torch's exporter renames an input that is also an output.
        return tuple(x.clone() if id(x) in inputs else x for x in tensors(result))

    model.register_forward_hook(flatten, with_kwargs=True)


def _leaves(result: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields every leaf with its name."""
    if isinstance(result, (Tensor, *_CONSTANTS)):
        yield name, result
    elif is_cache(result):
        return
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _leaves(value, _joined(name, str(key)))
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        for key, value in zip(result._fields, result, strict=True):
            yield from _leaves(value, _joined(name, key))
    elif isinstance(result, (tuple, list)):
        for number, value in enumerate(result):
            yield from _leaves(value, f"{name}.{number}" if name else f"output_{number}")
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        for field in dataclasses.fields(result):
            yield from _leaves(getattr(result, field.name, None), _joined(name, field.name))
    else:
        found = pytree.tree_leaves(result)
        if len(found) == 1 and found[0] is result:
            raise TypeError(
                f"The model returns a {type(result).__name__}, in which tensors cannot be found.\n"
                "Return tensors, tuples, lists, dicts or dataclasses, or register the class with "
                "torch.utils._pytree.register_pytree_node."
            )
        yield from _leaves(found, name or type(result).__name__)


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def is_cache(result: Any) -> bool:
    """Returns True for the keys and values that a language model of transformers keeps for its next call.

    They are no results: a file takes a whole sequence at a time. A call of a model changes the one that it is given.
    """
    return any(cls.__name__ == "Cache" and cls.__module__ == "transformers.cache_utils" for cls in type(result).__mro__)
