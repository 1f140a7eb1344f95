"""One line that puts torch's own fake-quantize operators on our kernels."""

from typing import TYPE_CHECKING, Protocol

from fakequant._backends import import_whole

if TYPE_CHECKING:
    from fakequant._backends.torch.override_aten import Acceleration


class _FrontEnd(Protocol):
    """The functions of `override_aten`, which is imported when it is needed."""

    def accelerate(self) -> "Acceleration": ...
    def decelerate(self) -> None: ...


def _front_end() -> _FrontEnd:
    try:
        import torch as _  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "`accelerate` replaces operators of torch, which is not installed.\n"
            'Install it: pip install "fakequant[torch]"'
        ) from error
    import_whole("_backends.torch.override_aten")
    from fakequant._backends.torch import override_aten

    return override_aten


def accelerate() -> "Acceleration":
    """From now on torch's fake-quantize operators run on our kernels: same bits, no change to your code.

    Whatever calls them gets faster: `torch.fake_quantize_per_tensor_affine` and its relatives, the modules
    of `torch.ao.quantization`, models prepared by it or by torchao. Only CPU tensors are affected. Before
    the first replacement each operator of the torch at hand is compared with its kernel, on inputs that tell
    implementations apart and on arguments that torch refuses. One that differs stays torch's: a RuntimeWarning names
    it, and it is in `left`. If all differ, RuntimeError is raised.

    Calling it again changes nothing. `decelerate()`, or `undo()` of the result, takes it back. As a context
    manager it lasts as long as the context:

    >>> import torch
    >>> with accelerate() as acceleration:
    ...     y = torch.fake_quantize_per_tensor_affine(torch.tensor([0.26, 9.0]), 0.1, 0, -8, 7)
    ...     "aten::fake_quantize_per_tensor_affine_cachemask" in acceleration.replaced
    True
    >>> acceleration.replaced
    ()
    """
    return _front_end().accelerate()


def decelerate() -> None:
    """Gives torch its own kernels back. Without `accelerate` before it, does nothing.

    >>> _ = accelerate()
    >>> decelerate()
    """
    _front_end().decelerate()
