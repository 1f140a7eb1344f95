"""Accuracy of a perceptron at 4, 3 and 2 bits: min-max ranges, compared with learned scales (LSQ, LSQ+) and with float.

    python benchmarks/digits.py [--json FILE] [--quick] [--seeds N] [--epochs N]

A multilayer perceptron, 64-64-64-10, is trained on scikit-learn's digits: 897 training images, 900 test images, with
another split and initialization for every seed. It is trained in float. Each method then starts from that model and
trains for the same number of steps with the same optimizer, with all weights and all inputs of layers quantized:

    min-max          weights per channel with the range of the current tensor; inputs with a moving average of ranges
    LSQ              weights per channel, and inputs: learned scales, initialized by LSQ's rule; zero point 0
    LSQ+             the same weights; inputs with learned scales and zero points, initialized to the least error
    LSQ+ min-max     as LSQ+, but inputs are initialized to the range of the data

The accuracy is that of the last step, on the test images, in percent: mean ± standard deviation over the seeds. The
learning rates were not tuned. Runs use one thread and are reproducible.

No value is negative after a ReLU, so zero points have little to learn. LSQ and the two LSQ+ differ mainly in the
initial scales of the inputs, and few steps with LSQ's small gradients do not move them far.
"""

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fakequant import QuantSpec, observers
from fakequant.nn import FakeQuantize, LearnedFakeQuantize, Quantizer, name_quantizers, param_groups, switch_quantizers

BITS = (4, 3, 2)
WIDTHS = (64, 64, 64, 10)
BATCH = 64
FLOAT_RATE, QUANTIZED_RATE = 0.1, 0.02  # learning rates of SGD, with cosine decay to 0

Split = tuple[Tensor, Tensor, Tensor, Tensor]


# --- data and models ------------------------------------------------------------------------------


def split(seed: int, test: int = 900) -> Split:
    """Returns training images and labels, test images and labels."""
    images, labels = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = (images / 16).float()[order], labels[order]
    return images[test:], labels[test:], images[:test], labels[:test]


def perceptron() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class QuantizedLinear(nn.Module):
    """A linear layer whose weight and input are quantized."""

    def __init__(self, linear: nn.Linear, weight: Quantizer, activation: Quantizer) -> None:
        super().__init__()
        self.linear, self.weight, self.activation = linear, weight, activation

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.activation(x), self.weight(self.linear.weight), self.linear.bias)


def min_max(bits: int, shape: torch.Size) -> tuple[Quantizer, Quantizer]:
    return (
        FakeQuantize(QuantSpec(bits=bits, axis=0), observers.Dynamic(), shape=shape),
        FakeQuantize(QuantSpec(bits=bits, signed=False, symmetric=False), observers.MovingAverage()),
    )


def learned(bits: int, shape: torch.Size, **inputs) -> tuple[Quantizer, Quantizer]:
    unsigned = QuantSpec(bits=bits, signed=False, symmetric=False)
    weight = LearnedFakeQuantize(QuantSpec(bits=bits, axis=0), shape=shape, init="lsq")
    return weight, LearnedFakeQuantize(unsigned, **inputs)


METHODS: dict[str, Callable[[int, torch.Size], tuple[Quantizer, Quantizer]]] = {
    "min-max": min_max,
    "LSQ": partial(learned, learn_zero_point=False),
    "LSQ+": learned,
    "LSQ+ min-max": partial(learned, init=observers.MinMax()),
}


def quantized(model: nn.Sequential, method: str, bits: int) -> nn.Sequential:
    """Returns a copy of a float model with quantizers."""
    layers = [
        QuantizedLinear(layer, *METHODS[method](bits, layer.weight.shape)) if isinstance(layer, nn.Linear) else layer
        for layer in copy.deepcopy(model)
    ]
    made = nn.Sequential(*layers)
    name_quantizers(made)
    return made


# --- training -------------------------------------------------------------------------------------


def calibrate(model: nn.Module, images: Tensor) -> None:
    """Observes data in float. To be called before the optimizer is created; learned scales are then not observed again."""
    switch_quantizers(model, observing=True, quantizing=False)
    with torch.no_grad():
        model(images)
    switch_quantizers(model, quantizing=True)
    for module in model.modules():
        if isinstance(module, LearnedFakeQuantize):
            module.observing = False


def train(model: nn.Module, data: Split, epochs: int, rate: float, seed: int) -> None:
    images, labels, *_ = data
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(param_groups(model), lr=rate, momentum=0.9, weight_decay=1e-4)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
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
    *_, images, labels = data
    model.eval()
    return (model(images).argmax(1) == labels).double().mean().item() * 100


def run_seed(seed: int, epochs: int) -> dict[str, float]:
    """Returns accuracies by name: "float", "LSQ 4" and so on."""
    data = split(seed)
    torch.manual_seed(seed)
    model = perceptron()
    train(model, data, epochs, FLOAT_RATE, seed)
    found = {"float": accuracy(model, data)}
    for bits in BITS:
        for method in METHODS:
            made = quantized(model, method, bits)
            calibrate(made, data[0])
            train(made, data, epochs, QUANTIZED_RATE, seed)
            found[f"{method} {bits}"] = accuracy(made, data)
    return found


# --- output ---------------------------------------------------------------------------------------


def formatted(figures: list[float]) -> str:
    spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
    return f"{statistics.mean(figures):.1f} ± {spread:.1f}"


def print_table(figures: dict[str, list[float]]) -> None:
    print(f"\n{'bits':<6}" + "".join(f"| {name:<14}" for name in METHODS))
    for bits in BITS:
        print(f"{bits:<6}" + "".join(f"| {formatted(figures[f'{m} {bits}']):<14}" for m in METHODS))
    print(f"{'float':<6}| {formatted(figures['float'])}")


def measure(
    description: str,
    epochs: int,
    run: Callable[[int, int], dict[str, float]],
    show: Callable[[dict[str, list[float]]], object],
    more: Callable[[dict[str, list[float]]], dict[str, object]] = lambda figures: {},
) -> int:
    """Runs the command line of an accuracy benchmark.

    Args:
        description: The docstring of the script.
        epochs: The default of `--epochs`.
        run: Takes a seed and a number of epochs, returns accuracies by name.
        show: Prints the accuracies, one per seed, of each name.
        more: Returns further entries of the JSON file.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--epochs", type=int, default=epochs, help="of training in float, and again of training with quantizers"
    )
    parser.add_argument("--quick", action="store_true", help="one seed and a quarter of the epochs")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, max(options.epochs // 4, 1)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    start = time.perf_counter()
    figures: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        for name, value in run(seed, options.epochs).items():
            figures.setdefault(name, []).append(value)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    show(figures)
    if options.json:
        versions = {name: version(name) for name in ("fakequant", "torch", "scikit-learn")}
        written = {"versions": versions, "epochs": options.epochs, "accuracy_percent": figures, **more(figures)}
        with open(options.json, "w") as file:
            json.dump(written, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(measure(__doc__, 30, run_seed, print_table))
