"""Coordinate descent: changes codes one by one, while that lowers the error."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fakequant.ptq._rounding import Problem

_SWEEPS = 4
# Inputs that are changed before the gradient of all others is updated, in one product.
_BLOCK = 64


def descend(problem: "Problem", codes: Tensor) -> Tensor:
    """Returns codes with an error no larger than that of `codes`.

    The error is quadratic in each weight, so the best code for it, with all others fixed, is known. All outputs are
    changed at once, input by input, a few times.

    >>> from fakequant.ptq._layer_products import Form
    >>> from fakequant.ptq._moments import Moments
    >>> from fakequant.ptq._rounding import Problem
    >>> w = torch.tensor([[[0.4, 0.4]]])  # both inputs are always equal, so one of the weights should be 1
    >>> a = torch.ones(1, 2, 2, dtype=torch.float64)
    >>> moments = Moments(Form(), w, a, w.double() @ a, (w.double() @ a * w).sum(-1))
    >>> descend(Problem(w, torch.ones(1, 1, 2), torch.zeros(1, 1, 2), -8, 7, moments), torch.zeros(1, 1, 2))
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
