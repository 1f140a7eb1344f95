"""`run`: the whole workflow, from float training to integer inference in ONNX Runtime."""

import copy
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fakequant import _runtimes
from fakequant._convert.convert import convert
from fakequant._demo.digits import (
    FLOAT_RATE,
    QUANTIZED_RATE,
    Digits,
    DigitsNet,
    Variant,
    accuracy,
    certainty,
    int4,
    load,
    steps_of,
    train,
    training_step,
    variants,
)
from fakequant._demo.result import CARD, Progress, Result, Row
from fakequant._diagnosis.card import Card, card
from fakequant._diagnosis.health import History
from fakequant._diagnosis.report.writing import report
from fakequant._diagnosis.sensitivity import sensitivity
from fakequant._export.onnx.export_onnx import export_onnx
from fakequant._prepare.prepare import prepare
from fakequant._runtimes.onnxruntime.session import OnnxRuntimeSession
from fakequant._train.calibrate import calibrate
from fakequant._util.packages import require
from fakequant._verify.verdict import Verification
from fakequant._verify.verify import verify
from fakequant.testing.timing import Contender, best_times

# The model for which the report is written.
_REPORTED = "QAT int4"
# The batch size when codes are compared.
_COMPARED = 100
# The number of batches for the report, and of points in its curves over training.
_REPORT_BATCHES, _POINTS = 4, 24
# Lengths in progress bars: of an export, in training steps, and of the step times, in rounds.
_EXPORT_STEPS, _ROUNDS = 40, 150
_PACKAGES = ("scikit-learn", "onnx", "onnxscript", "onnxruntime", "matplotlib", "jinja2")


def run(
    folder: str | os.PathLike[str] = "fakequant-demo",
    *,
    seed: int = 0,
    progress: bool = True,
    epochs: int = 12,
    images: int | None = None,
    timing: float = 5.0,
) -> Result:
    """Trains a residual CNN on digits, quantizes it in four ways, exports and verifies each, and writes a report.

    The folder gets `report.html`, its figures, an ONNX file of each model, `result.json`, `times.json` and `card.md`.
    Two runs with the same seed write the same bits, except for measured times. The demo runs in one thread and restores
    torch's settings and random state.

    Args:
        folder: The folder to write. It is created if necessary.
        seed: The seed of all random numbers.
        progress: Whether to show progress on stderr.
        epochs: The epochs of the float training, and of each training with quantizers.
        images: The maximum number of images. If None, all are used.
        timing: The maximum time for measuring training steps, in seconds.

    Needs `pip install "fakequant[demo]"`. On the command line: `fakequant demo`.

    >>> run(__file__)
    Traceback (most recent call last):
    NotADirectoryError: ...run.py' is a file, not a folder for the results. Use another path.
    """
    _check(seed=seed, epochs=epochs, images=images, timing=timing)
    goal = writable_folder(folder)
    for package in _PACKAGES:
        require("sklearn" if package == "scikit-learn" else package, package, "demo")
    with reproducible(seed):
        return _Run(goal, load(seed, images), seed, epochs, timing, Progress(progress)).run()


def _check(*, seed: int, epochs: int, images: int | None, timing: float) -> None:
    for name, value, least in (("seed", seed, 0), ("epochs", epochs, 1), ("images", images, 20)):
        if not (value is None and name == "images") and (type(value) is not int or value < least):
            raise ValueError(f"`{name}` must be a whole number, at least {least}, got {value!r}.")
    if isinstance(timing, bool) or not isinstance(timing, (int, float)) or not 0 <= timing < float("inf"):
        raise ValueError(f"`timing` must be a number of seconds, got {timing!r}.")


class _Made(NamedTuple):
    """A quantized model, its row without a step time, its verification, and its health over training."""

    model: nn.Module
    row: Row
    verification: Verification
    history: History


class _Run:
    """One run, stage by stage."""

    def __init__(self, folder: Path, digits: Digits, seed: int, epochs: int, timing: float, progress: Progress) -> None:
        self.folder, self.digits, self.seed, self.epochs, self.timing = folder, digits, seed, epochs, timing
        self.progress = progress

    def run(self) -> Result:
        model, first = self._train_in_float()
        made = {variant.name: self._quantize(model, variant) for variant in variants()}
        times = self._time_steps(model)
        self._report(model, made[_REPORTED])
        card = self._card(model, made[_REPORTED].model)
        rows = [first, *(one.row for one in made.values())]
        rows = [dataclasses.replace(row, step_time=times.get(row.model)) for row in rows]
        result = Result(
            folder=str(self.folder),
            rows=rows,
            test_images=len(self.digits.test_images),
            seconds=self.progress.seconds,
            card=card,
        )
        result.write()
        self.progress.print()
        return result

    def _train_in_float(self) -> tuple[nn.Module, Row]:
        model, digits = DigitsNet(), self.digits
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.progress.print(
            f"fakequant {version('fakequant')}: a residual CNN, {parameters:,} parameters; handwritten digits, "
            f"{len(digits.train_images)} to train, {len(digits.test_images)} to test\n"
        )
        with self.progress.stage("float", steps_of(digits, self.epochs)) as stage:
            stage.doing("train")
            train(model, digits, self.epochs, FLOAT_RATE, self.seed, lambda _: stage.step())
            found = accuracy(model, digits.test_images, digits.test_labels)
            row = Row(model="float", weight_bits=32, activation_bits=32, accuracy=found, bytes=4 * parameters)
            stage.result = f"{row.accuracy:.2f} %"
        return model, row

    def _quantize(self, model: nn.Module, variant: Variant) -> _Made:
        digits, history = self.digits, History()
        batches, compared = digits.batches(), list(digits.test_images.split(_COMPARED))
        steps = steps_of(digits, self.epochs) if variant.trained else 0
        with self.progress.stage(variant.name, len(batches) + steps + _EXPORT_STEPS + len(compared)) as stage:
            stage.doing("calibrate")
            made = _prepared(model, variant, batches[0], stage.each(batches))
            if variant.trained:
                stage.doing("train")

                def after_step(number: int) -> None:
                    stage.step()
                    if variant.name == _REPORTED and number % max(1, steps // _POINTS) == 0:
                        history.measure(number, made, batches[:1])

                train(made, digits, self.epochs, QUANTIZED_RATE, self.seed, after_step)
            found = accuracy(made, digits.test_images, digits.test_labels)
            stage.doing("export")
            path = self.folder / variant.file
            export_onnx(made, path, digits.test_images[:2])
            stage.step(_EXPORT_STEPS)
            stage.doing("verify")
            verification = verify(made, path, stage.each(compared))
            row = _row(made, variant, path, found, verification, digits)
            stage.result = (
                f"{found:.2f} %   {variant.file}: {row.differing_codes:,} of {row.codes:,} codes differ in ONNX Runtime"
            )
        return _Made(made, row, verification, history)

    def _time_steps(self, model: nn.Module) -> dict[str, float]:
        """Returns the times of training steps relative to the float model, measured in alternation."""
        with self.progress.stage("step times", _ROUNDS) as stage:
            stage.doing("measure")
            steps: dict[str, Contender] = {"float": training_step(copy.deepcopy(model), self.digits)}
            for variant in variants():
                if variant.trained:
                    batches = self.digits.batches()
                    made = _prepared(model, variant, batches[0], batches)
                    steps[variant.name] = training_step(made, self.digits)
            best = best_times(steps, seconds=self.timing, clock=time.process_time, after_round=stage.step)
            stage.result = f"of training: {best['float'] * 1e3:.2f} ms in float, one thread, 64 images"
        return {name: seconds / best["float"] for name, seconds in best.items()}

    def _card(self, model: nn.Module, made: nn.Module) -> Card:
        """Measures the model of the report, with its file, beside the float model."""
        images, labels = self.digits.test_images, self.digits.test_labels
        file = next(variant.file for variant in variants() if variant.name == _REPORTED)
        with self.progress.stage("card", 1) as stage:
            stage.doing("measure")
            found = card(
                made, self.folder / file, list(images.split(_COMPARED)),
                lambda measured: accuracy(measured, images, labels), float_model=model, seconds=self.timing / 5,
            )  # fmt: skip
            stage.result = f"{self.folder / CARD}: {_REPORTED} beside float"
        return found

    def _report(self, model: nn.Module, made: _Made) -> None:
        """Writes the report about one of the models.

        The sensitivity of layers is measured before quantized training. The score is the mean probability of the right
        digit, because 4 bits change the accuracy on the training images too little.
        """
        digits, batches = self.digits, self.digits.batches()
        with self.progress.stage("report", 1) as stage:
            stage.doing("look")
            show = stage.close()
            costs = sensitivity(
                model, int4(), lambda m: certainty(m, digits.train_images, digits.train_labels),
                data=batches, progress=show,
            )  # fmt: skip
            page = report(
                made.model, self.folder, batches[:_REPORT_BATCHES], float_model=model, sensitivity=costs,
                history=made.history, verification=made.verification, title=f"fakequant demo: {_REPORTED} on digits",
                progress=show,
            )  # fmt: skip
            stage.result = f"{page}: {_REPORTED}, tensor by tensor"


def _prepared(model: nn.Module, variant: Variant, example: Tensor, batches: Iterable[Tensor]) -> nn.Module:
    return calibrate(prepare(copy.deepcopy(model), variant.config, example=example), batches, progress=False)


def _row(
    model: nn.Module, variant: Variant, path: Path, found: float, verification: Verification, digits: Digits
) -> Row:
    """Returns the row of a quantized model, after running its file on the test images."""
    layer = variant.config.default
    assert layer is not None
    assert layer.weight is not None
    assert layer.input is not None
    scores = OnnxRuntimeSession(path).run((digits.test_images.numpy(),), {}).results[0]
    reasons = [tensor.why_prepared for tensor in verification.tensors if not tensor.is_equal_but_for_ties]
    return Row(
        model=variant.name,
        weight_bits=_runtimes.find(variant.config.target).fit_weight(layer.weight).bits,
        activation_bits=layer.input.bits,
        accuracy=found,
        runtime_accuracy=float(np.mean(scores.argmax(1) == digits.test_labels.numpy())) * 100,
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in convert(model).state_dict().values()),
        onnx_bytes=path.stat().st_size,
        differing_codes=sum(tensor.runtime_differ for tensor in verification.tensors),
        codes=sum(tensor.codes for tensor in verification.tensors),
        why="; ".join(dict.fromkeys(reasons)),
        kernels=verification.kernels,
    )


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Sets one thread, deterministic algorithms, float32 and a seed. Restores all settings at the end.

    There is one thread, because float sums depend on the number of threads.
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            torch.set_num_threads(1)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(True)
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


def writable_folder(folder: str | os.PathLike[str]) -> Path:
    """Creates the folder if necessary and returns its path. Raises OSError if it cannot be written."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{str(path)!r} is a file, not a folder for the results. Use another path.")
    trial = path / f"trial.{os.getpid()}.unfinished"
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise type(error)(
            f"The folder {str(path)!r} cannot be written: {error.strerror}. Use a writable folder."
        ) from error
    return path
