"""Typed versions of public names that torch does not annotate. At runtime they are torch's own objects."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["Context", "Function", "Library", "Operator", "Results", "broadcast_tensors", "is_tracing", "unpack_dual"]

# The results of an operator. Its schema says what they are.
Results: TypeAlias = Any
# The `ctx` of an autograd function. Functions set their own attributes on it.
Context: TypeAlias = Any
# An operator, a kernel or a rule for it. Their arguments and results differ.
Operator: TypeAlias = Callable[..., Results]

if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        """`torch.autograd.Function`."""

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            """Returns the results of `forward`."""

    class Library(torch.library.Library):
        """`torch.library.Library`."""

        def __init__(self, ns: str, kind: str, dispatch_key: str = "") -> None: ...

        def define(self, schema: str, alias_analysis: str = "", *, tags: Sequence[torch.Tag] = ()) -> str:
            """Defines an operator and returns its name."""

        def impl(
            self,
            op_name: str,
            fn: Operator,
            dispatch_key: str = "",
            *,
            with_keyset: bool = False,
            allow_override: bool = True,
        ) -> None:
            """Registers a kernel."""

    def is_tracing() -> bool:
        """Returns True inside `torch.jit.trace`."""

else:
    from torch.autograd import Function
    from torch.jit import is_tracing
    from torch.library import Library

unpack_dual: Callable[[Tensor], forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual
broadcast_tensors: Callable[..., tuple[Tensor, ...]] = torch.broadcast_tensors
