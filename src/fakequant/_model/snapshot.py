"""Undoing the changes that running a model makes to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from fakequant._model.shelf import Shelf
from fakequant.nn._model_quantizers import named_quantizers

_ATTRIBUTES = ("_stale", "_told", "_last")


class Snapshot:
    """A copy of the buffers of models and of the parameters and the state of their quantizers.

    It is in memory, or on a shelf, which must stay open until it is restored or not needed.
    """

    def __init__(self, *models: nn.Module, shelf: Shelf | None = None) -> None:
        found = [quantizer for model in models for _, quantizer in named_quantizers(model)]
        tensors = [buffer for model in models for buffer in model.buffers()]
        tensors += [t for quantizer in found for t in (*quantizer.parameters(), quantizer._nonfinite)]
        keep = _in_memory if shelf is None else shelf.put
        self._tensors: list[tuple[Tensor, Callable[[], Tensor]]] = [(t, keep(t)) for t in tensors]
        # The buffers themselves, because code such as `self.count = self.count + 1` replaces them by other tensors.
        modules = chain.from_iterable(model.modules() for model in models)
        self._buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
        self._attributes = [(q, name, getattr(q, name)) for q in found for name in _ATTRIBUTES]

    @torch.no_grad()
    def restore(self) -> None:
        """Restores all values. Does not write to unchanged tensors, which a backward pass may still need."""
        for module, buffers in self._buffers:
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
        for tensor, take in self._tensors:
            old = take()
            if not _same(tensor, old):
                tensor.copy_(old)
        for quantizer, name, value in self._attributes:
            setattr(quantizer, name, value)


def _in_memory(tensor: Tensor) -> Callable[[], Tensor]:
    copied = tensor.detach().clone()
    return lambda: copied


def _same(tensor: Tensor, old: Tensor) -> bool:
    """Returns True if a tensor still has its old values. NaN counts as equal to NaN."""
    now, before = (t.to_local() if hasattr(t, "to_local") else t for t in (tensor, old))  # the shard of this rank
    return not now.is_meta and bool(((now == before) | ((now != now) & (before != before))).all())


@contextmanager
def unchanged(*models: nn.Module) -> Iterator[None]:
    """Context after which the state of the models is restored, whether or not the body raises."""
    before = Snapshot(*models)
    try:
        yield
    finally:
        before.restore()
