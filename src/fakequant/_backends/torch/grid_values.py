"""Grids as ascending values, on tensors: the place of a code among them, and the distance to the next value.

The codes of a float format are bit patterns: they are not in the order of their values, some are NaN, and two are zero.
A place counts from the lowest value, a position from 0: how many values lie between a value and 0, negative below 0.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant.spec import QuantSpec


def number_of_values(spec: QuantSpec) -> int:
    """Returns how many different values a grid has.

    >>> number_of_values(QuantSpec(bits=4)), number_of_values(QuantSpec(format="e2m1"))
    (16, 15)
    """
    return spec.levels if spec.float_format is None else int(spec.float_format.grid().size)


def places_of(codes: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the number of each code's value on the ascending grid, from 0, and -1 for NaN and infinities.

    >>> places_of(torch.tensor([-8, 7]), QuantSpec(bits=4))
    tensor([ 0, 15])
    >>> places_of(torch.tensor([0, 7, 8, 15], dtype=torch.uint8), QuantSpec(format="e2m1"))  # 0, 6, -0, -6
    tensor([ 7, 14,  7,  0])
    """
    if spec.float_format is None:
        return codes.long() - spec.qmin
    return torch.from_numpy(_places(spec)).to(codes.device)[codes.long()]


@lru_cache(maxsize=64)
def _places(spec: QuantSpec) -> np.ndarray:
    assert spec.float_format is not None
    values, grid = spec.float_format.values(), spec.float_format.grid()
    return np.where(np.isfinite(values), np.searchsorted(grid, values), -1).astype(np.int64)


def positions(x: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the position of each element on a float grid with one scale, in float32. NaN stays NaN.

    Both zeros have the position 0, as 0.0 and -0.0.

    >>> positions(torch.tensor([-0.5, 0.0, 1.0, 99.0]), torch.tensor(1.0), QuantSpec(format="e2m1"))
    tensor([-1.,  0.,  2.,  7.])
    """
    codes = tensor_functions.quantize(x.float(), scale, 0, spec)
    found = (places_of(codes, spec) - number_of_values(spec) // 2).float()
    is_negative = codes.int() >= 1 << (spec.bits - 1)
    return torch.where(x.isnan(), torch.nan, torch.where(is_negative, -found.abs(), found))


def values_at(where: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the values of a float format at these positions, in float32. NaN stays NaN.

    >>> values_at(torch.tensor([-1.0, 7.0]), QuantSpec(format="e2m1"))
    tensor([-0.5000,  6.0000])
    """
    assert spec.float_format is not None
    ascending = torch.from_numpy(spec.float_format.grid())
    values = torch.copysign(ascending[where.abs().nan_to_num(0).long() + number_of_values(spec) // 2], where)
    return torch.where(where.isnan(), torch.nan, values)


def scale_of_each(scale: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the scale of each element of `x`, float32, computed by dequantizing the code of 1.

    >>> scale_of_each(torch.tensor([2.0, 3.0]), torch.zeros(2, 2), QuantSpec(axis=0))
    tensor([[2., 2.],
            [3., 3.]])
    """
    form = spec.float_format
    one = 1 if form is None else form.bias << form.mantissa_bits
    ones = torch.full(x.shape, one, dtype=getattr(torch, spec.storage), device=x.device)
    return tensor_functions.dequantize(ones, scale, 0, spec)


def step_of_each(scale: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the distance from the nearest value on the grid to the next larger one, for each element of `x`.

    Rounding alone moves an element by at most half of it.

    >>> step_of_each(torch.tensor(1.0), torch.tensor([0.2, 1.4, 3.9]), QuantSpec(format="e2m1"))
    tensor([0.5000, 0.5000, 2.0000])
    """
    scales, form = scale_of_each(scale, x, spec), spec.float_format
    if spec.ggml_type is not None:  # a scale may be negative, or 0 in a block of zeros, which has no steps
        return torch.where(scales == 0, 1.0, scales.abs())
    if form is None:
        return scales
    y = tensor_functions.fake_quantize(x.detach().float(), scale, 0, spec)
    _, exponent = torch.frexp((y / scales).abs())
    smallest = 1 - form.bias
    exponent = torch.where(y == 0, smallest, exponent - 1).clamp(min=smallest)
    return torch.ldexp(scales, exponent - form.mantissa_bits)
