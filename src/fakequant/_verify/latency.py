"""`latency`: the time of an exported file beside that of the float model in the same runtime."""

import dataclasses
import math
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._prepare.prepare import preparation
from fakequant._prepare.summary import summary
from fakequant._train.running import Batch, call_arguments, check_module
from fakequant._util.text_table import table
from fakequant._verify.file_of_model import open_file_of
from fakequant._verify.float_files import write_float
from fakequant._verify.float_layers import layers_in_float
from fakequant._verify.program_times import times_of_programs
from fakequant._verify.runtimes.executorch import ExecuTorch
from fakequant._verify.runtimes.opening import open_file
from fakequant.testing.timing import Contender, all_times


@dataclasses.dataclass(frozen=True)
class Latency:
    """The result of `latency`. Prints as a table. Times are those of one call, in milliseconds."""

    # The runtime: "onnxruntime", "openvino" or "executorch"; the target of the file; the number of threads.
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
                f"in integers: {len(self.integers)} of {layers} layers{share}",
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
    """Measures how long an exported file takes for a batch, beside the float model in the same runtime.

    The float model is exported for this: to an ONNX file with the opset and the dynamic axes of the file, or to a
    program for batches of the example's shape. Both take turns, so that a slow moment affects both alike. All
    optimizations of the runtime are on, and floats have 32 bits.

    Args:
        model: A prepared and calibrated model.
        path: The file that `export_onnx` or `export_executorch` wrote for this model.
        example: One batch: a tensor, a dict of keyword arguments, or a tuple.
        runtime: As in `verify`.
        threads: The number of threads. The pool of ExecuTorch cannot be changed safely once programs are loaded, so
            its programs are timed in a new process.
        seconds: How long to measure. There are at least five rounds, even if they take longer.
        accuracy_level: As in `verify`: 1 to time weight-only layers that do not round their inputs.

    Returns:
        A `Latency`. Print it.

    Raises:
        ValueError: If the file does not belong to the model, as in `verify`.

    Needs `pip install "fakequant[onnx]"`, and the extra `openvino` or `executorch` for files of these runtimes.

    >>> import tempfile, torch, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(target="onnxruntime-x86"), torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fq.export_onnx(model, f"{folder}/model.onnx", torch.ones(1, 4))
    ...     found = fq.latency(model, f"{folder}/model.onnx", torch.randn(8, 4), seconds=0.01)
    >>> found.runtime, found.kernels, found.median_ms > 0
    ('onnxruntime', {'0': 'QGemm'}, True)
    """
    check_module(model)
    _check(threads, seconds, accuracy_level)
    args, kwargs = call_arguments(model, example)
    file, golden = open_file_of(model, path, runtime, threads)
    file.run_unwatched(args, kwargs)  # raises an error if the batch does not fit
    file.find_kernels(args, kwargs)
    with tempfile.TemporaryDirectory() as folder:
        beside = write_float(model, args, kwargs, file, Path(folder))
        if isinstance(file, ExecuTorch):
            programs = {"file": Path(path), "float": beside}
            times = times_of_programs(programs, file.inputs(args, kwargs), threads, seconds)
        else:
            run = file.run_with_rounding if file.rounded and accuracy_level is None else file.run_unwatched
            other = open_file(beside, file.key, threads)
            contenders: dict[str, Contender] = {
                "file": partial(run, args, kwargs),
                "float": partial(other.run_unwatched, args, kwargs),
            }
            times = all_times(contenders, seconds=seconds)
    counts = preparation(model).multiplications
    return Latency(
        file.key,
        file.target or "generic",
        threads,
        [list(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)],
        statistics.median(times["file"]) * 1e3,
        min(times["file"]) * 1e3,
        statistics.median(times["float"]) * 1e3,
        min(times["float"]) * 1e3,
        file.kernels,
        [layer for layer in file.kernels if layer in file.integers],
        layers_in_float(model, golden, file),
        summary(model).multiplications,
        sum(counts.get(layer, 0) for layer in file.integers),
    )


def _check(threads: Any, seconds: Any, accuracy_level: Any) -> None:
    if type(threads) is not int or threads < 1:
        raise ValueError(f"`threads` must be a number of at least 1, got {threads!r}.")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(f"`seconds` must be a positive number, got {seconds!r}.")
    if accuracy_level not in (None, 1):
        raise ValueError(f"`accuracy_level` must be 1, or None for the default of the runtime, got {accuracy_level!r}.")
