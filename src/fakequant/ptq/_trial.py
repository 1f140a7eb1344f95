"""A trial of post-training methods: the accuracy of a model before and after each of them."""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn

from fakequant._diagnosis.sums import decibels
from fakequant._prepare.prepare import prepare, unprepare
from fakequant._train.calibrate import calibrate
from fakequant._train.running import call_arguments, copied, evaluating
from fakequant._util.text_table import table
from fakequant.config import QuantConfig
from fakequant.ptq._adaround import adaround
from fakequant.ptq._block_rounding import tensors_of
from fakequant.ptq._changes import Changes
from fakequant.ptq._correct_bias import correct_bias
from fakequant.ptq._equalize import equalize
from fakequant.ptq._gptq import gptq
from fakequant.ptq._smooth import smooth

METHODS: dict[str, Callable[..., Changes]] = {
    "equalize": equalize,
    "smooth": smooth,
    "correct_bias": correct_bias,
    "adaround": adaround,
    "gptq": gptq,
}
# Methods after which the model computes the same in float, with other weights. The next methods need these.
_EXACT = ("equalize", "smooth")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A model after one more method."""

    # "float", "nearest" (prepared and calibrated) or the name of a method.
    name: str
    # The SQNR of the model's results with respect to the float model, in dB. None for the float model.
    sqnr: float | None
    # What the given function returned. None without one.
    score: float | None
    # How long the method took, in seconds. None before the first.
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of `try_methods`. Prints as a table."""

    stages: list[Stage]
    # What each method did to the layers.
    changes: list[Changes]

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        with_score = any(stage.score is not None for stage in self.stages)
        rows = [
            [
                x.name if x.seconds is None else f"+ {x.name}",
                "-" if x.sqnr is None else f"{x.sqnr:.2f}",
                *([f"{x.score:.6g}"] if with_score else []),
                "-" if x.seconds is None else f"{x.seconds:.1f}",
            ]
            for x in self.stages
        ]
        return table(["model", "SQNR dB", *["score"] * with_score, "seconds"], rows)


def try_methods(
    model: nn.Module,
    config: QuantConfig,
    data: Iterable[Any],
    methods: Sequence[str],
    *,
    evaluate: Callable[[nn.Module], float] | None = None,
    steps: int | None = None,
    progress: bool = True,
) -> tuple[nn.Module, Trial]:
    """Prepares and calibrates a copy of a float model, applies methods one after the other, and measures each stage.

    Args:
        model: A float model. It is not changed.
        config: How to quantize it.
        data: Batches.
        methods: Names of `METHODS`.
        evaluate: A function that takes a model and returns a score. None for the SQNR only.
        steps: The maximum number of batches. None for all.
        progress: Whether to show progress bars.

    Returns:
        The quantized model, and the accuracy at each stage.
    """
    late = next((name for before, name in pairwise(methods) if name in _EXACT and before not in _EXACT), None)
    if late is not None:
        raise ValueError(
            f"{late} must come before methods that change the rounding or biases, got {', '.join(methods)}.\n"
            f"Use {late} first."
        )
    batches = list(islice(data, steps))
    floats = copy.deepcopy(model)
    quantized = prepare(copy.deepcopy(model), config, batches[0])
    calibrate(quantized, batches, progress=progress)

    def stage(name: str, measured: nn.Module, seconds: float | None = None) -> Stage:
        score = None if evaluate is None else float(evaluate(measured.eval()))
        return Stage(name, None if measured is floats else _sqnr(floats, measured, batches), score, seconds)

    stages = [stage("float", floats), stage("nearest", quantized)]
    changes = []
    reference = floats
    for name in methods:
        start = time.perf_counter()
        if name in _EXACT:
            changes.append(METHODS[name](quantized, batches, progress=progress))
            reference = unprepare(copy.deepcopy(quantized))
        else:
            changes.append(METHODS[name](quantized, batches, progress=progress, reference=reference))
        stages.append(stage(name, quantized, time.perf_counter() - start))
    return quantized, Trial(stages, changes)


@torch.no_grad()
def _sqnr(floats: nn.Module, quantized: nn.Module, batches: Sequence[Any]) -> float:
    signal = noise = 0.0
    with evaluating(floats), evaluating(quantized):
        for batch in batches:
            expected, found = (
                tensors_of(m(*args, **kwargs))
                for m in (floats, quantized)
                for args, kwargs in (copied(*call_arguments(m, batch)),)
            )
            for y, z in zip(expected, found, strict=True):
                signal += float(y.double().square().sum())
                noise += float((y.double() - z.double()).square().sum())
    return decibels(signal, noise)
