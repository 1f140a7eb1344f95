"""The sums that x86 CPUs without VNNI compute if 8-bit weights are too large.

The kernels multiply unsigned input codes, including their zero point, by signed weights. They add two neighbouring
products in 16 bits with saturation:

    sum_k clip16(x[2k] * w[2k] + x[2k + 1] * w[2k + 1])   -   zero_point * sum(w)   +   bias

Products are neighbours along the axis that is summed over. In a convolution, this axis consists of the positions of
the kernel, with the input channels of each position in a row. Depthwise convolutions do not saturate.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LOW, _HIGH = -(2**15), 2**15 - 1


@cache
def cpu_saturates() -> bool:
    """Returns True unless this CPU is known to have VNNI."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
    return not re.search(r"\b(avx512_vnni|avx_vnni)\b", flags)


def can_saturate(levels: Tensor, largest_code: int = 255) -> bool:
    """Returns True if the sum of two products can exceed 16 bits for some input.

    `levels` are the codes of the weight minus its zero point.

    >>> can_saturate(torch.tensor([64.0, 64.0])), can_saturate(torch.tensor([65.0, 65.0]))
    (False, True)
    """
    return bool(largest_code * 2 * levels.abs().max() > _HIGH + 1) if levels.numel() else False


def saturated_sums(layer: Any, codes: Tensor, zero_point: int, levels: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns the saturated sums of a layer in float64, or None for layers that are not supported.

    `codes` are the unsigned codes of the input, `levels` the codes of the weight minus their zero point, and `bias` has
    the scale of the sums.
    """
    if levels.dim() == 2:
        sums = _sums_of_pairs(codes.flatten(0, -2), levels.double()).reshape(*codes.shape[:-1], len(levels))
        sums = sums - zero_point * levels.double().sum(1)
        return sums if bias is None else sums + bias
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d)) or layer.groups != 1 or layer.padding_mode != "zeros":
        return None
    if codes.dim() != levels.dim() or isinstance(layer.padding, str):
        return None
    is_1d = isinstance(layer, nn.Conv1d)  # computed as an image of height 1
    if is_1d:
        codes = codes.unsqueeze(2)
    kernel, stride, dilation = (_height_and_width(x, 1) for x in (layer.kernel_size, layer.stride, layer.dilation))
    vertical, horizontal = _height_and_width(layer.padding, 0)
    padded = F.pad(codes, (horizontal, horizontal, vertical, vertical), value=float(zero_point))
    columns = F.unfold(padded, kernel, dilation, 0, stride)  # all positions of the first channel, then the next
    number, _, length = columns.shape
    columns = (
        columns.reshape(number, -1, kernel[0] * kernel[1], length).permute(0, 3, 2, 1).reshape(number * length, -1)
    )
    rows = levels.double().flatten(2).permute(0, 2, 1).flatten(1)
    sums = _sums_of_pairs(columns, rows) - zero_point * rows.sum(1)
    if bias is not None:
        sums = sums + bias
    height = (padded.shape[2] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    sums = sums.reshape(number, length, -1).permute(0, 2, 1).reshape(number, -1, height, length // height)
    return sums.squeeze(2) if is_1d else sums


def _height_and_width(value: tuple[int, ...], height: int) -> tuple[int, int]:
    """Returns a setting of a convolution for both axes of an image. `height` is used if it is one-dimensional."""
    return (height, value[0]) if len(value) == 1 else (value[0], value[1])


def _sums_of_pairs(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x @ weight.T` with the sum of every two products saturated to 16 bits."""
    if x.shape[1] % 2:
        x, weight = F.pad(x, (0, 1)), F.pad(weight, (0, 1))
    x, weight = x.double(), weight.double()
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for k in range(0, x.shape[1], 2):
        pair = torch.outer(x[:, k], weight[:, k]) + torch.outer(x[:, k + 1], weight[:, k + 1])
        total += pair.clamp(_LOW, _HIGH)
    return total
