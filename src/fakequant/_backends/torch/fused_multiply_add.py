"""The fused multiply-add, `a * b + c` rounded once, in torch's operations: no operation of torch's is one."""

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` with a single rounding. Takes tensors of float32, or of float64, and returns one.

    It can be differentiated like `a * b + c`.

    >>> a = torch.tensor(1 + 2.0**-12)
    >>> fma(a, a, torch.tensor(-1.0)).item() - (a * a - 1).item()
    5.960464477539063e-08
    """
    if a.dtype == torch.float32 and a.device.type != "mps":  # which has no float64
        plain, exact = _through_float64(a, b, c)
    else:
        # An infinite c decides, even where the rounded product overflows.
        plain = torch.where(c.isinf() & a.isfinite() & b.isfinite(), c, a * b + c)
        exact = _in_parts(a.detach(), b.detach(), c.detach())
    # The difference is exact. Where it is not a number, something has overflowed or was not finite.
    correction = (exact - plain).detach()
    return torch.where(correction.isfinite() & (correction != 0), plain + correction, plain)


def _through_float64(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded twice, and once: the product of two float32 is exact in float64."""
    product, addend = a.double() * b.double(), c.double()
    total, error = _two_sum(product, addend)
    return total.float(), _to_odd(total.detach(), error.detach()).float()


def _in_parts(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """In one dtype, by error terms: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008)."""
    product, product_error = _two_product(a, b)
    low, low_error = _two_sum(c, product_error)
    high, high_error = _two_sum(product, low)
    return high + _to_odd(*_two_sum(low_error, high_error))


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum, and what rounding took from it."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded product, and what rounding took from it."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of half as many bits with the sum `a`."""
    shifted = a * (2.0**27 + 1 if a.dtype == torch.float64 else 2.0**12 + 1)
    high = shifted - (shifted - a)
    return high, a - high


def _to_odd(total: Tensor, error: Tensor) -> Tensor:
    """A rounded sum, moved to its neighbour with an odd last bit if rounding took anything from it.

    Rounding that again to a shorter format gives what rounding the exact sum gives.
    """
    is_even = total.view(torch.int64 if total.dtype == torch.float64 else torch.int32) % 2 == 0
    neighbour = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), error))
    return torch.where(total.isfinite() & (error != 0) & is_even, neighbour, total)
