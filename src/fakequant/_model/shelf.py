"""Tensors that are needed again later: in memory, and in files when they are many."""

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fakequant._backends.torch.torch_private import pytree

# What a shelf keeps in memory, in bytes. Temporary files have the rest.
_MEMORY = 1 << 26


class Shelf:
    """Keeps copies of tensors until it is closed.

    >>> with Shelf() as shelf:
    ...     take = shelf.put([torch.ones(2), "a name"])
    ...     take()
    [tensor([1., 1.]), 'a name']
    """

    def __init__(self) -> None:
        self._size = self._files = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Shelf":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Removes the files."""
        if self._folder is not None:
            self._folder.cleanup()

    def put(self, value: Any) -> Callable[[], Any]:
        """Keeps any nesting of tensors and constants. Returns a function that returns a new copy of it."""
        leaves, structure = pytree.tree_flatten(value)
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if self._size + size <= _MEMORY:
            self._size += size
            kept = [_copy(leaf) for leaf in leaves]
            return lambda: pytree.tree_unflatten([_copy(leaf) for leaf in kept], structure)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fakequant-")
        self._files += 1
        path = Path(self._folder.name) / str(self._files)
        # Views would store the whole tensor that they show.
        whole = [_copy(x) if isinstance(x, Tensor) and x.untyped_storage().nbytes() > x.nbytes else x for x in leaves]
        torch.save(
            [x.detach() if isinstance(x, Tensor) else x for x in whole], path, pickle_protocol=pickle.HIGHEST_PROTOCOL
        )
        return lambda: _taken(path, structure)


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _taken(path: Path, structure: Any) -> Any:
    # The file is our own, so it may hold any constant.
    return pytree.tree_unflatten(torch.load(path, weights_only=False), structure)
