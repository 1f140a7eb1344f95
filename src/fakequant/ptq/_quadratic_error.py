"""The squared error of a layer's output as a function of its weight, and codes with a small error.

    error(w) = sum over rows of (w x - w_reference x_reference)^2
             = w A w^T - 2 w b^T + c

    A = sum of x^T x         b = sum of y x         c = sum of y^2         y = w_reference x_reference

x is the input of the layer in the quantized model, and x_reference that in the float model. All rows of a matrix have
the same A. So methods need no data after A, b and c are known.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant._paired_models.errors import decibels
from fakequant._paired_models.products import Form, LayerProduct
from fakequant._paired_models.runs import Pair
from fakequant.spec import QuantSpec

# Rows of one product that are used at most. It bounds time and memory for large images.
_ROWS = 4096
# How often coordinate descent goes over all inputs.
_SWEEPS = 4
# Inputs that are changed before the gradient of all others is updated, in one product.
_BLOCK = 64


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
        """Returns the SQNR of the layer's output in dB."""
        return decibels(float(self.c.sum()), float(self.error(matrix).sum()))

    def damped(self, damping: float) -> "Moments":
        """Returns moments with `damping * mean(diagonal of A) * |w - w_reference|^2` added to the error.

        It keeps weights that the data say little about near the float weights.
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


def rows_of(product: LayerProduct) -> Tensor:
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


@dataclasses.dataclass(frozen=True)
class RoundingProblem:
    """Which codes to choose for the weight of a layer.

        weight = (codes - zero_point) * scale, qmin <= codes <= qmax

    The codes of a float format are its values here, in units of the scale, instead of bit patterns.

    Attributes:
        weight: The float weight, as matrices.
        scale: The scale of each weight.
        zero_point: The zero point of each weight.
        qmin: The lowest code.
        qmax: The highest code.
        moments: The error of the layer's output, damped.
        float_grid: The float format, for one scale per tensor. None for integers.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    moments: Moments
    float_grid: QuantSpec | None = None

    def rounded(self, steps: Tensor, zero_point: Tensor) -> Tensor:
        """Returns the codes nearest to values in units of the scale."""
        if self.float_grid is not None:
            return tensor_functions.fake_quantize(steps, 1.0, 0, self.float_grid)
        return (torch.round(steps) + zero_point).clamp(self.qmin, self.qmax)

    def values(self, codes: Tensor) -> Tensor:
        """Returns the weights of codes."""
        return (codes - self.zero_point) * self.scale

    def nearest(self) -> Tensor:
        """Returns the codes nearest to the float weight."""
        return self.rounded(self.weight / self.scale, self.zero_point)


def descend(problem: RoundingProblem, codes: Tensor) -> Tensor:
    """Returns codes whose error is not larger than the error of `codes`.

    The error is quadratic in each weight, so the best code for it, with all others fixed, is known. All outputs are
    changed at once, input by input, a few times.

    >>> w = torch.tensor([[[0.4, 0.4]]])  # both inputs are always equal, so one of the weights should be 1
    >>> a = torch.ones(1, 2, 2, dtype=torch.float64)
    >>> moments = Moments(Form(), w, a, w.double() @ a, (w.double() @ a * w).sum(-1))
    >>> descend(RoundingProblem(w, torch.ones(1, 1, 2), torch.zeros(1, 1, 2), -8, 7, moments), torch.zeros(1, 1, 2))
    tensor([[[1., 0.]]])
    """
    a, is_float = problem.moments.a, problem.float_grid is not None
    slope = problem.values(codes.double()) @ a - problem.moments.b  # half the gradient
    # With inputs on axis 1, the outputs of one input are neighbours in memory.
    codes, slope, scale = (t.double().transpose(1, 2).contiguous() for t in (codes, slope, problem.scale))
    curvature = a.diagonal(dim1=1, dim2=2)[..., None] * scale
    for _ in range(_SWEEPS):
        before = codes.clone()
        for start in range(0, codes.shape[1], _BLOCK):
            end = min(start + _BLOCK, codes.shape[1])
            changes = torch.zeros_like(codes[:, start:end])
            for k in range(start, end):
                best = slope[:, k] / curvature[:, k]  # how far the code is above the best number
                if is_float:
                    wanted = problem.rounded(codes[:, k] - best, codes[:, k])
                else:
                    wanted = (codes[:, k] - torch.round(best)).clamp(problem.qmin, problem.qmax)
                change = (wanted - codes[:, k]) * scale[:, k]
                codes[:, k], changes[:, k - start] = wanted, change
                slope[:, start:end] += a[:, start:end, k, None] * change[:, None]
            slope[:, :start] += a[:, :start, start:end] @ changes
            slope[:, end:] += a[:, end:, start:end] @ changes
        if torch.equal(codes, before):
            break
    return codes.transpose(1, 2).float()


# Returns the codes of the weight, as floats.
Solver: TypeAlias = Callable[[RoundingProblem], Tensor]


def best_codes(problem: RoundingProblem, solve: Solver) -> Tensor:
    """Returns, for each output, the better of the solver's codes and the nearest codes, both improved one by one."""
    nearest = problem.nearest()
    best, least = nearest, problem.moments.error(problem.values(nearest))
    for start in (nearest, solve(problem)):
        codes = descend(problem, start)
        error = problem.moments.error(problem.values(codes))
        best = torch.where((error < least)[..., None], codes, best)
        least = torch.minimum(error, least)
    return best
