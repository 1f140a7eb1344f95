"""An ordinary training loop for float and prepared models."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fakequant._demo.data import BATCH, Digits
from fakequant._train.schedule import Schedule
from fakequant.nn._model_quantizers import quantizers
from fakequant.nn._param_groups import param_groups

# Learning rates of SGD with cosine decay, for the float training and for the training with quantizers.
FLOAT_RATE, QUANTIZED_RATE = 0.1, 0.02
# The last part of the training with quantizers, in which ranges and batch norm statistics are frozen.
FROZEN = 0.25


def steps_of(digits: Digits, epochs: int) -> int:
    """Returns the number of training steps."""
    return epochs * max(1, len(digits.train_images) // BATCH)


def train(
    model: nn.Module, digits: Digits, epochs: int, rate: float, seed: int, after_step: Callable[[int], object]
) -> None:
    """Trains a float model, or a prepared and calibrated one.

    Args:
        model: The model. It is in evaluation mode afterwards.
        digits: The data.
        epochs: The number of epochs.
        rate: The initial learning rate.
        seed: The seed for the order of the images.
        after_step: Called after every step with the number of steps so far.
    """
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
    """Returns a function that trains the model by one step on a fixed batch, for timing."""
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
    """Returns the accuracy in percent. The model is in evaluation mode afterwards."""
    model.eval()
    return float((model(images).argmax(1) == labels).double().mean()) * 100


@torch.no_grad()
def certainty(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Returns the mean probability of the right digit in percent, which changes before the accuracy does."""
    model.eval()
    return float(model(images).double().softmax(1)[torch.arange(len(labels)), labels].mean()) * 100


def _optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    groups = param_groups(model, lr=QUANTIZED_RATE)
    return torch.optim.SGD(groups, lr=rate, momentum=0.9, weight_decay=1e-4)
