"""Running data through a model in evaluation mode, and checks of what users pass for it."""

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from fakequant._backends.torch.torch_private import pytree
from fakequant._model.leaves import is_cache

with warnings.catch_warnings():  # a notebook without ipywidgets has bars of text
    warnings.filterwarnings("ignore", "IProgress")
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

# Arguments of a model are any nesting of tensors and constants.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
# What a model takes. Only the model knows: see `call_arguments`.
Batch: TypeAlias = Any
# Batches, or a function that runs the model.
Data: TypeAlias = Iterable[Batch] | Callable[[nn.Module], object]


class Bar(tqdm):  # type: ignore[misc]  # tqdm has no annotations
    """A progress bar without tqdm's monitor thread, which would live as long as the process."""

    monitor_interval = 0


def check_module(model: Any, name: str = "model") -> None:
    """Raises TypeError unless `model` is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`{name}` must be a torch.nn.Module, got {type(model).__name__}.")


def check_steps(steps: Any) -> None:
    """Raises ValueError unless `steps` is a number of batches, or None for all of them."""
    if steps is not None and (type(steps) is not int or steps < 0):
        raise ValueError(f"`steps` must be a number of batches or None, got {steps!r}.")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode and runs uncompiled. Restores the mode of every module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with _not_compiled():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Context that removes hooks at its end."""
    kept = list(handles)
    try:
        yield
    finally:
        for handle in kept:
            handle.remove()


@contextmanager
def explaining_ranks() -> Iterator[None]:
    """Context that adds the likely cause to errors of the communication between ranks."""
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
            "Another rank has probably failed, or has fewer batches. Look for the first error of any rank, and give "
            "all ranks the same number of batches: `steps`, or DataLoader(drop_last=True) with a DistributedSampler."
        ) from error


_OF_RANKS = ("gloo", "nccl", "timed out", "timeout", "connection closed", "connection reset", "broken pipe")


@contextmanager
def _not_compiled() -> Iterator[None]:
    """Context in which compiled models run eagerly, because compiled code ignores hooks that are added later."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it is slow
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def run(
    model: nn.Module,
    data: Data,
    steps: int | None,
    progress: str | None = None,
    call: Callable[..., Any] | None = None,
) -> None:
    """Calls a model with every batch of `data`.

    Args:
        model: The model.
        data: Batches, or a function that runs the model, which is then called once.
        steps: The maximum number of batches. If None, all are used.
        progress: The title of a progress bar. If None, no bar is shown.
        call: If not None, what to call with the arguments of each batch instead of `model`.
    """
    check_steps(steps)
    if isinstance(data, Tensor) and data.dim() > 0:
        data = [data]
    if isinstance(data, Mapping):
        raise TypeError("`data` must be batches, got one dict.\nUse [batch] if the dict is a batch.")
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
    warned = False
    bar = Bar(islice(data, steps), total=total, desc=progress, disable=progress is None, leave=False)
    for number, batch in enumerate(bar, 1):
        args, kwargs = call_arguments(model, batch)
        warned = warned or warn_about_dropped(model, batch, stacklevel=4)
        with describing_call(model, batch, f"batch {number} of `data`"):
            (call or model)(*args, **kwargs)


@contextmanager
def describing_call(model: nn.Module, batch: Batch, name: str) -> Iterator[None]:
    """Context that adds to errors, as a note, what the arguments of the model were.

    `batch` is what it is called with, or None, and `name` is what the user calls that. If the batch seems to be
    (target, input), the error is another, which says so.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(batch, (Tensor, Mapping, tuple, list)) or getattr(error, "__notes__", None):
            raise
        args, kwargs = call_arguments(model, batch)
        rest = batch[len(args) :] if isinstance(batch, (tuple, list)) else ()
        described = described_call(model, args, kwargs) + (f" Not passed: {_described(rest)}." if rest else "")
        if rest and _looks_like_labels(args[0]) and isinstance(rest[0], Tensor) and rest[0].is_floating_point():
            raise ValueError(
                f"The model fails on {name}, which seems to be (target, input): {described}\n"
                "Pass the input first: (x, y) as one batch, [(x, y) for y, x in data] as several."
            ) from error
        error.add_note(f"This happened with {name}: {described}")
        raise


def described_call(model: nn.Module, args: Args, kwargs: Kwargs) -> str:
    """Returns which argument of a model got what, as a sentence.

    >>> described_call(nn.Linear(2, 3), (torch.ones(1, 2),), {})
    'Linear.forward(input) got input: float32 of shape (1, 2).'
    """
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # code that is not Python
        names = ["..."]
    passed = {names[i] if i < len(names) else f"argument {i + 1}": value for i, value in enumerate(args)}
    return f"{type(model).__name__}.forward({', '.join(names)}) got {_described({**passed, **kwargs}) or 'nothing'}."


def _described(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{key}: {_described(value)}" for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return ", ".join(map(_described, batch))
    return type(batch).__name__


def call_arguments(model: nn.Module, batch: Batch, name: str = "A batch") -> tuple[Args, Kwargs]:
    """Returns the positional and keyword arguments of a model for a batch or an example.

        a tensor           is the only argument
        a dict             has keyword arguments, all of which are passed
        a tuple or list    has positional arguments, of which only those are passed that `forward` requires, and at
                           least one: others may be labels

    So a batch of a DataLoader is an example too. Optional arguments need a dict; `warn_about_dropped` says so. The rule
    is the same in `prepare`, `calibrate` and everything else that runs a model, in `latency`, and in the exports.

    >>> class Model(nn.Module):
    ...     def forward(self, x, mask=None): ...
    >>> call_arguments(Model(), ("images", "labels"))
    (('images',), {})
    """
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch[: _number_of_arguments(model, len(batch))]), {}
    hint = "\nUse torch.from_numpy(batch)." if type(batch).__module__ == "numpy" else ""
    raise TypeError(f"{name} must be a tensor, a dict, a tuple or a list, got {type(batch).__name__}.{hint}")


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]


def _number_of_arguments(model: nn.Module, available: int) -> int:
    """Returns how many elements of a batch to pass: those that `forward` requires, but at least one."""
    required = [p for p in _positional(model) if p.default is inspect.Parameter.empty]
    return min(max(len(required), 1), available)


def example_arguments(model: nn.Module, example: Batch) -> tuple[Args, Kwargs]:
    """Returns the arguments of a model for an example, by the rule of `call_arguments`, and warns about others."""
    found = call_arguments(model, example, "`example`")
    warn_about_dropped(model, example, stacklevel=4)
    return found


def warn_about_dropped(model: nn.Module, batch: Batch, stacklevel: int = 3) -> bool:
    """Warns if an element of a tuple that is not passed may be meant for an optional argument of `forward`.

    Elements that look like labels are ignored: one-dimensional integers, and elements at the position of an argument
    called label, target or y. So are tensors where the default is not None. Returns True if it warned.
    """
    if not isinstance(batch, (tuple, list)):
        return False
    passed = _number_of_arguments(model, len(batch))
    for parameter, value in zip(_positional(model)[passed:], batch[passed:], strict=False):
        is_number = isinstance(value, (bool, int, float, str))
        is_tensor = isinstance(value, Tensor) and parameter.default is None and not _looks_like_labels(value)
        named_label = parameter.name.lower().rstrip("s") in ("label", "target", "y")
        if (is_tensor or is_number) and not named_label:
            names = [p.name for p in _positional(model)]
            pairs = ", ".join(f'"{name}": ...' for name in names[: len(batch)])
            warnings.warn(
                f"Batches have {len(batch)} elements, but `forward` requires only {passed} of its arguments "
                f"({', '.join(names)}). An element that may be meant for `{parameter.name}` is not passed, because it "
                "may be a label.\n"
                f"If it is not a label, use dicts as batches: {{{pairs}}}. If it is, remove it from the batches.",
                UserWarning,
                stacklevel=stacklevel,
            )
            return True
    return False


def _looks_like_labels(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() <= 1 and not x.is_floating_point() and x.dtype != torch.bool


def as_batches(data: Any) -> Iterable[Batch]:
    """Returns batches that can be iterated several times. Raises TypeError for anything but batches."""
    if isinstance(data, Tensor) and data.dim() > 0:
        return [data]
    if isinstance(data, (Mapping, str, Tensor)) or not isinstance(data, Iterable):
        raise TypeError(
            f"`data` must be batches, such as a DataLoader or a list of tensors, got {type(data).__name__}.\n"
            "Use [batch] if it is one batch."
        )
    return list(data) if iter(data) is data else data


def first_batch(batches: Iterable[Batch]) -> Batch:
    """Returns the first batch. Raises ValueError if there is none."""
    with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed whenever it is iterated
        for batch in batches:
            return batch
    raise ValueError("`data` has no batches.")


def copied(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns copies of the arguments of a model, which the model may then change in place.

    A tensor that occurs several times is copied once, and so is a cache of keys and values, to which attention adds.
    """
    copies: dict[int, Any] = {}

    def copy_of(x: Any) -> Any:
        if not isinstance(x, Tensor) and not is_cache(x):
            return x
        if id(x) not in copies:
            with _Detaching():
                copies[id(x)] = x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x)
        return copies[id(x)]

    return (
        pytree.tree_map(copy_of, args, is_leaf=is_cache),
        pytree.tree_map(copy_of, kwargs, is_leaf=is_cache),
    )


class _Detaching(TorchFunctionMode):
    """Context in which deep copies of tensors are without their graph, with which torch does not copy them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            x, memo = args
            return memo.setdefault(id(x), x.detach().clone())
        return func(*args, **(kwargs or {}))
