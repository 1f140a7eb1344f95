"""What running a model changes in it, and how it is undone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fakequant.nn.quantizer import quantizers

_ATTRIBUTES = ("_stale", "_told", "saw_only_finite")


class Snapshot:
    """Buffers of models, and the parameters and the state of their quantizers, as they are now."""

    def __init__(self, *models: nn.Module) -> None:
        found = [quantizer for model in models for _, quantizer in quantizers(model)]
        tensors = [buffer for model in models for buffer in model.buffers()]
        tensors += [t for quantizer in found for t in (*quantizer.parameters(), quantizer._nonfinite)]
        self._tensors: list[tuple[Tensor, Tensor]] = [(t, t.detach().clone()) for t in tensors]
        self._attributes = [(q, name, getattr(q, name)) for q in found for name in _ATTRIBUTES]

    @torch.no_grad()
    def restore(self) -> None:
        """Makes them what they were."""
        for tensor, old in self._tensors:
            tensor.copy_(old)
        for quantizer, name, value in self._attributes:
            setattr(quantizer, name, value)


@contextmanager
def unchanged(*models: nn.Module) -> Iterator[None]:
    """Afterwards the models are what they were."""
    before = Snapshot(*models)
    try:
        yield
    finally:
        before.restore()
