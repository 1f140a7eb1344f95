"""Quantized `nn.Linear`."""

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.nn.layer import QuantizedLayer, quantizes


@quantizes(nn.Linear)
class Linear(QuantizedLayer):
    """y = x w^T + b, with x and w quantized."""

    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """As in `nn.Linear`."""
        return self.quantize_output(self.compute(lambda x, weight: F.linear(x, weight, self.bias), input))
