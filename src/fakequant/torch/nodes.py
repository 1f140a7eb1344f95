"""What is compiled for this release of torch, if anything is (csrc/torch/autograd.cc)."""

import importlib
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from fakequant.native import _native
from fakequant.torch.kernels import NUMERICS


def _load() -> Any:
    if os.environ.get("FAKEQUANT_PYTHON_NODES") == "1":  # to test what there is without them
        return None
    version = torch.__version__.split("+")[0].replace(".", "_")
    try:
        module = importlib.import_module(f"fakequant._autograd_{version}")
    except ModuleNotFoundError:
        return None
    except ImportError as error:  # compiled for another build of the same release
        warnings.warn(
            f"The autograd nodes compiled for torch {torch.__version__} cannot be loaded; those in Python are used, "
            f"which give the same results and take longer to call. {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    module.use_kernels(_native.kernel_api())
    return module


# None: the functions and nodes written in Python are used, which give the same results and take longer to call.
compiled: Any = _load()


def fake_quantize(
    x: Any,
    scale: Any,
    zero_point: Any,
    qmin: Any,
    qmax: Any,
    numerics: int,
    axis: int | None,
    *,
    zeros: tuple[Any, Any],
    has_torchs_name: bool = False,
    clipped: bool = True,
) -> Tensor | None:
    """The short way for ordinary arguments, with zero points within `zeros`; None: take the long one."""
    if compiled is None or torch.compiler.is_compiling():
        return None
    try:
        return compiled.fake_quantize(
            x, scale, zero_point, qmin, qmax, numerics, axis, *zeros, has_torchs_name, clipped
        )
    except TypeError:  # not the types it knows; the long way says what is wrong, if anything is
        return None


def fake_quantize_learned(
    x: Any,
    scale: Any,
    zero_point: Any,
    qmin: Any,
    qmax: Any,
    numerics: str,
    axis: int | None,
    *,
    grad_factor: Any,
    has_torchs_name: bool = False,
) -> Tensor | None:
    """The same with learned scale and zero point."""
    if compiled is None or torch.compiler.is_compiling():
        return None
    try:
        return compiled.fake_quantize_learned(
            x, scale, zero_point, qmin, qmax, numerics, NUMERICS[numerics], axis, has_torchs_name, grad_factor
        )
    except TypeError:
        return None
