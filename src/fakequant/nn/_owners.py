"""Layers whose products are layers of their own: recurrent layers and experts.

Such a layer, the owner, is prepared or converted too: its class changes, so that its forward pass calls its products.
Its products are the quantized layers.
"""

from typing import ClassVar

from torch import nn

from fakequant.nn._layer_kinds import AnyLayer, LayerKind
from fakequant.nn._owned_product import OwnedProduct
from fakequant.nn._quantized_layer import kind_of
from fakequant.nn._records import LayerRecord


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
