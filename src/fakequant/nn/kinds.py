"""Layer kinds for layers of other libraries. Register them with `fakequant.nn.register_layer_kind`.

    Linear              y = x @ weight.T + bias
    TransposedLinear    y = x @ weight + bias
    Experts             the experts of a mixture, whose weights are 3-D parameters

A linear layer may be any module with these attributes and a forward pass that takes one tensor. `Experts` lists the
attributes that it needs.
"""

from fakequant.nn._experts import Experts as Experts
from fakequant.nn._layers import Linear as Linear, TransposedLinear as TransposedLinear
