"""torch's private names, all of them: no other file of fakequant imports one.

Every name was seen in torch 2.12, 2.13, 2.14 and 2.15. Beside it stands what it is for, and what would be lost if a
release did not have it. A name that goes missing fails here, when fakequant is first used with tensors, and the error
says which. Attributes that modules and tensors have had for many releases (`_modules`, `_parameters`, `_buffers`,
`_forward_hooks`, `_version`) are used where they are needed.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

# `single_level_functions` is a context in which autograd functions run under a transform of `torch.func` that has been
# taken apart, `unwrap_dead_wrappers` gets saved tensors out of the wrappers of a transform that has ended. Without
# them: no derivatives under `torch.func`.
from torch._functorch.utils import enable_single_level_autograd_function as single_level_functions, unwrap_dead_wrappers

# The mode in which compilers run code on tensors without values. Without it: quantizers would look at values while a
# model is traced, and tracing would fail.
from torch._guards import active_fake_mode
from torch.autograd import forward_ad, function

# The suffix of a module's extra state in a state dict. Without it: `load_converted` could not read files.
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_SUFFIX

# Nested lists, tuples, dicts and data classes as flat lists; torch has no public functions for it. Without it: data
# and results of models could be tensors and tuples only.
from torch.utils import _pytree as pytree

# Sees every operation while it is active. Without it: `verify` could not tell rounding errors from wrong results.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "EXTRA_STATE_SUFFIX",
    "BelowADInplaceOrView",
    "BelowAutograd",
    "DispatchKey",
    "DispatchKeySet",
    "OperatorNamespace",
    "SingleLevelFunction",
    "TorchDispatchMode",
    "active_fake_mode",
    "destroy",
    "dispatch_keys",
    "functions",
    "included_keys",
    "inductor",
    "innermost_transform",
    "is_forward_mode",
    "pytree",
    "saved_tensor_hooks",
    "set_forward_mode_enabled",
    "single_level_functions",
    "tracing_state",
    "unwrap_dead_wrappers",
]

# The base of autograd functions that `torch.func` leaves alone: transforms reach the operators of `library` instead,
# once for each level. Without it: no derivatives under `torch.func`.
if TYPE_CHECKING:  # to type checkers the private base has no `apply`
    from fakequant._backends.torch.torch_annotations import Function as SingleLevelFunction
else:
    SingleLevelFunction = function._SingleLevelFunction

# Calls within these contexts go to an operator's kernel, past its derivative. Without them: an operator of
# `fakequant._backends.torch.operators` would call itself for ever.
BelowAutograd = torch._C._AutoDispatchBelowAutograd
BelowADInplaceOrView = torch._C._AutoDispatchBelowADInplaceOrView

# Switches forward-mode derivatives on within an autograd function. Without it: none under nested transforms.
set_forward_mode_enabled = forward_ad._set_fwd_grad_enabled

# torch's functions and a namespace of operators as they were before anybody bound their names to something else.
# Without them: `accelerate` might compare fakequant with itself.
functions = torch._C._VariableFunctions
OperatorNamespace = torch._ops._OpNamespace

# Sets of dispatch keys as numbers, by which plain memory is told from everything else in two comparisons. Without
# them: each call would ask a dozen questions in Python.
DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
_dispatch_keys = torch._C._dispatch_keys
_included_keys = torch._C._dispatch_tls_local_include_set


def dispatch_keys(x: Tensor) -> int:
    """The dispatch keys of a tensor."""
    return _dispatch_keys(x).raw_repr()


def included_keys() -> int:
    """The dispatch keys that modes and transforms add in this thread."""
    return _included_keys().raw_repr()


# What `torch.jit.trace` is at, or None. Without it: traces would lack fakequant's operators.
tracing_state = torch._C._get_tracing_state

# The innermost transform of `torch.func`, or None. Without it: observers would change state under transforms.
innermost_transform = torch._C._functorch.peek_interpreter_stack


def is_forward_mode() -> bool:
    """Whether a level of forward-mode derivatives is open. Without it: dual numbers would lose their tangents."""
    return forward_ad._current_level >= 0


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost hooks on saved tensors (pack, unpack), or None. Without it: codes could not be saved for backward
    instead of floats, as the hooks of others must not be replaced.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def destroy(library: torch.library.Library) -> None:
    """Takes a library's kernels out of torch's dispatcher. Without it: `decelerate` could only switch them off."""
    end: Callable[[], None] = library._destroy
    end()


class Inductor(NamedTuple):
    """Where Inductor looks for decompositions, and its settings."""

    tables: tuple[dict[Any, Any], dict[Any, Any]]
    config: Any


def inductor() -> Inductor | None:
    """Inductor, or None until it is imported. Without it: compiled code would call the kernels and fuse nothing."""
    module = sys.modules.get("torch._inductor.decomposition")
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    # The second is a copy of the first, made once, with a few more in it.
    return Inductor((module.decompositions, module.fast_random_decomps()), sys.modules["torch._inductor.config"])
