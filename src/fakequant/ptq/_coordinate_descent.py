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
    a, scale, codes = problem.moments.a, problem.scale.double(), codes.double()
    diagonal = a.diagonal(dim1=1, dim2=2)
    slope = problem.values(codes) @ a - problem.moments.b  # half the gradient
    inputs = codes.shape[2]
    for _ in range(_SWEEPS):
        before = codes.clone()
        for start in range(0, inputs, _BLOCK):
            end = min(start + _BLOCK, inputs)
            changes = torch.zeros_like(codes[..., start:end])
            for k in range(start, end):
                step = scale[..., k]
                wanted = codes[..., k] - torch.round(slope[..., k] / (diagonal[:, None, k] * step))
                change = wanted.clamp(problem.qmin, problem.qmax) - codes[..., k]
                codes[..., k] += change
                changes[..., k - start] = change * step
                slope[..., start:end] += changes[..., k - start, None] * a[:, None, k, start:end]
            slope[..., :start] += changes @ a[:, start:end, :start]
            slope[..., end:] += changes @ a[:, start:end, end:]
        if torch.equal(codes, before):
            break
    return codes.float()
