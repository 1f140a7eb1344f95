"""`card`: one table of what matters about a quantized model, float beside each exported file."""

import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant import _native
from fakequant._diagnosis.training_step import training_step
from fakequant._model.leaves import tensors, with_tensors
from fakequant._model.running import as_batches, call_arguments, check_module, check_steps, copied, evaluating
from fakequant._paired_models.errors import ErrorSums
from fakequant._prepare.attach import preparation
from fakequant._prepare.prepare import unprepare
from fakequant._runtimes.session import Session, open_file, session_for
from fakequant._util.shown import Shown
from fakequant._util.text import counted, table
from fakequant._verify.file_of_model import check_accuracy_level
from fakequant._verify.latency import Latency, latencies
from fakequant._verify.verdict import Verification
from fakequant._verify.verify import verify
from fakequant.testing.timing import Contender, best_times

_FLOAT, _UNQUANTIZED, _PREPARED = "float", "without quantizers", "prepared"


@dataclasses.dataclass(kw_only=True)
class CardRow:
    """A model: float, prepared, or an exported file. A field is None if it does not apply, or is not known."""

    # "float", "without quantizers" if no float model was given, "prepared", or the name of the file.
    name: str
    # What the given function returned for it.
    score: float | None = None
    # The share of rows with the same argmax as in the model of the first row, and the SQNR of all results, in dB.
    agreement: float | None = None
    sqnr: float | None = None
    # The size of parameters and buffers, or of the file. None for the prepared model, which is never stored like this.
    bytes: int | None = None
    # The size of the float model's file in the same format.
    float_bytes: int | None = None
    # The measured time of a training step over that of the float model.
    training_step: float | None = None
    # The runtime of the file, as an argument of `verify`, and its target.
    runtime: str | None = None
    target: str | None = None
    # The result of `verify`, and of `latency` for each number of threads.
    verification: Verification | None = None
    latencies: list[Latency] = dataclasses.field(default_factory=list)
    # Why something is missing.
    note: str = ""

    @property
    def share(self) -> float | None:
        """The share of the multiplications that the runtime computes in integers, from 0 to 1."""
        found = self.verification
        if found is None or not found.multiplications:
            return None
        return found.integer_multiplications / found.multiplications

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as dicts, lists, numbers and strings. Of the verification, it has the verdict."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        verified: Verification | None = found.pop("verification")
        return {
            **found,
            "latencies": [one.to_dict() for one in self.latencies],
            "share": self.share,
            "verified": None if verified is None else verified.ok,
            "problem": None if verified is None else verified.problem,
        }


@dataclasses.dataclass(repr=False)
class Card(Shown):
    """The result of `card`. Prints as a table."""

    rows: list[CardRow]
    # What was measured, and with which versions.
    notes: list[str]

    @property
    def ok(self) -> bool:
        """Whether `verify` found that every file computes what was trained."""
        return all(row.verification is None or row.verification.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
        return {"ok": self.ok, "rows": [row.to_dict() for row in self.rows], "notes": self.notes}

    def __str__(self) -> str:
        return "\n\n".join([table(*self._cells()), *(["\n".join(self._remarks())] if self._remarks() else [])])

    def to_markdown(self, title: str = "Quantization") -> str:
        """Returns a section of a model card in Markdown.

        >>> print(Card([CardRow(name="float", score=0.5, bytes=4000)], []).to_markdown())
        ## Quantization
        <BLANKLINE>
        | model | runtime | score | bytes |
        | --- | --- | --- | --- |
        | float | torch | 0.5 | 4,000 |
        """
        header, rows = self._cells()
        lines = [header, ["---"] * len(header), *rows]
        cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        remarks = [f"- {line}" for line in self._remarks()]
        return "\n".join([f"## {title}", "", *cells, *([""] if remarks else []), *remarks])

    def to_html(self) -> str:
        """Returns the table as HTML, without scripts and colors."""
        return self._repr_html_()

    def _remarks(self) -> list[str]:
        problems = [
            f"{row.name}: verify is not ok. {row.verification.problem}"
            for row in self.rows
            if row.verification is not None and not row.verification.ok
        ]
        notes = [f"{row.name}: {row.note}" for row in self.rows if row.note]
        return [" ".join(line.split()) for line in (*problems, *notes, *self.notes)]

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Returns the header and the rows, without columns that have no value."""
        rows = [shown for row in self.rows for shown in _with_float(row)]
        threads = sorted({one.threads for row in self.rows for one in row.latencies})
        columns: list[tuple[str, Callable[[CardRow], str]]] = [
            ("model", lambda row: row.name),
            ("runtime", lambda row: row.runtime or "torch"),
            ("score", lambda row: _number(row.score)),
            ("agreement", lambda row: "" if row.agreement is None else f"{row.agreement:.2%}"),
            ("SQNR dB", lambda row: "" if row.sqnr is None else f"{row.sqnr:.2f}"),
            ("bytes", lambda row: "" if row.bytes is None else f"{row.bytes:,}"),
            *((f"ms, {counted(n, 'thread')}", partial(_time, threads=n)) for n in threads),
            ("in integers", lambda row: "" if row.share is None else f"{row.share:.1%}"),
            ("verify", _verdict),
            ("training step", lambda row: "" if row.training_step is None else f"x {row.training_step:.2f}"),
        ]
        filled = [(name, cell) for name, cell in columns if any(map(cell, rows))]
        return [name for name, _ in filled], [[cell(row) or "-" for _, cell in filled] for row in rows]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _with_float(row: CardRow) -> list[CardRow]:
    """Returns a row, below one for the float model in the same runtime if that was measured."""
    if row.float_bytes is None:
        return [row]
    times = [dataclasses.replace(one, median_ms=one.float_median_ms) for one in row.latencies]
    return [CardRow(name=_FLOAT, runtime=row.runtime, bytes=row.float_bytes, latencies=times), row]


def _time(row: CardRow, threads: int) -> str:
    found = next((one for one in row.latencies if one.threads == threads), None)
    return "" if found is None else f"{found.median_ms:.4g}"


def _verdict(row: CardRow) -> str:
    if row.verification is None:
        return ""
    return "ok" if row.verification.ok else "NOT OK"


def card(
    model: nn.Module,
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    data: Iterable[Any],
    evaluate: Callable[[nn.Module], float] | None = None,
    *,
    float_model: nn.Module | None = None,
    accuracy_level: int | None = None,
    threads: int | Sequence[int] = 1,
    seconds: float = 1.0,
    steps: int | None = None,
) -> Card:
    """Measures a quantized model and its exported files, and puts the float model beside each of them.

    The card has the score, or without one the agreement with the float model, which is its first row; the bytes of
    files; the time of the first batch in the runtime of each file, beside the float model in the same runtime; the
    share of multiplications that run in integers; the verdict of `verify`; and the time of a training step relative to
    the float model.

    Args:
        model: A prepared and calibrated model.
        files: The files or folders that exporters wrote for this model.
        data: Batches, as `verify` takes them. The first is timed.
        evaluate: A function that takes a model and returns a score, such as the accuracy. It is called with the float
            model, the prepared model, and for each file with a module that runs the file and returns what the model
            returns. If None, the results of `data` are compared with those of the float model.
        float_model: The float model. If None, the first row is the prepared model without its quantizers. That is not
            the float model any more if training or a method of `ptq` has changed the weights.
        accuracy_level: As in `verify`: 1 if the runtime will not round the float inputs of weight-only layers.
        threads: The number of threads of the runtimes, or several.
        seconds: How long to measure times, for each file and number of threads. 0 to measure no times.
        steps: The number of batches of `data` to use; None for all.

    Returns:
        A `Card`. Print it, or take its `to_markdown()`, `to_html()` or `to_dict()`.

    Raises:
        ValueError: If a file does not belong to the model, as in `verify`.

    >>> import tempfile, torch, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(target="onnxruntime-x86"), torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = fq.export_onnx(model, f"{folder}/model.onnx", torch.ones(1, 4))
    ...     found = fq.card(model, f"{folder}/model.onnx", [torch.randn(8, 4)], seconds=0.01)
    >>> found.ok, [row.name for row in found.rows], found.rows[2].share
    (True, ['without quantizers', 'prepared', 'model.onnx'], 1.0)
    """
    check_module(model)
    check_steps(steps)
    preparation(model)  # raises an error if the model is not prepared
    paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    counts = [threads] if isinstance(threads, int) else list(threads)
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"`evaluate` must be a function that takes a model, got {type(evaluate).__name__}.")
    batches = list(islice(as_batches(data), steps))
    if not batches:
        raise ValueError("`data` has no batches.")
    check_accuracy_level(accuracy_level)
    if float_model is None:
        floats, name = unprepare(copy.deepcopy(model)), _UNQUANTIZED
    else:
        check_module(float_model, "float_model")
        floats, name = float_model, _FLOAT
    measure = _Measure(model, floats, batches, evaluate, counts, seconds, accuracy_level)
    rows = [measure.torch_row(name, floats), measure.torch_row(_PREPARED, model)]
    rows += [measure.file_row(path) for path in paths]
    if seconds:
        rows[0].training_step, rows[1].training_step = measure.training_steps()
    return Card(rows, _conditions(rows, batches))


def _conditions(rows: list[CardRow], batches: list[Any]) -> list[str]:
    """Returns what the numbers of a card depend on."""
    lines = []
    first = rows[0].name
    if first == _UNQUANTIZED:
        lines.append(
            f"{first}: its weights are those after training and ptq. Pass the float model to compare with that"
        )
    timed = next((row.latencies[0] for row in rows if row.latencies), None)
    if timed is not None:
        shapes = " and ".join("x".join(map(str, shape)) or "scalar" for shape in timed.shapes)
        lines.append(f"times: medians, of a batch of {shapes}, the file and the float model in turns")
    if any(row.training_step for row in rows):
        lines.append(
            f"training step: in torch with {counted(torch.get_num_threads(), 'thread')}, relative to the first row"
        )
    if any(row.agreement is not None for row in rows):
        number = counted(len(batches), "batch", "batches")
        lines.append(f"agreement: rows with the same argmax as in the first row of the table, in {number}")
    lines.append(f"fakequant {version('fakequant')}, torch {torch.__version__}, kernels for {_native.target()}")
    return lines


class _Measure:
    """Measures all rows on the same batches."""

    def __init__(
        self,
        model: nn.Module,
        floats: nn.Module,
        batches: list[Any],
        evaluate: Callable[[nn.Module], float] | None,
        threads: list[int],
        seconds: float,
        accuracy_level: int | None,
    ) -> None:
        self.model, self.floats, self.batches, self.evaluate = model, floats, batches, evaluate
        self.threads, self.seconds, self.accuracy_level = threads, seconds, accuracy_level

    def torch_row(self, name: str, model: nn.Module) -> CardRow:
        """Returns the row of a model in torch."""
        stored = [*model.parameters(), *model.buffers()] if model is self.floats else None
        size = None if stored is None else sum(x.numel() * x.element_size() for x in stored)
        row = CardRow(name=name, bytes=size)
        self._score(row, model)
        return row

    def file_row(self, path: str | os.PathLike[str]) -> CardRow:
        """Returns the row of a file, in its runtime."""
        found = verify(self.model, path, self.batches, accuracy_level=self.accuracy_level)
        session = session_for(path)
        opened = open_file(path, threads=self.threads[0])
        row = CardRow(
            name=Path(path).name, runtime=session.key, target=found.target, verification=found, bytes=opened.size()
        )
        if session.dequantizes:
            row.note = (
                f"{session.name} multiplies dequantized weights and is no faster than float; verify has compared its "
                "results"
            )
            return row
        self._score(row, _FileModel(opened, self.model, self.batches[0], exact_level=self.accuracy_level is not None))
        if self.seconds:
            row.latencies, row.float_bytes = latencies(
                self.model,
                path,
                self.batches[0],
                self.threads,
                runtime=session.key,
                seconds=self.seconds,
                accuracy_level=self.accuracy_level,
            )
        return row

    def _score(self, row: CardRow, model: nn.Module) -> None:
        with evaluating(model):
            if self.evaluate is not None:
                row.score = float(self.evaluate(model))
            elif model is not self.floats:
                with evaluating(self.floats):
                    row.agreement, row.sqnr = agreement(self.floats, model, self.batches)

    def training_steps(self) -> tuple[float | None, float | None]:
        """Returns the times of training steps of both models relative to the float model, if they can be trained."""
        steps: dict[str, Contender] = {}
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, model in ((_FLOAT, self.floats), (_PREPARED, self.model)):
                made = copy.deepcopy(model).train()
                learned = [p for p in made.parameters() if p.requires_grad]
                if not learned:
                    return None, None
                # Without a rate, so that weights stay as they are however often they are trained.
                steps[name] = partial(training_step, made, self.batches[0], torch.optim.SGD(learned, lr=0.0))
                if not steps[name]():
                    return None, None
            best = best_times(steps, seconds=self.seconds)
        return 1.0, best[_PREPARED] / best[_FLOAT]


@torch.no_grad()
def agreement(floats: nn.Module, model: nn.Module, batches: Iterable[Any]) -> tuple[float | None, float]:
    """Returns the share of rows with the same argmax, None if no result has any, and the SQNR of all results in dB.

    Rows are those of results with two axes, such as scores of classes, and with three, such as scores of tokens.
    """
    sums, rows, same = ErrorSums(), 0, 0
    for batch in batches:
        expected, found = (
            tensors(m(*args, **kwargs))
            for m in (floats, model)
            for args, kwargs in (copied(*call_arguments(floats, batch)),)
        )
        for y, z in zip(expected, found, strict=True):
            if not y.is_floating_point():
                continue
            sums.add_result(y, z)
            if y.dim() in (2, 3) and y.shape[-1] > 1 and y.shape == z.shape:
                rows += math.prod(y.shape[:-1])
                same += int((y.argmax(-1) == z.argmax(-1)).sum())
    return same / rows if rows else None, sums.sqnr


class _FileModel(nn.Module):
    """An exported file as a module: its results have the structure of the model's."""

    def __init__(self, file: Session, model: nn.Module, batch: Any, *, exact_level: bool) -> None:
        super().__init__()
        args, kwargs = call_arguments(model, batch)
        file.find_kernels(args, kwargs)  # which also finds the layers whose inputs are rounded
        self._run = file.results_at(exact_level=exact_level)
        # So that code that asks a parameter for its device finds one.
        self.device_of_file = nn.Parameter(torch.empty(0), requires_grad=False)
        with torch.no_grad(), evaluating(model):
            args, kwargs = copied(args, kwargs)
            self._result = model(*args, **kwargs)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the file."""
        found = self._run(args, kwargs)
        assert found is not None, "a file whose layers are rounded runs with rounding"
        return with_tensors(self._result, iter([_tensor(array) for array in found]))


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array.copy())
