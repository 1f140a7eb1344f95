"""The arithmetic of OpenVINO's CPU plug-in: how floats, sums of products, additions and means become codes.

OpenVINO reads a QuantizeLinear as a FakeQuantize, which does not divide by the scale. It multiplies by a factor `k` and
adds a shift `c`. Both are computed in float32, from the ends of the range of the 8-bit type:

    low  = scale * (lowest - zero_point)        lowest and highest are 0 and 255, or -128 and 127
    high = scale * (highest - zero_point)
    k    = 255 / (high - low)
    c    = -low * 255 / (high - low)

`k` and `c` of other ends are written k(low, high) and c(low, high). The codes of a float are

    rint(fma(clip(x, low, high), k, c)) + lowest

A quantizer with fewer levels is a QuantizeLinear with a Clip behind it. Its codes are clipped in addition.

A layer is fused with the quantizer that follows it. OpenVINO then combines the scale of the layer's sums and the bias
with `k` and `c`, in an order that depends on the layer. Its codes therefore differ from those of ONNX Runtime at ties,
and by one. The docstrings below give the formulas, which are computed in float32 in the order written. They use

    fused(v, k, c) = clip(rint(v * (1 / (1 / k))), lowest, highest)       if c + lowest is less than 255 * 1e-5
                     clip(rint(fma(v, k, c + lowest)), lowest, highest)   if k and c are scalars
                     clip(rint(v * k + (c + lowest)), lowest, highest)    if k or c has a value per channel

where a vector of equal values counts as a scalar, and so does a vector `c` whose values differ by less than 0.00005
from the first one, which is then used. In the first line, `v * k` is computed if a Clip follows.

The formulas were determined with OpenVINO 2026.4 on x86, with AVX2 and with AVX-512, for `INFERENCE_PRECISION_HINT`
"f32". Codes are integers in float32.
"""

import dataclasses

import torch
from torch import Tensor

from fakequant._backends.torch.fused_multiply_add import fma
from fakequant._convert.golden.tracked_codes import Accumulated, GridOf, codes_of, plain, quantized
from fakequant._runtimes.arithmetic import Reference
from fakequant._runtimes.openvino.rounding import ROUNDING, ends, line
from fakequant.spec import QuantSpec

_STEPS = 255.0
# OpenVINO's limits for shifts that it takes for 0, in parts of the range of codes, and for equal.
_NO_SHIFT, _SAME_SHIFT = 1e-5, 0.00005


@dataclasses.dataclass(frozen=True)
class LayerSums:
    """The sums of a layer, and what OpenVINO makes of them depends on.

    Tensors with a value per output channel must broadcast with the sums.
    """

    # Sums of the products of (code - zero point) and weights, without the bias.
    products: Tensor
    # The scale of the input times the scale of the weight, in float32: a scalar, or a value per output channel.
    scale: Tensor
    # The bias in float32.
    bias: Tensor | None = None
    # The zero point of the input times the sum of the weights, per output channel. Linear layers with a zero point need
    # it: OpenVINO subtracts it from their sums in float32, while convolutions subtract it in integers.
    offset: Tensor | None = None
    # True for linear layers. False for convolutions, and for products of two activations.
    is_linear: bool = False
    # True if a ReLU lies between the layer and the quantizer.
    is_rectified: bool = False


@dataclasses.dataclass(frozen=True)
class _Line:
    """The factor `k` and the shift `c` of a quantizer."""

    k: Tensor
    c: Tensor


class OpenVino(Reference):
    """The kernels of OpenVINO for x86: FakeQuantize, Convolution, FullyConnected, MatMul, Eltwise and Reduce."""

    def from_layer(self, layer: Accumulated, grid: GridOf) -> Tensor:
        """Returns the codes of the output of a layer, which are stored as uint8. See `from_layer_sums`."""
        if not _has_kernels(grid):
            return quantized(self.value(_sums_of(layer)), grid)
        unsigned, offset = _unsigned(grid)
        codes = self.from_layer_sums(_sums_of(layer), unsigned, is_stored=not _has_clip(grid))
        return _on(grid, codes - offset)

    def from_layer_addition(self, layer: Accumulated, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """Returns the codes of the sum of a layer's output and `b`. See `from_layer_sums_addition`."""
        if not (_has_kernels(b_grid) and _has_kernels(grid)):
            return quantized(self.value(_sums_of(layer)) + b, grid)
        unsigned, offset = _unsigned(grid)
        codes = self.from_layer_sums_addition(_sums_of(layer), b, _unsigned(b_grid)[0], unsigned, not _has_clip(grid))
        return _on(grid, codes - offset)

    def from_float(self, x: Tensor, grid: GridOf, has_fixed_shape: bool = False) -> Tensor:
        """rint(fma(clip(x, low, high), k, c)) + lowest.

        Scales per token and more than 8 bits follow the rule of ONNX.

        If all dimensions of the tensor are fixed in the file, another kernel is used. It computes
        rint(clip(x, low, high) * k - low * k) + lowest.
        """
        if not _has_kernels(grid):
            return quantized(x, grid)
        if not has_fixed_shape:
            return _on(grid, ROUNDING.codes(plain(x), grid.scale, grid.zero_point, grid.spec))
        low, high = _ends(grid)
        line = _line(low, high)
        x = torch.minimum(torch.maximum(plain(x).float(), low), high)
        return _on(grid, torch.round(x * line.k - low * line.k) + _lowest(grid))

    def from_sums(self, sums: Tensor, scale: Tensor, grid: GridOf) -> Tensor:
        """fused(sums, k(low / scale, high / scale), c(low / scale, high / scale)): a convolution without a bias.

        The sums must not contain a bias. Use `from_layer_sums` for layers with a bias and for linear layers.
        """
        return self.from_layer_sums(LayerSums(sums, scale), grid)

    def value(self, layer: LayerSums) -> Tensor:
        """products * scale + bias: the float result of a layer that no quantizer follows."""
        value = _floats(layer) * layer.scale
        value = value if layer.bias is None else value + layer.bias
        return value.clamp_min(0) if layer.is_rectified else value

    def from_layer_sums(
        self, layer: LayerSums, grid: GridOf, *, is_stored: bool = True, is_shifted: bool = False
    ) -> Tensor:
        """Returns the codes of the result of a layer.

        Without a bias:

            fused(products, k(low / scale, high / scale), c(low / scale, high / scale))

        If a linear layer without a bias has an offset, it is added to the products and to both ends.

        With a bias, and for linear layers with an offset and a ReLU:

            fused(max(products * scale + bias, 0), k, c)

        Linear layers with a bias but without a ReLU:

            fused(products * scale, k, c + bias * k)     if they have an offset and one scale
            fused(products, k * scale, c + bias * k)     if they have an offset and a scale per channel
            fused(products, scale * k, c + bias * k)     if they have no offset

        A ReLU before a quantizer whose zero point is the lowest code has no effect and is ignored.

        Args:
            layer: The sums of the layer.
            grid: The grid of the codes.
            is_stored: False if the codes are only dequantized, so that the kernel returns floats.
            is_shifted: True for signed codes that only convolutions read. OpenVINO stores them as uint8, 128 larger.
        """
        low, high = _ends(grid)
        lowest = 0 if is_shifted else _lowest(grid)
        is_last = is_stored and not _has_clip(grid)
        if not bool((low < 0).any()):
            layer = dataclasses.replace(layer, is_rectified=False)
        levels, line = _fused_line(layer, low, high)
        codes = _fused(levels, line, lowest, is_last, _scales_weights(layer))
        return _on(grid, codes - lowest + _lowest(grid))

    def from_addition(self, a: Tensor, a_grid: GridOf, b: Tensor, b_grid: GridOf, grid: GridOf) -> Tensor:
        """rint(fma(clip(fma(a, r, t) + b, low / sb, high / sb), k(low / sb, high / sb), c(low / sb, high / sb))).

        `a` and `b` are codes, both uint8, and `sb` is the scale of `b`. `r` and `t` bring `a` to the grid of `b`:

            first = (0 - (za + zb * sb / sa)) * (sa / sb)       za and zb are the zero points
            last  = (255 - (za + zb * sb / sa)) * (sa / sb)
            r     = (last - first) / 255
            t     = first

        The operand `a` is the result of a convolution. If there is none, or if there are two, it is the first operand.

        This holds if another operator reads the codes of `b`. Otherwise OpenVINO computes the addition in the kernel of
        the convolution, and drops the rounding of the quantizer between the convolution and the addition.
        """
        if not all(map(_has_kernels, (a_grid, b_grid, grid))):
            return quantized(a + b, grid)
        of, ((a_grid, _), (b_grid, _), (grid, moved_by)) = grid, map(_unsigned, (a_grid, b_grid, grid))
        za, zb = a_grid.zero_point.float(), b_grid.zero_point.float()
        offset, ratio = za + zb * b_grid.scale / a_grid.scale, a_grid.scale / b_grid.scale
        first, last = (0 - offset) * ratio, (_STEPS - offset) * ratio
        moved = _fma(codes_of(plain(a), a_grid), _Line((last - first) / _STEPS, first))
        low, high = (end / b_grid.scale for end in _ends(grid))
        total = torch.minimum(torch.maximum(moved + codes_of(plain(b), b_grid), low), high)
        return _on(of, torch.round(_fma(total, _line(low, high))) - moved_by)

    def from_layer_sums_addition(
        self, layer: LayerSums, b: Tensor, b_grid: GridOf, grid: GridOf, is_stored: bool = True
    ) -> Tensor:
        """fused((value(layer) - zb * sb) * (1 / sb) + b, k(low / sb, high / sb), c(low / sb, high / sb)).

        The result of a layer is added to `b` without a quantizer in between. `b` are codes, and `zb` and `sb` are their
        zero point and scale. `layer.is_rectified` refers to a ReLU after the addition.
        """
        value = self.value(dataclasses.replace(layer, is_rectified=False))
        value = (value - b_grid.zero_point.float() * b_grid.scale) * (1 / b_grid.scale)
        total = value + codes_of(plain(b), b_grid)
        total = total.clamp_min(0) if layer.is_rectified else total
        low, high = (end / b_grid.scale for end in _ends(grid))
        is_last = is_stored and not _has_clip(grid)
        return _on(grid, _fused(total, _line(low, high), _lowest(grid), is_last))

    def from_average(self, x: Tensor, x_grid: GridOf, axes: tuple[int, ...], grid: GridOf) -> Tensor:
        """clip(rint(fma(sum(codes) / number, k, c - zero_point * k)) + lowest).

        `k` and `c` are k(low / scale, high / scale) and c(low / scale, high / scale), with the scale of `x`.
        """
        if not (_has_kernels(x_grid) and _has_kernels(grid)):
            return super().from_average(x, x_grid, axes, grid)
        of, ((x_grid, _), (grid, moved_by)) = grid, map(_unsigned, (x_grid, grid))
        sums = codes_of(plain(x), x_grid).double().sum(axes, keepdim=True).float()
        number = torch.tensor(float(x.numel() // sums.numel()))
        low, high = (end / x_grid.scale for end in _ends(grid))
        line = _line(low, high)
        shifted = _Line(line.k, line.c - x_grid.zero_point.float() * line.k)
        return _on(of, torch.round(_fma(sums / number, shifted)) - moved_by)


def _sums_of(layer: Accumulated) -> LayerSums:
    """Returns what the kernel of a layer computes with. Products of two activations have no layer.

    OpenVINO removes a bias that is 0 in all channels.
    """
    has_bias = layer.bias is not None and bool(layer.bias.any())
    products = layer.sums if layer.bias is None else layer.sums - layer.bias
    bias = layer.bias.float() * layer.scale if layer.bias is not None and has_bias else None
    offset = None
    if layer.weight_sums is not None and layer.grid_in is not None:
        _, moved_by = _unsigned(layer.grid_in)
        offset = ((layer.grid_in.zero_point + moved_by) * layer.weight_sums).float()
    return LayerSums(products, layer.scale, bias, offset, is_linear=layer.weight_sums is not None)


def _has_kernels(grid: GridOf) -> bool:
    """Returns True for one fixed scale and at most 8 bits. Other tensors are quantized as the graph says."""
    return grid.scale.dim() == 0 and grid.spec.bits <= 8


def _unsigned(grid: GridOf) -> tuple[GridOf, int]:
    """Returns the grid that a file stores instead of a signed one, and by how much its codes are larger.

    It may have one more code than a signed grid with a narrow range.
    """
    if not grid.spec.signed:
        return grid, 0
    spec = QuantSpec(bits=grid.spec.bits, signed=False, symmetric=False)
    return GridOf(grid.scale, grid.zero_point - grid.spec.qmin, spec), -grid.spec.qmin


def _fused_line(layer: LayerSums, low: Tensor, high: Tensor) -> tuple[Tensor, _Line]:
    """Returns what is multiplied and shifted by the quantizer after a layer, and by what."""
    scale, bias, offset = _scalar_if_equal(layer.scale), layer.bias, _offset(layer)
    if bias is None and not (layer.is_rectified and offset is not None):
        low, high, levels = low / scale, high / scale, layer.products.float()
        if offset is not None:
            low, high, levels = low + offset, high + offset, _with_offset(layer.products, offset)
        return levels.clamp_min(0) if layer.is_rectified else levels, _line(low, high)
    line = _line(low, high)
    if bias is None or not layer.is_linear or layer.is_rectified:
        value = _floats(layer) * scale
        value = value if bias is None else value + bias
        return value.clamp_min(0) if layer.is_rectified else value, line
    shift = line.c + bias * line.k
    if offset is None:
        return layer.products.float(), _Line(line.k, shift)
    if scale.dim() == 0:
        return _floats(layer) * scale, _Line(line.k, shift)
    return _floats(layer), _Line(line.k * scale, shift)


def _scales_weights(layer: LayerSums) -> Tensor | None:
    """Returns the scale that a kernel multiplies by `k` before it multiplies the products, or None."""
    is_plain = layer.is_linear and layer.bias is not None and not layer.is_rectified
    return _scalar_if_equal(layer.scale) if is_plain and _offset(layer) is None else None


def _fused(v: Tensor, line: _Line, lowest: int, is_last: bool, scale: Tensor | None = None) -> Tensor:
    """Returns fused(v, k, c) as the module's docstring defines it, or fused(v, scale * k, c) if a scale is given."""
    k, c, first = _scalar_if_equal(line.k), line.c, line.c.reshape(-1)[0]
    c = first if bool(((c - first).abs() < _SAME_SHIFT).all()) else _scalar_if_equal(c)
    c = c + lowest
    if c.dim() == 0 and bool(c.abs() < _STEPS * _NO_SHIFT):
        c = torch.zeros_like(c)
    if k.dim() > 0 or c.dim() > 0 or (bool(c == 0) and not is_last):
        steps = v * (k if scale is None else scale * k) + c
    else:
        v = v if scale is None else v * scale
        steps = v * (1 / (1 / k)) if bool(c == 0) else _fma(v, _Line(k, c))
    return torch.round(steps).clamp(lowest, lowest + _STEPS)


def _floats(layer: LayerSums) -> Tensor:
    """Returns the products in float32. Linear layers with an offset subtract it in float32."""
    offset = _offset(layer)
    if offset is None:
        return layer.products.float()
    return _with_offset(layer.products, offset) - offset


def _with_offset(products: Tensor, offset: Tensor) -> Tensor:
    """Returns the sums of products of codes, which include the zero point, in float32."""
    return (products.double() + offset.double()).float()


def _offset(layer: LayerSums) -> Tensor | None:
    has_offset = layer.is_linear and layer.offset is not None and bool(layer.offset.any())
    return layer.offset if has_offset else None


def _ends(grid: GridOf) -> tuple[Tensor, Tensor]:
    """Returns the floats of the lowest and of the highest code of the 8-bit type."""
    return ends(grid.scale, grid.zero_point, _lowest(grid))


def _line(low: Tensor, high: Tensor) -> _Line:
    """Returns k(low, high) and c(low, high)."""
    return _Line(*line(low, high))


def _lowest(grid: GridOf) -> int:
    return -128 if grid.spec.signed else 0


def _has_clip(grid: GridOf) -> bool:
    return (grid.spec.qmin, grid.spec.qmax) != (_lowest(grid), _lowest(grid) + 255)


def _on(grid: GridOf, codes: Tensor) -> Tensor:
    return codes.clamp(grid.spec.qmin, grid.spec.qmax)


def _fma(x: Tensor, line: _Line) -> Tensor:
    return fma(*torch.broadcast_tensors(x, line.k, line.c))


def _scalar_if_equal(value: Tensor) -> Tensor:
    """Returns a scalar if all elements are equal, and the tensor itself otherwise."""
    first = value.reshape(-1)[0]
    return first if bool((value == first).all()) else value


ARITHMETIC = OpenVino()
