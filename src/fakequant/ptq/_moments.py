"""The squared error of a layer's result as a function of its weight.

    error(w) = sum over rows of (w x - w_reference x_reference)^2
             = w A w^T - 2 w b^T + c

    A = sum of x^T x         b = sum of y x         c = sum of y^2         y = w_reference x_reference

x is the input of the layer in the quantized model, and x_reference that in the float model. All rows of a matrix have
the same A. So methods need no data after A, b and c are known.
"""

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from fakequant._diagnosis.sums import decibels
from fakequant.ptq._layer_products import Form, Product
from fakequant.ptq._paired_runs import Pair

# Rows of one product that are used at most. It bounds time and memory for large images.
_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Moments:
    """A, b and c of the matrices of a layer, in float64.

    Attributes:
        form: How the weight is a stack of matrices.
        reference: The weight of the float model, as matrices.
        a: Of shape (matrices, inputs, inputs).
        b: Of shape (matrices, outputs, inputs).
        c: Of shape (matrices, outputs).
    """

    form: Form
    reference: Tensor
    a: Tensor
    b: Tensor
    c: Tensor

    def error(self, matrix: Tensor) -> Tensor:
        """Returns the squared error of every output, with the shape (matrices, outputs)."""
        w = matrix.double()
        return (((w @ self.a - 2 * self.b) * w).sum(-1) + self.c).clamp(min=0)

    def sqnr(self, matrix: Tensor) -> float:
        """Returns the SQNR of the layer's result in dB."""
        return decibels(float(self.c.sum()), float(self.error(matrix).sum()))

    def damped(self, damping: float) -> "Moments":
        """Returns moments with `damping * mean(diagonal of A) * |w - w_reference|^2` added to the error.

        It keeps weights that the data say little about near those of the float model.
        """
        amount = damping * self.a.diagonal(dim1=1, dim2=2).mean(1)
        amount = torch.where(amount > 0, amount, 1.0)  # inputs that are always 0
        w = self.reference.double()
        return dataclasses.replace(
            self,
            a=self.a + torch.diag_embed(amount[:, None].expand(-1, w.shape[2])),
            b=self.b + amount[:, None, None] * w,
            c=self.c + amount[:, None] * w.square().sum(-1),
        )


def rows_of(product: Product) -> Tensor:
    """Returns the rows of a product's input that are used, in float32. Empty if it has no matrix form."""
    return product.x.new_empty(0) if product.form is None else product.rows(_ROWS).float()


def moments_of(pairs: Iterable[Pair], weights: dict[str, Tensor]) -> dict[str, Moments | None]:
    """Returns the moments of layers, by path. None for layers whose products have no matrix form.

    Args:
        pairs: The products of the layers, with `rows_of` the products of the reference.
        weights: The weights of the float model, by path.
    """
    found: dict[str, Moments | None] = {}
    for pair in pairs:
        if pair.path not in found:
            form = pair.quantized.form
            found[pair.path] = None if form is None else _zeros(form, weights[pair.path])
        moments = found[pair.path]
        if moments is not None:
            _add(moments, pair)
    return found


def _zeros(form: Form, weight: Tensor) -> Moments:
    reference = form.matrix(weight).float()
    matrices, outputs, inputs = reference.shape
    shapes = ((matrices, inputs, inputs), (matrices, outputs, inputs), (matrices, outputs))
    return Moments(form, reference, *(torch.zeros(s, dtype=torch.float64, device=weight.device) for s in shapes))


def _add(moments: Moments, pair: Pair) -> None:
    x = rows_of(pair.quantized)
    expected = x if pair.reference is None else pair.reference
    part = pair.quantized.part
    own = slice(None) if part is None else slice(part, part + 1)
    y = expected @ moments.reference[own].transpose(1, 2)
    moments.a[own] += x.transpose(1, 2) @ x
    moments.b[own] += y.transpose(1, 2) @ x
    moments.c[own] += y.double().square().sum(1)
