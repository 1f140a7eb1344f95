"""What running a model changes in it, and how it is undone."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from fakequant.nn._model_quantizers import quantizers

_ATTRIBUTES = ("_stale", "_told", "saw_only_finite")


class Snapshot:
    """Buffers of models, and the parameters and the state of their quantizers, as they are now."""

    def __init__(self, *models: nn.Module) -> None:
        found = [quantizer for model in models for _, quantizer in quantizers(model)]
        tensors = [buffer for model in models for buffer in model.buffers()]
        tensors += [t for quantizer in found for t in (*quantizer.parameters(), quantizer._nonfinite)]
        self._tensors: list[tuple[Tensor, Tensor]] = [(t, t.detach().clone()) for t in tensors]
        # Which tensors they are: `self.count = self.count + 1` puts another one in the place of a buffer.
        modules = chain.from_iterable(model.modules() for model in models)
        self._buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
        self._attributes = [(q, name, getattr(q, name)) for q in found for name in _ATTRIBUTES]

    @torch.no_grad()
    def restore(self) -> None:
        """Makes them what they were. What did not change is not written: a backward pass may still need it."""
        for module, buffers in self._buffers:
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
        for tensor, old in self._tensors:
            if not _same(tensor, old):
                tensor.copy_(old)
        for quantizer, name, value in self._attributes:
            setattr(quantizer, name, value)


def _same(tensor: Tensor, old: Tensor) -> bool:
    """Whether a tensor has the values it had; a NaN is one too."""
    now, before = (t.to_local() if hasattr(t, "to_local") else t for t in (tensor, old))  # of this rank
    return not now.is_meta and bool(((now == before) | ((now != now) & (before != before))).all())


@contextmanager
def unchanged(*models: nn.Module) -> Iterator[None]:
    """Afterwards the models are what they were."""
    before = Snapshot(*models)
    try:
        yield
    finally:
        before.restore()
