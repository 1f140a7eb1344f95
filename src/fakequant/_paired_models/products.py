"""The products that the layers of a prepared model compute, seen while the model runs, as products of matrices.

A linear layer or a convolution computes, for every group g of its channels,

    y[g, n, o] = sum over k of rows[g, n, k] * matrix[g, o, k]

where a row holds the inputs of one output position, and a row of the matrix the weights of one output channel.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fakequant._backends.torch.grouped_linear import Groups
from fakequant.nn._attention import MultiheadAttention
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._operators import LAYER_FUNCTIONS
from fakequant.nn._quantized_layer import split_arguments
from fakequant.nn._records import Operator
from fakequant.nn._saved_codes import transposed_linear

_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The options of a convolution, with one number per axis of the image.

    Padding is given as (before, after), and output padding is included in it.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    is_transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Form:
    """How the weight of a layer is a stack of matrices.

    Attributes:
        geometry: The options of a convolution. None for a linear layer.
        matrices: The number of matrices.
        is_transposed: Whether the outputs of a linear layer are on axis 1 of its weight.
    """

    geometry: Geometry | None = None
    matrices: int = 1
    is_transposed: bool = False

    def matrix(self, weight: Tensor) -> Tensor:
        """Returns a weight, or a tensor of its shape, as matrices of shape (matrices, outputs, inputs)."""
        if self.geometry is None:
            matrix = weight.t() if self.is_transposed else weight
            return matrix.reshape(self.matrices, -1, matrix.shape[1])
        groups = self.geometry.groups
        if not self.geometry.is_transposed:
            return weight.reshape(groups, weight.shape[0] // groups, -1)
        inputs, outputs = weight.shape[:2]
        flipped = weight.flip(tuple(range(2, weight.dim())))
        return flipped.reshape(groups, inputs // groups, outputs, -1).transpose(1, 2).flatten(2)

    def weight(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Returns the weight of which `matrix` returned the matrices. It has the shape of `like`."""
        if self.geometry is None:
            flat = matrix.flatten(0, 1)
            return flat.t() if self.is_transposed else flat
        if not self.geometry.is_transposed:
            return matrix.reshape(like.shape)
        inputs, outputs = like.shape[:2]
        groups = self.geometry.groups
        split = matrix.reshape(groups, outputs, inputs // groups, -1).transpose(1, 2)
        return split.reshape(like.shape).flip(tuple(range(2, like.dim())))


@dataclasses.dataclass(frozen=True)
class LayerProduct:
    """One product of a layer: `operator(x, weight, bias)`.

    Attributes:
        operator: The function of input, weight and bias.
        source: The input of the layer, before it is quantized.
        x: The input that was multiplied, quantized if the layer quantizes it.
        y: The result, before it is quantized.
        form: How the weight is a stack of matrices. None if it is unknown.
        groups: Which expert each row of `x` goes to. None if the layer has no experts.
        part: The index of the matrix that was multiplied. None for all.
    """

    operator: Operator
    source: Tensor
    x: Tensor
    y: Tensor
    form: Form | None = None
    groups: Groups | None = None
    part: int | None = None

    def rows(self, limit: int) -> Tensor:
        """Returns at most `limit` rows of the input, with the shape (matrices, rows, inputs).

        The first axis has length 1 if one or all matrices of a linear layer have this input. The rows of experts are
        not limited.
        """
        assert self.form is not None
        if self.groups is not None:
            return expert_rows(self.x, self.groups)
        if self.form.geometry is None:
            return linear_rows(self.x, limit)
        return convolution_rows(self.x, self.form.geometry, limit)

    def channels_last(self, y: Tensor) -> Tensor:
        """Returns the result as rows of channels, with the shape (positions, channels)."""
        geometry = None if self.form is None else self.form.geometry
        if geometry is None:
            return y.reshape(-1, y.shape[-1])
        return y.movedim(y.dim() - len(geometry.kernel) - 1, -1).flatten(0, -2)


# The projections of queries, keys and values in an attention.
_PROJECTIONS = Form(matrices=3)


@contextmanager
def watching_products(layers: list[AnyLayer], see: Callable[[AnyLayer, LayerProduct], None]) -> Iterator[None]:
    """Calls `see(layer, product)` for every product that one of the prepared layers computes."""
    for layer in layers:
        record = layer._fakequant
        record.compute = _spying_compute(record, see)
        record.compute_rows = _spying_rows(record, see)
    try:
        yield
    finally:
        for layer in layers:
            del layer._fakequant.compute, layer._fakequant.compute_rows


def _spying_compute(record: Any, see: Callable[[AnyLayer, LayerProduct], None]) -> Callable[..., Tensor]:
    compute = type(record).compute

    # `operator` already belongs to `groups`.
    def spying(
        layer: AnyLayer,
        operator: Operator,
        input: Tensor,
        operands: Any = None,
        weight: Tensor | None = None,
        groups: Groups | None = None,
    ) -> Tensor:
        def spy(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            product = _seen(operator, input, x, weight, bias)
            if record.kind is MultiheadAttention:  # queries, keys and values may also have inputs of their own
                product = dataclasses.replace(product, form=_PROJECTIONS)
            see(layer, product)
            return product.y

        y: Tensor = compute(record, layer, spy, input, operands, weight)
        return y

    return spying


def _spying_rows(record: Any, see: Callable[[AnyLayer, LayerProduct], None]) -> Callable[..., list[Tensor]]:
    compute_rows = type(record).compute_rows

    def spying(layer: AnyLayer, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
        seen: list[LayerProduct] = []

        def spy(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            product = _seen(operator, inputs[len(seen)], x, weight, bias)
            seen.append(dataclasses.replace(product, form=_PROJECTIONS, part=len(seen)))
            return product.y

        results: list[Tensor] = compute_rows(record, layer, spy, inputs)
        for product in seen:
            see(layer, product)
        return results

    return spying


def _seen(operator: Operator, source: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> LayerProduct:
    """Computes a product, and returns it with its options."""
    owner = getattr(operator, "__self__", None)
    if isinstance(owner, Groups):
        return LayerProduct(operator, source, x, operator(x, weight, bias), Form(matrices=owner.number), owner)
    if operator is transposed_linear:
        return LayerProduct(operator, source, x, operator(x, weight, bias), Form(is_transposed=True))
    with _Calls() as calls:
        y = operator(x, weight, bias)
    if len(calls.found) != 1:
        return LayerProduct(operator, source, x, y)
    return LayerProduct(operator, source, calls.found[0][0], y, calls.found[0][1])


class _Calls(TorchFunctionMode):
    """Notes the calls of functions that multiply by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Form]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYER_FUNCTIONS or func in _TRANSPOSED:
            given = split_arguments(args, kwargs)
            form = Form()
            if func is not F.linear:
                of = transposed_geometry if func in _TRANSPOSED else convolution_geometry
                geometry = of(given.weight, *given.rest, **given.named)
                form = Form(geometry, geometry.groups)
            self.found.append((given.input, form))
        return func(*args, **kwargs)


def convolution_geometry(
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Geometry:
    """Returns the options of `F.conv1d`, `F.conv2d` or `F.conv3d`, given as its arguments after the bias."""
    kernel = tuple(weight.shape[2:])
    strides, dilations = _per_axis(stride, kernel), _per_axis(dilation, kernel)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        pads = tuple((total // 2, total - total // 2) for total in totals)
    else:
        pads = tuple((p, p) for p in _per_axis(0 if padding == "valid" else padding, kernel))
    return Geometry(kernel, strides, pads, dilations, groups)


def transposed_geometry(
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Geometry:
    """Returns the options of `F.conv_transpose1d` and the like, given as its arguments after the bias.

    A transposed convolution is a convolution, with the kernel flipped, of the input with zeros between its elements.
    """
    kernel = tuple(weight.shape[2:])
    strides, dilations = _per_axis(stride, kernel), _per_axis(dilation, kernel)
    axes = zip(kernel, dilations, _per_axis(padding, kernel), _per_axis(output_padding, kernel), strict=True)
    pads = tuple((d * (k - 1) - p, d * (k - 1) - p + more) for k, d, p, more in axes)
    return Geometry(kernel, strides, pads, dilations, groups, is_transposed=True)


def linear_rows(x: Tensor, limit: int) -> Tensor:
    """Returns at most `limit` rows of the input of a linear layer, with the shape (1, rows, inputs)."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[_chosen(rows.shape[0], limit, x)][None]


def expert_rows(x: Tensor, groups: Groups) -> Tensor:
    """Returns the rows of every expert, followed by rows of zeros up to the same number."""
    counts = torch.bincount(groups.experts, minlength=groups.number)
    rows = x.new_zeros(groups.number, int(counts.max()), x.shape[-1])
    starts = counts.cumsum(0) - counts
    rows[groups.experts, torch.arange(len(x), device=x.device) - starts[groups.experts]] = x
    return rows


def convolution_rows(x: Tensor, geometry: Geometry, limit: int) -> Tensor:
    """Returns at most `limit` rows of the input of a convolution, with the shape (groups, rows, inputs of a sum)."""
    axes = len(geometry.kernel)
    x = x[None] if x.dim() == axes + 1 else x
    stride = geometry.stride
    if geometry.is_transposed:
        x, stride = _with_zeros_between(x, stride), (1,) * axes
    x = F.pad(x, [side for pair in reversed(geometry.padding) for side in pair])
    for axis, (k, s, d) in enumerate(zip(geometry.kernel, stride, geometry.dilation, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    positions = (x.shape[0], *x.shape[2 : 2 + axes])
    chosen = _chosen(math.prod(positions), limit, x)
    first, *rest = torch.unravel_index(chosen, positions)
    rows = x.movedim(1, axes + 1)[(first, *rest)]  # (rows, channels, kernel)
    return rows.reshape(len(chosen), geometry.groups, -1).transpose(0, 1)


def _with_zeros_between(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    every = [slice(None), slice(None), *(slice(None, None, s) for s in stride)]
    wide[tuple(every)] = x
    return wide


def _chosen(number: int, limit: int, x: Tensor) -> Tensor:
    """Returns the indices of `limit` rows, spread evenly over all, or of all rows if there are no more."""
    if number <= limit:
        return torch.arange(number, device=x.device)
    # Uneven steps, so that they do not fall into step with the rows of an image.
    offsets = torch.rand(limit, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    found = ((torch.arange(limit, dtype=torch.float64) + offsets) * (number / limit)).long()
    return found.clamp(max=number - 1).to(x.device)


def _per_axis(value: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Iterable) else (value,)
    return tuple(int(v) for v in (values * len(kernel) if len(values) == 1 else values))
