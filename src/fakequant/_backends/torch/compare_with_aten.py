"""A quick comparison of torch's operators with fakequant's kernels, on inputs where implementations differ.

The values are ties, ends of the range, infinities, NaN, subnormal and huge numbers in every dtype. For arguments that
some release of torch rejects, the kernels must return None or raise the same error. `accelerate` does not replace an
operator that differs.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fakequant._backends.torch import aten_kernels, torch_originals
from fakequant._backends.torch.tensor_kernels import KERNEL_DTYPES
from fakequant._backends.torch.torch_annotations import Operator

# A call of an operator with its arguments bound as defaults. It returns a tensor, several, or None.
_Call: TypeAlias = Callable[..., Any]


def disagreements() -> list[str]:
    """Returns the names of torch's operators whose bits or errors differ from the kernels'.

    >>> disagreements()
    []
    """
    # Independent of the caller's default device and grad mode. Warnings of torch are not errors.
    with torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name for name, ours, theirs in _comparisons() if not _same(ours, theirs)}
        found |= {name for name, ours, theirs in _refusals() if not _same_refusal(ours, theirs)}
        return sorted(found)


def _same(ours: _Call, theirs: _Call) -> bool:
    try:
        a, b = ((r,) if isinstance(r, Tensor) else tuple(r) for r in (ours(), theirs()))
    except Exception:  # any error is a difference
        return False
    return all(_same_bits(p, q) for p, q in zip(a, b, strict=True))


def _same_refusal(ours: _Call, theirs: _Call) -> bool:
    """Returns True if the kernel returns None, so that torch's operator runs, or raises torch's error."""
    try:
        if ours() is None:
            return True
    except Exception as error:
        try:
            theirs()
        except Exception as torchs:
            return (type(error), str(error)) == (type(torchs), str(torchs))
        return False
    return _same(ours, theirs)


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


def _comparisons() -> Iterator[tuple[str, _Call, _Call]]:
    one = torch.ones(1, dtype=torch.int64)
    for dtype in KERNEL_DTYPES:
        x = _values(dtype)
        scale, zero_point = _floats(0.1), torch.tensor([1], dtype=torch.int32)
        numbers = (x, 0.1, 1, -8, 7)
        yield (
            "fake_quantize_per_tensor_affine_cachemask",
            lambda a=numbers: aten_kernels.cachemask(*a),
            lambda a=numbers: torch_originals.cachemask(*a),
        )
        tensors = (x, scale, zero_point, one, -8, 7)
        yield (
            "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
            lambda a=tensors: aten_kernels.cachemask_tensor_qparams(*a),
            lambda a=tensors: torch_originals.cachemask_tensor_qparams(*a),
        )
        for zeros in (torch.tensor([1, 0, -8, 7], dtype=torch.int32), _floats(0.5, 0, -0.25, 3.0)):
            channel = (x, _floats(0.1, 0.3, 1e-3, 2.0), zeros, 1, -8, 7)
            yield (
                "fake_quantize_per_channel_affine_cachemask",
                lambda a=channel: aten_kernels.channel_cachemask(*a),
                lambda a=channel: torch_originals.channel_cachemask(*a),
            )
        masked = (x, x.abs() < 0.5)
        for name, theirs in (
            ("per_tensor", torch_originals.cachemask_backward),
            ("per_channel", torch_originals.channel_cachemask_backward),
        ):
            yield (
                f"fake_quantize_{name}_affine_cachemask_backward",
                lambda a=masked: aten_kernels.cachemask_backward(*a),
                lambda a=masked, theirs=theirs: theirs(*a),
            )
    yield from _learnable()
    yield from _fused()


def _learnable() -> Iterator[tuple[str, _Call, _Call]]:
    """Compares one element at a time: terms have torch's bits, but long sums may differ in the last place."""
    for value in _values(torch.float32).flatten().tolist():
        x, dy = _floats(value)[:, None], _floats(0.7)[:, None]
        tensors = (dy, x, _floats(0.1), _floats(-1.5))
        numbers = (-8, 7, 0.3)
        yield (
            "_fake_quantize_learnable_per_tensor_affine_backward",
            lambda a=(*tensors, *numbers): aten_kernels.learnable_backward(*a),
            lambda a=(*tensors, *numbers): torch_originals.learnable_backward(*a),
        )
        yield (
            "_fake_quantize_learnable_per_channel_affine_backward",
            lambda a=(*tensors, 1, *numbers): aten_kernels.learnable_channel_backward(*a),
            lambda a=(*tensors, 1, *numbers): torch_originals.learnable_channel_backward(*a),
        )


def _fused() -> Iterator[tuple[str, _Call, _Call]]:
    finite = _values(torch.float32).nan_to_num(0.3, 4.0, -5.0).clamp(-9, 9).reshape(4, 21)
    for per_row in (False, True):
        for symmetric in (False, True):

            def run(operator: Operator, per_row: bool = per_row, symmetric: bool = symmetric) -> list[Tensor]:
                rows = 4 if per_row else 1
                on = torch.ones(1, dtype=torch.int64)
                state = (
                    _floats(torch.inf).repeat(rows),
                    _floats(-torch.inf).repeat(rows),
                    _floats(1.0).repeat(rows),
                    torch.zeros(rows, dtype=torch.int32),
                )
                results: list[Tensor] = []
                for x in (finite, finite * 0.7 - 0.1):
                    results += operator(x, on, on, *state, 0.01, -128, 127, 0 if per_row else -1, per_row, symmetric)
                return [*results, *state]

            yield (
                "_fused_moving_avg_obs_fq_helper",
                lambda run=run: run(aten_kernels.fused),
                lambda run=run: run(torch_originals.fused),
            )


def _refusals() -> Iterator[tuple[str, _Call, _Call]]:
    """Yields calls that some release of torch rejects."""
    x, bounds = _values(torch.float32).reshape(4, 21), (-8, 7)
    scale, zeros = _floats(0.1), torch.zeros(1, dtype=torch.int32)
    scales, channel_zeros = _floats(0.1, 0.2, 0.3, 0.4), torch.zeros(4, dtype=torch.int32)
    on = torch.ones(1, dtype=torch.int64)
    widest = (-(2**63), 2**63 - 1)
    learned = (scale, _floats(0.0))
    state = (_floats(-1.0), _floats(1.0), _floats(1.0), zeros)
    rest = (0.01, -128, 127, -1, False, False)
    calls: dict[str, tuple[Operator, Operator, list[tuple[Any, ...]]]] = {
        "fake_quantize_per_tensor_affine_cachemask": (
            aten_kernels.cachemask,
            torch_originals.cachemask,
            [(x.int(), 0.1, 0, *bounds), (x, 0.1, 9, *bounds), (x, 0.1, 0, 7, -8)],
        ),
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": (
            aten_kernels.cachemask_tensor_qparams,
            torch_originals.cachemask_tensor_qparams,
            [
                (x, scale, torch.tensor([2**31 - 0.5], dtype=torch.float64), on, *bounds),
                (x, _floats(0.1, 0.2), zeros, on, *bounds),
                (x, scale, zeros, on, 7, -8),
            ],
        ),
        "fake_quantize_per_channel_affine_cachemask": (
            aten_kernels.channel_cachemask,
            torch_originals.channel_cachemask,
            [
                (x, scales, channel_zeros + 9, 0, *bounds),
                (x, scales, channel_zeros, 1, *bounds),
                (x, scales.double(), channel_zeros, 0, *bounds),
            ],
        ),
        "_fake_quantize_learnable_per_tensor_affine_backward": (
            aten_kernels.learnable_backward,
            torch_originals.learnable_backward,
            [
                (x, x, scale, _floats(torch.inf), *widest),
                (x[None], x, *learned, *bounds),
                (x, x, *learned, 1, 7),
            ],
        ),
        "_fake_quantize_learnable_per_channel_affine_backward": (
            aten_kernels.learnable_channel_backward,
            torch_originals.learnable_channel_backward,
            [
                (x, x, scales, _floats(torch.inf, 0, 0, 0), 0, *widest),
                (x, x, scales, _floats(1e20, 0, 0, 0), 0, *widest),
                (x, x, scales, scales, 2, *bounds),
            ],
        ),
        "_fused_moving_avg_obs_fq_helper": (
            aten_kernels.fused,
            torch_originals.fused,
            [
                (x + 0j, on, on, *state, *rest),
                (x[:0], on, on, *state, *rest),
                (x, on, on, *state, 0.01, 7, -8, *rest[3:]),
            ],
        ),
    }
    for per in ("tensor", "channel"):
        original: Operator = (
            torch_originals.cachemask_backward if per == "tensor" else torch_originals.channel_cachemask_backward
        )
        masks = [(x, x[:2] > 0), (x, (x > 0).byte()), (x.int(), x > 0)]
        calls[f"fake_quantize_per_{per}_affine_cachemask_backward"] = (aten_kernels.cachemask_backward, original, masks)
    for name, (mine, theirs, arguments) in calls.items():
        for call in arguments:
            yield name, lambda a=call, f=mine: f(*a), lambda a=call, f=theirs: f(*a)
