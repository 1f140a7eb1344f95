"""Bits per character of a language model with 4-bit and 3-bit weights, after post-training methods and by peers.

    python benchmarks/ptq_text.py [--json FILE] [--quick] [--seeds N] [--steps N] [--only SUBSTRING]

The model and its text are described in `text_model.py`. Every seed has another division of the text and another
initialization. The weights of all linear layers have 4 or 3 bits in groups of 32; activations, norms and the embedding
stay in float. Calibration inputs are the same for all rows: 128 windows of 64 characters of the training text.

    nearest             `recipes.int4_weight_only(32)`, and the same with 3 bits: ranges of the recipe (min-max of the group)
    gptq, adaround...   the methods of `fakequant.ptq` after that, with their defaults
    mixed...            2, 4 or 8 bits for each weight, 4 or 3 on average, as `sensitivity(candidates=(2, 4, 8))` suggests from
                        the error of the output on 32 of the windows
    MSE: ...            the same after ranges of groups with the least square error (`observers.MSE()`)
    torchao             `IntxWeightOnlyConfig`, groups of 32, symmetric; nearest
    torchao, HQQ        the same with scales by its HQQ
    ONNX Runtime        `MatMulNBitsQuantizer`, blocks of 32, evaluated in ONNX Runtime: symmetric; nearest
    ..., asymmetric     with zero points, which the other rows do not have
    ..., HQQ, GPTQ      its other algorithms, which have zero points too. In version 1.31, its GPTQ gives the same results as
                        "asymmetric": the columns that are left do not change.
    brevitas, GPTQ      groups of 32, symmetric with a narrow range; nearest, and its GPTQ with `act_order`

A row is "-" if a package is not installed or does not have it; a note says why. torchao's GPTQ of 4 bits needs a package
with kernels for GPUs.

The figures are bits per character on the test text, mean ± standard deviation over the seeds, and the share of the loss
that a method recovers: 1 - (row - float) / (nearest - float), of the means. The limits apply to the best method with
the ranges of the recipe, as determined on the validation text; nothing is chosen by the test text. Seconds are CPU time
of the method on one thread at 4 bits, without calibration (means over the seeds).
"""

import argparse
import copy
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fakequant as fq
from ptq_digits import versions
from ptq_peers import Batches, Row, Unsupported, quiet_peers
from ptq_text_peers import PEERS
from text_model import loss, text, trained

GROUP = 32
BITS = (4, 3)
WINDOWS, BATCH = 128, 16  # of calibration
MIXED = 2  # batches to measure the cost of widths
RECOVERED = 0.5  # the share of the loss that the best method must recover
FLOAT, NEAREST = "float", "nearest"


@torch.no_grad()
def bits_per_character(model: Callable[[Tensor], Tensor], windows: Tensor) -> float:
    sums = [float(loss(model(part[:, :-1]), part)) * len(part) for part in windows.split(128)]
    return sum(sums) / len(windows) / math.log(2)


# --- methods --------------------------------------------------------------------------------------


def config(bits: int, observer: fq.observers.Observer | None) -> fq.QuantConfig:
    """Returns the config for an observer of weights; None for that of the recipe."""
    recipe = fq.recipes.int4_weight_only(GROUP).skip(type="Embedding")
    assert recipe.default is not None
    assert recipe.default.weight is not None
    weight = dataclasses.replace(recipe.default.weight, bits=bits)
    layer = dataclasses.replace(recipe.default, weight=weight, weight_observer=observer)
    return dataclasses.replace(recipe, default=layer)


Method = Callable[[nn.Module, Batches], object]


def nearest(model: nn.Module, batches: Batches) -> None:
    """Leaves the model as it is."""


METHODS: dict[str, Method] = {
    NEAREST: nearest,
    "gptq": lambda model, batches: fq.ptq.gptq(model, batches, progress=False),
    "adaround": lambda model, batches: fq.ptq.adaround(model, batches, progress=False),
    "bias": lambda model, batches: fq.ptq.correct_bias(model, batches, progress=False),
}


def ours(model: nn.Module, batches: Batches, bits: int, method: Method, mse: bool) -> Row:
    made = fq.prepare(copy.deepcopy(model), config(bits, fq.observers.MSE() if mse else None), batches[0])
    fq.calibrate(made, batches, progress=False)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {made.get_submodule(name).weight_quantizer.spec.bits for name in layers} == {bits}
    start = time.process_time()
    method(made, batches)
    return Row(made.eval(), time.process_time() - start)


def mixed(model: nn.Module, batches: Batches, bits: int, method: Method) -> Row:
    """Measures the cost of widths, and applies the method with the widths of the least cost."""
    start = time.process_time()
    found = fq.sensitivity(model, config(bits, None), data=batches[:MIXED], candidates=(2, 4, 8), progress=False)
    made = fq.prepare(copy.deepcopy(model), found.suggest(bits=bits), batches[0])
    method(made, batches)
    return Row(made.eval(), time.process_time() - start)


def rows() -> dict[str, Callable[[nn.Module, Batches, int], Row]]:
    """Returns a function for each row of the table, by name."""

    def row(method: Method, mse: bool) -> Callable[[nn.Module, Batches, int], Row]:
        return lambda model, batches, bits: ours(model, batches, bits, method, mse)

    return {
        **{name: row(method, mse=False) for name, method in METHODS.items()},
        "mixed": lambda model, batches, bits: mixed(model, batches, bits, nearest),
        "mixed, gptq": lambda model, batches, bits: mixed(model, batches, bits, METHODS["gptq"]),
        **{f"MSE: {name}": row(method, mse=True) for name, method in METHODS.items()},
        **PEERS,
    }


# --- measuring ------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """What was measured of one row at a number of bits: one figure per seed."""

    test: list[float]
    validation: list[float]
    seconds: list[float]


class Measured:
    """All figures, by bits and row, and why some are missing."""

    def __init__(self) -> None:
        self.figures: dict[tuple[int, str], Figures] = {}
        self.notes: dict[str, set[str]] = {}

    def mean(self, bits: int, row: str, what: str = "test") -> float:
        return statistics.mean(getattr(self.figures[bits, row], what))

    def recovered(self, bits: int, row: str) -> float | None:
        """Returns the share of the loss of the nearest codes that a row does not have."""
        if (bits, NEAREST) not in self.figures:
            return None
        least = self.mean(bits, FLOAT)
        return 1 - (self.mean(bits, row) - least) / (self.mean(bits, NEAREST) - least)

    def best(self, bits: int) -> str | None:
        """Returns the method with the ranges of the recipe that is the best on the validation text."""
        names = [name for name in METHODS if (bits, name) in self.figures]
        return min(names, key=lambda name: self.mean(bits, name, "validation"), default=None)


def measure(measured: Measured, seed: int, steps: int, only: str) -> None:
    data = text(seed)
    model = trained(data, seed, steps)
    batches = list(data.train[:WINDOWS, :-1].split(BATCH))

    def add(bits: int, name: str, made: Callable[[Tensor], Tensor], seconds: float) -> None:
        figures = measured.figures.setdefault((bits, name), Figures([], [], []))
        figures.test.append(bits_per_character(made, data.test))
        figures.validation.append(bits_per_character(made, data.validation))
        figures.seconds.append(seconds)

    for bits in BITS:
        add(bits, FLOAT, model, 0.0)
        for name, function in rows().items():
            if only not in f"{bits} {name}":
                continue
            torch.manual_seed(seed)
            try:
                row = function(model, batches, bits)
            except Unsupported as reason:
                measured.notes.setdefault(name, set()).add(f"{bits} bits: {reason}")
            else:
                add(bits, name, row.model, row.seconds)


# --- output ---------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A measured figure and its lower limit."""

    what: str
    measured: float
    at_least: float

    @property
    def met(self) -> bool:
        return self.measured >= self.at_least


def bars(measured: Measured) -> list[Bar]:
    found: list[Bar] = []
    for bits in BITS:
        best = measured.best(bits)
        if best is None:
            continue
        recovered = measured.recovered(bits, best)
        if recovered is not None:
            found.append(Bar(f"{bits} bits, share of the loss recovered: {best}", recovered, RECOVERED))
        peers = [name for name in PEERS if (bits, name) in measured.figures]
        if peers:
            peer = min(peers, key=lambda name: measured.mean(bits, name))
            ahead = measured.mean(bits, peer) - measured.mean(bits, best)
            found.append(Bar(f"{bits} bits, {best} ahead of {peer}, bits per character", ahead, 0.0))
    return found


def formatted(figures: list[float]) -> str:
    spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
    return f"{statistics.mean(figures):.4f} ± {spread:.4f}"


def print_tables(measured: Measured) -> None:
    print(f"\n{'bits per character':<26}" + "".join(f"| {bits} bits{'':<11}recovered " for bits in BITS) + "| seconds")
    for name in (FLOAT, *rows()):
        if not any((bits, name) in measured.figures for bits in BITS) and name not in measured.notes:
            continue
        cells = []
        for bits in BITS:
            figures = measured.figures.get((bits, name))
            share = None if figures is None or name == FLOAT else measured.recovered(bits, name)
            percent = "" if share is None else f"{100 * share:.0f} %"
            cells.append(f"| {'-' if figures is None else formatted(figures.test):<16} {percent:>9} ")
        timed = measured.figures.get((BITS[0], name))
        print(
            f"{name:<26}"
            + "".join(cells)
            + ("|" if timed is None or name == FLOAT else f"| {statistics.mean(timed.seconds):.2f}")
        )
    for name, reasons in measured.notes.items():
        for reason in sorted(reasons):
            print(f"\n{name}, {reason}", end="")
    print(f"\n\n{'figure':<72}| measured | limit")
    for bar in bars(measured):
        print(f"{bar.what:<72}| {bar.measured:8.4f} | >= {bar.at_least:g} | {'met' if bar.met else 'NOT met'}")


def as_data(measured: Measured, steps: int) -> dict[str, object]:
    return {
        "versions": versions("fakequant", "torch", "torchao", "onnx", "onnxruntime", "brevitas"),
        "steps": steps,
        "rows": [{"bits": bits, "row": name, **f._asdict()} for (bits, name), f in measured.figures.items()],
        "not_available": {name: sorted(reasons) for name, reasons in measured.notes.items()},
        "bars": [bar._asdict() | {"met": bar.met} for bar in bars(measured)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800, help="of training in float")
    parser.add_argument("--only", default="", help="only rows with this in 'bits row'")
    parser.add_argument("--quick", action="store_true", help="one seed and a quarter of the steps")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, max(options.steps // 4, 1)
    torch.set_num_threads(1)
    quiet_peers()
    measured, start = Measured(), time.perf_counter()
    for seed in range(options.seeds):
        measure(measured, seed, options.steps, options.only)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print_tables(measured)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(as_data(measured, options.steps), file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
