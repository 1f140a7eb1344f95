"""The result of the demo, and its progress: a bar for the running stage, and one line for every finished stage.

Progress goes to stderr, because stdout is for results that a machine may read.
"""

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fakequant._diagnosis.card import Card
from fakequant._model.running import Bar
from fakequant._util.files import writing
from fakequant._util.text import table

# The file with the card, in the folder of the demo.
CARD = "card.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one model. A field is None if it does not apply."""

    model: str
    # Bits of weights and activations.
    weight_bits: int
    activation_bits: int
    # On the test images, in percent: in torch, and of the file in ONNX Runtime.
    accuracy: float
    runtime_accuracy: float | None = None
    # The size of the parameters: floats, or codes, scales and biases.
    bytes: int
    onnx_bytes: int | None = None
    # The measured time of a training step, relative to the float model.
    step_time: float | None = None
    # The number of codes that differ between ONNX Runtime and the golden model, and of all codes.
    differing_codes: int | None = None
    codes: int | None = None
    # Why codes differ between torch and the integer model. Empty if they are equal, except for a few ties.
    why: str = ""
    # The kernels of ONNX Runtime, by layer.
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of `run`. Prints as a table with explanations."""

    folder: str
    rows: list[Row]
    # The number of test images.
    test_images: int
    # The measured duration of every stage.
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    # One of the models beside the float model.
    card: Card | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
        card = None if self.card is None else self.card.to_dict()
        return {**dataclasses.asdict(dataclasses.replace(self, card=None)), "card": card}

    def write(self) -> None:
        """Writes `result.json`, which is the same in every run, and `times.json` and `card.md` with measured times."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        times = {row["model"]: row.pop("step_time") for row in rows}
        self._write("result.json", {"test_images": self.test_images, "rows": rows})
        self._write("times.json", {"step_time_over_float": times, "seconds": self.seconds})

        if self.card is not None:
            self._write_text(CARD, self.card.to_markdown())

    def _write(self, name: str, value: dict[str, Any]) -> None:
        self._write_text(name, json.dumps(value, indent=2))

    def _write_text(self, name: str, text: str) -> None:
        with writing(Path(self.folder) / name) as unfinished:
            unfinished.write_text(f"{text}\n", encoding="utf-8")

    def __str__(self) -> str:
        header = ["model", "bits", "accuracy", "in the runtime", "bytes", "step time", "differing codes"]
        cells = [_cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        # Numbers and their titles are right-aligned.
        lines = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in (header, *cells)]
        for line in lines:
            line[0] = line[0].strip()
        card = [] if self.card is None else [str(self.card)]
        return "\n\n".join([table(lines[0], lines[1:]), self._meaning(), self._next(), *card])

    def _meaning(self) -> str:
        lines = [
            f"accuracy         on {self.test_images} test images, in torch; then of the ONNX file in ONNX Runtime",
            "bits, bytes      of weights / activations; of codes, scales and biases (float: of parameters)",
            "step time        of training, relative to the float model; best of many, in one thread",
            "differing codes  codes of all quantizers in ONNX Runtime that differ from the golden model's",
        ]
        if any(row.weight_bits == 7 for row in self.rows):
            lines.insert(2, "7 bits           int8 weights limited to 7 bits, so that sums are exact on any x86 CPU")
        lines += [f"{row.model:<17}integer model differs: {row.why}" for row in self.rows if row.why]
        return "\n".join(lines)

    def _next(self) -> str:
        folder = Path(self.folder)
        return (
            f"Look at it       {folder / 'report.html'} in a browser: every tensor and layer\n"
            f"Run it           {folder}/*.onnx in ONNX Runtime; all results are in result.json\n"
            "Use it           with your own model: fq.prepare, calibrate, train, export_onnx, verify"
        )


def _cells(row: Row) -> list[str]:
    return [
        row.model,
        f"{row.weight_bits} / {row.activation_bits}",
        f"{row.accuracy:.2f} %",
        "–" if row.runtime_accuracy is None else f"{row.runtime_accuracy:.2f} %",
        f"{row.bytes:,}",
        "–" if row.step_time is None else f"× {row.step_time:.2f}",
        "–" if row.codes is None else f"{row.differing_codes:,} of {row.codes:,}",
    ]


_Item = TypeVar("_Item")


class Stage:
    """A stage of the demo, with a progress bar if stderr is a terminal."""

    def __init__(self, name: str, total: int, show: bool) -> None:
        self._bar = Bar(
            total=total,
            disable=None if show else True,  # None disables it unless stderr is a terminal
            leave=False,
            ncols=min(94, shutil.get_terminal_size().columns - 1),
            bar_format="  {desc:<24} {bar} {percentage:3.0f} % {elapsed}",
        )
        self._name = name
        # The result to print in the line of the stage.
        self.result = ""

    def doing(self, what: str) -> None:
        """Shows what is being done now."""
        self._bar.set_description_str(f"{self._name}: {what}", refresh=True)

    def step(self, number: int = 1) -> None:
        """Advances the bar."""
        self._bar.update(number)

    def each(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yields the items and advances the bar after each."""
        for item in items:
            yield item
            self.step()

    def close(self) -> bool:
        """Removes the bar. Returns True if it was visible, so that other bars may replace it."""
        shown = not self._bar.disable
        self._bar.close()
        return shown


class Progress:
    """Prints a heading and a line for every finished stage, or nothing if `show` is False."""

    def __init__(self, show: bool) -> None:
        self.show = show
        # The duration of every stage.
        self.seconds: dict[str, float] = {}

    def print(self, text: str = "") -> None:
        """Prints a line to stderr."""
        if self.show:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Stage]:
        """Times a stage with `total` steps and prints its line."""
        start = time.perf_counter()
        stage = Stage(name, total, self.show)
        try:
            yield stage
        finally:
            stage.close()
        self.seconds[name] = time.perf_counter() - start
        self.print(f"  {name:<12}{stage.result:<72}{self.seconds[name]:6.1f} s")
