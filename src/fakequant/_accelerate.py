"""`accelerate` and `decelerate`: torch's own fake-quantize operators on fakequant's kernels."""

from typing import TYPE_CHECKING, Protocol

from fakequant._backends import import_whole

if TYPE_CHECKING:
    from fakequant._backends.torch.override_aten import Acceleration


class _OverrideAten(Protocol):
    """The functions of the module `override_aten`, which is imported on first use."""

    def accelerate(self) -> "Acceleration": ...
    def decelerate(self) -> None: ...


def _override_aten() -> _OverrideAten:
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
    """Makes torch's fake-quantize operators run on fakequant's kernels: same bits, no change to your code.

    This speeds up every caller of these operators: `torch.fake_quantize_per_tensor_affine` and its relatives,
    the modules of `torch.ao.quantization`, and models prepared by it or by torchao. Only CPU tensors are affected.

    The first call compares each operator of the installed torch with its kernel, on inputs where implementations
    differ and on arguments that torch rejects. An operator that differs is not replaced: a RuntimeWarning names it,
    and `left` of the result lists it. Raises RuntimeError if all of them differ.

    Further calls have no effect. `decelerate()`, or `undo()` of the result, restores torch's kernels. Used as a
    context manager, the replacement ends with the context:

    >>> import torch
    >>> with accelerate() as acceleration:
    ...     y = torch.fake_quantize_per_tensor_affine(torch.tensor([0.26, 9.0]), 0.1, 0, -8, 7)
    ...     "aten::fake_quantize_per_tensor_affine_cachemask" in acceleration.replaced
    True
    >>> acceleration.replaced
    ()
    """
    return _override_aten().accelerate()


def decelerate() -> None:
    """Restores torch's own kernels. Does nothing if `accelerate` was not called.

    >>> _ = accelerate()
    >>> decelerate()
    """
    _override_aten().decelerate()
