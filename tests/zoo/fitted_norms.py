"""Batch norms of networks with random weights."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def fit_norms(model: nn.Module, images: Tensor) -> nn.Module:
    """Gives all batch norms the statistics of `images`, in place, and returns the model in evaluation mode.

    With the initial statistics, signals in a deep network with random weights vanish or explode.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms:
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0  # the statistics of these images only
        model.train()(images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return model.eval()
