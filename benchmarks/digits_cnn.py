"""Accuracy of a small CNN through `prepare`, `calibrate` and training: PTQ and QAT, compared with float.

    python benchmarks/digits_cnn.py [--json FILE] [--quick] [--seeds N] [--epochs N]

The network has a convolution of 16 channels, one of 32 with stride 2 and a residual block of 32, each convolution
with batch norm and ReLU, then the mean over the image and a linear layer: 23,738 parameters. The data are those of
`digits.py`: 897 training images, 900 test images, with another split and initialization for every seed.

The network is trained in float. Every other row starts from a copy of that model:

    float, trained on    trained further in float: same steps, optimizer, order of images and schedule as QAT
    PTQ                  `prepare` and `calibrate` on the training images, no training
    QAT                  the same, then trained

    int8, w4a8           the recipes
    min-max b            weights and activations of b bits: weights per channel with the range of the current tensor,
                         activations with a moving average of the range
    LSQ b                the recipe `lsq(b)`: the same grids, with learned scales and zero points
    LSQ b everywhere     the same, but without 8 bits for the first and last layer (`first_last_bits=None`)

The operands of the addition have b bits too. Ranges, learned scales and the statistics of batch norm are frozen in
the last quarter of the steps.

The accuracy is that of the last step, on the test images, in percent: mean ± standard deviation over the seeds. The
learning rates are those of `digits.py`; learned scales use that of the weights, without weight decay. They were not
tuned (half the rate in the second training was tried, on other seeds). Runs use one thread and are reproducible.

Few steps with LSQ's small gradients change its scales by a few percent at most, so LSQ and min-max differ mainly in
the initial scales. This is worth some points at 2 bits; at 3 bits the difference is within the spread of the seeds.
"""

import copy
import dataclasses
import statistics
import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fakequant as fq
from digits import BATCH, FLOAT_RATE, QUANTIZED_RATE, Split, accuracy, formatted, measure, split

SCALE_RATE = QUANTIZED_RATE
FROZEN = 0.25  # the last part of the second training, in which ranges and batch norm statistics are frozen


# --- models ---------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(channels, channels), nn.ReLU(), *convolution(channels, channels))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.body(x))


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *convolution(1, 16),
        nn.ReLU(),
        *convolution(16, 32, stride=2),
        nn.ReLU(),
        Residual(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def min_max(bits: int) -> fq.QuantConfig:
    """Returns the config of `lsq(bits)` with observed instead of learned ranges."""
    learned = fq.recipes.lsq(bits)
    assert learned.default is not None
    return dataclasses.replace(learned, default=dataclasses.replace(learned.default, learned=False))


class Row(NamedTuple):
    """A config, and whether the network is trained with it."""

    name: str
    config: fq.QuantConfig
    trained: bool


ROWS = (
    Row("PTQ int8", fq.recipes.int8(), trained=False),
    Row("PTQ min-max 4", min_max(4), trained=False),
    Row("QAT int8", fq.recipes.int8(), trained=True),
    Row("QAT w4a8", fq.recipes.w4a8(), trained=True),
    Row("QAT min-max 4", min_max(4), trained=True),
    Row("QAT min-max 3", min_max(3), trained=True),
    Row("QAT LSQ 3", fq.recipes.lsq(3), trained=True),
    Row("QAT min-max 2", min_max(2), trained=True),
    Row("QAT LSQ 2 everywhere", fq.recipes.lsq(2, first_last_bits=None), trained=True),
    Row("QAT LSQ 2", fq.recipes.lsq(2), trained=True),
)


# --- training -------------------------------------------------------------------------------------


def train(model: nn.Module, data: Split, epochs: int, rate: float, seed: int, frozen: float = 0.0) -> None:
    """Trains with an ordinary loop. A prepared model must be calibrated first, so that its learned scales exist."""
    images, labels, *_ = data
    generator = torch.Generator().manual_seed(seed)
    groups = fq.nn.param_groups(model, lr=SCALE_RATE)
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, weight_decay=1e-4)
    steps = epochs * (len(images) // BATCH)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    start = steps - int(frozen * steps) if frozen else None
    quantized = any(True for _ in fq.nn.named_quantizers(model))
    schedule = fq.Schedule(model, freeze_ranges_at=start if quantized else None, freeze_norms_at=start)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            cosine.step()
            schedule.step()


def train_in_float(seed: int, epochs: int) -> tuple[Split, nn.Module, dict[str, float]]:
    """Returns the data, the float model that all rows start from, and accuracies in float by name."""
    data = split(seed)
    torch.manual_seed(seed)
    model = network()
    train(model, data, epochs, FLOAT_RATE, seed)
    found = {"float": accuracy(model, data)}

    longer = copy.deepcopy(model)
    train(longer, data, epochs, QUANTIZED_RATE, seed, FROZEN)
    found["float, trained on"] = accuracy(longer, data)
    return data, model, found


def run_seed(seed: int, epochs: int) -> dict[str, float]:
    """Returns accuracies by the names of the rows."""
    data, model, found = train_in_float(seed, epochs)
    for row in ROWS:
        made = fq.prepare(copy.deepcopy(model), row.config, data[0][:BATCH])
        fq.calibrate(made, data[0].split(BATCH), progress=False)
        if row.trained:
            train(made, data, epochs, QUANTIZED_RATE, seed, FROZEN)
        found[row.name] = accuracy(made, data)
    return found


# --- output ---------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A difference of mean accuracies and its lower limit."""

    what: str
    measured: float
    more_than: float

    @property
    def met(self) -> bool:
        return self.measured > self.more_than


def bars(figures: dict[str, list[float]]) -> list[Bar]:
    mean = {name: statistics.mean(values) for name, values in figures.items()}
    return [
        Bar("QAT int8 - float, trained on", mean["QAT int8"] - mean["float, trained on"], -0.3),
        Bar("QAT LSQ 2 - QAT min-max 2", mean["QAT LSQ 2"] - mean["QAT min-max 2"], 0.0),
    ]


def print_table(figures: dict[str, list[float]]) -> None:
    print(f"\n{'':<21}| accuracy in percent")
    for name, values in figures.items():
        print(f"{name:<21}| {formatted(values)}")
    print("\ndifference in points         | measured |  limit")
    for bar in bars(figures):
        print(f"{bar.what:<29}| {bar.measured:+8.2f} | > {bar.more_than:+.1f} | {'met' if bar.met else 'NOT met'}")


def bars_as_data(figures: dict[str, list[float]]) -> dict[str, object]:
    return {"bars": [bar._asdict() | {"met": bar.met} for bar in bars(figures)]}


if __name__ == "__main__":
    sys.exit(measure(__doc__, 12, run_seed, print_table, bars_as_data))
