"""The squared error of a layer's output as a function of its weight, and codes with a small error.

    error(w) = sum over rows of (w x - w_reference x_reference)^2
             = w A w^T - 2 w b^T + c

    A = sum of x^T x         b = sum of y x         c = sum of y^2         y = w_reference x_reference

x is the input of the layer in the quantized model, and x_reference that in the float model. All rows of a matrix have
the same A. So methods need no data after A, b and c are known.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fakequant._backends.torch import tensor_functions
from fakequant._paired_models.products import Form, LayerProduct
from fakequant._paired_models.runs import Pair
from fakequant.spec import QuantSpec

# Rows of one product that are used at most. It bounds time and memory for large images.
_ROWS = 4096
# How often coordinate descent goes over all inputs.
_SWEEPS = 4
# Inputs that are changed before the gradient of all others is updated, in one product.
_BLOCK = 32
# Weights that are worked on at once. It bounds the memory for large layers, whose outputs are independent.
_ELEMENTS = 1 << 20
# By how much an error must be smaller to matter. At ties, float32 weights and scales decide by chance.
_ROUNDING = 1e-5
# As many matrices are worked on together. Of fewer, only the outputs that still change are.
_MANY = 8


@dataclasses.dataclass(frozen=True)
class Moments:
    """A, b and c of some outputs of a layer's matrices, in float64.

    Attributes:
        reference: The weight of the float model, as matrices.
        a: Of shape (matrices, inputs, inputs).
        b: Of shape (matrices, outputs, inputs).
        c: Of shape (matrices, outputs).
        amount: What was added to the diagonal of A, of shape (matrices,). None for nothing.
    """

    reference: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    amount: Tensor | None = None

    def error(self, matrix: Tensor) -> Tensor:
        """Returns the squared error of every output, with the shape (matrices, outputs)."""
        w = matrix.double()
        return (((w @ self.a - 2 * self.b) * w).sum(-1) + self.c).clamp(min=0)

    def powers(self, matrix: Tensor, error: Tensor) -> Tensor:
        """Returns the squared outputs and their squared error, without damping. `error` is the error of the matrix."""
        signal, noise = self.c.sum(), error.sum()
        if self.amount is not None:
            distances = (matrix - self.reference).double().square().sum((1, 2))
            signal = signal - (self.amount * self.reference.double().square().sum((1, 2))).sum()
            noise = noise - (self.amount * distances).sum()
        return torch.stack([signal, noise])


def rows_of(product: LayerProduct) -> Tensor:
    """Returns the rows of a product's input that are used, in float32. Empty if it has no matrix form."""
    return product.x.new_empty(0) if product.form is None else product.rows(_ROWS).float()


class LayerSums:
    """Sums over the rows of both models, from which the moments of a layer's outputs follow.

    A = sum of x^T x        cross = sum of x_reference^T x        square = sum of x_reference^T x_reference

    b = w_reference cross   c = diagonal of w_reference square w_reference^T

    b is as large as the weight in float64. It replaces the sums if it is smaller than these, and is otherwise computed
    for some outputs at a time.

    Args:
        form: How the weight is a stack of matrices.
        weight: The weight of the float model.
    """

    def __init__(self, form: Form, weight: Tensor) -> None:
        self.form = form
        self.reference = form.matrix(weight).float()
        matrices, _, inputs = self.reference.shape
        self.a, self.cross, self.square = (
            torch.zeros(matrices, inputs, inputs, dtype=torch.float64, device=weight.device) for _ in range(3)
        )
        self._amount: Tensor | None = None
        self._linear: tuple[Tensor, Tensor] | None = None  # b and c of all outputs, instead of `cross` and `square`

    def add(self, part: int | None, products: Iterable[Tensor]) -> None:
        """Adds x^T x, x_reference^T x and x_reference^T x_reference of some rows, for one matrix or for all."""
        own = slice(None) if part is None else slice(part, part + 1)
        each = iter(products)
        for total in (self.a, self.cross, self.square):
            total[own].add_(next(each))  # no name keeps it while the next one is computed

    def damp(self, damping: float) -> "LayerSums":
        """Adds `damping * mean(diagonal of A) * |w - w_reference|^2` to the error, in place.

        It keeps weights that the data say little about near the float weights.
        """
        amount = damping * self.a.diagonal(dim1=1, dim2=2).mean(1)
        self._amount = torch.where(amount > 0, amount, 1.0)  # inputs that are always 0
        for sums in (self.a, self.cross, self.square):  # so that b and c follow from them
            sums.diagonal(dim1=1, dim2=2).add_(self._amount[:, None])
        if self.reference.shape[1] <= self.reference.shape[2]:
            b = self._b_of(slice(None))
            del self.cross
            self._linear = (b, self._c_of(slice(None)))
            del self.square
        return self

    def moments(self, outputs: slice = slice(None)) -> Moments:
        """Returns the moments of some outputs."""
        if self._linear is None:
            b, c = self._b_of(outputs), self._c_of(outputs)
        else:
            b, c = (part[:, outputs] for part in self._linear)
        return Moments(self.reference[:, outputs], self.a, b, c, self._amount)

    def _b_of(self, outputs: slice) -> Tensor:
        return self.reference[:, outputs].double() @ self.cross

    def _c_of(self, outputs: slice) -> Tensor:
        w = self.reference[:, outputs].double()
        return (w @ self.square).mul_(w).sum(-1)


def parts_of(matrix: Tensor) -> list[slice]:
    """Returns slices of the outputs of matrices, so that their parts are not too large."""
    matrices, outputs, inputs = matrix.shape
    size = max(_ELEMENTS // max(matrices * inputs, 1), 1)
    return [slice(start, start + size) for start in range(0, outputs, size)]


def sums_of(pairs: Iterable[Pair], weights: dict[str, Tensor]) -> dict[str, LayerSums]:
    """Returns the sums of layers, by path, without layers whose products have no matrix form.

    Args:
        pairs: The products of the layers, with `rows_of` the products of the reference.
        weights: The weights of the float model, by path.
    """
    found: dict[str, LayerSums | None] = {}
    last: tuple[Tensor, Tensor, Iterable[Tensor]] | None = None
    for pair in pairs:
        if pair.path not in found:
            form = pair.quantized.form
            found[pair.path] = None if form is None else LayerSums(form, weights[pair.path])
        sums = found[pair.path]
        if sums is None:
            continue
        x = rows_of(pair.quantized)
        expected = x if pair.reference is None else pair.reference
        # Layers with the same input have the same products.
        if last is None or not _same(last[0], x) or not _same(last[1], expected):
            last = None  # they are as large as the sums
            products = _products(x, expected)
            last = (x, expected, tuple(products) if len(weights) > 1 else products)
        sums.add(pair.quantized.part, last[2])
        last = last if len(weights) > 1 else None
        del pair  # so that its result is not kept while the next batch runs
    return {path: sums for path, sums in found.items() if sums is not None}


def _products(x: Tensor, expected: Tensor) -> Iterator[Tensor]:
    yield x.mT @ x
    yield expected.mT @ x
    yield expected.mT @ expected


def _same(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.shape == y.shape and torch.equal(x, y))


@dataclasses.dataclass(frozen=True)
class RoundingProblem:
    """Which codes to choose for the weight of a layer, or for some of its outputs.

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


class _Codes:
    """Codes with the gradient of their error. Inputs are on axis 1, and outputs on axis 2.

    So the outputs of one input are neighbours in memory. The outputs are independent of each other.
    """

    def __init__(self, problem: RoundingProblem, codes: Tensor) -> None:
        self.problem = problem
        w = problem.values(codes.double())
        slope = w @ problem.moments.a - problem.moments.b  # half the gradient
        self.error = ((slope - problem.moments.b) * w).sum(-1) + problem.moments.c
        self.codes, self.slope = (t.transpose(1, 2).contiguous() for t in (codes.double(), slope))

    def descend(self) -> None:
        """Changes single codes where it lowers the error."""
        a = self.problem.moments.a
        scale = self.problem.scale.double().transpose(1, 2).contiguous()
        for matrix in range(len(a)) if len(a) < _MANY else ():
            # An output that a whole sweep has not changed has no better code for any input.
            left = torch.arange(scale.shape[2], device=a.device)
            for _ in range(_SWEEPS):
                if not len(left):
                    break
                parts = [t[matrix : matrix + 1, :, left] for t in (self.codes, self.slope, scale)]
                before = parts[0].clone()
                self._sweep(a[matrix : matrix + 1], *parts)
                self.codes[matrix, :, left], self.slope[matrix, :, left] = parts[0][0], parts[1][0]
                left = left[(parts[0] != before).any(1)[0]]
        for _ in range(_SWEEPS) if len(a) >= _MANY else ():
            before = self.codes.clone()
            self._sweep(a, self.codes, self.slope, scale)
            if torch.equal(self.codes, before):
                break
        b, w = self.problem.moments.b, self.problem.values(self.codes.transpose(1, 2))
        self.error = ((self.slope.transpose(1, 2) - b) * w).sum(-1) + self.problem.moments.c

    def _sweep(self, a: Tensor, codes: Tensor, slope: Tensor, scale: Tensor) -> None:
        """Finds the best code for each input, one after the other, in place."""
        problem = self.problem
        curvature = a.diagonal(dim1=1, dim2=2)[..., None] * scale
        for start in range(0, codes.shape[1], _BLOCK):
            end = min(start + _BLOCK, codes.shape[1])
            changes = torch.zeros_like(codes[:, start:end])
            near, within = slope[:, start:end], a[:, start:end, start:end]
            for k in range(start, end):
                best = slope[:, k] / curvature[:, k]  # how far the code is above the best number
                if problem.float_grid is not None:
                    wanted = problem.rounded(codes[:, k] - best, codes[:, k])
                else:
                    wanted = (codes[:, k] - best.round_()).clamp_(problem.qmin, problem.qmax)
                change = changes[:, k - start]
                torch.sub(wanted, codes[:, k], out=change)
                change *= scale[:, k]
                codes[:, k] = wanted
                near.addcmul_(within[:, :, k - start, None], change[:, None])
            slope[:, :start] += a[:, :start, start:end] @ changes
            slope[:, end:] += a[:, end:, start:end] @ changes


def descend(problem: RoundingProblem, codes: Tensor) -> Tensor:
    """Returns codes whose error is not larger than the error of `codes`.

    The error is quadratic in each weight, so the best code for it, with all others fixed, is known. All outputs are
    changed at once, input by input, a few times.

    >>> w = torch.tensor([[[0.4, 0.4]]])  # both inputs are always equal, so one of the weights should be 1
    >>> a = torch.ones(1, 2, 2, dtype=torch.float64)
    >>> moments = Moments(w, a, w.double() @ a, (w.double() @ a * w).sum(-1))
    >>> descend(RoundingProblem(w, torch.ones(1, 1, 2), torch.zeros(1, 1, 2), -8, 7, moments), torch.zeros(1, 1, 2))
    tensor([[[1., 0.]]])
    """
    made = _Codes(problem, codes)
    made.descend()
    return made.codes.transpose(1, 2).float()


# Returns the codes of a weight, as floats.
Solver: TypeAlias = Callable[[RoundingProblem], Tensor]
# Returns the solver of a layer's outputs, which all have this A.
SolverOf: TypeAlias = Callable[[Tensor], Solver]


class Rounded(NamedTuple):
    """Codes, with the errors of the nearest ones and of themselves, per output."""

    codes: Tensor
    nearest: Tensor
    error: Tensor


def best_codes(problem: RoundingProblem, solve: Solver) -> Rounded:
    """Returns, for each output, the better of the solver's codes and the nearest codes, both improved one by one."""
    best = problem.nearest()
    made = _Codes(problem, best)
    nearest = least = made.error
    for choose in (None, solve):
        if choose is not None:
            del made  # before the memory of the next one is needed
            made = _Codes(problem, choose(problem))
        made.descend()
        better = made.error < (1 - _ROUNDING) * least
        best = torch.where(better[..., None], made.codes.transpose(1, 2).to(best), best)
        least = torch.where(better, made.error, least)
    return Rounded(best, nearest, least)
