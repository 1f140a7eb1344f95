"""Quantized linear layers."""

from typing import ClassVar

from torch import Tensor, nn

from fakequant.nn._layer_kinds import AnyLayer, LayerKind, quantizes
from fakequant.nn._linear_function import linear
from fakequant.nn._own_forward import OwnForwardLinear
from fakequant.nn._quantized_layer import quantize_output


def reason_against_matrix(module: AnyLayer) -> str | None:
    """Returns why a module cannot be a linear layer, or None if its `weight` is a matrix.

    >>> reason_against_matrix(nn.Conv1d(1, 1, 1))
    'the `weight` of Conv1d is not a matrix'
    """
    if isinstance(module, nn.Linear):  # not read: reading a parametrized weight can change its state
        return None
    if getattr(getattr(module, "weight", None), "ndim", None) == 2:
        return None
    return f"the `weight` of {type(module).__name__} is not a matrix"


@quantizes(nn.Linear)
class Linear(LayerKind):
    """A layer that computes y = x w^T + b, with x and w quantized, such as `nn.Linear`.

    `weight` has the shape (outputs, inputs), and `bias` has the shape (outputs,), is None or is absent.

    >>> import fakequant as fq
    >>> kind = fq.nn.quantizes("package.module.Dense")(Linear)
    """

    own_forward: ClassVar[type[LayerKind] | None] = OwnForwardLinear

    @classmethod
    def unsupported_reason(cls, module: AnyLayer) -> str | None:
        """Returns why `module` is no such layer, or None if it is."""
        return reason_against_matrix(module)

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor) -> Tensor:
        """Takes and returns the same as `nn.Linear`."""
        return quantize_output(layer, layer._fakequant.compute(layer, linear, input))
