"""Modules that quantize a tensor in the forward pass, and learn or observe how."""

# Each says which layers of torch it is for.
from fakequant.nn import attention as attention, conv as conv, embedding as embedding, linear as linear
from fakequant.nn.fake_quantize import FakeQuantize as FakeQuantize
from fakequant.nn.kinds import LayerKind as LayerKind, quantizes as quantizes
from fakequant.nn.layer import (
    QuantizedLayer as QuantizedLayer,
    compute as compute,
    quantize_input as quantize_input,
    quantize_output as quantize_output,
    quantized_weight as quantized_weight,
)
from fakequant.nn.learned import LearnedFakeQuantize as LearnedFakeQuantize
from fakequant.nn.pact import PACT as PACT
from fakequant.nn.param_groups import param_groups as param_groups
from fakequant.nn.quantizer import (
    Quantizer as Quantizer,
    name_quantizers as name_quantizers,
    quantizers as quantizers,
    set_state as set_state,
)
from fakequant.nn.torch_ao import FusedFakeQuantize as FusedFakeQuantize, from_torch_ao as from_torch_ao
