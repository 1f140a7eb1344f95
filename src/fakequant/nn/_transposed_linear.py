"""Linear layers whose weight is transposed: its output channels are on axis 1."""

from typing import ClassVar

import torch
from torch import Tensor

from fakequant.nn._layer_kinds import AnyLayer, LayerKind
from fakequant.nn._linear import reason_against_matrix
from fakequant.nn._quantized_layer import compute, quantize_output


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight + bias`, as one product of matrices.

    >>> transposed_linear(torch.ones(1, 1, 2), torch.ones(2, 3), None)
    tensor([[[2., 2., 2.]]])
    """
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return y.reshape(*x.shape[:-1], -1)


class TransposedLinear(LayerKind):
    """A layer that computes y = x w + b, with x and w quantized.

    `weight` has the shape (inputs, outputs), and `bias` has the shape (outputs,), is None or is absent.

    >>> import fakequant as fq
    >>> kind = fq.nn.quantizes("package.module.Conv1D")(TransposedLinear)
    """

    channel_axis: ClassVar[int] = 1

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Returns why `module` is no such layer, or None if it is."""
        return reason_against_matrix(module)

    @staticmethod
    def forward(layer: AnyLayer, x: Tensor) -> Tensor:
        """Takes and returns a tensor with features on the last axis."""
        return quantize_output(layer, compute(layer, transposed_linear, x))
