"""A quick comparison of torch's operators with ours, on the inputs where implementations part.

Ties, the ends of the range, infinities, NaN, subnormal and huge values, in every dtype. A torch that
computes them differently is not one whose operators may be replaced.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fakequant.torch import aten_kernels, originals
from fakequant.torch.kernels import KERNEL_DTYPES


def disagreements() -> list[str]:
    """The operators of this torch that do not have the bits of ours.

    >>> disagreements()
    []
    """
    # Whatever the caller has set as defaults.
    with torch.device("cpu"), torch.no_grad():
        return sorted({name for name, ours, theirs in _comparisons() if not _same(ours, theirs)})


def _same(ours: Callable, theirs: Callable) -> bool:
    try:
        a, b = ((r,) if isinstance(r, Tensor) else tuple(r) for r in (ours(), theirs()))
    except Exception:  # whatever it was, it was not agreement
        return False
    return all(_same_bits(p, q) for p, q in zip(a, b, strict=True))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    # NaN is NaN, whatever is in its lower bits.
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


def _comparisons() -> Iterator[tuple[str, Callable, Callable]]:
    one = torch.ones(1, dtype=torch.int64)
    for dtype in KERNEL_DTYPES:
        x = _values(dtype)
        scale, zero_point = _floats(0.1), torch.tensor([1], dtype=torch.int32)
        numbers = (x, 0.1, 1, -8, 7)
        yield (
            "fake_quantize_per_tensor_affine_cachemask",
            lambda a=numbers: aten_kernels.cachemask(*a),
            lambda a=numbers: originals.cachemask(*a),
        )
        tensors = (x, scale, zero_point, one, -8, 7)
        yield (
            "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
            lambda a=tensors: aten_kernels.cachemask_tensor_qparams(*a),
            lambda a=tensors: originals.cachemask_tensor_qparams(*a),
        )
        for zeros in (torch.tensor([1, 0, -8, 7], dtype=torch.int32), _floats(0.5, 0, -0.25, 3.0)):
            channel = (x, _floats(0.1, 0.3, 1e-3, 2.0), zeros, 1, -8, 7)
            yield (
                "fake_quantize_per_channel_affine_cachemask",
                lambda a=channel: aten_kernels.channel_cachemask(*a),
                lambda a=channel: originals.channel_cachemask(*a),
            )
        masked = (x, x.abs() < 0.5)
        for name, theirs in (
            ("per_tensor", originals.cachemask_backward),
            ("per_channel", originals.channel_cachemask_backward),
        ):
            yield (
                f"fake_quantize_{name}_affine_cachemask_backward",
                lambda a=masked: aten_kernels.cachemask_backward(*a),
                lambda a=masked, theirs=theirs: theirs(*a),
            )
    yield from _learnable()
    yield from _fused()


def _learnable() -> Iterator[tuple[str, Callable, Callable]]:
    """One element at a time: the terms have torch's bits, long sums may differ in the last place."""
    for value in _values(torch.float32).flatten().tolist():
        x, dy = _floats(value)[:, None], _floats(0.7)[:, None]
        tensors = (dy, x, _floats(0.1), _floats(-1.5))
        numbers = (-8, 7, 0.3)
        yield (
            "_fake_quantize_learnable_per_tensor_affine_backward",
            lambda a=(*tensors, *numbers): aten_kernels.learnable_backward(*a),
            lambda a=(*tensors, *numbers): originals.learnable_backward(*a),
        )
        yield (
            "_fake_quantize_learnable_per_channel_affine_backward",
            lambda a=(*tensors, 1, *numbers): aten_kernels.learnable_channel_backward(*a),
            lambda a=(*tensors, 1, *numbers): originals.learnable_channel_backward(*a),
        )


def _fused() -> Iterator[tuple[str, Callable, Callable]]:
    finite = _values(torch.float32).nan_to_num(0.3, 4.0, -5.0).clamp(-9, 9).reshape(4, 21)
    for per_row in (False, True):
        for symmetric in (False, True):

            def run(operator, per_row=per_row, symmetric=symmetric):
                rows = 4 if per_row else 1
                on = torch.ones(1, dtype=torch.int64)
                state = (
                    _floats(torch.inf).repeat(rows),
                    _floats(-torch.inf).repeat(rows),
                    _floats(1.0).repeat(rows),
                    torch.zeros(rows, dtype=torch.int32),
                )
                results = []
                for x in (finite, finite * 0.7 - 0.1):
                    results += operator(x, on, on, *state, 0.01, -128, 127, 0 if per_row else -1, per_row, symmetric)
                return [*results, *state]

            yield (
                "_fused_moving_avg_obs_fq_helper",
                lambda run=run: run(aten_kernels.fused),
                lambda run=run: run(originals.fused),
            )
