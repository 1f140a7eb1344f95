"""Public names of torch that it has not annotated, with types. At runtime they are torch's own objects."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["Function", "Library", "Operator", "Results", "broadcast_tensors", "is_tracing", "unpack_dual"]

# What an operator returns: its schema says what that is.
Results: TypeAlias = Any
# An operator, its kernel or a rule for it. They differ in what they take and return.
Operator: TypeAlias = Callable[..., Results]

if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        """`torch.autograd.Function`."""

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            """What `forward` returns, whatever that is."""

    class Library(torch.library.Library):
        """`torch.library.Library`."""

        def __init__(self, ns: str, kind: str, dispatch_key: str = "") -> None: ...

        def define(self, schema: str, alias_analysis: str = "", *, tags: Sequence[torch.Tag] = ()) -> str:
            """The name of the new operator."""

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
        """Whether `torch.jit.trace` is at work."""

else:
    from torch.autograd import Function
    from torch.jit import is_tracing
    from torch.library import Library

unpack_dual: Callable[[Tensor], forward_ad.UnpackedDualTensor] = forward_ad.unpack_dual
broadcast_tensors: Callable[..., tuple[Tensor, ...]] = torch.broadcast_tensors
