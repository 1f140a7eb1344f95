"""The arithmetic of the reference, from which those of runtimes are derived, and the table of all.

It says how floats, accumulators (sums of products), additions, products and means become codes. The reference runs the
operators of the ONNX graph one after the other, in float32. Runtimes fuse a layer, an addition or a mean with the
quantizer that follows it into one kernel. Their codes differ from those of the reference only at ties, and by one.

Codes are integers in float32.
"""

from functools import cache

import torch.nn.functional as F
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant._convert.golden.tracked_codes import (
    Accumulated,
    Arithmetic,
    Clamped,
    GridOf,
    Joined,
    Windows,
    plain,
    quantized,
)
from fakequant._runtimes import TARGETS, part
from fakequant.spec import QuantSpec


class Reference:
    """The operators of the graph, one after the other."""

    # Whether kernels round sums more than once, so that codes may be one step off where no tie is.
    rounds_twice = False

    def from_float(self, x: Tensor, grid: GridOf) -> Tensor:
        """quantize(x), by the rule of ONNX."""
        return quantized(x, grid)

    def dynamic_grid(self, x: Tensor, spec: QuantSpec, eps: float) -> GridOf:
        """Returns choose_qparams(min(x), max(x)), or that of each token."""
        x = plain(x)
        seen = tensor_functions.min_max(x, spec)
        empty = seen.min > seen.max
        lo, hi = seen.min.masked_fill(empty, 0), seen.max.masked_fill(empty, 0)
        scale, zero_point = tensor_functions.choose_qparams(lo, hi, spec, eps=eps)
        shape = (*x.shape[:-1], 1) if spec.granularity == "token" else scale.shape
        return GridOf(scale.reshape(shape), zero_point.reshape(shape), spec)

    def from_layer(self, layer: Accumulated, grid: GridOf) -> Tensor:
        """Returns the codes of the output of a layer."""
        return self.from_sums(layer.sums, layer.scale, grid)

    def from_layer_addition(self, layer: Accumulated, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """quantize(sums * scale + b)."""
        return self.from_float(layer.sums.float() * layer.scale + b, grid)

    def from_sums(self, sums: Tensor, scale: Tensor, grid: GridOf) -> Tensor:
        """quantize(sums * scale)."""
        return quantized(sums.float() * scale, grid)

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """quantize(a + b)."""
        return quantized(a + b, grid)

    def from_product(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """quantize(a * b), element by element."""
        return self.from_float(a * b, grid)

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """quantize(mean(x))."""
        return quantized(x.mean(axes, keepdim=True), grid)

    def from_join(self, join: Joined, grid: GridOf) -> Tensor:
        """quantize(cat(operands))."""
        return self.from_float(join.value, grid)

    def from_clamp(self, clamp: Clamped, grid: GridOf) -> Tensor:
        """quantize(min(max(x, low), high))."""
        return self.from_float(clamp.value.value, grid)

    def from_pool(self, x: Tensor, x_grid: GridOf, windows: Windows, grid: GridOf) -> Tensor:
        """quantize(average_pool(x))."""
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(windows.size) - 1]
        return self.from_float(pool(x, *windows[:3], False, windows.counts_padding), grid)

    def bias_in_file(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Returns the codes of a bias that a file has. Files of most runtimes store these codes themselves."""
        return codes


# The names by which targets refer to an arithmetic: "reference", rooms, and kernels of rooms.
_NAMES = [name for target in TARGETS.values() for name in (target.arithmetic, target.wide_arithmetic)]
ARITHMETICS = tuple(dict.fromkeys(["reference", *filter(None, _NAMES)]))


@cache
def find_arithmetic(name: str) -> Arithmetic:
    """Returns the arithmetic with one of the names in `ARITHMETICS`. The files of other rooms are not loaded."""
    if name == "reference":
        return Reference()
    room, _, kernels = name.partition("/")
    module = part(room, "arithmetic")
    found: Arithmetic = module.KERNELS[kernels] if kernels else module.ARITHMETIC
    return found


def arithmetics() -> dict[str, Arithmetic]:
    """Returns all arithmetics by name.

    >>> list(arithmetics())[:2]
    ['reference', 'onnxruntime']
    """
    return {name: find_arithmetic(name) for name in ARITHMETICS}
