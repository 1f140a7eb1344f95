"""`RecurrentProduct`: one product of a recurrent layer, as a layer of its own."""

from torch import Tensor
from torch.nn import functional as F

from fakequant.nn._layer_kinds import AnyLayer, LayerKind, quantizes
from fakequant.nn._linear_function import linear
from fakequant.nn._owned_product import OwnedProduct
from fakequant.nn._quantized_layer import quantize_output
from fakequant.nn._records import Operands


class RecurrentProduct(OwnedProduct):
    """The product of a tensor with one weight of a recurrent layer, plus the bias.

    >>> from torch import nn
    >>> owner = nn.LSTM(3, 2)
    >>> RecurrentProduct(owner, "weight_hh_l0", "bias_hh_l0").weight is owner.weight_hh_l0
    True
    """

    def forward(self, input: Tensor, operands: Operands | None = None) -> Tensor:
        """Returns `input @ weight.T + bias`. `operands` are not needed in float."""
        return F.linear(input, self.weight, self.bias)


@quantizes(RecurrentProduct)
class QuantizedProduct(LayerKind):
    """A product with quantized input and weight."""

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor, operands: Operands | None = None) -> Tensor:
        """Returns the product. `operands` are those of the layer's record, for several calls with one weight."""
        return quantize_output(layer, layer._fakequant.compute(layer, linear, input, operands))
