"""Whether a tensor is plain CPU memory, so that a kernel may be called on its address."""

import torch

from fakequant._backends.torch.torch_private import (
    DispatchKey,
    DispatchKeySet,
    dispatch_keys,
    included_keys,
    innermost_transform,
    tracing_state,
)


def _set_of(*names: str) -> int:
    keys = DispatchKeySet(getattr(DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys.add(getattr(DispatchKey, name))
    return keys.raw_repr()


# Plain tensors are recognized by their set of dispatch keys: a subclass, a fake or batched tensor, another device or
# layout, a lazily negated view, a mode or a transform all add keys. The sets are spelled out rather than read from a
# new tensor, because this module may be imported inside a mode. The second of each is for `torch.inference_mode`.
_PLAIN = (_set_of("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"), _set_of("CPU", "AutocastCPU"))
_NO_MODES = (_set_of("BackendSelect", "ADInplaceOrView"), _set_of("BackendSelect"))


def is_memory(x: torch.Tensor) -> bool:
    """Returns True if `x` is a strided CPU tensor with its values in memory.

    >>> is_memory(torch.zeros(2)), is_memory(torch.zeros(2, device="meta"))
    (True, False)
    """
    return dispatch_keys(x) in _PLAIN


def is_eager(x: torch.Tensor) -> bool:
    """Returns True if `x` is plain memory and no mode, transform or tracer is active.

    >>> is_eager(torch.zeros(2)), torch.func.vmap(lambda x: x * is_eager(x))(torch.ones(2))
    (True, tensor([0., 0.]))
    """
    return dispatch_keys(x) in _PLAIN and has_no_modes()


def has_no_modes() -> bool:
    """Returns True if no mode, transform or tracer is active.

    >>> has_no_modes()
    True
    """
    return included_keys() in _NO_MODES and tracing_state() is None


def is_direct(x: torch.Tensor) -> bool:
    """Returns True if a kernel may be called on `x`: `is_eager(x)`, and torch.compile is not tracing.

    >>> is_direct(torch.zeros(2))
    True
    """
    return not torch.compiler.is_compiling() and is_eager(x)


def is_transformed() -> bool:
    """Returns True under a transform of `torch.func`, where tensors from outside must not be changed.

    Returns False while torch.compile is tracing, because Dynamo handles transforms itself.

    >>> is_transformed(), torch.func.vmap(lambda x: x * is_transformed())(torch.ones(2))
    (False, tensor([1., 1.]))
    """
    return not torch.compiler.is_compiling() and innermost_transform() is not None
