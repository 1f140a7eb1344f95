"""Finds the tensors in a model's result: any nesting of tuples, lists, dicts, named tuples and dataclasses."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fakequant._backends.torch.torch_private import pytree
from fakequant._convert.golden.tracked_codes import plain

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)


def tensors(result: Any) -> list[Tensor]:
    """Returns all tensors of a result, in the order of torch's exporter.

    >>> import torch
    >>> tensors({"logits": torch.ones(1), "states": (torch.zeros(1), None)})
    [tensor([1.]), tensor([0.])]
    """
    return [plain(leaf) for leaf in _leaves(result) if isinstance(leaf, Tensor)]


def constants(result: Any) -> list[Any]:
    """Returns all leaves of a result that are not tensors: numbers, strings and None."""
    return [leaf for leaf in _leaves(result) if not isinstance(leaf, Tensor)]


def _leaves(result: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, (Tensor, *_CONSTANTS)):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name, None))
        elif isinstance(leaf, dict):  # a subclass of dict that is not a registered pytree
            for value in leaf.values():
                yield from _leaves(value)
        elif isinstance(leaf, (tuple, list)):
            for value in leaf:
                yield from _leaves(value)
        else:
            raise TypeError(
                f"The model returns a {type(leaf).__name__}, in which tensors to compare cannot be found.\n"
                "Return tensors, tuples, lists, dicts or dataclasses, or register the class with "
                "torch.utils._pytree.register_pytree_node."
            )
