"""The functions and autograd nodes compiled for this release of torch, if there are any (csrc/torch/autograd.cc).

The compiled functions return None for arguments they do not handle. The Python code then handles them or raises an
error.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fakequant import _kernels, _native
from fakequant._backends.blocks import group_length
from fakequant._backends.types import Numbers, Unchecked
from fakequant._kernels import NUMERICS, numerics_name
from fakequant._torch_releases import NEWEST, OLDEST, describe, is_tested
from fakequant.spec import QuantSpec


class CompiledNodes(Protocol):
    """The compiled module; see the end of csrc/torch/autograd.cc.

    Functions whose result may be None return it for arguments that they do not handle.
    """

    def use_kernels(self, address: int) -> None: ...
    def fake_quantize(
        self, x: Unchecked, scale: Numbers, zero_point: Numbers, qmin: int, qmax: int, numerics: int, axis: int | None,
        group: int | None, lowest_zero: int, highest_zero: int, has_torchs_name: bool, clipped: bool,
    ) -> Tensor | None: ...  # fmt: skip
    def observe(
        self, x: Tensor, running_min: Tensor, running_max: Tensor, scale: Tensor, zero_point: Tensor, *options: Any
    ) -> tuple[Any, int] | None: ...
    def fake_quantize_learned(
        self, x: Unchecked, scale: Numbers, zero_point: Numbers, qmin: int, qmax: int, numerics_name: str,
        numerics: int, axis: int | None, has_torchs_name: bool, grad_factor: float,
    ) -> Tensor | None: ...  # fmt: skip
    def keep_within(self, value: Tensor, before: Tensor, low: float, high: float) -> bool: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None: ...
    def empty_floats(self, sizes: Sequence[int]) -> Tensor: ...
    def release_memory(self) -> None: ...
    def integer_linear(
        self, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, x_low: int, x_high: int, weight: Tensor,
        weight_scale: Tensor, weight_zero: Tensor | None, weight_low: int, weight_high: int, bias: Tensor | None,
        bias_codes: Tensor | None, code_factor: float, with_int8: bool, kept: object = None,
    ) -> Tensor | None: ...  # fmt: skip
    def weight_levels(
        self, weight: Tensor, scale: Tensor, zero: Tensor | None, low: int, high: int, with_int8: bool
    ) -> object: ...
    def integer_convolution(
        self, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, x_low: int, x_high: int, weight: Tensor,
        weight_scale: Tensor, weight_zero: Tensor | None, weight_low: int, weight_high: int, bias: Tensor | None,
        bias_codes: Tensor | None, code_factor: float, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int, with_int8: bool,
    ) -> Tensor | None: ...  # fmt: skip
    def clipped(self, x: Tensor, y: Tensor, mask: Tensor, order: tuple[int, ...] | None, multiply: bool) -> None: ...
    def pass_through(self, x: Tensor, y: Tensor) -> None: ...


_HOW = (
    "To compile them: pip install scikit-build-core nanobind cmake ninja, then install fakequant once more with "
    "`--no-build-isolation --no-binary fakequant`."
)


def _load() -> CompiledNodes | None:
    if os.environ.get("FAKEQUANT_PYTHON_NODES") == "1":  # for tests, and to silence the warning below
        return None
    version = torch.__version__.split("+")[0]
    try:
        module = importlib.import_module(f"fakequant._autograd_{version.replace('.', '_')}")
    except ModuleNotFoundError:
        _warn(_why_missing(version))
        return None
    except ImportError as error:  # compiled for another build of the same release
        _warn(f"those compiled for torch {version} cannot be loaded: {error}. {_HOW}")
        return None
    nodes = cast("CompiledNodes", module)
    nodes.use_kernels(_native.kernel_api())
    return nodes


def _why_missing(version: str) -> str:
    if not is_tested(version):
        releases = f"{describe(OLDEST)} to {describe(NEWEST)}"
        return f"compiled ones are for torch {releases}, and this is torch {version}."
    return f"this installation has none compiled for torch {version}. {_HOW}"


def _warn(why: str) -> None:
    """Warns that there are no compiled nodes, once per process. Not on Windows, where they are not built yet."""
    if sys.platform == "win32":
        return
    warnings.warn(
        f"fakequant uses autograd nodes written in Python: {why} Results are the same, calls take longer. "
        "FAKEQUANT_PYTHON_NODES=1 in the environment chooses them without this message.",
        RuntimeWarning,
        stacklevel=2,
    )


# None if there is no compiled module. The functions and nodes in Python then give the same results, more slowly.
compiled: CompiledNodes | None = _load()


def release_memory() -> None:
    """Frees memory that is kept for results to come, and gives free memory back to the system."""
    if compiled is not None:
        compiled.release_memory()


# --- functions ------------------------------------------------------------------------------------
#
# Callers have to check that integer arguments fit int64 and that factors are floats.


@lru_cache(maxsize=1024)
def _codes_of(spec: QuantSpec) -> tuple[int, int, int, int, int]:
    """Returns qmin, qmax, the kernels' number of the numerics, and the lowest and highest zero point of a spec."""
    qmin, qmax = spec.qmin, spec.qmax
    numerics = NUMERICS[numerics_name(spec)]
    return qmin, qmax, numerics, *((0, 0) if spec.symmetric else (qmin, qmax))


def fake_quantize(x: Unchecked, scale: Numbers, zero_point: Numbers, spec: QuantSpec, clipped: bool) -> Tensor | None:
    """Runs `fakequant.fake_quantize`, or returns None for arguments that the compiled function does not handle."""
    is_compiling = torch.compiler.is_compiling()
    if compiled is None or is_compiling or not isinstance(x, Tensor) or spec.group_rows is not None:
        return None
    qmin, qmax, numerics, lowest_zero, highest_zero = _codes_of(spec)
    axis, group = spec.axis, spec.group_size
    if axis is not None and axis < 0:
        axis += x.dim()
    if spec.has_block_scales and axis is not None and 0 <= axis < x.dim():
        group = group_length(x.shape[axis], spec)
    return compiled.fake_quantize(
        x, scale, zero_point, qmin, qmax, numerics, axis, group, lowest_zero, highest_zero, False, clipped
    )


def fake_quantize_affine(
    x: Unchecked, scale: Numbers, zero_point: Numbers, quant_min: int, quant_max: int, *, axis: int | None = None
) -> Tensor | None:
    """Runs torch's fake-quantize per tensor, or per channel on `axis`. Returns None for arguments it cannot handle."""
    if compiled is None or torch.compiler.is_compiling():
        return None
    numerics = _kernels.TORCH_TENSOR if axis is None else _kernels.TORCH_CHANNEL
    return compiled.fake_quantize(
        x, scale, zero_point, quant_min, quant_max, numerics, axis, None, quant_min, quant_max, True, True
    )


def fake_quantize_learnable_affine(
    x: Unchecked,
    scale: Numbers,
    zero_point: Numbers,
    quant_min: int,
    quant_max: int,
    grad_factor: float,
    *,
    axis: int | None = None,
) -> Tensor | None:
    """Runs torch's learnable fake-quantize per tensor, or per channel on `axis`.

    Returns None for arguments that the compiled function does not handle.
    """
    if compiled is None or torch.compiler.is_compiling():
        return None
    name = "torch_tensor" if axis is None else "torch_channel"
    return compiled.fake_quantize_learned(
        x, scale, zero_point, quant_min, quant_max, name, NUMERICS[name], axis, True, grad_factor
    )
