"""A small residual network with 2-bit weights and activations and learned scales (LSQ).

    python examples/residual_cnn_lsq.py [--epochs N]

Compared with the loop of `digits_mlp.py`, few bits need two more things: learned scales in an optimizer group with a
separate learning rate and no weight decay (`param_groups`), and frozen ranges and batch norm statistics in the last
quarter of the training (`Schedule`).
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fakequant as fq

BATCH = 30


def convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """Returns a convolution and a batch norm, which `convert` folds into it."""
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(channels, channels), nn.ReLU(), *convolution(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the input; `prepare` quantizes both operands of the addition too."""
        return torch.relu(x + self.body(x))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    """Trains with one loop for float and quantized models."""
    steps = epochs * (len(x) // BATCH)
    optimizer = torch.optim.SGD(fq.nn.param_groups(model, lr=rate), lr=rate, momentum=0.9, weight_decay=1e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    quantized = any(True for _ in fq.nn.named_quantizers(model))
    late = steps * 3 // 4
    schedule = fq.Schedule(model, freeze_ranges_at=late, freeze_norms_at=late) if quantized else None
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            cosine.step()
            if schedule:
                schedule.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Returns the accuracy in percent."""
    model.eval()
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).double().mean().item()


def main() -> None:
    """Prints the accuracies and the health of the quantizers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="of each training")
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images))
    x, y = torch.tensor(images, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16, torch.tensor(labels)[order]

    model = nn.Sequential(
        *convolution(1, 16), nn.ReLU(),
        *convolution(16, 32, stride=2), nn.ReLU(),
        Residual(32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    train(model, x[:900], y[:900], epochs, rate=0.05)
    print(f"float               {accuracy(model, x[900:], y[900:]):.1f} %")

    fq.prepare(model, fq.recipes.lsq(2), example=x[:1])
    fq.calibrate(model, x[:900].split(BATCH), progress=False)  # initializes the learned scales
    print(f"2 bits, calibrated  {accuracy(model, x[900:], y[900:]):.1f} %")
    before = {name: quantizer.scale.clone() for name, quantizer in fq.nn.named_quantizers(model)}
    train(model, x[:900], y[:900], epochs, rate=0.02)
    print(f"2 bits, trained     {accuracy(model, x[900:], y[900:]):.1f} %")
    moved = [float((q.scale / before[name] - 1).abs().max()) for name, q in fq.nn.named_quantizers(model)]
    print(f"{len(moved)} quantizers learned: their scales moved by up to {100 * max(moved):.1f} %")
    print(fq.health(model, [x[:BATCH]]))


if __name__ == "__main__":
    main()
