"""The demo's network and data, the ways in which it is quantized, and an ordinary training loop.

The network is a small residual CNN with everything that makes deployment interesting: batch norms to fold, an addition,
a mean, and a linear layer at the end. The data are the 1,797 handwritten digits of 8 × 8 pixels of scikit-learn.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fakequant.recipes as recipes
from fakequant._train.schedule import Schedule
from fakequant._util.packages import require
from fakequant.config import LayerConfig, QuantConfig
from fakequant.nn._model_quantizers import named_quantizers, param_groups
from fakequant.spec import QuantSpec

# A module whose call has a type: nn.Module.__call__ returns Any.
Layer = Callable[[Tensor], Tensor]
BATCH = 64
# For any x86 CPU: int8 weights use 7 bits, so that sums of products cannot saturate.
TARGET = "onnxruntime-x86"
# Learning rates of SGD with cosine decay, for the float training and for the training with quantizers.
FLOAT_RATE, QUANTIZED_RATE = 0.1, 0.02
# The last part of the training with quantizers, in which ranges and batch norm statistics are frozen.
FROZEN = 0.25


def _convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_convolution(channels, channels), nn.ReLU(), *_convolution(channels, channels))
        self.relu: Layer = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Returns relu(x + body(x))."""
        return self.relu(x + self.body(x))


class DigitsNet(nn.Module):
    """Two convolutions, a residual block, the mean over the image, a linear layer: 23,738 parameters.

    >>> import torch
    >>> DigitsNet()(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(1, 16), nn.ReLU())
        self.down = nn.Sequential(*_convolution(16, 32, stride=2), nn.ReLU())
        self.block = Residual(32)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head: Layer = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores of the ten digits."""
        return self.head(self.pool(self.block(self.down(self.stem(x)))))


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images with values from 0 to 1, in random order: one half for training, one half for testing."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(self) -> list[Tensor]:
        """Returns the training images in batches."""
        return list(self.train_images.split(BATCH))


def load(seed: int = 0, images: int | None = None) -> Digits:
    """Loads the digits, shuffled with `seed`, at most `images` of them.

    >>> digits = load()
    >>> digits.train_images.shape, digits.test_images.shape
    (torch.Size([897, 1, 8, 8]), torch.Size([900, 1, 8, 8]))
    """
    datasets = require("sklearn.datasets", "scikit-learn", "demo")
    pixels, labels = (torch.from_numpy(array) for array in datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))[:images]
    found, classes = (pixels[order] / 16).float().view(-1, 1, 8, 8), labels[order]
    test = len(order) * 900 // 1797
    return Digits(found[test:], classes[test:], found[:test], classes[:test])


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    # The name of its ONNX file.
    file: str
    config: QuantConfig
    # Whether it is trained with quantizers. Otherwise it is only calibrated.
    trained: bool


def int4() -> QuantConfig:
    """Returns a config with 4-bit weights per channel and 4-bit activations per tensor, with observed ranges.

    Weights use the narrow range -7 to 7, so that batch norms with negative factors can be folded.

    >>> int4().default.weight.qmin, int4().default.input.bits
    (-7, 4)
    """
    activations = QuantSpec(bits=4, signed=False, symmetric=False)
    layer = LayerConfig(weight=QuantSpec(bits=4, narrow_range=True, axis=0), input=activations)
    return QuantConfig(default=layer, operands=activations, target=TARGET)


def variants() -> list[Variant]:
    """Returns all variants, in the order of the table."""
    return [
        Variant("PTQ int8", "ptq-int8.onnx", recipes.int8(target=TARGET), trained=False),
        Variant("QAT int8", "qat-int8.onnx", recipes.int8(target=TARGET), trained=True),
        Variant("QAT int4", "qat-int4.onnx", int4(), trained=True),
        Variant("LSQ 2-bit", "lsq-2bit.onnx", recipes.lsq(2, target=TARGET), trained=True),
    ]


def steps_of(digits: Digits, epochs: int) -> int:
    """Returns the number of training steps."""
    return epochs * max(1, len(digits.train_images) // BATCH)


def train(
    model: nn.Module, digits: Digits, epochs: int, rate: float, seed: int, after_step: Callable[[int], object]
) -> None:
    """Trains a float model, or a prepared and calibrated one, and puts it in evaluation mode.

    `rate` is the initial learning rate, and `seed` decides the order of the images. `after_step` is called after every
    step with the number of steps so far.
    """
    images, labels = digits.train_images, digits.train_labels
    generator = torch.Generator().manual_seed(seed)
    steps = steps_of(digits, epochs)
    optimizer = _optimizer(model, rate)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    is_prepared = next(named_quantizers(model), None) is not None
    freeze_at = steps - int(FROZEN * steps) if is_prepared else None
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
