"""Shared by the callbacks for all trainers: options, calibration without side effects, and health metrics."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fakequant._diagnosis.health import HealthMemory, measured
from fakequant._model.running import evaluating
from fakequant._prepare.attach import is_prepared
from fakequant._train.calibrate import calibrate
from fakequant._train.schedule import Schedule
from fakequant.nn._model_quantizers import has_scale, named_quantizers, weight_quantizers
from fakequant.nn._quantizer import Quantizer

# Whatever the model's forward pass takes.
Batch: TypeAlias = Any
# A generator or None, and a sampler of rows or of batches.
_State: TypeAlias = tuple[torch.Generator | None, Any]

_BY_HAND = "Call fakequant.calibrate(model, batches) before training, and use QATCallback(calibrate=None)."
# The logged fields of `QuantizerHealth`, each with the function that finds the worst value: of scales and ends of
# grids, the value of the widest grid.
_WORST: dict[str, Callable[[Iterable[float]], float]] = {
    "clipped": max,
    "levels_used": min,
    "scale_drift": max,
    "oscillating": max,
    "bias_error": max,
    "scale": max,
    "min": min,
    "max": max,
}


class TrainingCallback:
    """What all callbacks have: their options, and the schedule of a training."""

    def __init__(
        self,
        *,
        quantize_from: int | None = None,
        freeze_ranges_at: int | None = None,
        freeze_norms_at: int | None = None,
        calibrate: int | None = 8,
        log_health: bool = True,
    ) -> None:
        if calibrate is not None and (type(calibrate) is not int or calibrate < 1):
            raise ValueError(
                f"`calibrate` must be a number of batches, 1 or more, or None for no calibration, got {calibrate!r}."
            )
        if not isinstance(log_health, bool):
            raise TypeError(f"`log_health` must be True or False, got {log_health!r}.")
        self.quantize_from = quantize_from
        self.freeze_ranges_at = freeze_ranges_at
        self.freeze_norms_at = freeze_norms_at
        self.calibrate = calibrate
        self.log_health = log_health
        self.schedule: Schedule | None = None
        self._memory = HealthMemory()

    def _start(
        self,
        model: nn.Module,
        state: dict[str, Any],
        batches: Callable[[int], Iterator[Batch]],
        show: Callable[[Iterator[Batch]], None],
    ) -> None:
        """Calibrates the model if necessary, and creates the schedule with this state.

        `batches(number)` returns the first training batches, and `show` passes them through the model.
        """
        require_quantizers(model)
        if self.calibrate is not None and needs_calibration(model):
            first = batches(self.calibrate)
            calibrate_without_trace(model, lambda: show(first))
        self.schedule = Schedule(
            model,
            quantize_from=self.quantize_from,
            freeze_ranges_at=self.freeze_ranges_at,
            freeze_norms_at=self.freeze_norms_at,
        )
        self.schedule.load_state_dict(state)


def require_quantizers(model: nn.Module) -> None:
    """Raises ValueError if the model is not prepared."""
    if next(named_quantizers(model), None) is None:
        raise ValueError(
            f"QATCallback found no quantizers in the model, a {type(model).__name__}: it is a float model.\n"
            "Use fakequant.prepare(model, config) before you pass the model to the trainer, or remove the callback."
        )


# --- calibration ------------------------------------------------------------------------------------


def needs_calibration(model: nn.Module) -> bool:
    """Returns True if some activation quantizers need data for a scale, and none of them has one yet.

    One quantizer without a scale is not a reason to calibrate again: data may never reach its layer.
    """
    of_weights = weight_quantizers(model)
    waiting = [q for _, q in named_quantizers(model) if q not in of_weights and _needs_data(q)]
    return bool(waiting) and not any(map(has_scale, waiting))


def _needs_data(quantizer: Quantizer) -> bool:
    return not quantizer.is_dynamic and getattr(getattr(quantizer, "observer", None), "needs_data", True)


def calibrate_without_trace(model: nn.Module, run: Callable[[], None]) -> None:
    """Calibrates a model with the data that `run` passes through it. Random states and modes are restored."""
    roots = [module for module in model.modules() if is_prepared(module)]
    with random_states_kept(), evaluating(model):
        calibrate(roots[0] if len(roots) == 1 else model, lambda _: run(), progress=False)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the random states of Python, NumPy and torch, on the CPU and on CUDA, at the end."""
    python, array = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


def first_batches(loader: Iterable[Batch], number: int) -> Iterator[Batch]:
    """Yields the first batches of `loader` without changing the state of its samplers, generators and workers.

    Nothing happens before the first batch is requested, because creating a loader's iterator draws random numbers.
    """
    yield from islice(_another(loader) if isinstance(loader, DataLoader) else _restartable(loader), number)


def _another(loader: "DataLoader[Batch]") -> "DataLoader[Batch]":
    """Returns a loader of the same batches, without workers, and with copies of the sampler and the generator."""
    dataset, size = loader.dataset, loader.batch_size
    if isinstance(dataset, IterableDataset):
        _restartable(dataset)
        drop_last = size is not None and loader.drop_last
        return DataLoader(dataset, size, collate_fn=loader.collate_fn, drop_last=drop_last)
    by_rows = loader.batch_sampler is None
    # Copied together, because the loader and its sampler may share a generator.
    generator, sampler = _copied((loader.generator, loader.sampler if by_rows else loader.batch_sampler), dataset)
    how = {"batch_size": None, "sampler": sampler} if by_rows else {"batch_sampler": sampler}
    return DataLoader(dataset, collate_fn=loader.collate_fn, generator=generator, **how)


def _copied(state: _State, dataset: object) -> _State:
    try:
        return copy.deepcopy(state, {id(dataset): dataset})  # the dataset itself is not copied
    except TypeError as error:
        raise TypeError(
            f"{type(state[1]).__name__} cannot be copied ({error}), but calibration must not consume its batches.\n"
            f"{_BY_HAND}"
        ) from error


def _restartable(data: Iterable[Batch]) -> Iterable[Batch]:
    if isinstance(data, Iterator):
        raise TypeError(
            f"The training data is a {type(data).__name__}, which can be read only once: training would not see the "
            f"batches used for calibration.\n{_BY_HAND}"
        )
    return data


# --- metrics ----------------------------------------------------------------------------------------


def figures(model: nn.Module, memory: HealthMemory) -> dict[str, float]:
    """Returns the health of a model without data as metrics: mean and worst value over all quantizers.

    Scales and codes are compared with what `memory` has of earlier measurements.
    """
    found = measured(model, None, None, memory).quantizers
    named: dict[str, float] = {}
    for name, worst in _WORST.items():
        values = [value for q in found if (value := getattr(q, name)) is not None]
        if values:
            named |= {f"quant/{name}_mean": fmean(values), f"quant/{name}_worst": float(worst(values))}
    return {**named, "quant/nonfinite": float(sum(q.nonfinite for q in found))}
