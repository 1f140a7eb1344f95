"""What the callbacks for all trainers share: calibration that leaves no trace, and figures of health."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fakequant._prepare.prepare import is_prepared
from fakequant._train.calibrate import calibrate
from fakequant._train.health import health
from fakequant._train.running import evaluating
from fakequant.nn._model_quantizers import quantizers
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer

_BY_HAND = "Calibrate before training, fakequant.calibrate(model, batches), and use QATCallback(calibrate=None)."
# What `health` finds for a quantizer, and which of two values is the worse.
_WORST: dict[str, Callable[[Iterable[float]], float]] = {
    "clipped": max,
    "levels_used": min,
    "scale_drift": max,
    "oscillating": max,
    "bias_error": max,
}


def check_options(calibrate: Any, log_health: Any) -> None:
    """That the options of a callback are a number of batches or None, and a bool."""
    if calibrate is not None and (type(calibrate) is not int or calibrate < 1):
        raise ValueError(
            f"`calibrate` must be a number of batches, 1 or more, or None for no calibration, got {calibrate!r}."
        )
    if not isinstance(log_health, bool):
        raise TypeError(f"`log_health` must be True or False, got {log_health!r}.")


def require_quantizers(model: nn.Module) -> None:
    """Raises ValueError if the model is not prepared."""
    if next(quantizers(model), None) is None:
        raise ValueError(
            f"QATCallback found no quantizers in the model, a {type(model).__name__}: it is a float model.\n"
            "Use fakequant.prepare(model, config) before the model is given to the trainer, or leave out the callback."
        )


# --- calibration ------------------------------------------------------------------------------------


def needs_calibration(model: nn.Module) -> bool:
    """Whether no quantizer of an activation has a scale yet, and there is one that needs data for it.

    A layer that no data reaches never gets a scale: it is no reason to calibrate again.
    """
    of_weights = {module.weight_quantizer for module in model.modules() if isinstance(module, QuantizedLayer)}
    waiting = [q for _, q in quantizers(model) if q not in of_weights and _needs_data(q)]
    return bool(waiting) and not any(map(_has_scale, waiting))


def _needs_data(quantizer: Any) -> bool:
    return not quantizer.is_dynamic and getattr(getattr(quantizer, "observer", None), "needs_data", True)


def _has_scale(quantizer: Quantizer) -> bool:
    try:
        quantizer.qparams()
    except RuntimeError:
        return False
    return True


def calibrate_without_trace(model: nn.Module, run: Callable[[], None]) -> None:
    """Calibrates a model by what `run` passes through it; random states and modes are what they were."""
    roots = [module for module in model.modules() if is_prepared(module)]
    with random_states_kept(), evaluating(model):
        calibrate(roots[0] if len(roots) == 1 else model, lambda _: run(), progress=False)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Afterwards the random states of Python, NumPy and torch, on the CPU and on CUDA, are what they were."""
    python, array = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


def first_batches(loader: Any, number: int) -> Iterator[Any]:
    """The batches that `loader` will begin with, read past it: its samplers, generators and workers are not used.

    Nothing happens before the first one is asked for: a loader draws random numbers when its iterator is made.
    """
    yield from islice(_another(loader) if isinstance(loader, DataLoader) else _restartable(loader), number)


def _another(loader: "DataLoader[Any]") -> "DataLoader[Any]":
    """A loader of the same batches, in this process, with copies of all that remembers a position."""
    dataset, size = loader.dataset, loader.batch_size
    if isinstance(dataset, IterableDataset):
        _restartable(dataset)
        drop_last = size is not None and loader.drop_last
        return DataLoader(dataset, size, collate_fn=loader.collate_fn, drop_last=drop_last)
    by_rows = loader.batch_sampler is None
    # Together: the loader and its sampler may share a generator.
    generator, sampler = _copied((loader.generator, loader.sampler if by_rows else loader.batch_sampler), dataset)
    how = {"batch_size": None, "sampler": sampler} if by_rows else {"batch_sampler": sampler}
    return DataLoader(dataset, collate_fn=loader.collate_fn, generator=generator, **how)


def _copied(state: tuple[Any, Any], dataset: Any) -> tuple[Any, Any]:
    try:
        return copy.deepcopy(state, {id(dataset): dataset})  # a sampler may know its data, which stay one
    except TypeError as error:
        raise TypeError(
            f"{type(state[1]).__name__} cannot be copied ({error}), and calibration must not use up its batches.\n"
            f"{_BY_HAND}"
        ) from error


def _restartable(data: Any) -> Any:
    if isinstance(data, Iterator):
        raise TypeError(
            f"The training data are a {type(data).__name__}, which can be read only once: training would not see the "
            f"batches used for calibration.\n{_BY_HAND}"
        )
    return data


# --- figures ----------------------------------------------------------------------------------------


def figures(model: nn.Module) -> dict[str, float]:
    """What `fakequant.health` finds without data, as a mean and the worst over quantizers, by name."""
    found = health(model).quantizers
    named: dict[str, float] = {}
    for name, worst in _WORST.items():
        values = [value for q in found if (value := getattr(q, name)) is not None]
        if values:
            named |= {f"quant/{name}_mean": fmean(values), f"quant/{name}_worst": float(worst(values))}
    return {**named, "quant/nonfinite": float(sum(q.nonfinite for q in found))}
