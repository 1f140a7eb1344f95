"""Codes of a float format as positions: how many values lie between a value and 0, negative below 0.

Bit patterns have a sign bit, so that neighbours in value are not neighbours as integers. Positions are: two values with
the positions n and n + 1 have no other value between them. Both zeros have the position 0, as 0.0 and -0.0.
"""

import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant.spec import QuantSpec


def positions(x: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the position of each element on a float grid with one scale, in float32. NaN stays NaN.

    >>> positions(torch.tensor([-0.5, 0.0, 1.0, 99.0]), torch.tensor(1.0), QuantSpec(format="e2m1"))
    tensor([-1.,  0.,  2.,  7.])
    """
    codes = tensor_functions.quantize(x.float(), scale, 0, spec).int()
    half = 1 << (spec.bits - 1)
    magnitude = (codes & (half - 1)).float()
    found = torch.where(codes >= half, -magnitude, magnitude)
    return torch.where(x.isnan(), torch.nan, found)


def values_at(where: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the values of a format at these positions, in float32. NaN stays NaN.

    >>> values_at(torch.tensor([-1.0, 7.0]), QuantSpec(format="e2m1"))
    tensor([-0.5000,  6.0000])
    """
    assert spec.float_format is not None
    table = torch.from_numpy(spec.float_format.values())
    values = torch.copysign(table[where.abs().nan_to_num(0).long()], where)
    return torch.where(where.isnan(), torch.nan, values)
