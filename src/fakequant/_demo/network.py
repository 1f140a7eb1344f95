"""A small residual CNN with everything that makes deployment interesting.

It has batch norms to fold, an addition, a mean, and a linear layer at the end.
"""

from collections.abc import Callable

from torch import Tensor, nn

# A module with a typed call: that of nn.Module returns Any.
Layer = Callable[[Tensor], Tensor]


def _convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Two convolutions with a skip connection.

    >>> import torch
    >>> Residual(4)(torch.zeros(1, 4, 8, 8)).shape
    torch.Size([1, 4, 8, 8])
    """

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
