"""Handwritten digits: the 1,797 images of 8 × 8 pixels that come with scikit-learn."""

import dataclasses

import torch
from torch import Tensor

from fakequant._util.optional_packages import require

BATCH = 64


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
