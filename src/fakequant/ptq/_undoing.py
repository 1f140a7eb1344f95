"""Undoing what a post-training method did to a model, if it fails."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fakequant._train.model_snapshot import Snapshot
from fakequant.nn._model_quantizers import quantizers


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Context that restores parameters, buffers, and the switches of quantizers if the body raises.

    The body may change values, but must not replace parameters.
    """
    values = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    switches = [(q, q.observing, q.quantizing, q.frozen) for _, q in quantizers(model)]
    before = Snapshot(model)
    try:
        yield
    except BaseException:
        for quantizer, *states in switches:
            for name, on in zip(("observing", "quantizing", "frozen"), states, strict=True):
                if getattr(quantizer, name) != on:
                    setattr(quantizer, name, on)
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
        before.restore()
        raise
