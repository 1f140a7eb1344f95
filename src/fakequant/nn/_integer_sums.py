"""Exact sums in quantized layers: when sums are integers, and the grids they belong to.

With `QuantConfig(sums="exact")`, a layer whose input and weight are codes of at most 8 bits adds up products of
integers, as runtimes do. Its results do not depend on the machine, on the number of threads, or on the library that
multiplies.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant._backends.torch.grouped_linear import Groups
from fakequant._backends.torch.integer_convolution import Geometry, integer_convolution
from fakequant._backends.torch.integer_grouped_linear import integer_grouped_linear
from fakequant._backends.torch.integer_linear import (
    BiasCodes,
    IntegerGrid,
    has_int8_products,
    integer_linear,
    weight_levels,
)
from fakequant._backends.torch.plain_memory import is_eager
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._folding import deployed_bias_codes, has_one_scale_per_sum
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._operators import ConvolutionCall
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._recomputation import as_first, runs
from fakequant.nn._records import Operator
from fakequant.nn._saved_codes import linear, transposed_linear
from fakequant.nn._tensor_ranges import must_be_pure, pure_qparams
from fakequant.spec import QuantSpec


class KeptWeight(NamedTuple):
    """A weight that several calls multiply by, as integers."""

    grid: IntegerGrid
    # What `weight_levels` returned.
    levels: object
    bias: BiasCodes | None


_CONVOLUTIONS = (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)


def exact_product(
    layer: AnyLayer,
    operator: Operator,
    x: Tensor,
    weight: Tensor,
    bias: Callable[[], Tensor | None],
    x_quantizer: Quantizer | None,
    sources: tuple[Tensor | None, Tensor | None] = (None, None),
    rows: slice | None = None,
    kept: KeptWeight | None = None,
    groups: Groups | None = None,
) -> Tensor | None:
    """Returns what `operator` computes, with exact sums, or None if it has none or its sums are not integers.

    `x` and `weight` are quantized. `sources` are the tensors before that, if this call has quantized them. With `rows`,
    `weight` is these rows of the layer's. `bias` returns what is added, which sums with the deployed bias do not need.
    `kept` is what `kept_weight` returned for the weight. `operator` is the product of `groups`, if there are any.
    """
    quantizer: Quantizer | None = layer._modules.get("weight_quantizer")
    settings = _settings_of(layer, operator)
    is_convolution = settings is not None
    if not is_convolution and groups is None and operator not in (linear, F.linear, transposed_linear):
        return None
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or quantizer is None or x_quantizer is None:
        return None
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in (x, weight)) and not torch.compiler.is_exporting():
        return None  # a subclass, which may be spread over several processes
    if x.numel() == 0 or weight.numel() == 0 or x.device.type not in ("cpu", "cuda"):
        return None
    if torch.is_autocast_enabled(x.device.type) or not (is_integer(x_quantizer.spec) and is_integer(quantizer.spec)):
        return None
    if not has_one_scale_per_sum(layer, quantizer.spec, weight.dim()):
        return None
    if is_convolution and (x_quantizer.spec.granularity != "tensor" or not x.is_cpu):
        return None
    x_grid = _grid_of(x_quantizer, x, sources[0])
    if x_grid is None:
        return None
    weight_grid = kept.grid if kept else _grid_of(quantizer, weight, sources[1], is_kernel=is_convolution)
    if weight_grid is None:
        return None
    if runs.stack and not torch.compiler.is_compiling() and layer._modules.get("input_quantizer") is None:
        present = [tensor for tensor in x_grid[:2] if tensor is not None]  # which may have moved on since
        scale, *zero = as_first((layer, "input grid"), *present)
        x_grid = x_grid._replace(scale=scale, zero_point=zero[0] if zero else None)
    found = kept.bias if kept else _bias_codes(layer, quantizer, x, weight)
    # The gradient of the deployed bias is that of the layer's own.
    added = bias() if found is None else getattr(layer, layer._fakequant.kind.bias_name).to(weight.dtype)
    if rows is not None:
        weight_grid = weight_grid.part(rows)
        if found is not None and added is not None:
            found, added = found._replace(codes=found.codes[rows]), added[rows]
    if settings is not None:
        image = x if isinstance(operator, ConvolutionCall) else _padded(layer, x)
        return _convolution(image, weight, added, x_grid, weight_grid, settings, found)
    if groups is not None:
        return integer_grouped_linear(x, weight, added, groups, x_grid, weight_grid, found)
    weight = weight.t() if operator is transposed_linear else weight
    levels = kept.levels if kept else None
    if x.dim() > 1:
        return integer_linear(x, weight, added, x_grid, weight_grid, found, levels)
    y = integer_linear(x.unsqueeze(0), weight, added, x_grid, weight_grid, found, levels)
    return None if y is None else y.squeeze(0)


def kept_weight(layer: AnyLayer, weight: Tensor) -> KeptWeight | None:
    """Returns a quantized weight of a linear layer as integers, for several calls, or None if sums are not exact."""
    quantizer: Quantizer | None = layer._modules.get("weight_quantizer")
    if not layer._fakequant.exact_sums or quantizer is None or weight.dtype != torch.float32 or weight.numel() == 0:
        return None
    if not is_integer(quantizer.spec) or not has_one_scale_per_sum(layer, quantizer.spec, weight.dim()):
        return None
    grid = _grid_of(quantizer, weight, None)
    if grid is None:
        return None
    return KeptWeight(grid, weight_levels(weight, grid), _bias_codes(layer, quantizer, weight, weight))


def _bias_codes(layer: AnyLayer, quantizer: Quantizer, x: Tensor, weight: Tensor) -> BiasCodes | None:
    codes = deployed_bias_codes(layer, x, weight)
    return None if codes is None else BiasCodes(codes, 2.0 ** layer._fakequant.weight_shift(quantizer.spec))


def _settings_of(layer: AnyLayer, operator: Operator) -> tuple[Any, Any, Any, int] | None:
    """Returns stride, padding, dilation and groups of a convolution, or None if `operator` is not one of torch's.

    Classes derived from torch's may have a `_conv_forward` of their own, which computes something else.
    """
    if isinstance(operator, ConvolutionCall):
        return operator.settings
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or type(layer)._conv_forward not in _CONVOLUTIONS:
        return None
    if operator != layer._conv_forward:
        return None
    padding = layer.padding if layer.padding_mode == "zeros" else 0
    return layer.stride, padding, layer.dilation, layer.groups


def _padded(layer: AnyLayer, x: Tensor) -> Tensor:
    if layer.padding_mode == "zeros":
        return x
    return F.pad(x, layer._reversed_padding_repeated_twice, layer.padding_mode)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_grid: IntegerGrid,
    weight_grid: IntegerGrid,
    settings: tuple[Any, Any, Any, int],
    bias_codes: BiasCodes | None,
) -> Tensor | None:
    image = x if x.dim() == weight.dim() else x.unsqueeze(0)
    axes = weight.dim() - 2
    stride, padding, dilation = (_for_axes(value, axes) for value in settings[:3])
    if padding == "valid":
        padding = [0] * axes
    elif padding == "same":  # one more zero at the end if their number is odd
        zeros = [by * (size - 1) for by, size in zip(dilation, weight.shape[2:], strict=True)]
        padding = [number // 2 for number in zeros]
        if any(number % 2 for number in zeros):
            image = F.pad(image, [number for one in reversed(zeros) for number in (0, one % 2)])
    geometry = Geometry(stride, padding, dilation, settings[3])
    y = integer_convolution(image, weight, bias, x_grid, weight_grid, geometry, bias_codes)
    return y if y is None or x.dim() == weight.dim() else y.squeeze(0)


def _for_axes(value: Any, axes: int) -> Any:
    """Returns a setting of a convolution with one number for each axis."""
    if isinstance(value, str):
        return value
    return [value] * axes if isinstance(value, int) else list(value) * (axes if len(value) == 1 else 1)


def is_integer(spec: QuantSpec) -> bool:
    """Returns True if values are integers of at most 8 bits times one scale, or one per row or output channel."""
    return spec.format == "int" and spec.bits <= 8 and spec.granularity in ("tensor", "token", "channel")


def _grid_of(quantizer: Quantizer, y: Tensor, x: Tensor | None, *, is_kernel: bool = False) -> IntegerGrid | None:
    """Returns the grid of `y`, which the quantizer has just returned for `x`, or None if it is not known."""
    spec = quantizer.spec
    if not quantizer._quantizing:
        return None
    # A hook may move values off the grid, which is only noticed in ordinary memory.
    has_hooks = bool(quantizer._forward_hooks or quantizer._forward_pre_hooks)
    if has_hooks and (torch.compiler.is_compiling() or not is_eager(y)):
        return None
    if quantizer._blocks is None and spec.axis not in (-1, y.dim() - 1):
        return None
    if spec.granularity == "channel" and y.dim() != 2 and not is_kernel:
        return None
    if quantizer._blocks is None or (quantizer._observes_now() and must_be_pure(quantizer.training)):
        # They are not stored. Compiled code computes them once more, because nothing passes them on there.
        found = None
        if not torch.compiler.is_compiling():
            found = quantizer.last_qparams(y)
        elif isinstance(quantizer, FakeQuantize) and quantizer.rounding is None and x is not None:
            found = pure_qparams(quantizer, x)
        if found is None:
            return None
        scale, zero_point = found
    else:
        scale, zero_point = quantizer.scale, quantizer.zero_point
    return IntegerGrid(scale.detach(), None if spec.symmetric else zero_point, spec.qmin, spec.qmax)


def sums_in_words(layer: AnyLayer, x_quantizer: Quantizer | None) -> str:
    """Returns how a prepared layer adds up its products, for `summary`: "float", or how exact sums are computed."""
    record = layer._fakequant
    quantizer: Quantizer | None = layer._modules.get("weight_quantizer")
    if not (record.exact_sums and record.kind.can_sum_exactly) or x_quantizer is None or quantizer is None:
        return "float"
    if not (is_integer(x_quantizer.spec) and is_integer(quantizer.spec)):
        return "float"
    if not has_one_scale_per_sum(layer, quantizer.spec, 2):
        return "float"
    return "exact, 8-bit instructions" if has_int8_products() else "exact, products of floats"
