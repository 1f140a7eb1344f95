"""Layers whose products are layers of their own: recurrent layers and experts.

Such a layer, the owner, is prepared or converted too: its class changes, so that its forward pass calls its products.
Its products are the quantized layers.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from fakequant.nn._layer_kinds import AnyLayer, LayerKind
from fakequant.nn._quantized_layer import kind_of
from fakequant.nn._records import LayerRecord


class OwnedProduct(nn.Module):
    """The product of a tensor with one weight of another layer, its owner, plus the bias.

    It has no parameters. `weight` and `bias` are read from the owner, which keeps them under their own names. It is a
    child of the owner, so that its quantizers and codes have a place of their own.

    `weight` and `bias` are their names. The owner need not have the bias.
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
    """Returns the weight of a layer as the model stores it. A product may read it in another form."""
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


class OwnerKind(LayerKind):
    """The base of kinds of layers whose products are layers of their own."""

    # The class of the record of a prepared or converted layer.
    record: ClassVar[type[LayerRecord]]

    @classmethod
    def products(cls, module: AnyLayer) -> dict[str, OwnedProduct]:
        """Returns new products for a float layer, by their names as children."""
        raise NotImplementedError


def is_owner(module: nn.Module) -> bool:
    """Returns True for a layer with an `OwnerKind`, quantized or not.

    >>> is_owner(nn.LSTM(2, 2)), is_owner(nn.Linear(2, 2))
    (True, False)
    """
    kind = kind_of(module)
    return kind is not None and issubclass(kind, OwnerKind)


def owner_record(module: nn.Module) -> LayerRecord:
    """Returns the record with which a float layer becomes a prepared or converted owner."""
    kind = _kind(module)
    return kind.record(kind=kind, float_class=type(module))


def products_of(module: nn.Module) -> dict[str, OwnedProduct]:
    """Returns new products for a float layer, by name.

    >>> list(products_of(nn.LSTM(2, 2)))
    ['ih_l0', 'hh_l0']
    """
    return _kind(module).products(module)


def _kind(module: nn.Module) -> type[OwnerKind]:
    kind = kind_of(module)
    assert kind is not None
    assert issubclass(kind, OwnerKind)
    return kind
