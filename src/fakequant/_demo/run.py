"""`run`: the whole workflow, from float training to integer inference in ONNX Runtime."""

import copy
import dataclasses
import os
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from fakequant import _targets
from fakequant._demo import deploy
from fakequant._demo.data import Digits, load
from fakequant._demo.deploy import Deployed
from fakequant._demo.environment import reproducible, writable_folder
from fakequant._demo.network import DigitsNet
from fakequant._demo.progress import Progress
from fakequant._demo.result import Result, Row
from fakequant._demo.training import FLOAT_RATE, QUANTIZED_RATE, accuracy, steps_of, train, training_step
from fakequant._demo.variants import Variant, variants
from fakequant._demo.watch import Watch
from fakequant._diagnosis.history import History
from fakequant._prepare.prepare import prepare
from fakequant._train.calibrate import calibrate
from fakequant._util.optional_packages import require
from fakequant.testing.timing import Contender, best_times

# The model for which the report is written.
_REPORTED = "QAT int4"
# The batch size when codes are compared.
_COMPARED = 100
# Lengths in progress bars: of an export, in training steps, and of the step times, in rounds.
_EXPORT_STEPS, _ROUNDS = 40, 150
_PACKAGES = {
    "sklearn": "scikit-learn",
    "onnx": "onnx",
    "onnxscript": "onnxscript",
    "onnxruntime": "onnxruntime",
    "matplotlib": "matplotlib",
    "jinja2": "jinja2",
}


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

    The folder gets `report.html`, its figures, an ONNX file of each model, `result.json` and `times.json`. Two runs
    with the same seed write the same bits, except for measured times. The demo runs in one thread and restores torch's
    settings and random state.

    Args:
        folder: The folder to write. It is created if necessary.
        seed: The seed of all random numbers.
        progress: Whether to show progress on stderr.
        epochs: The epochs of the float training, and of each training with quantizers.
        images: The maximum number of images. None for all.
        timing: The maximum time for measuring training steps, in seconds.

    Needs `pip install "fakequant[demo]"`. On the command line: `fakequant demo`.

    >>> run(__file__)
    Traceback (most recent call last):
    NotADirectoryError: ...run.py' is a file, not a folder for the results. Use another path.
    """
    _check(seed=seed, epochs=epochs, images=images, timing=timing)
    goal = writable_folder(folder)
    for module, package in _PACKAGES.items():
        require(module, package, "demo")
    with reproducible(seed):
        return _Run(goal, load(seed, images), seed, epochs, timing, Progress(progress)).run()


def _check(*, seed: int, epochs: int, images: int | None, timing: float) -> None:
    for name, value, least in (("seed", seed, 0), ("epochs", epochs, 1), ("images", images, 20)):
        if not (value is None and name == "images") and (type(value) is not int or value < least):
            raise ValueError(f"`{name}` must be a whole number, at least {least}, got {value!r}.")
    if isinstance(timing, bool) or not isinstance(timing, (int, float)) or not 0 <= timing < float("inf"):
        raise ValueError(f"`timing` must be a number of seconds, got {timing!r}.")


class _Made(NamedTuple):
    """A quantized model, its row without a step time, its exported file, and its health over training."""

    model: nn.Module
    row: Row
    deployed: Deployed
    history: History | None


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
        rows = [first, *(one.row for one in made.values())]
        rows = [dataclasses.replace(row, step_time=times.get(row.model)) for row in rows]
        result = Result(str(self.folder), rows, len(self.digits.test_images), self.progress.seconds)
        result.write()
        self.progress.end()
        return result

    def _train_in_float(self) -> tuple[nn.Module, Row]:
        model = DigitsNet()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        digits = self.digits
        self.progress.heading(
            f"fakequant {version('fakequant')}: a residual CNN, {parameters:,} parameters; handwritten digits, "
            f"{len(digits.train_images)} to train, {len(digits.test_images)} to test"
        )
        with self.progress.stage("float", steps_of(digits, self.epochs)) as stage:
            stage.doing("train")
            train(model, digits, self.epochs, FLOAT_RATE, self.seed, lambda _: stage.step())
            row = Row(
                model="float",
                weight_bits=32,
                activation_bits=32,
                accuracy=accuracy(model, digits.test_images, digits.test_labels),
                bytes=4 * parameters,
            )
            stage.result = f"{row.accuracy:.2f} %"
        return model, row

    def _quantize(self, model: nn.Module, variant: Variant) -> _Made:
        digits, history = self.digits, None
        batches, compared = digits.batches(), list(digits.test_images.split(_COMPARED))
        steps = steps_of(digits, self.epochs) if variant.trained else 0
        total = len(batches) + steps + _EXPORT_STEPS + len(compared)
        with self.progress.stage(variant.name, total) as stage:
            stage.doing("calibrate")
            made = self._prepared(model, variant, stage.each(batches))
            if variant.trained:
                stage.doing("train")
                watch = Watch(made, digits, steps)
                history = watch.history

                def after_step(number: int) -> None:
                    stage.step()
                    if variant.name == _REPORTED:
                        watch.after_step(number)

                train(made, digits, self.epochs, QUANTIZED_RATE, self.seed, after_step)
            found = accuracy(made, digits.test_images, digits.test_labels)
            stage.doing("export")
            path = self.folder / variant.file
            deploy.export(made, path, digits)
            stage.step(_EXPORT_STEPS)
            stage.doing("verify")
            deployed = deploy.check(made, path, digits, stage.each(compared))
            row = self._row(variant, found, deployed)
            stage.result = (
                f"{found:.2f} %   {variant.file}: {row.differing_codes:,} of {row.codes:,} codes differ in ONNX Runtime"
            )
        return _Made(made, row, deployed, history)

    def _prepared(self, model: nn.Module, variant: Variant, batches: Iterable[Tensor]) -> nn.Module:
        made = prepare(copy.deepcopy(model), variant.config)
        return calibrate(made, batches, progress=False)

    def _row(self, variant: Variant, found: float, deployed: Deployed) -> Row:
        layer = variant.config.default
        assert layer is not None
        assert layer.weight is not None
        assert layer.input is not None
        return Row(
            model=variant.name,
            weight_bits=_targets.find(variant.config.target).fit_weight(layer.weight).bits,
            activation_bits=layer.input.bits,
            accuracy=found,
            runtime_accuracy=deployed.accuracy,
            bytes=deployed.bytes,
            onnx_bytes=deployed.onnx_bytes,
            differing_codes=deployed.differing_codes,
            codes=deployed.codes,
            why=deployed.why,
            kernels=deployed.verification.kernels,
        )

    def _time_steps(self, model: nn.Module) -> dict[str, float]:
        """Returns the times of training steps relative to the float model, measured in alternation."""
        trained = [variant for variant in variants() if variant.trained]
        with self.progress.stage("step times", _ROUNDS) as stage:
            stage.doing("measure")
            steps: dict[str, Contender] = {"float": training_step(copy.deepcopy(model), self.digits)}
            for variant in trained:
                made = self._prepared(model, variant, self.digits.batches())
                steps[variant.name] = training_step(made, self.digits)
            best = best_times(steps, seconds=self.timing, clock=time.process_time, after_round=stage.step)
            times = {name: seconds / best["float"] for name, seconds in best.items()}
            stage.result = f"of training: {best['float'] * 1e3:.2f} ms in float, one thread, 64 images"
        return times

    def _report(self, model: nn.Module, made: _Made) -> None:
        # Imported here, because Matplotlib takes time to import.
        from fakequant._demo import diagnosis

        with self.progress.stage("report", 1) as stage:
            stage.doing("look")
            page = diagnosis.write_report(
                made.model, self.folder, self.digits, name=_REPORTED, float_model=model, history=made.history,
                verification=made.deployed.verification, progress=stage.close(),
            )  # fmt: skip
            stage.result = f"{page}: {_REPORTED}, tensor by tensor"
