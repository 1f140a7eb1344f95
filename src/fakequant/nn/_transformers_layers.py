"""The layers of transformers that are quantized, by name, so that transformers need not be installed."""

from fakequant.nn._layer_kinds import quantizes
from fakequant.nn._linear import Linear
from fakequant.nn._transposed_linear import TransposedLinear

quantizes("transformers.models.falcon.modeling_falcon.FalconLinear")(Linear)
quantizes("transformers.pytorch_utils.Conv1D")(TransposedLinear)
