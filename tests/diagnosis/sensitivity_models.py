"""Configs and a model for the tests of `sensitivity` and its suggestions."""

import pytest

from fakequant import LayerConfig, QuantConfig, QuantSpec, presets

torch = pytest.importorskip("torch")
nn = torch.nn

# One scale for a whole weight.
INT4 = QuantConfig(default=LayerConfig(weight=QuantSpec(bits=4, narrow_range=True), input=presets.uint8()))
INT8 = LayerConfig(weight=presets.int8(), input=presets.uint8())


class Block(nn.Module):
    """Quantizes results between layers, and has a layer whose input is on the grid of another module."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.relu(self.stem(x))
        return self.head((x + self.norm(self.conv(x))).mean((2, 3)))
