"""The outputs that `distill` compares: kept from layers of a model, and matched with the teacher's."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class LayerResults:
    """Keeps the outputs of layers from the last call of a model, until `take` returns them.

    This needs hooks on the model and its layers. They are removed by `remove()`, and when this object is deleted. In
    copies and pickles of the model the hooks do nothing.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        self._kept: dict[str, list[Any]] = {path: [] for path in paths}
        handles: list[RemovableHandle] = []
        # Every call of the model clears them: outputs that activation checkpointing recomputed belong to the last step.
        if self._kept:
            handles.append(model.register_forward_pre_hook(_Forget(list(self._kept.values()))))
        for path, kept in self._kept.items():
            handles.append(model.get_submodule(path).register_forward_hook(_Keep(kept)))
        self.remove = weakref.finalize(self, _remove, handles)

    def take(self) -> dict[str, list[Any]]:
        """Returns the outputs of each call of each layer, by the paths of the layers, and forgets them."""
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


def matched(result: Any, aim: Any, what: str) -> list[tuple[Tensor, Tensor]]:
    """Returns the tensors of a result, each with the teacher's, at least in float32."""
    found, aims = dict(_floats(_scores(result))), dict(_floats(_scores(aim)))
    if not found and not aims:
        raise TypeError(
            f"There are no float tensors to compare in {what}: {type(result).__name__} and {type(aim).__name__}.\n"
            "Tensors are found in dicts, tuples, lists and dataclasses."
        )
    if found.keys() != aims.keys():
        differing = sorted(found.keys() ^ aims.keys())
        raise ValueError(
            f"Tensors of {what} are only in one of student and teacher: {', '.join(differing[:3])}.\n"
            "Both must return the same structure. Pass the student's result as it is, and all of its inputs."
        )
    for name, y in found.items():
        if y.shape != aims[name].shape:
            raise ValueError(
                f"The shapes of {what} differ{f' at {name}' if name else ''}: {tuple(y.shape)} in the student, "
                f"{tuple(aims[name].shape)} in the teacher.\n"
                "Pass the student's inputs after its result, and use a teacher with results of the same shape."
            )
    return [(_precise(y), _precise(aims[name])) for name, y in found.items()]


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(result: Any) -> Any:
    """Returns the logits of a result, or the result if it has none."""
    logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    return logits if isinstance(logits, Tensor) else result


def _floats(result: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the float tensors in a result, each with the place where it is."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield name, result
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _floats(value, f"{name}[{key!r}]")
    elif isinstance(result, (tuple, list)):
        for index, value in enumerate(result):
            yield from _floats(value, f"{name}[{index}]")
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        for field in dataclasses.fields(result):
            yield from _floats(getattr(result, field.name), f"{name}.{field.name}")
