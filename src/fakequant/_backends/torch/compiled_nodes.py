"""What is compiled for this release of torch, if anything is (csrc/torch/autograd.cc)."""

import importlib
import os
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from fakequant._backends.torch.tensor_kernels import NUMERICS
from fakequant._kernels import _native
from fakequant._torch_releases import NEWEST, OLDEST, describe, is_tested

_HOW = (
    "To compile them: pip install scikit-build-core nanobind cmake ninja, then install fakequant once more with "
    "`--no-build-isolation --no-binary fakequant`."
)


def _load() -> Any:
    if os.environ.get("FAKEQUANT_PYTHON_NODES") == "1":  # to test without compiled ones, or to hear nothing of them
        return None
    version = torch.__version__.split("+")[0]
    try:
        module = importlib.import_module(f"fakequant._autograd_{version.replace('.', '_')}")
    except ModuleNotFoundError:
        _say(_why_missing(version))
        return None
    except ImportError as error:  # compiled for another build of the same release
        _say(f"those compiled for torch {version} cannot be loaded: {error}. {_HOW}")
        return None
    module.use_kernels(_native.kernel_api())
    return module


def _why_missing(version: str) -> str:
    if not is_tested(version):
        releases = f"{describe(OLDEST)} to {describe(NEWEST)}"
        return f"compiled ones are for torch {releases}, and this is torch {version}."
    return f"this installation has none compiled for torch {version}. {_HOW}"


def _say(why: str) -> None:
    """Warns, once per process, where compiled nodes could be had: not on Windows, where they are not built yet."""
    if sys.platform == "win32":
        return
    warnings.warn(
        f"fakequant uses autograd nodes written in Python: {why} Results are the same, calls take longer. "
        "FAKEQUANT_PYTHON_NODES=1 in the environment chooses them without this message.",
        RuntimeWarning,
        stacklevel=2,
    )


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
