"""What the demo found."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from fakequant._util.optional_packages import writing
from fakequant._util.text_table import table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One model. None: there is no such thing of it."""

    model: str
    # Bits of weights and activations.
    weight_bits: int
    activation_bits: int
    # Percent of the test images: in torch, and of the file in ONNX Runtime.
    accuracy: float
    runtime_accuracy: float | None = None
    # Of the weights: floats, or codes, scales and biases.
    bytes: int
    onnx_bytes: int | None = None
    # Time of a training step over that of the float model; measured, so another in every run.
    step_time: float | None = None
    # Codes that ONNX Runtime has and the golden model has not, of how many.
    differing_codes: int | None = None
    codes: int | None = None
    # Why torch has other codes than the integer model; empty: they are the same, but for a few ties.
    why: str = ""
    # Layers by the kernels that ONNX Runtime computes them with.
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """What `run` found; prints as a table, and says where to go on.

    >>> row = Row(model="float", weight_bits=32, activation_bits=32, accuracy=98.25, bytes=1000)
    >>> print(str(Result("out", [row], 900)).splitlines()[2])
    float | 32 / 32 |  98.25 % |              – | 1,000 |         – |               –
    """

    folder: str
    rows: list[Row]
    # How many the accuracies are of.
    test_images: int
    # Of every stage; measured.
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)

    def write(self) -> None:
        """`result.json`, the same in every run, and `times.json`, which is measured."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        times = {row["model"]: row.pop("step_time") for row in rows}
        self._write("result.json", {"test_images": self.test_images, "rows": rows})
        self._write("times.json", {"step_time_over_float": times, "seconds": self.seconds})

    def _write(self, name: str, value: Any) -> None:
        with writing(Path(self.folder) / name) as unfinished:
            unfinished.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        header = ["model", "bits", "accuracy", "in the runtime", "bytes", "step time", "differing codes"]
        cells = [_cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        # Numbers stand under each other at the right, and so do their titles.
        lines = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in (header, *cells)]
        for line in lines:
            line[0] = line[0].strip()
        return "\n\n".join([table(lines[0], lines[1:]), self._meaning(), self._next()])

    def _meaning(self) -> str:
        lines = [
            f"accuracy         of {self.test_images} test images, in torch; then of the ONNX file in ONNX Runtime",
            "bits, bytes      of weights / activations; of codes, scales and biases (float: of parameters)",
            "step time        of training, over the float model's; best of many, on one CPU",
            "differing codes  all that quantizers put out: ONNX Runtime beside the integer model",
        ]
        if any(row.weight_bits == 7 for row in self.rows):
            lines.insert(2, "7 bits           int8 without the highest: what any x86 adds up exactly, VNNI or not")
        lines += [f"{row.model:<17}in integers: {row.why}" for row in self.rows if row.why]
        return "\n".join(lines)

    def _next(self) -> str:
        folder = Path(self.folder)
        lines = [
            f"Look at it       {folder / 'report.html'} in a browser: every tensor and layer",
            f"Run it           {folder}/*.onnx in ONNX Runtime; all figures are in result.json",
            "Do it            with a model of yours: fq.prepare, calibrate, train, export_onnx, verify",
        ]
        return "\n".join(lines)


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
