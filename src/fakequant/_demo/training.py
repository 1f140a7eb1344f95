"""An ordinary training loop, for float and prepared models alike."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fakequant._demo.data import BATCH, Digits
from fakequant._train.schedule import Schedule
from fakequant.nn._model_quantizers import quantizers
from fakequant.nn._param_groups import param_groups

# Of SGD, down to 0 along half a cosine: for the first training, and for the second one with quantizers.
FLOAT_RATE, QUANTIZED_RATE = 0.1, 0.02
# The last part of the second training, in which ranges and statistics of batch norms stay as they are.
FROZEN = 0.25


def steps_of(digits: Digits, epochs: int) -> int:
    """How many steps `train` takes."""
    return epochs * max(1, len(digits.train_images) // BATCH)


def train(
    model: nn.Module, digits: Digits, epochs: int, rate: float, seed: int, after_step: Callable[[int], object]
) -> None:
    """Trains a model, which is calibrated if it is prepared; `after_step` is told how many steps were done."""
    images, labels = digits.train_images, digits.train_labels
    generator = torch.Generator().manual_seed(seed)
    steps = steps_of(digits, epochs)
    optimizer = _optimizer(model, rate)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    freeze_at = None
    if next(quantizers(model), None) is not None:
        freeze_at = steps - int(FROZEN * steps)
    schedule = Schedule(model, freeze_ranges_at=freeze_at, freeze_norms_at=freeze_at)
    model.train()
    done = 0
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order.split(BATCH)[: steps // epochs]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            cosine.step()
            schedule.step()
            done += 1
            after_step(done)
    model.eval()


def training_step(model: nn.Module, digits: Digits) -> Callable[[], None]:
    """One step on one batch, to be timed; the model is trained by it."""
    images, labels = digits.train_images[:BATCH], digits.train_labels[:BATCH]
    optimizer = _optimizer(model, QUANTIZED_RATE)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of the images whose digit a model finds; it is in evaluation mode afterwards."""
    model.eval()
    return float((model(images).argmax(1) == labels).double().mean()) * 100


@torch.no_grad()
def certainty(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The probability that a model gives the right digit, in percent: it changes before any image is read wrong."""
    model.eval()
    return float(model(images).double().softmax(1)[torch.arange(len(labels)), labels].mean()) * 100


def _optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    groups = param_groups(model, lr=QUANTIZED_RATE)
    return torch.optim.SGD(groups, lr=rate, momentum=0.9, weight_decay=1e-4)
