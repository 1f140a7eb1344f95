"""The products that the layers of a prepared model compute, seen while the model runs."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fakequant.nn._attention import MultiheadAttention
from fakequant.nn._expert_groups import Groups
from fakequant.nn._layer_calls import PRODUCTS, split_arguments
from fakequant.nn._layer_kinds import AnyLayer
from fakequant.nn._records import Operator
from fakequant.nn._transposed_linear import transposed_linear
from fakequant.ptq._matrix_rows import (
    Geometry,
    convolution_geometry,
    convolution_rows,
    expert_rows,
    linear_rows,
    matrix_of,
    transposed_geometry,
    weight_of,
)

_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


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
        return matrix_of(weight, self.geometry, self.matrices, is_transposed=self.is_transposed)

    def weight(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Returns the weight of which `matrix` returned the matrices. It has the shape of `like`."""
        return weight_of(matrix, like, self.geometry, is_transposed=self.is_transposed)


@dataclasses.dataclass(frozen=True)
class Product:
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
def watching_products(layers: list[AnyLayer], see: Callable[[AnyLayer, Product], None]) -> Iterator[None]:
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


def _spying_compute(record: Any, see: Callable[[AnyLayer, Product], None]) -> Callable[..., Tensor]:
    compute = type(record).compute

    def spying(
        layer: AnyLayer, operator: Operator, input: Tensor, operands: Any = None, weight: Tensor | None = None
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


def _spying_rows(record: Any, see: Callable[[AnyLayer, Product], None]) -> Callable[..., list[Tensor]]:
    compute_rows = type(record).compute_rows

    def spying(layer: AnyLayer, operator: Operator, inputs: list[Tensor]) -> list[Tensor]:
        seen: list[Product] = []

        def spy(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            product = _seen(operator, inputs[len(seen)], x, weight, bias)
            seen.append(dataclasses.replace(product, form=_PROJECTIONS, part=len(seen)))
            return product.y

        results: list[Tensor] = compute_rows(record, layer, spy, inputs)
        for product in seen:
            see(layer, product)
        return results

    return spying


def _seen(operator: Operator, source: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
    """Computes a product, and returns it with its options."""
    owner = getattr(operator, "__self__", None)
    if isinstance(owner, Groups):
        return Product(operator, source, x, operator(x, weight, bias), Form(matrices=owner.number), owner)
    if operator is transposed_linear:
        return Product(operator, source, x, operator(x, weight, bias), Form(is_transposed=True))
    with _Calls() as calls:
        y = operator(x, weight, bias)
    if len(calls.found) != 1:
        return Product(operator, source, x, y)
    return Product(operator, source, calls.found[0][0], y, calls.found[0][1])


class _Calls(TorchFunctionMode):
    """Notes the calls of functions that multiply by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Form]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS or func in _TRANSPOSED:
            given = split_arguments(args, kwargs)
            form = Form()
            if func is not F.linear:
                of = transposed_geometry if func in _TRANSPOSED else convolution_geometry
                geometry = of(given.weight, *given.rest, **given.named)
                form = Form(geometry, geometry.groups)
            self.found.append((given.input, form))
        return func(*args, **kwargs)
