"""`calibrate`: shows a prepared model some data, so that its activations have scales."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from fakequant.nn.quantizer import Quantizer, quantizers

Data = Iterable[Any] | Callable[[nn.Module], Any]


class _Bar(tqdm):
    """Without the thread that watches over slow bars, which would live as long as the process."""

    monitor_interval = 0


def calibrate(model: nn.Module, data: Data, steps: int | None = None, *, progress: bool = True) -> nn.Module:
    """Runs `data` through the model, in float, and lets its quantizers observe; returns the model.

    This is post-training quantization in one call, and the start of training with quantizers. `data` is
    a DataLoader or any iterable of batches, of which at most `steps` are used. A batch is a tensor, a
    dict of keyword arguments, or a tuple; of a tuple as many elements are passed as `forward` needs, so
    that labels may be there. Or `data` is a function that runs the model itself.

    The model is in evaluation mode while it runs, and afterwards in the mode it was in.

    >>> import fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8())
    >>> model = calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> model[0].input_quantizer.scale
    tensor(0.0039)
    """
    found = [module for _, module in quantizers(model) if not module.frozen]
    if not found:
        raise ValueError("The model has no quantizers to calibrate.\nUse fakequant.prepare(model, config) first.")
    modes = {module: module.training for module in model.modules()}
    switches = [(q.observing, q.quantizing) for q in found]
    before = [_snapshot(quantizer) for quantizer in found]
    model.eval()
    try:
        for quantizer in found:
            quantizer.train()
            if not quantizer.is_initialized:
                quantizer.observing = True
            quantizer.quantizing = False
        with torch.no_grad():
            batches = _run(model, data, steps, progress)
        _require(batches)
    except BaseException:
        for quantizer, state in zip(found, before, strict=True):
            _restore(quantizer, state)
        raise
    finally:
        for quantizer, (observing, quantizing) in zip(found, switches, strict=True):
            if quantizer.observing != observing:
                quantizer.observing = observing
            quantizer.quantizing = quantizing
        for module, training in modes.items():
            module.training = training
    return model


def _require(batches: int) -> None:
    if batches == 0:
        raise ValueError("`data` has no batches: there was nothing to calibrate with.")


_ATTRIBUTES = ("_stale", "_told", "saw_only_finite")


def _snapshot(quantizer: Quantizer) -> tuple[list[Tensor], list[Any]]:
    """What calibrating may change."""
    tensors = [t.detach().clone() for t in _tensors(quantizer)]
    return tensors, [getattr(quantizer, name) for name in _ATTRIBUTES]


def _tensors(quantizer: Quantizer) -> list[Tensor]:
    return [*quantizer.parameters(), *quantizer.buffers(), quantizer._nonfinite]


@torch.no_grad()
def _restore(quantizer: Quantizer, state: tuple[list[Tensor], list[Any]]) -> None:
    for tensor, old in zip(_tensors(quantizer), state[0], strict=True):
        tensor.copy_(old)
    for name, value in zip(_ATTRIBUTES, state[1], strict=True):
        setattr(quantizer, name, value)


def _run(model: nn.Module, data: Data, steps: int | None, progress: bool) -> int:
    if callable(data) and not isinstance(data, Iterable):
        data(model)
        return 1
    number = 0
    try:
        total: int | None = len(data)  # type: ignore[arg-type]
    except TypeError:  # nobody knows
        total = None
    if steps is not None:
        total = steps if total is None else min(steps, total)
    bar = _Bar(islice(data, steps), total=total, desc="calibrate", disable=not progress, leave=False)
    for batch in bar:
        run_batch(model, batch)
        number += 1
    return number


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Calls the model with a batch: a tensor, a dict, or a tuple that may hold labels too."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch[: _needed(model, len(batch))])
    raise TypeError(f"A batch must be a tensor, a dict, a tuple or a list, got {type(batch).__name__}.")


def _needed(model: nn.Module, available: int) -> int:
    """How many positional arguments `forward` needs."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return min(max(len(needed), 1), available)
