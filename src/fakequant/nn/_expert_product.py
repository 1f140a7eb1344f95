"""`ExpertProduct`: one product of all experts of a module, as a layer of its own."""

from torch import Tensor

from fakequant.nn._expert_groups import Groups
from fakequant.nn._layer_kinds import AnyLayer, LayerKind, quantizes
from fakequant.nn._owned_product import OwnedProduct
from fakequant.nn._quantized_layer import quantize_output


class ExpertProduct(OwnedProduct):
    """The products of rows, each with the matrix of its expert, plus the bias.

    `weight` is a matrix: the weights of all experts, one after the other, with the shape (experts * outputs, inputs).
    So scales per channel are scales per expert and output. `bias` has the shape (experts * outputs,).
    """

    def read(self, name: str) -> Tensor | None:
        """Returns the weight of the owner as a matrix, or its bias as a vector."""
        value = super().read(name)
        if value is None or name == "bias":
            return None if value is None else value.flatten()
        return (value.transpose(1, 2) if self.owner.is_transposed else value).flatten(0, 1)

    def forward(self, input: Tensor, groups: Groups) -> Tensor:
        """Returns the products in float. `input` has the rows of all experts, in the order that `groups` says."""
        return groups.linear(input, self.weight, self.bias)


@quantizes(ExpertProduct)
class QuantizedExpertProduct(LayerKind):
    """A product of all experts with quantized rows and weights. All rows of a call are observed as one tensor."""

    @staticmethod
    def forward(layer: AnyLayer, input: Tensor, groups: Groups) -> Tensor:
        """Takes and returns the same as `ExpertProduct`."""
        return quantize_output(layer, layer._fakequant.compute_groups(layer, input, groups))
