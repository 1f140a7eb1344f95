"""Modules that quantize a tensor in the forward pass, and learn or observe how."""

from fakequant.nn.fake_quantize import FakeQuantize as FakeQuantize
from fakequant.nn.quantizer import (
    Quantizer as Quantizer,
    name_quantizers as name_quantizers,
    quantizers as quantizers,
    set_state as set_state,
)
