"""What an x86 without VNNI computes with 8-bit weights that are too large.

Its kernels multiply unsigned codes of the input, zero point and all, with signed weights, add two neighbouring
products in 16 bits, and saturate:

    sum_k clip16(x[2k] * w[2k] + x[2k + 1] * w[2k + 1])   -   zero_point * sum(w)   +   bias

The neighbours are along the axis that is summed over; in a convolution input channels run fastest, then the
places of the kernel. Depthwise convolutions do not saturate.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LOW, _HIGH = -(2**15), 2**15 - 1


def can_saturate(levels: Tensor, largest_code: int = 255) -> bool:
    """Whether some input makes a pair of products leave 16 bits.

    >>> can_saturate(torch.tensor([64.0, 64.0])), can_saturate(torch.tensor([65.0, 65.0]))
    (False, True)
    """
    return bool(largest_code * 2 * levels.abs().max() > _HIGH + 1) if levels.numel() else False


def saturated_sums(layer: Any, codes: Tensor, zero_point: int, levels: Tensor, bias: Tensor | None) -> Tensor | None:
    """The sums of a layer for unsigned codes of its input, in float64; None: a layer that this does not know."""
    if levels.dim() == 2:
        sums = _pairs(codes.flatten(0, -2), levels.double()).unflatten(0, codes.shape[:-1])
        sums = sums - zero_point * levels.double().sum(1)
        return sums if bias is None else sums + bias
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d)) or layer.groups != 1 or layer.padding_mode != "zeros":
        return None
    if codes.dim() != levels.dim() or isinstance(layer.padding, str):
        return None
    flat = isinstance(layer, nn.Conv1d)  # computed as an image of one row
    if flat:
        codes = codes.unsqueeze(2)
    kernel, stride, dilation = (_of_image(x, 1) for x in (layer.kernel_size, layer.stride, layer.dilation))
    vertical, horizontal = _of_image(layer.padding, 0)
    padded = F.pad(codes, (horizontal, horizontal, vertical, vertical), value=float(zero_point))
    columns = F.unfold(padded, kernel, dilation, 0, stride)  # channel, then place
    number, _, length = columns.shape
    columns = (
        columns.reshape(number, -1, kernel[0] * kernel[1], length).permute(0, 3, 2, 1).reshape(number * length, -1)
    )
    rows = levels.double().flatten(2).permute(0, 2, 1).flatten(1)
    sums = _pairs(columns, rows) - zero_point * rows.sum(1)
    if bias is not None:
        sums = sums + bias
    height = (padded.shape[2] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    sums = sums.reshape(number, length, -1).permute(0, 2, 1).reshape(number, -1, height, length // height)
    return sums.squeeze(2) if flat else sums


def _of_image(value: tuple[int, ...], missing: int) -> tuple[int, int]:
    """What a convolution has for height and width; one along a line has nothing for the height."""
    return (missing, value[0]) if len(value) == 1 else (value[0], value[1])


def _pairs(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of x times rows of weight, pairs of products clipped."""
    if x.shape[1] % 2:
        x, weight = F.pad(x, (0, 1)), F.pad(weight, (0, 1))
    x, weight = x.double(), weight.double()
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for k in range(0, x.shape[1], 2):
        pair = torch.outer(x[:, k], weight[:, k]) + torch.outer(x[:, k + 1], weight[:, k + 1])
        total += pair.clamp(_LOW, _HIGH)
    return total
