"""Accuracy of two small CNNs with 4-bit and 3-bit weights after post-training methods, compared with peers.

    python benchmarks/ptq_digits.py [--json FILE] [--quick] [--seeds N] [--epochs N] [--only SUBSTRING]

The data are scikit-learn's digits: 897 training images, 300 validation images, 600 test images, with another split
and another initialization for every seed. There are two networks, trained in float with Adam:

    depthwise     the depthwise-separable CNN of `digits_depthwise.py` on images of 8x8
    series        four dilated Conv1d on the image as a series of 64 steps, 27,000 weights

All convolutions have batch norm and ReLU. Activations have 8 bits per tensor, weights are per channel:

    w4a8          `recipes.w4a8()`: 4-bit weights, but 8 bits in the first and the last layer
    w4a8 all      4-bit weights in all layers
    w3a8 all      3-bit weights in all layers

Every row starts from a copy of the float model and sees the same calibration inputs: 512 training images in batches
of 64, without labels.

    nearest             `prepare` and `calibrate`, with the ranges of the recipe (min-max of the weight)
    bias, adaround...   the methods of `fakequant.ptq` after that, with their defaults. In sums, the second method takes the
                        float model as reference.
    equalize...         `ptq.equalize` first. In rows "tensor: ...", weights have one scale per tensor instead of one per
                        channel.
    mixed...            2, 4 or 8 bits for each weight, 4 on average, as `sensitivity(candidates=(2, 4, 8))` suggests from the
                        error of the output; only for w4a8 all
    MSE: ...            the same after ranges of weights with the least square error (`observers.MSE()`)
    torch.ao FX         static quantization with histogram observers, evaluated with fake quantizers
    ONNX Runtime        `quantize_static`, evaluated in ONNX Runtime
    brevitas...         nearest, min-max and MSE ranges of weights; its bias correction; its GPTQ; its AdaRound ("learned"), which
                        is part of the examples in its package
    AIMET AdaRound      with 1000 steps per layer instead of 15,000, which take minutes

Peers are described in `ptq_peers.py`. A row is "-" if a package is not installed or does not have it; a note says why.

The accuracy is that on the test images, in percent: mean ± standard deviation over the seeds. The limits
apply to the best method with the ranges of the recipe. Which one that is, is determined on the validation images; nothing
is chosen by the test images.

Seconds are CPU time of the method alone, without `prepare` and `calibrate`, on one thread (means over the seeds, for w3a8
all). Where a package does all in one call, they include the calibration; such rows are marked "*".
"""

import argparse
import copy
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fakequant as fq
from digits import BATCH
from digits_depthwise import network as depthwise
from ptq_peers import PEERS, Batches, Bits, Row, Unsupported, bits_of, layer_names, quiet_peers

TEST, VALIDATION, CALIBRATION = 600, 300, 512  # numbers of images
RATE = 4e-3  # of Adam, with cosine decay to 0


class Split(NamedTuple):
    """Images and labels."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def split(seed: int) -> Split:
    images, labels = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = (images / 16).float()[order], labels[order]
    parts = (len(images) - TEST - VALIDATION, VALIDATION, TEST)
    return Split(*zip(images.split(parts), labels.split(parts), strict=True))


# --- networks -------------------------------------------------------------------------------------


def series() -> nn.Sequential:
    def convolution(inputs: int, outputs: int, dilation: int) -> list[nn.Module]:
        conv = nn.Conv1d(inputs, outputs, 3, padding=dilation, dilation=dilation, bias=False)
        return [conv, nn.BatchNorm1d(outputs), nn.ReLU()]

    return nn.Sequential(
        nn.Unflatten(1, (1, 64)),
        *convolution(1, 32, 1),
        *convolution(32, 48, 2),
        *convolution(48, 64, 4),
        *convolution(64, 64, 8),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {"depthwise": depthwise, "series": series}


def trained(make: Callable[[], nn.Sequential], data: Split, epochs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = make().train()
    images, labels = data.train
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(images) // BATCH))
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor]) -> float:
    images, labels = data
    return (model(images).argmax(1) == labels).double().mean().item() * 100


# --- recipes and methods --------------------------------------------------------------------------

RECIPES = {"w4a8": Bits(4, 8), "w4a8 all": Bits(4, 4), "w3a8 all": Bits(3, 3)}
LIMITS = {"w4a8": 1.0, "w4a8 all": 1.0, "w3a8 all": 3.0}  # points below float
TIMED = "w3a8 all"
MIXED = "w4a8 all"


def config(bits: Bits, observer: fq.observers.Observer | None, axis: int | None = 0) -> fq.QuantConfig:
    """Returns the config for an observer of weights, None for that of the recipe, and the axis of their scales."""
    recipe = fq.recipes.w4a8(first_last_bits=None if bits.first_last == bits.inner else bits.first_last)
    assert recipe.default is not None
    weight = fq.QuantSpec(bits=bits.inner, axis=axis)
    layer = dataclasses.replace(recipe.default, weight=weight, weight_observer=observer)
    return dataclasses.replace(recipe, default=layer)


Method = Callable[[nn.Module, nn.Module, Batches], object]


def nearest(model: nn.Module, reference: nn.Module, batches: Batches) -> None:
    """Leaves the model as it is."""


def bias(model: nn.Module, reference: nn.Module, batches: Batches) -> None:
    fq.ptq.correct_bias(model, batches, progress=False)


def adaround(model: nn.Module, reference: nn.Module, batches: Batches) -> None:
    fq.ptq.adaround(model, batches, progress=False)


def gptq(model: nn.Module, reference: nn.Module, batches: Batches) -> None:
    fq.ptq.gptq(model, batches, progress=False)


def then_bias(first: Method) -> Method:
    def both(model: nn.Module, reference: nn.Module, batches: Batches) -> None:
        first(model, reference, batches)
        fq.ptq.correct_bias(model, batches, reference=reference, progress=False)

    return both


def equalized(then: Method) -> Method:
    def both(model: nn.Module, reference: nn.Module, batches: Batches) -> None:
        fq.ptq.equalize(model, batches, progress=False)
        then(model, reference, batches)

    return both


METHODS: dict[str, Method] = {
    "nearest": nearest,
    "bias": bias,
    "adaround": adaround,
    "gptq": gptq,
    "adaround + bias": then_bias(adaround),
    "gptq + bias": then_bias(gptq),
    "equalize": equalized(nearest),
    "equalize + bias": equalized(bias),
}


def calibrated(model: nn.Module, batches: Batches, used: fq.QuantConfig) -> nn.Module:
    made = fq.prepare(copy.deepcopy(model), used, batches[0])
    return fq.calibrate(made, batches, progress=False)


def mixed(model: nn.Module, batches: Batches, bits: Bits, method: Method) -> Row:
    """Measures the cost of widths, and applies the method with the widths of the least cost."""
    start = time.process_time()
    found = fq.sensitivity(model, config(bits, None), data=batches, candidates=(2, 4, 8), progress=False)
    made = calibrated(model, batches, found.suggest(bits=4))
    method(made, model, batches)
    return Row(made.eval(), time.process_time() - start)


def ours(model: nn.Module, batches: Batches, bits: Bits, method: Method, mse: bool, axis: int | None = 0) -> Row:
    observer = fq.observers.MSE() if mse else None
    made = calibrated(model, batches, config(bits, observer, axis))
    widths = {name: made.get_submodule(name).weight_quantizer.spec.bits for name in layer_names(model)}
    assert widths == bits_of(model, bits), widths
    start = time.process_time()
    method(made, model, batches)
    return Row(made.eval(), time.process_time() - start)


def rows() -> dict[str, Callable[[nn.Module, Batches, Bits], Row]]:
    """Returns a function for each row of the tables, by name."""

    def row(method: Method, mse: bool) -> Callable[[nn.Module, Batches, Bits], Row]:
        return lambda model, batches, bits: ours(model, batches, bits, method, mse)

    def per_tensor(method: Method) -> Callable[[nn.Module, Batches, Bits], Row]:
        return lambda model, batches, bits: ours(model, batches, bits, method, mse=False, axis=None)

    return {
        **{name: row(method, mse=False) for name, method in METHODS.items()},
        "mixed": lambda model, batches, bits: mixed(model, batches, bits, nearest),
        "mixed, adaround": lambda model, batches, bits: mixed(model, batches, bits, adaround),
        **{f"tensor: {name}": per_tensor(METHODS[name]) for name in ("nearest", "equalize", "bias", "equalize + bias")},
        **{f"MSE: {name}": row(method, mse=True) for name, method in METHODS.items()},
        **PEERS,
    }


INCLUDE_CALIBRATION = {"torch.ao FX", "ONNX Runtime", "brevitas", "brevitas, MSE"}


# --- measuring ------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """What was measured of one row, for a network and a recipe: one figure per seed."""

    test: list[float]
    validation: list[float]
    seconds: list[float]


Key = tuple[str, str, str]  # network, recipe, row
FLOAT = "float"


class Measured:
    """All figures, and why some are missing."""

    def __init__(self) -> None:
        self.figures: dict[Key, Figures] = {}
        self.notes: dict[str, set[str]] = {}

    def add(self, key: Key, model: Callable[[Tensor], Tensor], data: Split, seconds: float) -> None:
        figures = self.figures.setdefault(key, Figures([], [], []))
        figures.test.append(accuracy(model, data.test))
        figures.validation.append(accuracy(model, data.validation))
        figures.seconds.append(seconds)

    def mean(self, network: str, recipe: str, row: str, what: str = "test") -> float:
        return statistics.mean(getattr(self.figures[network, recipe, row], what))

    def best(self, network: str, recipe: str) -> str | None:
        """Returns the method with the ranges of the recipe that is the best on the validation images."""
        names = [name for name in METHODS if (network, recipe, name) in self.figures]
        return max(names, key=lambda name: self.mean(network, recipe, name, "validation"), default=None)


def measure(measured: Measured, seed: int, epochs: int, only: str) -> None:
    data = split(seed)
    batches = list(data.train[0][:CALIBRATION].split(BATCH))
    for network, make in NETWORKS.items():
        model = trained(make, data, epochs, seed)
        for recipe, bits in RECIPES.items():
            measured.add((network, recipe, FLOAT), model, data, 0.0)
            for name, function in rows().items():
                if only not in f"{network} {recipe} {name}" or (name.startswith("mixed") and recipe != MIXED):
                    continue
                torch.manual_seed(seed)
                try:
                    row = function(model, batches, bits)
                except Unsupported as reason:
                    measured.notes.setdefault(name, set()).add(f"{network}, {recipe}: {reason}")
                else:
                    measured.add((network, recipe, name), row.model, data, row.seconds)


# --- output ---------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A measured figure and its upper limit."""

    what: str
    measured: float
    at_most: float

    @property
    def met(self) -> bool:
        return self.measured <= self.at_most


def bars(measured: Measured) -> list[Bar]:
    found: list[Bar] = []
    for network in NETWORKS:
        for recipe, limit in LIMITS.items():
            best = measured.best(network, recipe)
            if best is not None:
                lost = measured.mean(network, recipe, FLOAT) - measured.mean(network, recipe, best)
                found.append(Bar(f"{network} {recipe}, points below float: {best}", lost, limit))
    key = ("depthwise", TIMED, "adaround")
    if key in measured.figures:
        found.append(Bar("depthwise, seconds of adaround", max(measured.figures[key].seconds), 20.0))
    return found


def formatted(figures: list[float]) -> str:
    spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
    return f"{statistics.mean(figures):.1f} ± {spread:.1f}"


def print_tables(measured: Measured) -> None:
    for network in NETWORKS:
        print(f"\n{network:<24}" + "".join(f"| {recipe:<12}" for recipe in RECIPES) + "| seconds")
        for name in (FLOAT, *rows()):
            keys = [(network, recipe, name) for recipe in RECIPES]
            if not any(key in measured.figures for key in keys) and name not in measured.notes:
                continue
            cells = [formatted(measured.figures[k].test) if k in measured.figures else "-" for k in keys]
            timed = measured.figures.get((network, TIMED, name))
            seconds = "" if timed is None or name == FLOAT else f"{statistics.mean(timed.seconds):.2f}"
            mark = "*" if name in INCLUDE_CALIBRATION and seconds else ""
            print(f"{name:<24}" + "".join(f"| {cell:<12}" for cell in cells) + f"| {seconds}{mark}")
    for name, reasons in measured.notes.items():
        for reason in sorted(reasons):
            print(f"\n{name}, {reason}", end="")
    print(f"\n\n{'figure':<58}| measured | limit")
    for bar in bars(measured):
        print(f"{bar.what:<58}| {bar.measured:8.2f} | <= {bar.at_most:g} | {'met' if bar.met else 'NOT met'}")


def versions(*names: str) -> dict[str, str | None]:
    """Returns the versions of packages. None for those that are not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def as_data(measured: Measured, epochs: int) -> dict[str, object]:
    return {
        "versions": versions("fakequant", "torch", "onnxruntime", "brevitas", "aimet-torch", "scikit-learn"),
        "epochs": epochs,
        "rows": [
            {"network": network, "recipe": recipe, "row": name, **figures._asdict()}
            for (network, recipe, name), figures in measured.figures.items()
        ],
        "not_available": {name: sorted(reasons) for name, reasons in measured.notes.items()},
        "bars": [bar._asdict() | {"met": bar.met} for bar in bars(measured)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40, help="of training in float")
    parser.add_argument("--only", default="", help="only rows with this in 'network recipe row'")
    parser.add_argument("--quick", action="store_true", help="one seed and a quarter of the epochs")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, max(options.epochs // 4, 1)
    torch.set_num_threads(1)
    quiet_peers()
    measured, start = Measured(), time.perf_counter()
    for seed in range(options.seeds):
        measure(measured, seed, options.epochs, options.only)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print_tables(measured)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(as_data(measured, options.epochs), file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
