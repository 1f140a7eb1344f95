"""Parameter groups for an optimizer, with learned scales in a separate group."""

from typing import Any

from torch import nn

from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize


def param_groups(model: nn.Module, **scale_options: Any) -> list[dict[str, Any]]:
    """Returns the parameters of `model` in two groups: all others, and the step sizes and offsets of quantizers.

    The second group has no weight decay, which would pull scales towards 0. `scale_options` are its other
    options, e.g. a learning rate. A group without parameters is left out.

    >>> import torch
    >>> from fakequant import QuantSpec
    >>> model = nn.Sequential(nn.Linear(4, 4), LearnedFakeQuantize(QuantSpec()))
    >>> optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3), lr=1e-2)
    >>> [(g["weight_decay"], g["lr"], len(g["params"])) for g in optimizer.param_groups]
    [(0.01, 0.01, 2), (0.0, 0.001, 1)]
    """
    scales = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, LearnedFakeQuantize)
        for parameter in module.parameters(recurse=False)
    }
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if id(p) not in scales]},
        {"params": [p for p in parameters if id(p) in scales], "weight_decay": 0.0, **scale_options},
    ]
    return [group for group in groups if group["params"]]
