"""Modules that quantize a tensor in the forward pass, with observed or learned scales, and functions on them."""

# Importing these registers the layer kinds.
from fakequant.nn import (
    _attention as _attention,
    _experts as _experts,
    _layers as _layers,
    _recurrent as _recurrent,
    kinds as kinds,
)
from fakequant.nn._adapters import quantize_adapters as quantize_adapters
from fakequant.nn._fake_quantize import FakeQuantize as FakeQuantize
from fakequant.nn._frozen_weights import frozen_weights as frozen_weights
from fakequant.nn._layer_kinds import LayerKind as LayerKind, register_layer_kind as register_layer_kind
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize as LearnedFakeQuantize
from fakequant.nn._model_quantizers import (
    name_quantizers as name_quantizers,
    named_quantizers as named_quantizers,
    param_groups as param_groups,
    switch_quantizers as switch_quantizers,
)
from fakequant.nn._pact import PACT as PACT
from fakequant.nn._quantized_layer import (
    QuantizedLayer as QuantizedLayer,
    compute as compute,
    quantize_input as quantize_input,
    quantize_output as quantize_output,
    quantized_weight as quantized_weight,
)
from fakequant.nn._quantizer import Quantizer as Quantizer
from fakequant.nn._torch_ao import FusedFakeQuantize as FusedFakeQuantize, from_torch_ao as from_torch_ao
