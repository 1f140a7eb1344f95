"""`RecurrentProduct`: one product of a recurrent layer, as a layer of its own."""

from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from fakequant.nn._layer_kinds import AnyLayer, LayerKind, quantizes
from fakequant.nn._linear_function import linear
from fakequant.nn._quantized_layer import quantize_output
from fakequant.nn._records import Operands

# The names of a weight and a bias in the recurrent layer.
Names: TypeAlias = tuple[str, str]


class RecurrentProduct(nn.Module):
    """The product of a tensor with one weight of a recurrent layer, plus the bias.

    It has no parameters. `weight` and `bias` are read from the recurrent layer, its owner, which keeps them under
    their own names. It is a child of the owner, so that its quantizers and codes have a place of their own.

    Args:
        owner: The recurrent layer.
        weight: The name of the weight in the owner.
        bias: The name of the bias in the owner. The owner need not have it.

    >>> owner = nn.LSTM(3, 2)
    >>> RecurrentProduct(owner, "weight_hh_l0", "bias_hh_l0").weight is owner.weight_hh_l0
    True
    """

    def __init__(self, owner: nn.Module, weight: str, bias: str) -> None:
        super().__init__()
        self.train(owner.training)
        self.names = {"weight": weight, "bias": bias}
        self.__dict__["owner"] = owner  # not registered: the owner is no child of its child

    def __getattr__(self, name: str) -> Any:
        """Returns the weight or the bias of the owner, unless the product has one of its own."""
        if name in ("weight", "bias") and name not in self._parameters:
            value = self.names[name]
            return getattr(self.owner, value) if name == "weight" else getattr(self.owner, value, None)
        return super().__getattr__(name)

    def forward(self, input: Tensor, operands: Operands | None = None) -> Tensor:
        """Returns `input @ weight.T + bias`. `operands` are not needed in float."""
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Returns the name of the weight."""
        return self.names["weight"]


@quantizes(RecurrentProduct)
class QuantizedProduct(LayerKind):
    """A product with quantized input and weight."""

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor, operands: Operands | None = None) -> Tensor:
        """Returns the product. `operands` are those of the layer's record, for several calls with one weight."""
        return quantize_output(layer, layer._fakequant.compute(layer, linear, input, operands))


def release_from_owner(layer: nn.Module, name: str) -> None:
    """Removes the parameter that a product reads as `name` from its owner. Does nothing for other layers."""
    if not isinstance(layer, RecurrentProduct):
        return
    owner: nn.Module = layer.owner
    owner._parameters.pop(layer.names[name], None)
    if isinstance(owner, nn.RNNBase):
        owner._apply(lambda tensor: tensor, recurse=False)  # updates torch's second list of the parameters
