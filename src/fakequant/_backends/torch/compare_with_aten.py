"""A quick comparison of torch's operators with fakequant's kernels, on inputs where implementations differ.

The values are ties, ends of the range, infinities, NaN, subnormal and huge numbers in every dtype. For arguments that
some release of torch rejects, the kernels must return None or raise the same error. `accelerate` does not replace an
operator that differs.
"""

import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fakequant._backends.torch import aten_kernels
from fakequant._backends.torch.tensor_kernels import KERNEL_DTYPES
from fakequant._backends.torch.torch_annotations import Operator
from fakequant._backends.torch.torch_private import Originals

CACHEMASK = "fake_quantize_per_tensor_affine_cachemask"
TENSOR_QPARAMS = "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
CHANNEL_CACHEMASK = "fake_quantize_per_channel_affine_cachemask"
BACKWARD = "fake_quantize_per_tensor_affine_cachemask_backward"
CHANNEL_BACKWARD = "fake_quantize_per_channel_affine_cachemask_backward"
LEARNABLE_BACKWARD = "_fake_quantize_learnable_per_tensor_affine_backward"
LEARNABLE_CHANNEL_BACKWARD = "_fake_quantize_learnable_per_channel_affine_backward"
FUSED = "_fused_moving_avg_obs_fq_helper"

# The operators that `accelerate` replaces, with the kernels that it replaces them by.
REPLACED: dict[str, Operator] = {
    CACHEMASK: aten_kernels.cachemask,
    TENSOR_QPARAMS: aten_kernels.cachemask_tensor_qparams,
    CHANNEL_CACHEMASK: aten_kernels.channel_cachemask,
    BACKWARD: aten_kernels.cachemask_backward,
    CHANNEL_BACKWARD: aten_kernels.cachemask_backward,
    LEARNABLE_BACKWARD: aten_kernels.learnable_backward,
    LEARNABLE_CHANNEL_BACKWARD: aten_kernels.learnable_channel_backward,
    FUSED: aten_kernels.fused,
}
_ORIGINALS: dict[str, Operator] = {
    CACHEMASK: Originals.cachemask,
    TENSOR_QPARAMS: Originals.cachemask_tensor_qparams,
    CHANNEL_CACHEMASK: Originals.channel_cachemask,
    BACKWARD: Originals.cachemask_backward,
    CHANNEL_BACKWARD: Originals.channel_cachemask_backward,
    LEARNABLE_BACKWARD: Originals.learnable_backward,
    LEARNABLE_CHANNEL_BACKWARD: Originals.learnable_channel_backward,
    FUSED: Originals.fused,
}
# The name of an operator, and the arguments of a call.
_Call: TypeAlias = tuple[str, tuple[Any, ...]]


def disagreements() -> list[str]:
    """Returns the names of torch's operators whose bits or errors differ from the kernels'.

    >>> disagreements()
    []
    """
    # Independent of the caller's default device and grad mode. Warnings of torch are not errors.
    with torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name for name, arguments in _calls() if not _agree(name, arguments, may_refuse=False)}
        found |= {name for name, arguments in _refused_calls() if not _agree(name, arguments, may_refuse=True)}
        return sorted(found)


def _agree(name: str, arguments: tuple[Any, ...], *, may_refuse: bool) -> bool:
    """Returns True if the kernel has torch's bits or error, or if it may return None and does.

    A kernel that returns None makes torch's operator run.
    """
    ours = _outcome(REPLACED[name], arguments)
    if ours is None:
        return may_refuse
    theirs = _outcome(_ORIGINALS[name], arguments)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same_bits, ours, theirs))
    return may_refuse and (type(ours), str(ours)) == (type(theirs), str(theirs))


def _outcome(operator: Operator, arguments: tuple[Any, ...]) -> list[Tensor] | Exception | None:
    """Returns the results of a call and its arguments after it, or its error, or None if the kernel returns None."""
    copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    try:
        results = operator(*copies)
    except Exception as error:
        return error
    if results is None:
        return None
    results = (results,) if isinstance(results, Tensor) else results
    return [*results, *(a for a in copies if isinstance(a, Tensor))]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    # NaN equals NaN, whatever its payload.
    a, b = (torch.where(t.isnan(), torch.full_like(t, torch.nan), t).contiguous().view(bits) for t in (a, b))
    return torch.equal(a, b)


def _floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _values(dtype: torch.dtype) -> Tensor:
    scale = 0.1
    ties = (torch.arange(-12, 12, dtype=torch.float64) + 0.5) * scale
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, -3e38, 1e19], dtype=torch.float64)
    near = torch.tensor([1 - 2**-23, 1.0, 1 + 2**-23], dtype=torch.float64)
    x = torch.cat([(ties[:, None] * near).flatten(), special, torch.tensor([0.55, -0.85, 7.0], dtype=torch.float64)])
    return x.to(dtype).reshape(3, 4, 7)


def _calls() -> Iterator[_Call]:
    """Yields calls that torch accepts."""
    one = torch.ones(1, dtype=torch.int64)
    for dtype in KERNEL_DTYPES:
        x = _values(dtype)
        yield CACHEMASK, (x, 0.1, 1, -8, 7)
        yield TENSOR_QPARAMS, (x, _floats(0.1), torch.tensor([1], dtype=torch.int32), one, -8, 7)
        for zeros in (torch.tensor([1, 0, -8, 7], dtype=torch.int32), _floats(0.5, 0, -0.25, 3.0)):
            yield CHANNEL_CACHEMASK, (x, _floats(0.1, 0.3, 1e-3, 2.0), zeros, 1, -8, 7)
        yield BACKWARD, (x, x.abs() < 0.5)
        yield CHANNEL_BACKWARD, (x, x.abs() < 0.5)
    # One element at a time: terms have torch's bits, but long sums may differ in the last place.
    for value in _values(torch.float32).flatten().tolist():
        tensors = (_floats(0.7)[:, None], _floats(value)[:, None], _floats(0.1), _floats(-1.5))
        yield LEARNABLE_BACKWARD, (*tensors, -8, 7, 0.3)
        yield LEARNABLE_CHANNEL_BACKWARD, (*tensors, 1, -8, 7, 0.3)
    finite = _values(torch.float32).nan_to_num(0.3, 4.0, -5.0).clamp(-9, 9).reshape(4, 21)
    for per_row in (False, True):
        for symmetric in (False, True):
            rows = 4 if per_row else 1
            state = [_floats(v).repeat(rows) for v in (torch.inf, -torch.inf, 1.0)]
            state.append(torch.zeros(rows, dtype=torch.int32))
            for x in (finite, finite * 0.7 - 0.1):
                call = (x, one, one, *state, 0.01, -128, 127, 0 if per_row else -1, per_row, symmetric)
                yield FUSED, call
                Originals.fused(*call)  # the next call starts with the state after this one


def _refused_calls() -> Iterator[_Call]:
    """Yields calls that some release of torch rejects."""
    x, bounds = _values(torch.float32).reshape(4, 21), (-8, 7)
    scale, zeros = _floats(0.1), torch.zeros(1, dtype=torch.int32)
    scales, channel_zeros = _floats(0.1, 0.2, 0.3, 0.4), torch.zeros(4, dtype=torch.int32)
    on = torch.ones(1, dtype=torch.int64)
    widest = (-(2**63), 2**63 - 1)
    learned = (scale, _floats(0.0))
    fused = (on, on, _floats(-1.0), _floats(1.0), _floats(1.0), zeros, 0.01)
    yield CACHEMASK, (x.int(), 0.1, 0, *bounds)
    yield CACHEMASK, (x, 0.1, 9, *bounds)
    yield CACHEMASK, (x, 0.1, 0, 7, -8)
    yield TENSOR_QPARAMS, (x, scale, torch.tensor([2**31 - 0.5], dtype=torch.float64), on, *bounds)
    yield TENSOR_QPARAMS, (x, _floats(0.1, 0.2), zeros, on, *bounds)
    yield TENSOR_QPARAMS, (x, scale, zeros, on, 7, -8)
    yield CHANNEL_CACHEMASK, (x, scales, channel_zeros + 9, 0, *bounds)
    yield CHANNEL_CACHEMASK, (x, scales, channel_zeros, 1, *bounds)
    yield CHANNEL_CACHEMASK, (x, scales.double(), channel_zeros, 0, *bounds)
    for name in (BACKWARD, CHANNEL_BACKWARD):
        yield name, (x, x[:2] > 0)
        yield name, (x, (x > 0).byte())
        yield name, (x.int(), x > 0)
    yield LEARNABLE_BACKWARD, (x, x, scale, _floats(torch.inf), *widest)
    yield LEARNABLE_BACKWARD, (x[None], x, *learned, *bounds)
    yield LEARNABLE_BACKWARD, (x, x, *learned, 1, 7)
    yield LEARNABLE_CHANNEL_BACKWARD, (x, x, scales, _floats(torch.inf, 0, 0, 0), 0, *widest)
    yield LEARNABLE_CHANNEL_BACKWARD, (x, x, scales, _floats(1e20, 0, 0, 0), 0, *widest)
    yield LEARNABLE_CHANNEL_BACKWARD, (x, x, scales, scales, 2, *bounds)
    yield FUSED, (x + 0j, *fused, -128, 127, -1, False, False)
    yield FUSED, (x[:0], *fused, -128, 127, -1, False, False)
    yield FUSED, (x, *fused, 7, -8, -1, False, False)
