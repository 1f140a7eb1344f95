"""Finding the tensors that correspond to each other in the results of two models."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def matched(result: Any, aim: Any, what: str) -> list[tuple[Tensor, Tensor]]:
    """Returns the tensors of a result beside those of the teacher, at least in float32."""
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
