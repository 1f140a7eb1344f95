"""Tensors that are needed again later: in memory, and in a file when they are many."""

import io
import pickle
import tempfile
from collections.abc import Callable
from typing import IO, Any

import torch
from torch import Tensor

from fakequant._backends.torch.torch_private import pytree

# What a shelf keeps in memory, in bytes. A temporary file has the rest.
_MEMORY = 1 << 24


class Shelf:
    """Keeps copies of tensors until it is closed.

    >>> with Shelf() as shelf:
    ...     take = shelf.put([torch.ones(2), "a name"])
    ...     take()
    [tensor([1., 1.]), 'a name']
    """

    def __init__(self) -> None:
        self._size = 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "Shelf":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Removes the file."""
        if self._file is not None:
            self._file.close()

    def put(self, value: Any) -> Callable[[], Any]:
        """Keeps any nesting of tensors and constants. Returns a function that returns a new copy of it."""
        leaves, structure = pytree.tree_flatten(value)
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if self._size + size <= _MEMORY:
            self._size += size
            kept = [_copy(leaf) for leaf in leaves]
            return lambda: pytree.tree_unflatten([_copy(leaf) for leaf in kept], structure)
        if self._file is None:
            # It has no name (on Windows, it goes with its last handle), so nothing is left if the process is killed.
            self._file = tempfile.TemporaryFile(prefix="fakequant-")  # noqa: SIM115
        file = self._file
        start = file.seek(0, io.SEEK_END)
        # Views would store the whole tensor that they show.
        whole = [_copy(x) if isinstance(x, Tensor) and x.untyped_storage().nbytes() > x.nbytes else x for x in leaves]
        torch.save(
            [x.detach() if isinstance(x, Tensor) else x for x in whole], file, pickle_protocol=pickle.HIGHEST_PROTOCOL
        )
        end = file.seek(0, io.SEEK_END)

        def take() -> Any:
            part = io.BufferedReader(_Part(file, start, end))
            # The file is our own, so it may hold any constant.
            return pytree.tree_unflatten(torch.load(part, weights_only=False), structure)

        return take


class _Part(io.RawIOBase):
    """A part of a file, to read from."""

    def __init__(self, file: IO[bytes], start: int, end: int) -> None:
        self._file, self._start, self._length, self._at = file, start, end - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        found = self._file.readinto(memoryview(buffer)[: max(self._length - self._at, 0)])  # type: ignore[attr-defined]
        self._at += found
        return int(found)


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
