"""Layer kinds for linear layers of other libraries. Register them with `fakequant.nn.quantizes`.

    Linear              y = x @ weight.T + bias
    TransposedLinear    y = x @ weight + bias

The layer may be any module with these attributes and a forward pass that takes one tensor.
"""

from fakequant.nn._linear import Linear as Linear
from fakequant.nn._transposed_linear import TransposedLinear as TransposedLinear
