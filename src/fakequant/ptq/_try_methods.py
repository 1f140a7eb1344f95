"""`try_methods`: the accuracy of a model before and after each of several post-training methods."""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn

from fakequant._model.running import call_arguments, copied, evaluating
from fakequant._paired_models.calls import float_tensors
from fakequant._paired_models.errors import ErrorSums
from fakequant._prepare.prepare import prepare, unprepare
from fakequant._train.calibrate import calibrate
from fakequant._util.shown import Shown
from fakequant._util.text import table
from fakequant.config import QuantConfig
from fakequant.ptq._adaround import adaround
from fakequant.ptq._correct_bias import correct_bias
from fakequant.ptq._equalize import equalize
from fakequant.ptq._gptq import gptq
from fakequant.ptq._layer_changes import Changes
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
class MethodStage:
    """A model after one more method."""

    # "float", "nearest" (prepared and calibrated) or the name of a method.
    name: str
    # The SQNR of the model's outputs with respect to the float model, in dB. None for the float model.
    sqnr: float | None
    # What the given function returned. None without one.
    score: float | None
    # How long the method took, in seconds. None before the first.
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class MethodStages(Shown):
    """The result of `try_methods`. Prints as a table."""

    stages: list[MethodStage]
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
) -> tuple[nn.Module, MethodStages]:
    """Prepares and calibrates a copy of a float model, applies methods one after the other, and measures each stage.

    `methods` are names of `METHODS`. `evaluate` takes a model and returns a score; without it, only the SQNR is
    measured. `steps` is the maximum number of batches. Returns the quantized model, and the accuracy at each stage.
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

    def stage(name: str, measured: nn.Module, seconds: float | None = None) -> MethodStage:
        score = None if evaluate is None else float(evaluate(measured.eval()))
        sqnr = None if measured is floats else _sqnr(floats, measured, batches)
        return MethodStage(name=name, sqnr=sqnr, score=score, seconds=seconds)

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
    return quantized, MethodStages(stages, changes)


@torch.no_grad()
def _sqnr(floats: nn.Module, quantized: nn.Module, batches: Sequence[Any]) -> float:
    sums = ErrorSums()
    with evaluating(floats), evaluating(quantized):
        for batch in batches:
            expected, found = (
                float_tensors(m(*args, **kwargs))
                for m in (floats, quantized)
                for args, kwargs in (copied(*call_arguments(m, batch)),)
            )
            for y, z in zip(expected, found, strict=True):
                sums.add_result(y, z)
    return sums.sqnr
