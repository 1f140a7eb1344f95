"""Whether a tensor is ordinary memory that a kernel may be pointed at."""

import torch

_C = torch._C


def _keys(x: torch.Tensor) -> int:
    return _C._dispatch_keys(x).raw_repr()


def _modes() -> int:
    return _C._dispatch_tls_local_include_set().raw_repr()


# What says so is the set of dispatch keys: a subclass, a fake or batched tensor, another device or
# layout, a lazily negated view, a mode or a transform all add to it.
with torch.inference_mode():
    _INFERENCE = _keys(torch.empty(0))
with torch.inference_mode(False):
    _PLAIN = (_keys(torch.empty(0)), _INFERENCE)
_NO_MODES = _modes()


def is_memory(x: torch.Tensor) -> bool:
    """Whether `x` is a strided CPU tensor with its values in memory.

    >>> is_memory(torch.zeros(2)), is_memory(torch.zeros(2, device="meta"))
    (True, False)
    """
    return _keys(x) in _PLAIN


def is_eager(x: torch.Tensor) -> bool:
    """Whether, besides, nothing watches or transforms what happens to it.

    >>> is_eager(torch.zeros(2)), torch.func.vmap(lambda x: x * is_eager(x))(torch.ones(2))
    (True, tensor([0., 0.]))
    """
    return _keys(x) in _PLAIN and _modes() == _NO_MODES and _C._get_tracing_state() is None
