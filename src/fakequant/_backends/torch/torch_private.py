"""All private names of torch that fakequant imports. No other file imports one.

Every name exists in torch 2.12, 2.13, 2.14 and 2.15. The comments say what it is for and what would not work without
it. If a release lacks a name, this module fails to import when fakequant is first used with tensors, and the error
names it. Private attributes that modules and tensors have had for many releases (`_modules`, `_parameters`, `_buffers`,
`_forward_hooks`, `_version`) are not listed here.
"""

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

# `single_level_functions` is a context that allows autograd functions at a single level of nested `torch.func`
# transforms. `unwrap_dead_wrappers` unwraps saved tensors from transforms that have ended. Without them: no derivatives
# under `torch.func`.
from torch._functorch.utils import enable_single_level_autograd_function as single_level_functions, unwrap_dead_wrappers

# The mode in which compilers run code on tensors without values. Without it: quantizers would read values while a model
# is traced, and tracing would fail.
from torch._guards import active_fake_mode
from torch.autograd import forward_ad, function

# The suffix of a module's extra state in a state dict. Without it: `load_converted` could not read files.
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_SUFFIX

# Flattens nested lists, tuples, dicts and data classes; torch has no public function for it. Without it: inputs and
# results of models could only be tensors and tuples.
from torch.utils import _pytree as pytree, checkpoint

# Intercepts every operation. Without it: `verify` could not tell rounding errors from wrong results.
# Within `_disable_current_modes`, no such mode sees an operation. Without it: modes that compare the operations of the
# forward and the backward pass, such as those of selective checkpoints, would see what only one of them has to copy.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes as without_modes

__all__ = [
    "EXTRA_STATE_SUFFIX",
    "BelowADInplaceOrView",
    "BelowAutograd",
    "DispatchKey",
    "DispatchKeySet",
    "Originals",
    "SingleLevelFunction",
    "TorchDispatchMode",
    "active_fake_mode",
    "destroy",
    "dispatch_keys",
    "included_keys",
    "inductor",
    "innermost_transform",
    "int_mm",
    "is_forward_mode",
    "on_checkpoint",
    "pytree",
    "saved_tensor_hooks",
    "set_forward_mode_enabled",
    "single_level_functions",
    "tracing_state",
    "unwrap_dead_wrappers",
    "without_modes",
]

# The base of autograd functions that `torch.func` does not transform: it transforms the operators of `operators`
# instead, once per level. Without it: no derivatives under `torch.func`.
if TYPE_CHECKING:  # to type checkers the private base has no `apply`
    from fakequant._backends.torch.torch_annotations import Function as SingleLevelFunction
else:
    SingleLevelFunction = function._SingleLevelFunction

# Within these contexts, calls of an operator skip its autograd rule. Without them: the autograd rules of
# `fakequant._backends.torch.operators` would call themselves for ever.
BelowAutograd = torch._C._AutoDispatchBelowAutograd
BelowADInplaceOrView = torch._C._AutoDispatchBelowADInplaceOrView

# Products of 8-bit integers with 32-bit sums. Without it: exact sums on GPUs would be products of float64 numbers.
int_mm = torch._int_mm

# Enables forward-mode derivatives within an autograd function. Without it: none under nested transforms.
set_forward_mode_enabled = forward_ad._set_fwd_grad_enabled

_functions = torch._C._VariableFunctions
# A new namespace, without attributes that programs have set on `torch.ops.aten`.
_aten = torch._ops._OpNamespace("aten")


class Originals:
    """torch's own fake-quantize functions and operators, even if their public names have been rebound.

    Programs may rebind torch's names to fakequant's functions, possibly before this module is imported. Without these,
    fakequant's functions might call themselves, and `accelerate` might compare fakequant with itself.
    """

    fake_quantize_per_tensor_affine = _functions.fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine = _functions.fake_quantize_per_channel_affine
    fake_quantize_learnable_per_tensor_affine = _functions._fake_quantize_learnable_per_tensor_affine
    fake_quantize_learnable_per_channel_affine = _functions._fake_quantize_learnable_per_channel_affine
    fused_moving_avg_obs_fake_quant = _functions.fused_moving_avg_obs_fake_quant

    cachemask = _aten.fake_quantize_per_tensor_affine_cachemask
    cachemask_tensor_qparams = _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    cachemask_backward = _aten.fake_quantize_per_tensor_affine_cachemask_backward
    channel_cachemask = _aten.fake_quantize_per_channel_affine_cachemask
    channel_cachemask_backward = _aten.fake_quantize_per_channel_affine_cachemask_backward
    learnable_backward = _aten._fake_quantize_learnable_per_tensor_affine_backward
    learnable_channel_backward = _aten._fake_quantize_learnable_per_channel_affine_backward
    fused = _aten._fused_moving_avg_obs_fq_helper


# Sets of dispatch keys as numbers, which identify plain memory with two comparisons. Without them: each call would need
# a dozen checks in Python.
DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
_dispatch_keys = torch._C._dispatch_keys
_included_keys = torch._C._dispatch_tls_local_include_set


def dispatch_keys(x: Tensor) -> int:
    """Returns the dispatch keys of a tensor."""
    return _dispatch_keys(x).raw_repr()


def included_keys() -> int:
    """Returns the dispatch keys that modes and transforms add in this thread."""
    return _included_keys().raw_repr()


# The state of `torch.jit.trace`, or None. Without it: traces would lack fakequant's operators.
tracing_state = torch._C._get_tracing_state

# The innermost transform of `torch.func`, or None. Without it: observers would change state under transforms.
innermost_transform = torch._C._functorch.peek_interpreter_stack


def is_forward_mode() -> bool:
    """Returns True inside a forward-mode level. Without it: dual numbers would lose their tangents."""
    return forward_ad._current_level >= 0


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Returns the innermost hooks on saved tensors (pack, unpack), or None.

    Without it: codes could not be saved for backward instead of floats, because other hooks must not be replaced.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


class Segment(Protocol):
    """One call of `torch.utils.checkpoint`."""

    def first_run(self) -> AbstractContextManager[None]:
        """Returns the context of its function in the forward pass."""

    def recomputation(self) -> AbstractContextManager[None]:
        """Returns the context of its function in the backward pass."""


def on_checkpoint(begin: Callable[[], Segment]) -> None:
    """Makes `torch.utils.checkpoint` call `begin()` first, and run its function in the contexts of the result.

    Without it: code inside a checkpoint would be observed twice, and quantized in another way in the backward pass.
    """
    module: Any = checkpoint
    # The context of the first run, unless the checkpoint is reentrant. It gets everything about a checkpoint.
    hook: Any = module._checkpoint_hook
    apply = module.CheckpointFunction.apply

    class Hook(hook):  # type: ignore[misc]
        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            segment, run_again = begin(), frame.recompute_fn

            def recompute(*args: Any) -> None:
                with segment.recomputation():
                    run_again(*args)

            frame.recompute_fn = recompute
            self.first_run = segment.first_run()

        def __enter__(self) -> None:
            super().__enter__()
            self.first_run.__enter__()

        def __exit__(self, *exception: Any) -> None:
            self.first_run.__exit__(*exception)
            super().__exit__(*exception)

    def apply_in_contexts(function: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():  # it will not run again
            return apply(function, *args)
        segment = begin()
        contexts = chain([segment.first_run], repeat(segment.recomputation))

        def run(*args: Any) -> Any:
            with next(contexts)():
                return function(*args)

        return apply(run, *args)

    module._checkpoint_hook = Hook
    module.CheckpointFunction.apply = staticmethod(apply_in_contexts)


def destroy(library: torch.library.Library) -> None:
    """Removes a library's kernels from torch's dispatcher. Without it: `decelerate` could only switch them off."""
    end: Callable[[], None] = library._destroy
    end()


class Inductor(NamedTuple):
    """Inductor's tables of decompositions, and its settings."""

    tables: tuple[dict[Any, Any], dict[Any, Any]]
    config: Any


def _is_imported(name: str) -> bool:
    """Returns True if a module is imported, and not in the middle of being imported."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def inductor() -> Inductor | None:
    """Returns Inductor, or None if nothing is compiled yet. Without it: compiled code would not fuse the operators.

    Inductor copies its tables when it is imported, in the middle of a compilation. It is imported before that, as soon
    as the compiler in front of it is.
    """
    if not _is_imported("torch._dynamo"):
        return None
    module = importlib.import_module("torch._inductor.decomposition")
    if not _is_imported("torch._inductor.decomposition"):
        return None
    # The second table is a cached, extended copy of the first, so both have to be updated.
    return Inductor((module.decompositions, module.fast_random_decomps()), sys.modules["torch._inductor.config"])
