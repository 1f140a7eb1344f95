"""`accelerate`: torch's own fake-quantize operators on our kernels, for code that is already written.

The CPU kernels of the aten operators are replaced in torch's dispatcher, below autograd, so torch.ao,
torchao and anything else that calls them runs on ours: same bits, same saved masks, same errors.
"""

import threading
import warnings
from collections.abc import Callable
from types import TracebackType

import torch

from fakequant.torch import aten_kernels
from fakequant.torch.verification import disagreements

REPLACED: dict[str, Callable] = {
    "fake_quantize_per_tensor_affine_cachemask": aten_kernels.cachemask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": aten_kernels.cachemask_tensor_qparams,
    "fake_quantize_per_channel_affine_cachemask": aten_kernels.channel_cachemask,
    "fake_quantize_per_tensor_affine_cachemask_backward": aten_kernels.cachemask_backward,
    "fake_quantize_per_channel_affine_cachemask_backward": aten_kernels.cachemask_backward,
    "_fake_quantize_learnable_per_tensor_affine_backward": aten_kernels.learnable_backward,
    "_fake_quantize_learnable_per_channel_affine_backward": aten_kernels.learnable_channel_backward,
    "_fused_moving_avg_obs_fq_helper": aten_kernels.fused,
}


class _Switch:
    """On while it has been switched on for good, or somebody is inside a context."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.library: torch.library.Library | None = None
        self.verified = False
        self.for_good = False
        self.contexts = 0

    def update(self) -> None:
        wanted = self.for_good or self.contexts > 0
        if wanted and self.library is None:
            self.library = _replace_kernels()
        elif not wanted and self.library is not None:
            self.library._destroy()
            self.library = None


_switch = _Switch()


class Acceleration:
    """What `accelerate` returns: what was replaced, a way back, and a context manager."""

    def __init__(self, switched_on: bool) -> None:
        self._switched_on = switched_on

    @property
    def replaced(self) -> tuple[str, ...]:
        """The operators that run on our kernels now."""
        return tuple(f"aten::{name}" for name in REPLACED) if is_accelerated() else ()

    def undo(self) -> None:
        """Gives torch its own kernels back."""
        decelerate()

    def __enter__(self) -> "Acceleration":
        with _switch.lock:
            _switch.contexts += 1
            if self._switched_on:
                # Only for as long as the context lasts, then.
                _switch.for_good = self._switched_on = False
            _switch.update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _switch.lock:
            _switch.contexts -= 1
            _switch.update()

    def __repr__(self) -> str:
        return f"Acceleration(replaced={list(self.replaced)})"


def accelerate() -> Acceleration:
    """See `fakequant.accelerate`."""
    with _switch.lock:
        if not _switch.verified:
            _verify()
            _switch.verified = True
        switched_on = not _switch.for_good
        _switch.for_good = True
        _switch.update()
    return Acceleration(switched_on)


def decelerate() -> None:
    """See `fakequant.decelerate`."""
    with _switch.lock:
        _switch.for_good = False
        _switch.update()


def is_accelerated() -> bool:
    """Whether torch's operators run on our kernels at the moment."""
    return _switch.library is not None


def _verify() -> None:
    found = disagreements()
    if found:
        raise RuntimeError(
            f"torch {torch.__version__} and fakequant's kernels differ in {', '.join(found)}; nothing was replaced.\n"
            "The kernels have the bits of torch 2.13 on x86-64 with AVX2. Use fakequant's own functions instead, "
            "or torch 2.13."
        )


def _replace_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # That a kernel is overridden is the point.
            warnings.filterwarnings("ignore", category=UserWarning, message="(?s).*[Oo]verrid")
            for name, function in REPLACED.items():
                original = torch.library.get_kernel(f"aten::{name}", "CPU")
                library.impl(name, _or_original(function, original), "CPU", with_keyset=True, allow_override=True)
    except BaseException:
        library._destroy()
        raise
    return library


def _or_original(function: Callable, original) -> Callable:
    """Ours where it applies, torch's where it does not."""

    def kernel(keys, *args):
        result = function(*args)
        return original.call_boxed(keys, *args) if result is None else result

    return kernel
