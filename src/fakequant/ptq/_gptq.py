"""`gptq`: rounds weights one by one, and lets the remaining weights compensate for the error."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fakequant._model.running import Data
from fakequant.ptq._layer_changes import Changes, check_switch
from fakequant.ptq._quadratic_error import RoundingProblem, Solver
from fakequant.ptq._rounding import round_layers

# Columns that are rounded before the rest of the matrix is updated, in one product.
_BLOCK = 32


def gptq(
    model: nn.Module,
    data: Data,
    *,
    act_order: bool = True,
    damping: float = 0.01,
    layers: str | Sequence[str] = "*",
    steps: int | None = None,
    reference: nn.Module | None = None,
    progress: bool = True,
) -> Changes:
    """Rounds the weights of linear layers and convolutions with second-order information (GPTQ), in place.

    The columns of a weight are rounded one after the other. The columns that are left change so that the output of the
    layer on the data stays as close as possible to its output in the float model:

        A   = sum of x^T x over the inputs of the layer + damping * mean(diagonal of A) * I
        U   = upper Cholesky factor of the inverse of A
        e   = (w[k] - round(w[k])) / U[k, k]
        w[j] = w[j] - e * U[k, j] for all j > k

    The start is not the weight of the float model, but the weight with the least error for the inputs of the quantized
    model. So a layer also compensates for errors before it. Finally, single codes are changed where this lowers
    the error. All scales, including group and block scales, are computed from the float weight. Weights in float
    formats, MX and NVFP4 are rounded to the values of their format.

    Weights become points of their grids, and scales of weights are frozen. The model trains, converts and exports as
    before.

    Args:
        model: A prepared and calibrated model.
        data: Batches, as for `fakequant.calibrate`. The benchmarks use 512 images, or 128 lines of text.
        act_order: Whether to round columns with large inputs first. Otherwise they are rounded in their order.
        damping: How strongly weights are kept near the float weights, relative to the mean square of the inputs.
        layers: Patterns of the paths of the layers to round, such as "encoder.*".
        steps: The maximum number of batches. If None, all are used.
        reference: The float model. If None, `model` with quantizers off, as it is when the function is called. After
            `smooth` or `equalize`, it must have their weights: `unprepare(copy.deepcopy(model))`.
        progress: Whether to show a progress bar.

    Returns:
        The SQNR of each layer's output, with the nearest codes and with the chosen ones.

    >>> import fakequant as fq
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> model = fq.prepare(nn.Sequential(nn.Linear(8, 4)), fq.recipes.int4_weight_only(group_size=4))
    >>> changes = fq.ptq.gptq(model, [x], progress=False)
    >>> changes.layers[0].after > changes.layers[0].before
    True
    """
    check_switch("act_order", act_order)
    return round_layers(
        model,
        data,
        "gptq",
        partial(solver_of, act_order=act_order),
        damping=damping,
        layers=layers,
        steps=steps,
        reference=reference,
        progress=progress,
    )


def solver_of(a: Tensor, act_order: bool) -> Solver:
    """Returns a function that chooses the codes of outputs with this A, as GPTQ does."""
    order = a.diagonal(dim1=1, dim2=2).argsort(1, descending=True) if act_order else torch.arange(a.shape[1])[None]
    order = order.to(a.device).expand(len(a), -1)
    back = order.argsort(1)
    a, matrix = a.mT, torch.arange(len(a), device=a.device)[:, None, None]
    # LAPACK stores columns together. A matrix in that order is factored in place, and needs no copy.
    lower = a[matrix, order[:, :, None], order[:, None]].mT
    torch.linalg.cholesky(lower, out=lower)
    upper = torch.cholesky_inverse(lower)
    torch.linalg.cholesky(upper, upper=True, out=upper)
    diagonal = upper.diagonal(dim1=1, dim2=2).clone()
    # U goes above the diagonal of L, which nothing reads there.
    for k in range(1, a.shape[1]):
        lower[:, :k, k] = upper[:, :k, k]
    factors = lower
    del a, upper

    def solve(problem: RoundingProblem) -> Tensor:
        # With inputs on axis 1, the weights of one column are neighbours in memory.
        b, scale, zero_point = (
            t.double().transpose(1, 2).take_along_dim(order[:, :, None], 1)
            for t in (problem.moments.b, problem.scale, problem.zero_point)
        )
        codes = _compensated(torch.cholesky_solve(b, factors), scale, zero_point, factors, diagonal, problem)
        return codes.take_along_dim(back[:, :, None], 1).transpose(1, 2).float()

    return solve


def _compensated(
    w: Tensor, scale: Tensor, zero_point: Tensor, upper: Tensor, diagonal: Tensor, problem: RoundingProblem
) -> Tensor:
    """Returns the codes of matrices with inputs on axis 1, rounded one after the other. Changes `w`.

    `upper` has U above its diagonal, and `diagonal` has the diagonal of U.
    """
    codes = torch.empty_like(w)
    inputs = w.shape[1]
    for start in range(0, inputs, _BLOCK):
        end = min(start + _BLOCK, inputs)
        errors = torch.empty_like(w[:, start:end])
        for k in range(start, end):
            code = problem.rounded(w[:, k] / scale[:, k], zero_point[:, k])
            error = (w[:, k] - (code - zero_point[:, k]) * scale[:, k]) / diagonal[:, k, None]
            codes[:, k], errors[:, k - start] = code, error
            w[:, k + 1 : end].addcmul_(upper[:, k, k + 1 : end, None], error[:, None], value=-1)
        w[:, end:] -= upper[:, start:end, end:].transpose(1, 2) @ errors
    return codes
