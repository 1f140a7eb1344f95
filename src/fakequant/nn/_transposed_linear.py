"""Linear layers of other libraries, known by name: transformers' `Conv1D`, whose weight is transposed, and others."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fakequant.nn._layer_kinds import LayerKind, quantizes
from fakequant.nn._linear import Linear
from fakequant.nn._quantized_layer import compute, quantize_output


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight + bias`, as one product of matrices.

    >>> transposed_linear(torch.ones(1, 1, 2), torch.ones(2, 3), None)
    tensor([[[2., 2., 2.]]])
    """
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return y.reshape(*x.shape[:-1], -1)


@quantizes("transformers.pytorch_utils.Conv1D")
class TransposedLinear(LayerKind):
    """y = x w + b, with x and w quantized."""

    channel_axis: ClassVar[int] = 1

    @staticmethod
    def forward(layer: Any, x: Tensor) -> Tensor:
        """As in `Conv1D` of transformers."""
        return quantize_output(layer, compute(layer, transposed_linear, x))


quantizes("transformers.models.falcon.modeling_falcon.FalconLinear")(Linear)
