"""Keeping the results of some layers of a model."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class LayerResults:
    """Keeps the results of layers from the last call of a model, until `take` returns them.

    This needs hooks on the model and its layers. They are removed by `remove()`, and when this object is deleted. In
    copies and pickles of the model the hooks do nothing.

    Args:
        model: The model.
        paths: The paths of the layers.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        self._kept: dict[str, list[Any]] = {path: [] for path in paths}
        handles: list[RemovableHandle] = []
        # A call of the model starts anew: what activation checkpointing computed again in the backward pass is old.
        if self._kept:
            handles.append(model.register_forward_pre_hook(_Forget(list(self._kept.values()))))
        for path, kept in self._kept.items():
            handles.append(model.get_submodule(path).register_forward_hook(_Keep(kept)))
        self.remove = weakref.finalize(self, _remove, handles)

    def take(self) -> dict[str, list[Any]]:
        """Returns the results of each call of each layer, by the paths of the layers, and forgets them."""
        found = {path: list(kept) for path, kept in self._kept.items()}
        for kept in self._kept.values():
            kept.clear()
        return found


class _Hook:
    """A hook that belongs to one model only: a copy or a pickle of the model has `_no_hook` in its place."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _give_no_hook, ()


class _Keep(_Hook):
    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept

    def __call__(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self.kept.append(result)


class _Forget(_Hook):
    def __init__(self, lists: list[list[Any]]) -> None:
        self.lists = lists

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for kept in self.lists:
            kept.clear()


def _no_hook(*args: Any) -> None:
    """Does nothing."""


def _give_no_hook() -> Callable[..., None]:
    return _no_hook


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
