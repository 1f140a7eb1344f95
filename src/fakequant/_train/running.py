"""Running data through a model, and leaving the model as it was."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from fakequant._backends.torch.torch_private import pytree

Data = Iterable[Any] | Callable[[nn.Module], Any]


class Bar(tqdm):
    """Without the thread that watches over slow bars, which would live as long as the process."""

    monitor_interval = 0


def check_module(model: Any, name: str = "model") -> None:
    """Raises TypeError unless `model` is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`{name}` must be a torch.nn.Module, got {type(model).__name__}.")


def check_steps(steps: Any) -> None:
    """Raises ValueError unless it is a number of batches, or None for all of them."""
    if steps is not None and (type(steps) is not int or steps < 0):
        raise ValueError(f"`steps` must be a number of batches or None, got {steps!r}.")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model is in evaluation mode and not compiled; then every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with _not_compiled():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def explaining_ranks() -> Iterator[None]:
    """While it lasts, an error of communication between ranks says what its cause is likely to be."""
    try:
        yield
    except RuntimeError as error:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            raise
        if not isinstance(error, distributed.DistError) and not any(word in str(error).lower() for word in _OF_RANKS):
            raise
        raise RuntimeError(
            f"The ranks could not exchange what they have seen: {str(error).splitlines()[0]}\n"
            "Another rank has likely ended with an error, or has fewer batches. See the first error of any rank, and "
            "give every rank as many batches: `steps`, or DataLoader(drop_last=True) with a DistributedSampler."
        ) from error


_OF_RANKS = ("gloo", "nccl", "timed out", "timeout", "connection closed", "connection reset", "broken pipe")


def _not_compiled() -> AbstractContextManager[Any]:
    """Compiled code does not run hooks that were added later, and has nothing to wait for data with."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes long
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def run(
    model: nn.Module,
    data: Data,
    steps: int | None,
    progress: str | None = None,
    call: Callable[..., Any] | None = None,
) -> None:
    """Passes batches, at most `steps`, through the model, or to `call`; `progress` is what a bar is called."""
    check_steps(steps)
    if isinstance(data, Tensor) and data.dim() > 0:
        data = [data]
    if isinstance(data, Mapping):
        raise TypeError("`data` must be batches, got one dict.\nUse [batch] if it is one.")
    if isinstance(data, Tensor) or not (callable(data) or isinstance(data, Iterable)):
        raise TypeError(
            "`data` must be batches, such as a DataLoader or a list, or a function that runs the model, got "
            f"{type(data).__name__}."
        )
    if not isinstance(data, Iterable):
        data(model)
        return
    try:
        total: int | None = len(data)  # type: ignore[arg-type]
    except TypeError:  # the length is unknown
        total = None
    if steps is not None:
        total = steps if total is None else min(steps, total)
    told = False
    for batch in Bar(islice(data, steps), total=total, desc=progress, disable=progress is None, leave=False):
        args, kwargs = call_arguments(model, batch)
        if not told and isinstance(batch, (tuple, list)) and len(batch) > len(args):
            told = _warn_about_dropped(model, batch, len(args))
        (call or model)(*args, **kwargs)


def call_arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call the model with for a batch: a tensor, a dict, or a tuple that may hold labels too."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch[: _needed(model, len(batch))]), {}
    raise TypeError(f"A batch must be a tensor, a dict, a tuple or a list, got {type(batch).__name__}.")


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]


def _needed(model: nn.Module, available: int) -> int:
    """How many positional arguments `forward` needs."""
    needed = [p for p in _positional(model) if p.default is inspect.Parameter.empty]
    return min(max(len(needed), 1), available)


def _warn_about_dropped(model: nn.Module, batch: Any, passed: int) -> bool:
    """Warns if what is left out of a batch may be meant for an optional argument; whether it did.

    Labels are not: integers in one row, or for an argument that is called so. Nor is anything for an argument whose
    default is a number or a switch.
    """
    optional = _positional(model)[passed : len(batch)]
    for parameter, value in zip(optional, batch[passed:], strict=False):
        is_label = (
            isinstance(value, Tensor)
            and value.dim() <= 1
            and not value.is_floating_point()
            and (value.dtype != torch.bool)
        )
        named_label = parameter.name.lower().rstrip("s") in ("label", "target", "y")
        if isinstance(value, Tensor) and parameter.default is None and not is_label and not named_label:
            names = [p.name for p in _positional(model)]
            pairs = ", ".join(f'"{name}": ...' for name in names[: len(batch)])
            warnings.warn(
                f"Batches have {len(batch)} elements, and `forward` needs {passed} of its arguments "
                f"({', '.join(names)}): what may be meant for `{parameter.name}` is left out, as labels are.\n"
                f"If it is no label, pass dicts, {{{pairs}}}; if it is one, pass batches without it.",
                UserWarning,
                stacklevel=5,
            )
            return True
    return False


def copied(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Copies of what a model is given, which it may change in place; what is one tensor stays one."""
    copies: dict[int, Tensor] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone()
        return copies[id(x)]

    return pytree.tree_map(copy, args), pytree.tree_map(copy, kwargs)
