"""Layers that hold codes instead of weights, and compute with them.

Like a quantized layer, an integer layer is of a class derived from the layer's own: its forward pass is
that of the quantized layer, with another way to compute.
"""

import dataclasses
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.export import operators
from fakequant.integer.grid import Grid
from fakequant.integer.values import Accumulated, OnGrid, known, origin_of, plain
from fakequant.nn.attention import MultiheadAttention
from fakequant.nn.layer import QuantizedLayer, find_forward
from fakequant.nn.linear import linear
from fakequant.spec import QuantSpec
from fakequant.torch import functional
from fakequant.torch.tensors import block_shape

# Integers up to here are float32, and so are all sums of them that stay below it.
# Whether the CPU's convolutions sum products as they are: on ARM some are transformed first, which rounds.
_DIRECT_CONVOLUTIONS = platform.machine().lower() in ("x86_64", "amd64")
_EXACT_IN_FLOAT32 = 2**24

_INTEGER: "dict[type[nn.Module], type[IntegerLayer]]" = {}


class IntegerLayer(QuantizedLayer):
    """What is mixed into the class of a layer.

        sum_j (x_codes_j - x_zero_point) * (weight_codes_j - weight_zero_point)  +  bias_codes

    without rounding, times `x_scale * weight_scale`. Where the input is not on a grid of one scale, or scales of
    the weight vary along the sum, the layer computes with the numbers that the codes stand for, in float.
    """

    weight_spec: QuantSpec | None
    # Packed below 8 bits, where the spec can be packed.
    weight_codes: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    weight_shape: tuple[int, ...]
    # At the scale of the sums; None: there is no bias, or it is a float.
    bias_codes: Tensor | None
    # In the model, for names.
    path: str
    exported_bits: int
    exported_codes: Tensor
    exported_scale: Tensor
    exported_zero_point: Tensor | None
    exported_bias_scale: Tensor

    def weight_levels(self) -> Tensor:
        """Codes minus zero point, in float32, in the shape of the weight."""
        return self._dequantized(torch.ones_like(self.weight_scale))

    def set_weight(self, weight: Tensor) -> None:
        """Codes of a weight, packed if several fit in a byte."""
        spec = self.weight_spec
        assert spec is not None
        zero_point: Any = 0 if self.weight_zero_point is None else self.weight_zero_point
        self.weight_codes = functional.quantize(weight, self.weight_scale, zero_point, spec, packed=spec.bits in (2, 4))

    def set_levels(self, levels: Tensor) -> None:
        """The same from codes minus zero point, of a symmetric grid."""
        assert self.weight_spec is not None
        spec = dataclasses.replace(self.weight_spec, axis=None, group_size=None)
        self.weight_codes = functional.quantize(levels, torch.ones(()), 0, spec, packed=spec.bits in (2, 4))

    @property
    def is_packed(self) -> bool:
        """Whether several codes share a byte."""
        return tuple(self.weight_codes.shape) != self.weight_shape

    def float_weight(self) -> Tensor:
        """What the codes stand for."""
        return self._dequantized(self.weight_scale)

    def _dequantized(self, scale: Tensor) -> Tensor:
        assert self.weight_spec is not None
        zero_point: Any = 0 if self.weight_zero_point is None else self.weight_zero_point
        shape = self.weight_shape if self.is_packed else None
        return functional.dequantize(self.weight_codes, scale, zero_point, self.weight_spec, shape=shape)

    def float_bias(self, scale: Tensor | None) -> Tensor | None:
        """The bias, as a float."""
        if self.bias_codes is None:
            return getattr(self, self.bias_name, None)
        assert scale is not None
        return self.bias_codes.float() * scale

    def start_export(self, bytes_for_kernels: bool) -> None:
        """Makes the tensors that are to be in the file; nothing is computed while the model is traced.

        `bytes_for_kernels`: codes of a layer that computes with integers have 8 bits each, because the kernels
        take nothing else.
        """
        if self.weight_spec is None:
            return
        bits = self.weight_spec.bits
        if self.is_integer:  # ONNX Runtime refuses 2 bits beside a quantized input
            bits = 8 if bytes_for_kernels else max(bits, 4)
        self.exported_bits = bits
        spec, shape = self.weight_spec, self.weight_shape
        zero_point: Any = 0 if self.weight_zero_point is None else self.weight_zero_point
        self.exported_codes = functional.quantize(self.float_weight(), self.weight_scale, zero_point, spec)
        blocks = block_shape(shape, spec) if spec.axis is not None else ()
        self.exported_scale = self.weight_scale.reshape(blocks)
        self.exported_zero_point = None if self.weight_zero_point is None else self.weight_zero_point.reshape(blocks)
        if self.bias_codes is not None:
            self.exported_bias_scale = self.along_outputs(self._sum_scale(self._input_scale()))

    def _name(self, tensor: str) -> str:
        return f"{self.path}.{tensor}" if self.path else tensor

    def _exported(self, operator: Any, input: Tensor, rows: slice) -> Tensor:
        x = self.quantize_input(input)
        weight, bias = self.quantized_weight(), getattr(self, self.bias_name, None)
        if self.bias_codes is not None:
            bias = operators.stored(self.bias_codes, self.exported_bias_scale, None, 32, self._name("bias"))
        weight, bias = weight[rows] if rows != slice(None) else weight, _part(bias, rows)
        if operator is linear and x.dim() > 2:  # a product of two matrices, with its bias, is one kernel
            return operator(x.flatten(0, -2), weight, bias).unflatten(0, (-1, *x.shape[1:-1]))
        return operator(x, weight, bias)

    def quantized_weight(self) -> Tensor:
        """What the codes stand for."""
        if operators.is_exporting() and self.weight_spec is not None:
            zero_point = self.exported_zero_point
            bits, name = self.exported_bits, self._name("weight")
            return operators.stored(self.exported_codes, self.exported_scale, zero_point, bits, name)
        return getattr(self, self.weight_name) if self.weight_spec is None else self.float_weight()

    def compute(
        self,
        operator: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        input: Tensor,
        rows: slice = slice(None),
    ) -> Tensor:
        """`operator` of codes, if it can be, else of floats; with some rows of the weight and the bias."""
        if operators.is_exporting():
            return self._exported(operator, input, rows)
        with torch.no_grad():
            return self._compute(operator, input, rows)

    def _compute(self, operator: Any, input: Tensor, rows: slice) -> Tensor:
        x = self.quantize_input(input)
        origin = origin_of(x)
        if self.weight_spec is None or not isinstance(origin, OnGrid) or not self._sums_have_one_scale():
            bias_scale = None if self.bias_codes is None else self.along_outputs(self._sum_scale(self._input_scale()))
            return operator(plain(x), self.quantized_weight()[rows], _part(self.float_bias(bias_scale), rows))
        grid = origin.grid
        levels = torch.round(plain(x) / grid.scale)
        weight = self.weight_levels()
        dtype = self._wide_enough(grid, weight)
        bias = None if self.bias_codes is None else self.bias_codes.to(dtype)
        sums = operator(levels.to(dtype), weight[rows].to(dtype), _part(bias, rows))
        scale = self._along_channels(_part(self.along_outputs(self._sum_scale(grid.scale)), rows))
        value = sums.float() * scale
        floating = None if self.bias_codes is not None else getattr(self, self.bias_name, None)
        if floating is not None:
            return value + self._along_channels(floating[rows])
        return known(value, Accumulated(sums, scale, self, levels + grid.zero_point, grid.zero_point))

    @property
    def is_integer(self) -> bool:
        """Whether it computes with integers: input and weight have scales that do not vary within a sum."""
        grid = self.input_quantizer or self.input_grid
        known = isinstance(grid, Grid) and grid.has_one_scale
        return known and self.weight_spec is not None and self._sums_have_one_scale()

    def _input_scale(self) -> Tensor:
        grid = self.input_quantizer or self.input_grid
        assert isinstance(grid, Grid)
        assert grid.scale is not None
        return grid.scale

    def _sums_have_one_scale(self) -> bool:
        """Whether the scale of the weight is the same for all terms of a sum."""
        assert self.weight_spec is not None
        return self.has_one_scale_per_sum(self.weight_spec, len(self.weight_shape))

    def _sum_scale(self, x_scale: Tensor) -> Tensor:
        """In float32, as runtimes multiply them."""
        return x_scale * self.weight_scale

    def _along_channels(self, value: Tensor) -> Tensor:
        """Values per output channel in a shape that broadcasts with the sums."""
        spatial = len(self.weight_shape) - 2
        return value if value.dim() == 0 or spatial == 0 else value.reshape(-1, *[1] * spatial)

    def _wide_enough(self, grid: Any, weight: Tensor) -> torch.dtype:
        """A float type in which no partial sum is rounded."""
        zero = int(grid.zero_point) if grid.zero_point.numel() == 1 else None
        spec = grid.spec
        largest = spec.levels if zero is None else max(spec.qmax - zero, zero - spec.qmin)
        axes = [axis for axis in range(weight.dim()) if axis != self.channel_axis]
        bound = largest * float(weight.abs().double().sum(axes).max())
        if self.bias_codes is not None:
            bound += float(self.bias_codes.abs().max())
        # On other devices products of float32 may be of fewer bits.
        plainly = weight.is_cpu and (weight.dim() == 2 or _DIRECT_CONVOLUTIONS)
        plainly = plainly and torch.get_float32_matmul_precision() == "highest"
        narrow = bound < _EXACT_IN_FLOAT32 and plainly
        return torch.float32 if narrow else torch.float64

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.float_class,), self.__getstate__()


class IntegerAttention(IntegerLayer):
    """The projections of an attention."""

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        layer: Any = self
        if key is query and value is query:
            return list(layer._between(self.compute(linear, query)).chunk(3, dim=-1))
        size = self.weight_shape[0] // 3
        rows = [slice(i * size, (i + 1) * size) for i in range(3)]
        return [layer._between(self.compute(linear, x, r)) for x, r in zip((query, key, value), rows, strict=True)]


def _part(value: Any, rows: slice) -> Any:
    if value is None or value.dim() == 0 or rows == slice(None):  # all of it: a slice would hide its name in a file
        return value
    return value[..., rows]


def integer_class(cls: type[nn.Module]) -> type[IntegerLayer]:
    """The class of an integer layer for the class of a float one.

    >>> issubclass(integer_class(nn.Linear), nn.Linear)
    True
    """
    if cls not in _INTEGER:
        forward = find_forward(cls)
        assert forward is not None
        fields = {"float_class": cls, "__module__": __name__}
        base = IntegerAttention if forward is MultiheadAttention else IntegerLayer
        _INTEGER[cls] = type(f"Integer{cls.__name__}", (base, forward, cls), fields)
    return _INTEGER[cls]


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    integer = integer_class(cls)
    return integer.__new__(integer)
