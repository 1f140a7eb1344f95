"""A stand-in for a GPU: CPU tensors take the way of tensors on a GPU, and launches and host reads are counted.

Operators of fakequant run what is registered for CUDA, in Triton's interpreter. `make test-gpu` switches the
interpreter on.
"""

import contextlib
import os

import numpy as np
import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off: run `make test-gpu`", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from fakequant._backends.torch import compiled_nodes, operators

# What allocates memory or describes it, and starts no kernel.
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "view", "_unsafe_view",
    "detach", "alias", "expand", "permute", "slice", "select", "unbind", "split", "as_strided", "t", "transpose",
    "unsqueeze", "squeeze", "reshape", "_reshape_alias",
}  # fmt: skip
# What waits for the device.
HOST_READS = {"_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero", "masked_select", "unique", "_unique2"}


class StandIn(TorchDispatchMode):
    """Routes operators of fakequant as for a GPU, and records what a GPU would launch and what the host would read."""

    def __init__(self):
        super().__init__()
        self.launches, self.reads = [], []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name.split("::")[1].rstrip("_")
        own = operators.ON_GPU.get(operator._schema.name.split("::")[1])
        if operator.namespace == "fakequant" and own is not None:
            with self:  # its own torch operations are counted too
                return own(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if name in HOST_READS or (name == "_to_copy" and kwargs.get("device") == torch.device("cpu")):
            self.reads.append(name)
        result = operator(*args, **kwargs)
        changes_nothing = name == "to" and result is args[0]
        if name not in NO_KERNEL | HOST_READS and not on_meta((args, kwargs)) and not changes_nothing:
            self.launches.append(name)
        return result


def on_meta(arguments):
    """Returns True if a tensor is on the meta device, where nothing is computed."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    return any(t.is_meta for t in tensors) or torch.device("meta") in torch.utils._pytree.tree_leaves(arguments)


@contextlib.contextmanager
def gpu():
    """Yields the stand-in, which is active within the context."""
    from fakequant._backends.torch import routes, tensor_checks
    from fakequant.nn import _quantizer, _tensor_ranges

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"), StandIn() as device:
        patch.setattr(compiled_nodes, "compiled", None)
        for module in (routes, tensor_checks, _quantizer, _tensor_ranges):
            patch.setattr(module, "is_memory", lambda x: False)
        launch = interpreter.GridExecutor.__call__

        def counted(executor, *args, **kwargs):
            device.launches.append(executor.fn.__name__)
            with torch.utils._python_dispatch._disable_current_modes():
                return launch(executor, *args, **kwargs)

        patch.setattr(interpreter.GridExecutor, "__call__", counted)
        yield device
