"""The functions of `formula`, as Triton kernels."""

from fakequant._backends.torch.triton.codes import dequantize, dequantize_packed, quantize, quantize_packed
from fakequant._backends.torch.triton.fake_quantize import fake_quantize, mask_backward
from fakequant._backends.torch.triton.learned import learned_backward
from fakequant._backends.torch.triton.observe import min_max, observe_fake_quantize, observe_into

__all__ = [
    "dequantize",
    "dequantize_packed",
    "fake_quantize",
    "learned_backward",
    "mask_backward",
    "min_max",
    "observe_fake_quantize",
    "observe_into",
    "quantize",
    "quantize_packed",
]
