"""The arithmetic of LiteRT with XNNPACK, its default kernels. `Int8Arithmetic` has the formulas.

Where XNNPACK has no kernel for the scales of an addition, a product or a mean, the file computes it in float.
"""

import torch
from torch import Tensor

from fakequant._runtimes.litert.target import TOKEN_SPEC
from fakequant._runtimes.reciprocal_arithmetic import Int8Arithmetic
from fakequant._runtimes.reciprocal_rounding import reciprocal_codes


class Litert(Int8Arithmetic):
    """The kernels of XNNPACK: convert, convolution, fully connected, add, multiply and mean."""

    token_spec = TOKEN_SPEC

    def has_addition(self, a_scale: float, b_scale: float, scale: float) -> bool:
        return has_addition(a_scale, b_scale, scale)

    def has_product(self, a_scale: float, b_scale: float, scale: float) -> bool:
        return has_product(a_scale, b_scale, scale)

    def has_average(self, x_scale: float, scale: float) -> bool:
        return has_average(x_scale, scale)


def float_codes(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> Tensor:
    """Returns the int8 codes of constants."""
    return reciprocal_codes(x.detach(), scale, zero_point).clamp(low, high).to(torch.int8)


def has_addition(a_scale: float, b_scale: float, scale: float) -> bool:
    """Returns True if XNNPACK has an integer kernel for sums of tensors with these scales.

    >>> has_addition(1.0, 0.5, 1.0), has_addition(1.0, 1e-4, 1.0)
    (True, False)
    """
    return all(2**-10 <= one / scale < 2**8 for one in (a_scale, b_scale))


def has_product(a_scale: float, b_scale: float, scale: float) -> bool:
    """Returns True if XNNPACK has an integer kernel for products of elements of tensors with these scales.

    >>> has_product(0.1, 0.1, 0.1), has_product(1.0, 1.0, 1e-3)
    (True, False)
    """
    return 2**-16 <= a_scale * b_scale / scale < 2**8


def has_average(x_scale: float, scale: float) -> bool:
    """Returns True if XNNPACK has an integer kernel for means of a tensor with these scales.

    >>> has_average(0.1, 0.1), has_average(1.0, 1e-3)
    (True, False)
    """
    return 2**-8 <= x_scale / scale < 2**8


ARITHMETIC = Litert()
