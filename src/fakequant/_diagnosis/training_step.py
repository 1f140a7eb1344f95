"""One step of training without labels: for `check`, which tries it, and for `card`, which times it."""

from typing import Any

import torch
from torch import Tensor, nn

from fakequant._model.leaves import tensors
from fakequant._model.running import call_arguments, copied


def training_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Trains a model by one step, with the mean square of its results as the loss.

    Returns False, and does nothing more than run the model, if no result has a gradient.
    """
    optimizer.zero_grad()
    args, kwargs = copied(*call_arguments(model, batch))
    loss = sum(y.float().square().mean() for y in tensors(model(*args, **kwargs)) if y.requires_grad)
    if not isinstance(loss, Tensor):
        return False
    loss.backward()
    optimizer.step()
    return True
