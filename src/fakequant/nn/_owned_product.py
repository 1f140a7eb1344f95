"""`OwnedProduct`: one product of a layer that has several weights, as a layer of its own."""

from typing import Any

from torch import Tensor, nn

from fakequant.nn._layer_kinds import AnyLayer


class OwnedProduct(nn.Module):
    """The product of a tensor with one weight of another layer, its owner, plus the bias.

    It has no parameters. `weight` and `bias` are read from the owner, which keeps them under their own names. It is a
    child of the owner, so that its quantizers and codes have a place of their own.

    Args:
        owner: The layer.
        weight: The name of the weight in the owner.
        bias: The name of the bias in the owner. The owner need not have it.
    """

    def __init__(self, owner: nn.Module, weight: str, bias: str) -> None:
        super().__init__()
        self.train(owner.training)
        self.names = {"weight": weight, "bias": bias}
        self.__dict__["owner"] = owner  # not registered: the owner is no child of its child

    def __getattr__(self, name: str) -> Any:
        """Returns the weight or the bias of the owner, unless the product has one of its own."""
        if name in ("weight", "bias") and name not in self._parameters:
            return self.read(name)
        return super().__getattr__(name)

    def read(self, name: str) -> Tensor | None:
        """Returns "weight" or "bias" of the owner, in the form in which the product multiplies by it and adds it."""
        own: Tensor | None = (
            getattr(self.owner, self.names[name]) if name == "weight" else getattr(self.owner, self.names[name], None)
        )
        return own

    def extra_repr(self) -> str:
        """Returns the name of the weight."""
        return self.names["weight"]


def stored_weight(layer: AnyLayer, name: str) -> Tensor:
    """Returns the weight of a layer as the model stores it. A product may read it in another form.

    Args:
        layer: A layer, or a product of one.
        name: The name of the weight in the layer.
    """
    if isinstance(layer, OwnedProduct) and layer.names[name] in layer.owner._parameters:
        layer, name = layer.owner, layer.names[name]
    weight: Tensor = getattr(layer, name)
    return weight


def release_from_owner(layer: nn.Module, name: str) -> None:
    """Removes the parameter that a product reads as `name` from its owner. Does nothing for other layers."""
    if not isinstance(layer, OwnedProduct):
        return
    owner: nn.Module = layer.owner
    owner._parameters.pop(layer.names[name], None)
    if isinstance(owner, nn.RNNBase):
        owner._apply(lambda tensor: tensor, recurse=False)  # updates torch's second list of the parameters
