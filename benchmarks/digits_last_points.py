"""Accuracy at 2 and 3 bits with distillation, progressive bits, and two remedies for oscillating weights.

    python benchmarks/digits_last_points.py [--json FILE] [--quick] [--seeds N] [--epochs N]

The network is the depthwise-separable CNN of `digits_depthwise.py`, the kind on which oscillation was found to cost
most. The data are those of `digits.py`: 897 training images, 900 test images, with another split and initialization
for every seed. The network is trained in float. Every row starts from a copy of that model, with the recipe `lsq` for
the target `onnxruntime-x86`, and trains for the same number of steps with Adam and a cosine decay to 0:

    baseline        cross entropy
    constant rate   the same, without the decay
    distilled       the same + `fakequant.distill` from the float model, at temperature 4
    progressive     8 bits in the first third of the steps, then 4 bits, then the bits of the row
    dampened        the same as the baseline + a loss that pulls weights to the middle of their codes, the sum of
                    (fake-quantized weight - clipped weight)^2; its factor grows from 0 to 0.01 along a cosine
    frozen          a weight whose code keeps turning back is set to its mean code and stays there; "keeps turning"
                    means a moving average of turns (constant 0.01) above a threshold that falls from 0.02 to 0.005

The last two are those of Nagel et al., "Overcoming Oscillations in Quantization-Aware Training" (2022). Learned scales
are frozen in the last quarter of the steps. Each row is trained with three treatments of batch norm:

    running         running statistics to the end
    re-estimated    the same model, with statistics computed again over the training images
    norms frozen    statistics frozen in the last quarter, which is what the guides recommend

The figures are accuracies of the last step on the test images, in percent: mean ± standard deviation over the seeds. In
brackets is the difference from the baseline with the same seed and batch norm. A star marks differences whose mean is
larger than their standard deviation; others are noise. `turning` is the share of weights of few bits, in percent, whose
code turned back at least once in the last quarter of the steps ("running").

Rates, temperature, factor and threshold were chosen on four other seeds, with 250 of the training images for validation:
rates of weights 0.001, 0.003 and 0.01, with and without decay; rates of scales 0.003 to 0.0001, of which only the last
two let 8-bit scales survive Adam, which the progressive rows need; temperatures 1, 2 and 4, in 60 epochs; factors 0.01 and 0.1;
thresholds 0.04 to 0.01, 0.02 to 0.005 and 0.01 to 0.0025. Most of these choices differed by less than the spread.
"""

import copy
import math
import statistics
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import fakequant as fq
from digits import BATCH, FLOAT_RATE, Split, formatted, measure, split
from digits_cnn import train as train_with_sgd
from digits_depthwise import accuracy, network

BITS = (2, 3)
METHODS = ("baseline", "constant rate", "distilled", "progressive", "dampened", "frozen")
NORMS = ("running", "re-estimated", "norms frozen")
RATE, SCALE_RATE = 3e-3, 1e-4  # learning rates of Adam: of weights, and of learned scales
LAST = 0.25  # the last part of the steps, in which ranges and batch norms are frozen
TEMPERATURE = 4.0
DAMPENING = 0.01
MOMENTUM, THRESHOLDS = 0.01, (0.02, 0.005)


# --- oscillation ----------------------------------------------------------------------------------


def cosine(first: float, last: float, share: float) -> float:
    """Returns a number that goes from `first` to `last` as `share` goes from 0 to 1."""
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


def low_bit_layers(model: nn.Module) -> Iterator[nn.Module]:
    for layer in model.modules():
        if isinstance(layer, fq.nn.QuantizedLayer) and layer.weight_quantizer.spec.bits <= max(BITS):
            yield layer


def grid_of(layer: nn.Module) -> tuple[Tensor, int, int]:
    """Returns the scale of a weight, shaped to divide it, and its lowest and highest code."""
    quantizer = layer.weight_quantizer
    scale = quantizer.scale.detach().reshape(-1, *[1] * (layer.weight.dim() - 1))
    return scale, quantizer.spec.qmin, quantizer.spec.qmax


def dampening(model: nn.Module) -> Tensor:
    """Returns the sum of squared distances of weights from the middle of their codes. Clipped weights add nothing."""
    total = torch.zeros(())
    for layer in low_bit_layers(model):
        scale, low, high = grid_of(layer)
        codes = (layer.weight.detach() / scale).round().clamp(low, high)
        inside = torch.maximum(torch.minimum(layer.weight, high * scale), low * scale)
        total = total + (codes * scale - inside).square().sum()
    return total


class Turns:
    """How often the codes of a weight turn back, with the weights that are frozen for it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.codes = self.current()
        self.mean = self.codes.clone()
        self.direction, self.rate, self.number, self.frozen_at = (torch.zeros_like(self.codes) for _ in range(4))
        self.is_frozen = torch.zeros_like(self.codes, dtype=torch.bool)

    def current(self) -> Tensor:
        scale, low, high = grid_of(self.layer)
        return (self.layer.weight.detach() / scale).round().clamp(low, high)

    def count(self) -> None:
        """Counts the codes that changed in the direction opposite to their last change."""
        codes = self.current()
        change = (codes - self.codes).sign()
        turned = (change * self.direction < 0).float()
        self.direction = torch.where(change != 0, change, self.direction)
        self.rate.lerp_(turned, MOMENTUM)
        self.number += turned
        self.mean.lerp_(codes, MOMENTUM)
        self.codes = codes

    @torch.no_grad()
    def freeze(self, threshold: float) -> None:
        """Freezes weights that turn more often than the threshold, and puts all frozen weights on their codes."""
        new = (self.rate > threshold) & ~self.is_frozen
        self.frozen_at = torch.where(new, self.mean.round(), self.frozen_at)
        self.is_frozen |= new
        self.layer.weight.copy_(torch.where(self.is_frozen, self.frozen_at * grid_of(self.layer)[0], self.layer.weight))
        self.codes = torch.where(self.is_frozen, self.frozen_at, self.codes)


def turning(turns: list[Turns]) -> float:
    return torch.cat([t.number.flatten() > 0 for t in turns]).float().mean().item() * 100


# --- training -------------------------------------------------------------------------------------


def batches(data: Split, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels, *_ = data
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            yield images[batch], labels[batch]


def train(
    float_model: nn.Module, data: Split, bits: int, epochs: int, seed: int, method: str, *, norms_frozen: bool
) -> tuple[nn.Module, float]:
    """Returns a trained model, and the share of its weights that turned in the last part."""
    steps = epochs * (len(data[0]) // BATCH)
    last = steps - int(LAST * steps)
    stages = {0: 8, steps // 3: 4, 2 * steps // 3: bits} if method == "progressive" else {0: bits}
    start = max(stages)
    model = copy.deepcopy(float_model)
    for step, (images, labels) in enumerate(batches(data, epochs, seed)):
        if step in stages:
            model = fq.prepare(
                model if step == 0 else fq.unprepare(model),
                fq.recipes.lsq(stages[step], target="onnxruntime-x86"),
                data[0][:BATCH],
            )
            fq.calibrate(model, data[0].split(BATCH), progress=False)
            model.train()
            optimizer = torch.optim.Adam(fq.nn.param_groups(model, lr=SCALE_RATE), lr=RATE)
            at = last - start if step == start else None
            schedule = fq.Schedule(model, freeze_ranges_at=at, freeze_norms_at=at if norms_frozen else None)
            distillation = fq.distill(model, float_model, temperature=TEMPERATURE)
            turns = [Turns(layer) for layer in low_bit_layers(model)]
            rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate if method == "constant rate" else cosine(rate, 0.0, step / steps)
        optimizer.zero_grad()
        y = model(images)
        loss = nn.functional.cross_entropy(y, labels)
        if method == "distilled":
            loss = loss + distillation(y, images)
        if method == "dampened":
            loss = loss + cosine(0.0, DAMPENING, step / steps) * dampening(model)
        loss.backward()
        optimizer.step()
        schedule.step()
        for turn in turns:
            if step == last:
                turn.number.zero_()
            turn.count()
            if method == "frozen":
                turn.freeze(cosine(*THRESHOLDS, step / steps))
    return model, turning(turns)


@torch.no_grad()
def estimate_norms_again(model: nn.Module, data: Split) -> None:
    """Sets the statistics of batch norms to their mean over the training images."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    model.train()
    for images in data[0].split(BATCH):
        model(images)


def run_seed(seed: int, epochs: int) -> dict[str, float]:
    """Returns accuracies by bits, method and treatment of batch norm, and shares of turning weights."""
    data = split(seed)
    torch.manual_seed(seed)
    float_model = network()
    train_with_sgd(float_model, data, epochs, FLOAT_RATE, seed)
    found = {"float": accuracy(float_model.eval(), data)}
    for bits in BITS:
        for method in METHODS:
            name = f"{bits} bits, {method}"
            model, turned = train(float_model, data, bits, epochs, seed, method, norms_frozen=False)
            found[f"{name}, running"] = accuracy(model.eval(), data)
            estimate_norms_again(model, data)
            found[f"{name}, re-estimated"] = accuracy(model.eval(), data)
            model, _ = train(float_model, data, bits, epochs, seed, method, norms_frozen=True)
            found[f"{name}, norms frozen"] = accuracy(model.eval(), data)
            found[f"{name}, turning"] = turned
    return found


# --- output ---------------------------------------------------------------------------------------


def differences(figures: dict[str, list[float]], bits: int, method: str, norms: str) -> list[float]:
    """Returns what a method adds to the baseline, by seed."""
    pairs = zip(figures[f"{bits} bits, {method}, {norms}"], figures[f"{bits} bits, baseline, {norms}"], strict=True)
    return [value - baseline for value, baseline in pairs]


def is_more_than_noise(values: list[float]) -> bool:
    return len(values) > 1 and abs(statistics.mean(values)) > statistics.stdev(values)


def cell(figures: dict[str, list[float]], bits: int, method: str, norms: str) -> str:
    text = formatted(figures[f"{bits} bits, {method}, {norms}"])
    if method == "baseline":
        return text
    added = differences(figures, bits, method, norms)
    star = "*" if is_more_than_noise(added) else ""
    return f"{text} ({'+' if statistics.mean(added) >= 0 else ''}{formatted(added)}){star}"


def print_table(figures: dict[str, list[float]]) -> None:
    print(f"\n{'':<22}" + "".join(f"| {norms:<26}" for norms in NORMS) + "| turning")
    print(f"{'float':<22}| {formatted(figures['float'])}")
    for bits in BITS:
        for method in METHODS:
            cells = "".join(f"| {cell(figures, bits, method, norms):<26}" for norms in NORMS)
            turned = statistics.mean(figures[f"{bits} bits, {method}, turning"])
            print(f"{f'{bits} bits, {method}':<22}{cells}| {turned:.1f}")


if __name__ == "__main__":
    sys.exit(measure(__doc__, 40, run_seed, print_table))
