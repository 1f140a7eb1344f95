"""`latency`: the times of an exported file and of the float model in the same runtime."""

import copy
import dataclasses
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._export.example import bind_constants, without_autocast
from fakequant._export.failures import reason_of
from fakequant._model.leaves import return_tensors
from fakequant._model.running import Args, Batch, Kwargs, check_module, example_arguments
from fakequant._prepare.attach import preparation
from fakequant._prepare.prepare import unprepare
from fakequant._prepare.summary import summary
from fakequant._runtimes.session import Session
from fakequant._util.files import size_of
from fakequant._util.shown import Shown
from fakequant._util.text import counted, table
from fakequant._verify.file_of_model import check_accuracy_level, open_file_of
from fakequant._verify.float_layers import layers_in_float


@dataclasses.dataclass(frozen=True, repr=False)
class Latency(Shown):
    """The result of `latency`. Prints as a table. Times are those of one call, in milliseconds."""

    # The runtime, as an argument of `verify`; the target of the file; the number of threads.
    runtime: str
    target: str
    threads: int
    # The shapes of the batch's tensors.
    shapes: list[list[int]]
    # The median and the shortest time of the file.
    median_ms: float
    best_ms: float
    # The same for the float model.
    float_median_ms: float
    float_best_ms: float
    # The runtime's kernel for each layer with a quantized weight, by path.
    kernels: dict[str, str]
    # Layers that the runtime computes in integers.
    integers: list[str]
    # Layers that compute products in float in the runtime, by path, each with the reason. Some are not quantized.
    floats: dict[str, str]
    # Multiplications on the example of `prepare`: all, and those that the runtime computes in integers. 0 if there was
    # no example, nor a first batch of `calibrate`.
    multiplications: int
    integer_multiplications: int

    @property
    def ratio(self) -> float:
        """The median time of the file over that of the float model. Below 1, the file is faster."""
        return self.median_ms / self.float_median_ms

    @property
    def speedup(self) -> float:
        """The median time of the float model over that of the file. Above 1, the file is faster."""
        return self.float_median_ms / self.median_ms

    @property
    def share(self) -> float | None:
        """The share of the multiplications that the runtime computes in integers, from 0 to 1. None if not known."""
        return self.integer_multiplications / self.multiplications if self.multiplications else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as dicts, lists, numbers and strings."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "speedup": self.speedup, "share": self.share}

    def __str__(self) -> str:
        rows = [
            [name, f"{median:.4g}", f"{best:.4g}"]
            for name, median, best in (
                ("file", self.median_ms, self.best_ms),
                ("float model", self.float_median_ms, self.float_best_ms),
            )
        ]
        batch = " and ".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        layers = len(self.integers) + len(self.floats)
        share = "" if self.share is None else f", {self.share:.1%} of the multiplications"
        return "\n".join(
            [
                f"{self.runtime}, {threads}, batch of {batch}",
                "",
                table(["milliseconds", "median", "best"], rows),
                "",
                f"time over float: {self.ratio:.2f} ({self.speedup:.2f} times as fast)",
                f"in integers: {len(self.integers)} of {counted(layers, 'layer')}{share}",
            ]
        )


def latency(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Batch,
    *,
    runtime: str | None = None,
    threads: int = 1,
    seconds: float = 1.0,
    accuracy_level: int | None = None,
) -> Latency:
    """Measures how long an exported file and the float model take for a batch in the same runtime.

    The float model is exported for this: to an ONNX file with the opset and the dynamic axes of the file, or, in other
    formats, for batches of the example's shape. Both take turns, so that a slow moment affects both alike. All
    optimizations of the runtime are on, and floats have 32 bits.

    Args:
        model: A prepared and calibrated model.
        path: The file that an exporter, such as `export_onnx`, wrote for this model.
        example: One batch, as `prepare` takes it.
        runtime: As in `verify`.
        threads: The number of threads. A runtime whose number of threads cannot be changed safely once files are loaded
            is timed in a new process.
        seconds: How long to measure. There are at least five rounds, even if they take longer.
        accuracy_level: As in `verify`: 1 to time weight-only layers that do not round their inputs.

    Returns:
        A `Latency`. Print it.

    Raises:
        ValueError: If the file does not belong to the model, as in `verify`.

    Needs the extra of the runtime, such as `pip install "fakequant[onnx]"`.

    >>> import tempfile, torch, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(target="onnxruntime-x86"), torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = fq.export_onnx(model, f"{folder}/model.onnx", torch.ones(1, 4))
    ...     found = fq.latency(model, f"{folder}/model.onnx", torch.randn(8, 4), seconds=0.01)
    >>> found.runtime, found.kernels, found.median_ms > 0
    ('onnxruntime', {'0': 'QGemm'}, True)
    """
    found, _ = latencies(
        model, path, example, [threads], runtime=runtime, seconds=seconds, accuracy_level=accuracy_level
    )
    return found[0]


def latencies(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Batch,
    threads: Sequence[int],
    *,
    runtime: str | None = None,
    seconds: float = 1.0,
    accuracy_level: int | None = None,
) -> tuple[list[Latency], int]:
    """Measures a file with several numbers of threads, as `latency` does, but exports the float model only once.

    Returns the results, and the size of the float model's file in bytes.
    """
    check_module(model)
    for number in threads:
        _check(number, seconds, accuracy_level)
    args, kwargs = example_arguments(model, example)
    float_file, size, found = None, 0, []
    with tempfile.TemporaryDirectory() as folder:
        for number in threads:
            file, golden = open_file_of(model, path, runtime, number)
            file.run_unwatched(args, kwargs)  # raises an error if the batch does not fit
            file.find_kernels(args, kwargs)
            if float_file is None:
                float_file = write_float(model, args, kwargs, file, Path(folder))
                size = size_of(Path(folder))
            exact = accuracy_level is not None
            times = file.times_with(float_file, args, kwargs, threads=number, seconds=seconds, exact_level=exact)
            found.append(_latency(model, golden, file, number, (args, kwargs), *times))
    return found, size


def _latency(
    model: nn.Module,
    golden: nn.Module,
    file: Session,
    threads: int,
    batch: Any,
    times: list[float],
    float_times: list[float],
) -> Latency:
    counts = preparation(model).multiplications
    return Latency(
        runtime=file.key,
        target=file.target or "generic",
        threads=threads,
        shapes=[list(x.shape) for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)],
        median_ms=statistics.median(times) * 1e3,
        best_ms=min(times) * 1e3,
        float_median_ms=statistics.median(float_times) * 1e3,
        float_best_ms=min(float_times) * 1e3,
        kernels=file.kernels,
        integers=[layer for layer in file.kernels if layer in file.integers],
        floats=layers_in_float(model, golden, file),
        multiplications=summary(model).multiplications,
        integer_multiplications=sum(counts.get(layer, 0) for layer in file.integers),
    )


def _check(threads: Any, seconds: Any, accuracy_level: Any) -> None:
    if type(threads) is not int or threads < 1:
        raise ValueError(f"`threads` must be a number of at least 1, got {threads!r}.")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(f"`seconds` must be a positive number, got {seconds!r}.")
    check_accuracy_level(accuracy_level)


# --- the float model


def write_float(model: nn.Module, args: Args, kwargs: Kwargs, file: Session, folder: Path) -> Path:
    """Writes the float model of a prepared model, which is not changed, and returns the path of the new file.

    The new file is like `file`, see `Session.write_float`.
    """
    made = unprepare(copy.deepcopy(model)).eval()
    return_tensors(made)
    args, kwargs, _ = bind_constants(made, args, kwargs, None)
    try:
        with torch.no_grad(), without_autocast(), _without_fast_path():
            return file.write_float(made, args, kwargs, folder)
    except Exception as error:
        raise ValueError(f"The float model cannot be exported to compare its time: {reason_of(error)}") from error


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Context in which transformer layers call the usual operators, because runtimes have no kernel for the others."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
