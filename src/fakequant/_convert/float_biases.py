"""Biases that a runtime takes as floats and quantizes itself, with a formula in float32.

    code = rint(bias * (1 / scale))

Not every code can be reached in this way: those beyond 2^22 may miss by a few units.
"""

import torch
from torch import Tensor


def float_of_codes(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns floats whose codes are `codes`, or as near to them as floats can be.

    >>> float_of_codes(torch.tensor([3]), torch.tensor([0.5]))
    tensor([1.5000])
    """
    start = (codes.double() * scale.double()).float()
    best = start
    for towards in (torch.inf, -torch.inf):
        value = start
        for _ in range(2):
            value = torch.nextafter(value, torch.full_like(value, towards))
            is_nearer = _distance(value, scale, codes) < _distance(best, scale, codes)
            best = torch.where(is_nearer, value, best)
    return best


def codes_of_float(bias: Tensor, scale: Tensor) -> Tensor:
    """Returns the codes that the runtime computes, in int32.

    It has no integer kernels for subnormal scales, whose reciprocals may be infinite. There the bias is divided.

    >>> codes_of_float(torch.tensor([1.5, 0.0]), torch.tensor([0.5, 1e-40]))
    tensor([3, 0], dtype=torch.int32)
    """
    limits = torch.iinfo(torch.int32)
    divided = torch.round(bias.double() / scale.double()).clamp(limits.min, limits.max).to(torch.int32)
    is_normal = scale >= torch.finfo(torch.float32).tiny
    return torch.where(is_normal, torch.round(bias * (1.0 / scale)).to(torch.int32), divided)


def _distance(bias: Tensor, scale: Tensor, codes: Tensor) -> Tensor:
    return (codes_of_float(bias, scale).long() - codes.long()).abs()
