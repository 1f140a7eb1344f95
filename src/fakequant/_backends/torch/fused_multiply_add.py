"""The fused multiply-add, `a * b + c` rounded once, in torch operations, because torch does not have it."""

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns `a * b + c` with a single rounding, for float32 or float64 tensors.

    The result is differentiable like `a * b + c`.

    >>> a = torch.tensor(1 + 2.0**-12)
    >>> fma(a, a, torch.tensor(-1.0)).item() - (a * a - 1).item()
    5.960464477539063e-08
    """
    if a.dtype == torch.float32 and a.device.type != "mps":  # mps has no float64
        plain, exact = _through_float64(a, b, c)
    else:
        # With an infinite c the sum is c, even where the rounded product overflows.
        plain = torch.where(c.isinf() & a.isfinite() & b.isfinite(), c, a * b + c)
        exact = _in_parts(a.detach(), b.detach(), c.detach())
    # The difference is exact. It is not finite if something overflowed or was not finite; then `plain` is right.
    correction = (exact - plain).detach()
    return torch.where(correction.isfinite() & (correction != 0), plain + correction, plain)


def _through_float64(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the result rounded twice, and rounded once. The product of two float32 is exact in float64."""
    product, addend = a.double() * b.double(), c.double()
    total, error = _two_sum(product, addend)
    return total.float(), _to_odd(total.detach(), error.detach()).float()


def _in_parts(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Computes in one dtype with error terms: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums"."""
    product, product_error = _two_product(a, b)
    low, low_error = _two_sum(c, product_error)
    high, high_error = _two_sum(product, low)
    return high + _to_odd(*_two_sum(low_error, high_error))


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rounded sum and its rounding error."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rounded product and its rounding error."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    """Splits `a` into two numbers with half the bits, whose sum is `a`."""
    shifted = a * (2.0**27 + 1 if a.dtype == torch.float64 else 2.0**12 + 1)
    high = shifted - (shifted - a)
    return high, a - high


def _to_odd(total: Tensor, error: Tensor) -> Tensor:
    """Rounds to odd: if the sum was inexact and its last bit is even, returns its neighbour towards the error.

    Rounding the result to a shorter format is then the same as rounding the exact sum.
    """
    is_even = total.view(torch.int64 if total.dtype == torch.float64 else torch.int32) % 2 == 0
    neighbour = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), error))
    return torch.where(total.isfinite() & (error != 0) & is_even, neighbour, total)
