"""Accuracy of an LSTM and a GRU with int8 products, compared with float, and codes compared with ONNX Runtime.

    python benchmarks/digits_recurrent.py [--json FILE] [--quick] [--seeds N] [--epochs N]

Each 8x8 image is a sequence of 8 rows. A recurrent layer of 64 units reads them, and a linear layer classifies its
last result: 19,594 parameters with the LSTM, 14,858 with the GRU. The data are those of `digits.py`: 897 training
images, 900 test images, with another split and initialization for every seed.

The network is trained in float. Every other row starts from a copy of that model:

    float, trained on    trained further in float: same steps, optimizer, order of images and schedule as QAT
    PTQ int8             `prepare` with `int8(target="onnxruntime-x86")` and `calibrate`, no training
    QAT int8             the same, then trained; ranges are frozen in the last quarter of the steps

The accuracy is that of the last step, on the test images, in percent: mean ± standard deviation over the seeds. The
models of QAT are exported, and `verify` compares all codes of golden model and ONNX Runtime on the test images.

The optimizer is Adam, and gradients are clipped to a norm of 1, as usual for recurrent layers. The learning rates were
not tuned. Runs use one thread and are reproducible.
"""

import copy
import statistics
import sys
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fakequant as fq
from digits import BATCH, Split, accuracy, formatted, measure, split

UNITS = 64
FLOAT_RATE, QUANTIZED_RATE = 0.01, 0.002  # learning rates of Adam, with cosine decay to 0
FROZEN = 0.25  # the last part of the second training, in which ranges are frozen
LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU}


class Classifier(nn.Module):
    """A recurrent layer over the rows of an image, and a linear layer on its last result."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = layer(8, UNITS, batch_first=True), nn.Linear(UNITS, 10)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x.unflatten(1, (8, 8)))
        return self.head(y[:, -1])


class Verified(NamedTuple):
    """What `verify` found for one exported model."""

    name: str
    ok: bool
    kernels: list[str]
    codes: int
    golden_differ: int
    runtime_differ: int


VERIFIED: list[Verified] = []


# --- training -------------------------------------------------------------------------------------


def train(model: nn.Module, data: Split, epochs: int, rate: float, seed: int, frozen: float = 0.0) -> None:
    images, labels, *_ = data
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(fq.nn.param_groups(model), lr=rate)
    steps = epochs * (len(images) // BATCH)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    quantized = any(True for _ in fq.nn.named_quantizers(model))
    schedule = fq.Schedule(model, freeze_ranges_at=steps - int(frozen * steps) if quantized else None)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            cosine.step()
            schedule.step()


def run_seed(seed: int, epochs: int) -> dict[str, float]:
    """Returns accuracies by the names of the rows."""
    data, found = split(seed), {}
    for name, layer in LAYERS.items():
        torch.manual_seed(seed)
        model = Classifier(layer)
        train(model, data, epochs, FLOAT_RATE, seed)
        found[f"{name} float"] = accuracy(model, data)

        longer = copy.deepcopy(model)
        train(longer, data, epochs, QUANTIZED_RATE, seed)
        found[f"{name} float, trained on"] = accuracy(longer, data)

        made = fq.prepare(copy.deepcopy(model), fq.recipes.int8(target="onnxruntime-x86"), data[0][:1])
        fq.calibrate(made, data[0].split(BATCH), progress=False)
        found[f"{name} PTQ int8"] = accuracy(made, data)
        train(made, data, epochs, QUANTIZED_RATE, seed, FROZEN)
        found[f"{name} QAT int8"] = accuracy(made, data)
        VERIFIED.append(verified(name, made, data))
    return found


def verified(name: str, model: nn.Module, data: Split) -> Verified:
    """Exports a model and compares the file with it on the test images."""
    with tempfile.TemporaryDirectory() as folder:
        fq.export_onnx(model, f"{folder}/model.onnx", data[2][:1])
        found = fq.verify(model, f"{folder}/model.onnx", data[2].split(300))
    return Verified(
        name,
        found.ok,
        sorted(set(found.kernels.values())),
        sum(t.codes for t in found.tensors),
        sum(t.prepared_differ for t in found.tensors),
        sum(t.runtime_differ for t in found.tensors),
    )


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
        Bar(f"{name} QAT int8 - float, trained on", mean[f"{name} QAT int8"] - mean[f"{name} float, trained on"], -0.5)
        for name in LAYERS
    ]


def print_table(figures: dict[str, list[float]]) -> None:
    print(f"\n{'':<23}| accuracy in percent")
    for name, values in figures.items():
        print(f"{name:<23}| {formatted(values)}")
    print("\ndifference in points              | measured |  limit")
    for bar in bars(figures):
        print(f"{bar.what:<34}| {bar.measured:+8.2f} | > {bar.more_than:+.1f} | {'met' if bar.met else 'NOT met'}")
    print("\nexported | models verified | kernels | codes   | prepared / golden | golden / runtime")
    for name in LAYERS:
        found = [one for one in VERIFIED if one.name == name]
        kernels = ", ".join(sorted({kernel for one in found for kernel in one.kernels}))
        totals = [sum(getattr(one, key) for one in found) for key in ("codes", "golden_differ", "runtime_differ")]
        ok = f"{sum(one.ok for one in found)} of {len(found)}"
        print(f"{name:<9}| {ok:<16}| {kernels:<8}| {totals[0]:<8}| {totals[1]:<18}| {totals[2]}")


def more(figures: dict[str, list[float]]) -> dict[str, object]:
    return {
        "bars": [bar._asdict() | {"met": bar.met} for bar in bars(figures)],
        "verified": [one._asdict() for one in VERIFIED],
    }


if __name__ == "__main__":
    sys.exit(measure(__doc__, 30, run_seed, print_table, more))
