"""The layers of transformers that are quantized, recognized without importing transformers."""

from fakequant.nn._experts import Experts
from fakequant.nn._layer_kinds import quantizes, quantizes_if
from fakequant.nn._linear import Linear
from fakequant.nn._transposed_linear import TransposedLinear

quantizes("transformers.models.falcon.modeling_falcon.FalconLinear")(Linear)
quantizes("transformers.pytorch_utils.Conv1D")(TransposedLinear)


def _is_experts(cls: type) -> bool:
    """Returns True for classes with the decorator `use_experts_implementation`, which replaces their forward pass."""
    forward = cls.__dict__.get("forward")
    return getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"


quantizes_if(_is_experts, Experts)
