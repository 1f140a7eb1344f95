"""Accuracy lost by rounding the biases of a 2-bit depthwise-separable CNN, compared with float biases.

    python benchmarks/digits_depthwise.py [--json FILE] [--quick] [--seeds N] [--epochs N]

The network has a convolution of 16 channels and two depthwise-separable blocks, each convolution with batch norm
and ReLU, then the mean over the image and a linear layer. The data are those of `digits.py`. The network is trained
in float. A copy is prepared with the recipe `lsq(2)` for the target `onnxruntime-x86`, calibrated and trained with
Adam. Ranges and batch norms are frozen in the last quarter.

An integer kernel adds the bias, most of which comes from the folded batch norm, as an integer at the scale of the
sums. The rows are accuracies of the same weights on the test images, in percent:

    eval()          with the biases that are deployed
    train()         in training mode, with batch norms frozen
    float bias      with float biases, which no integer kernel has
    own step        with biases rounded to the step of the weights' 2-bit codes instead of their 8-bit codes

The last row is the number of codes that differ between the golden model and ONNX Runtime.
"""

import copy
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import fakequant as fq
from digits import BATCH, FLOAT_RATE, Split, formatted, measure, split
from digits_cnn import train as train_with_sgd
from fakequant.nn import _quantized_layer

RATE = 1e-3  # learning rate of Adam
FROZEN = 0.25


def convolution(inputs: int, outputs: int, kernel: int = 3, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *convolution(1, 16),
        *convolution(16, 16, groups=16),
        *convolution(16, 32, kernel=1),
        *convolution(32, 32, groups=32),
        *convolution(32, 32, kernel=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def train(model: nn.Module, data: Split, epochs: int, seed: int) -> None:
    images, labels, *_ = data
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(fq.nn.param_groups(model), lr=RATE)
    steps = epochs * (len(images) // BATCH)
    start = steps - int(FROZEN * steps)
    schedule = fq.Schedule(model, freeze_ranges_at=start, freeze_norms_at=start)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: Split) -> float:
    """Returns the accuracy in the current mode of the model, train or eval."""
    *_, images, labels = data
    return (model(images).argmax(1) == labels).float().mean().item() * 100


@contextmanager
def replaced(place: Any, name: str, function: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, function)
    try:
        yield
    finally:
        setattr(place, name, before)


def run_seed(seed: int, epochs: int) -> dict[str, float]:
    data = split(seed)
    torch.manual_seed(seed)
    model = network()
    train_with_sgd(model, data, epochs, FLOAT_RATE, seed)
    found = {"float": accuracy(model.eval(), data)}
    quantized = fq.prepare(copy.deepcopy(model), fq.recipes.lsq(2, target="onnxruntime-x86"), data[0][:BATCH])
    fq.calibrate(quantized, data[0].split(BATCH), progress=False)
    train(quantized, data, epochs, seed)
    found["eval()"] = accuracy(quantized.eval(), data)
    found["train()"] = accuracy(quantized.train(), data)
    quantized.eval()
    with replaced(_quantized_layer, "bias_to_add", lambda layer, x, weight: layer.bias):
        found["float bias"] = accuracy(quantized, data)
    with replaced(_quantized_layer.Quantization, "weight_shift", lambda record, spec: 0):
        found["own step"] = accuracy(quantized, data)
    with tempfile.TemporaryDirectory() as folder:
        fq.export_onnx(quantized, f"{folder}/model.onnx", data[2][:2])
        verified = fq.verify(quantized, f"{folder}/model.onnx", [data[2]])
    found["differing codes"] = float(sum(tensor.runtime_differ for tensor in verified.tensors))
    return found


class Bar(NamedTuple):
    """A measured figure and its upper limit."""

    what: str
    measured: float
    at_most: float

    @property
    def met(self) -> bool:
        return self.measured <= self.at_most


def bars(figures: dict[str, list[float]]) -> list[Bar]:
    mean = {name: statistics.mean(values) for name, values in figures.items()}
    return [
        Bar("float bias - eval(), points", mean["float bias"] - mean["eval()"], 1.5),
        Bar("train() - eval(), points", abs(mean["train()"] - mean["eval()"]), 0.0),
        Bar("differing codes", max(figures["differing codes"]), 0.0),
    ]


def print_table(figures: dict[str, list[float]]) -> None:
    print(f"\n{'':<18}| accuracy in percent")
    for name, values in figures.items():
        print(f"{name:<18}| {formatted(values)}")
    print("\nfigure                       | measured |  limit")
    for bar in bars(figures):
        print(f"{bar.what:<29}| {bar.measured:8.2f} | <= {bar.at_most} | {'met' if bar.met else 'NOT met'}")


def bars_as_data(figures: dict[str, list[float]]) -> dict[str, object]:
    return {"bars": [bar._asdict() | {"met": bar.met} for bar in bars(figures)]}


if __name__ == "__main__":
    sys.exit(measure(__doc__, 20, run_seed, print_table, bars_as_data))
