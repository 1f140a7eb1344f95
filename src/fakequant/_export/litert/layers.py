"""Layers: linear layers, convolutions and transposed convolutions, in integers or in float."""

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from fakequant._export.litert.builder import Builder, Grid, Known, Pending, Value, scale_of
from fakequant._export.litert.exported_modules import Weight
from fakequant._export.litert.file import schema
from fakequant._export.litert.graph import AnyLength, Tensor
from fakequant._runtimes.litert.arithmetic import LARGEST_SUM

FUSED = {"NONE": 0, "RELU": 1, "RELU6": 3}
SAME, VALID = 0, 1
# Why a layer whose weight is quantized is computed in float.
_NO_CODES = "its input or its weight is not on an integer grid with one scale"
_NO_RESULT = "its result is not quantized"
_NO_KERNEL = "there is no kernel in integers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One call of a layer."""

    x: Value
    weight: Weight
    # The bias if it is not that of the weight.
    bias: torch.Tensor | None
    shape: tuple[int, ...]
    # Whether scales of tokens are computed by the kernel.
    is_dynamic: bool = False
    is_transposed: bool = False
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1


def layer(builder: Builder, call: Layer) -> Value:
    """Returns the result of a layer."""
    return Pending(
        call.shape,
        lambda: _in_float(builder, call, _why_float(builder, call)),
        lambda grid: _codes(builder, call, grid),
    )


def _why_float(builder: Builder, call: Layer) -> str:
    if call.weight.codes is None or builder.codes_of(call.x) is None:
        return _NO_CODES
    return _NO_KERNEL if _has_no_kernel(call) else _NO_RESULT


def _has_no_kernel(call: Layer) -> bool:
    return len(call.weight.floats.shape) == 5


def _codes(builder: Builder, call: Layer, grid: Grid) -> Known | None:
    operands, weight = builder.operands_of(grid, call.x), call.weight
    if weight.codes is None or operands is None or call.is_dynamic or _has_no_kernel(call):
        return None
    if call.bias is not None and weight.bias is None:
        return None
    assert weight.scale is not None
    (x,) = operands
    x_scale = scale_of(x.tensor)
    scale, kernels = weight.scale, builder.kernels(grid)
    if not kernels.rounds_twice:
        # Any scale suits a channel without weights and bias. Its own may be so small that XNNPACK refuses it.
        scale = torch.where(_is_empty(weight), grid.scale / x_scale, scale)
    if not kernels.has_layer(x_scale, scale, grid.scale, weight.largest_sum):
        return None
    call = dataclasses.replace(call, weight=dataclasses.replace(weight, scale=scale))
    return _Emission(builder, call, x, grid).result()


def _is_empty(weight: Weight) -> torch.Tensor:
    """Returns which outputs have no weights and no bias."""
    assert weight.codes is not None
    is_empty = (weight.codes == 0).transpose(0, weight.axis).flatten(1).all(1)
    return is_empty if weight.bias is None else is_empty & (weight.bias[0] == 0).reshape(-1, len(is_empty)).all(0)


def _in_float(builder: Builder, call: Layer, why: str) -> Known:
    if call.is_dynamic and call.weight.codes is not None:
        return _Emission(builder, call, builder.floats(call.x), None).result()
    plain = dataclasses.replace(call, weight=dataclasses.replace(call.weight, codes=None))
    return _Emission(builder, plain, builder.floats(call.x), None, why).result()


class _Emission:
    """Adds the operators of one layer."""

    def __init__(self, builder: Builder, call: Layer, x: Known, grid: Grid | None, why: str = "") -> None:
        self.builder, self.call, self.x, self.grid, self.why = builder, call, x, grid, why
        self.graph = builder.graph

    def result(self) -> Known:
        axes = self.call.weight.floats.dim()
        if axes == 2:
            return self.linear()
        if axes == 3:
            return self.along_one_axis()
        return self.volumes() if axes == 5 else self.images()

    @property
    def is_wide(self) -> bool:
        """Whether the codes of input and result have 16 bits."""
        return self.grid is not None and self.grid.bits == 16

    @property
    def sums_bits(self) -> int:
        """The number of bits of sums and the bias. With 16-bit codes, kernels of convolutions round less with 32."""
        fits = self.call.weight.largest_sum < LARGEST_SUM and self.call.weight.floats.dim() > 2
        return 32 if not self.is_wide or fits else 64

    # --- tensors

    def weight(self, arrange: Any, axis: int) -> Tensor:
        """Returns the weight, of which `arrange` moves elements. `axis` is that of the outputs afterwards."""
        weight = self.call.weight
        if weight.codes is None:
            array = np.ascontiguousarray(arrange(weight.floats).detach().numpy())
            return Tensor(array.shape, "float32", f"{weight.path}.weight", array)
        array = np.ascontiguousarray(arrange(weight.codes).detach().numpy())
        assert weight.scale is not None
        scale, kind = weight.scale.numpy().astype(np.float32), "int4" if weight.bits == 4 else "int8"
        return Tensor(array.shape, kind, f"{weight.path}.weight", array, scale, axis=axis)

    def bias(self, number: int) -> Tensor:
        weight = self.call.weight
        name = f"{weight.path}.bias"
        if self.grid is not None:
            assert weight.scale is not None
            x_scale = np.float32(scale_of(self.x.tensor))
            scale = np.broadcast_to(x_scale * weight.scale.numpy().astype(np.float32), number)
            kind = "int64" if self.sums_bits == 64 else "int32"
            codes = np.zeros(number, kind) if weight.bias is None else weight.bias[0].numpy().astype(kind)
            return Tensor((number,), kind, name, codes, np.ascontiguousarray(scale))
        bias = self.call.bias
        floats = np.zeros(number, np.float32) if bias is None else bias.detach().numpy().astype(np.float32)
        return Tensor((number,), "float32", name, floats)

    def output(self, shape: Sequence[int]) -> tuple[Tensor, str, Any]:
        if self.grid is None:
            return Tensor(tuple(shape), "float32"), "NONE", lambda tensor: tensor
        return self.builder.result(self.grid, shape)

    def add(self, code: str, inputs: list[Tensor | None], shape: Sequence[int], options: Any, products: int) -> Tensor:
        out, activation, limited = self.output(shape)
        name, values = options
        values = {**values, "fusedActivationFunction": FUSED[activation]}
        if self.is_wide and self.sums_bits == 32:
            values["quantizedBiasType"] = schema().TensorType.INT32
        path = self.call.weight.path or self.graph.path
        more = {"path": path, "products": products, "why_float": self.why}
        made: Tensor = limited(self.graph.add(code, inputs, [out], (name, values), **more))
        return made

    # --- forms

    def linear(self) -> Known:
        x = self.builder.with_last(self.x, -1)
        weight = self.weight(lambda w: w, 0)
        outputs, inputs = weight.shape
        shape = (*x.tensor.shape[:-1], outputs)
        options = ("FullyConnected", {"keepNumDims": True, "asymmetricQuantizeInputs": True})
        products = prod(x.tensor.shape[:-1]) * outputs * inputs
        return x.like(self.add("FULLY_CONNECTED", [x.tensor, weight, self.bias(outputs)], shape, options, products))

    def along_one_axis(self) -> Known:
        """A convolution along one axis is one along two axes, of which the first has length 1."""
        x = self.builder.arranged(self.x, (0, 2, 1))
        batch, length, channels = x.tensor.shape
        image = Known(self.builder.reshaped(x.tensor, (batch, 1, length, channels)), (0, 2, 3, 1))
        call, weight = self.call, self.call.weight
        call = dataclasses.replace(
            call,
            weight=dataclasses.replace(
                weight,
                floats=weight.floats.unsqueeze(2),
                codes=None if weight.codes is None else weight.codes.unsqueeze(2),
            ),
            shape=(*call.shape[:2], 1, call.shape[2]),
            stride=(1, *call.stride),
            padding=(0, *call.padding),
            dilation=(1, *call.dilation),
        )
        made = _Emission(self.builder, call, image, self.grid, self.why).images()
        batch, _, length, channels = made.tensor.shape
        return Known(self.builder.reshaped(made.tensor, (batch, length, channels)), (0, 2, 1))

    def images(self) -> Known:
        order = (0, 2, 3, 1)
        x = self.builder.arranged(self.x, order)
        if self.call.is_transposed:
            return Known(self.transposed(x.tensor), order)
        call = self.call
        outputs, inputs, *kernel = call.weight.floats.shape
        # Of the kernels for 16 bits, the one for groups rounds less.
        is_depthwise = call.groups == x.tensor.shape[3] and inputs == 1 and call.groups > 1 and not self.is_wide
        tensor, padding = padded(self.builder, x.tensor, kernel, call)
        if is_depthwise:
            weight = self.weight(lambda w: w.permute(1, 2, 3, 0), 3)
        else:
            weight = self.weight(lambda w: w.permute(0, 2, 3, 1), 0)
        settings = {
            "padding": padding,
            "strideH": call.stride[0],
            "strideW": call.stride[1],
            "dilationHFactor": call.dilation[0],
            "dilationWFactor": call.dilation[1],
        }
        if is_depthwise:
            settings["depthMultiplier"] = outputs // call.groups
        name = "DepthwiseConv2D" if is_depthwise else "Conv2D"
        shape = [call.shape[axis] for axis in order]
        code = "DEPTHWISE_CONV_2D" if is_depthwise else "CONV_2D"
        products = prod(shape) * inputs * prod(kernel)
        return Known(self.add(code, [tensor, weight, self.bias(outputs)], shape, (name, settings), products), order)

    def volumes(self) -> Known:
        if self.call.is_transposed:
            raise NotImplementedError("transposed convolutions along three axes")
        order = (0, 2, 3, 4, 1)
        x, call = self.builder.arranged(self.x, order), self.call
        if call.groups > 1:
            raise NotImplementedError("convolutions along three axes with groups")
        outputs, inputs, *kernel = call.weight.floats.shape
        tensor, padding = padded(self.builder, x.tensor, kernel, call)
        weight = self.weight(lambda w: w.permute(2, 3, 4, 1, 0), 4)
        settings = {"padding": padding}
        for axis, name in enumerate("DHW"):
            settings[f"stride{name}"], settings[f"dilation{name}Factor"] = call.stride[axis], call.dilation[axis]
        shape = [call.shape[axis] for axis in order]
        products = prod(shape) * inputs * prod(kernel)
        inputs_: list[Tensor | None] = [tensor, weight, self.bias(outputs)]
        return Known(self.add("CONV_3D", inputs_, shape, ("Conv3D", settings), products), order)

    def transposed(self, x: Tensor) -> Tensor:
        """Computes the whole result of a transposed convolution, and cuts the padding off."""
        call = self.call
        _, outputs, *kernel = call.weight.floats.shape
        if any(one != 1 for one in call.dilation):
            raise NotImplementedError("transposed convolutions with dilation")
        if any(isinstance(length, AnyLength) for length in x.shape):
            raise NotImplementedError("transposed convolutions, whose results must have a known length")
        if call.groups > 1:
            return self.transposed_groups(x)
        sizes = [call.shape[axis] + 2 * pad for axis, pad in zip((2, 3), call.padding, strict=True)]
        whole = (call.shape[0], *sizes, outputs)
        weight = self.weight(lambda w: w.permute(1, 2, 3, 0), 0)
        options = ("TransposeConv", {"padding": VALID, "strideH": call.stride[0], "strideW": call.stride[1]})
        shape = self.graph.constant([int(length) for length in whole], "int32")
        products = prod(x.shape) * outputs * prod(kernel)
        made = self.add("TRANSPOSE_CONV", [shape, weight, x, self.bias(outputs)], whole, options, products)
        if not any(call.padding):
            return made
        cut = (call.shape[0], call.shape[2], call.shape[3], outputs)
        return self.builder.sliced(made, (0, *call.padding, 0), cut)

    def transposed_groups(self, x: Tensor) -> Tensor:
        """Computes the groups one by one. There is no kernel for all."""
        call, parts = self.call, []
        *sizes, channels = x.shape
        inputs, outputs = channels // call.groups, call.shape[1] // call.groups
        for group in range(call.groups):
            some = self.builder.sliced(x, (0, 0, 0, group * inputs), (*sizes, inputs))
            rows = slice(group * outputs, (group + 1) * outputs)
            one = dataclasses.replace(
                call,
                weight=_group_of(call.weight, slice(group * inputs, (group + 1) * inputs), rows),
                bias=None if call.bias is None else call.bias[rows],
                shape=(call.shape[0], outputs, *call.shape[2:]),
                groups=1,
            )
            parts.append(_Emission(self.builder, one, Known(some, (0, 2, 3, 1)), self.grid, self.why).transposed(some))
        shape = [call.shape[axis] for axis in (0, 2, 3, 1)]
        options = ("Concatenation", {"axis": 3})
        return self.graph.add("CONCATENATION", list(parts), [self.builder.moved(parts[0], shape)], options)


def _group_of(weight: Weight, inputs: slice, outputs: slice) -> Weight:
    """Returns the part of a transposed convolution's weight that computes a group of outputs."""
    bias = None if weight.bias is None else (weight.bias[0][outputs], weight.bias[1][outputs])
    return dataclasses.replace(
        weight,
        floats=weight.floats[inputs],
        codes=None if weight.codes is None else weight.codes[inputs],
        scale=weight.scale if weight.scale is None or weight.axis == 1 else weight.scale[inputs],
        bias=bias,
    )


def padded(builder: Builder, x: Tensor, kernel: Sequence[int], call: Layer) -> tuple[Tensor, int]:
    """Returns the input of a convolution, padded if necessary, and the kind of padding that the operator adds."""
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, call.dilation, strict=True)]
    pads, kind = paddings(x.shape, call.shape, reach, call.stride, call.padding)
    return (x, kind) if kind is not None else (pad_zeros(builder, x, pads), VALID)


def paddings(
    image: Sequence[int], results: Sequence[int], sizes: Sequence[int], strides: Sequence[int], before: Sequence[int]
) -> tuple[list[tuple[int, int]], int | None]:
    """Returns the paddings around an image, and the kind that operators add by themselves, or None.

    Args:
        image: The shape, with channels last.
        results: The shape of the result, with channels first.
        sizes: The lengths of windows.
        strides: Their strides.
        before: The paddings in front.
    """
    after, same = [], []
    for length, number, size, stride, pad in zip(image[1:-1], results[2:], sizes, strides, before, strict=True):
        needed = max((number - 1) * stride + size - length, 0)
        same.append(number == -(-length // stride) and needed // 2 == pad)
        after.append(max(needed - pad, 0))
    kind = SAME if all(same) else None
    return [(0, 0), *zip(before, after, strict=True), (0, 0)], kind if any((*before, *after)) else VALID


def pad_zeros(builder: Builder, x: Tensor, pads: Sequence[tuple[int, int]], value: float | None = None) -> Tensor:
    """Returns a tensor with zeros, or another number, around it."""
    shape = [length if not sum(pad) else length + sum(pad) for length, pad in zip(x.shape, pads, strict=True)]
    sizes = builder.graph.constant(np.array(pads), "int32")
    if value is None:
        return builder.graph.add("PAD", [x, sizes], [builder.moved(x, shape)], ("Pad", {}))
    if x.is_codes:
        number = builder.moved(x, (1,))
        number.data = np.array([value], number.dtype)
    else:
        number = builder.graph.constant([value], x.dtype)
    return builder.graph.add("PADV2", [x, sizes, number], [builder.moved(x, shape)], ("PadV2", {}))
