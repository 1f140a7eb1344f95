"""Quantizing a tensor in the call that observes it, for `FakeQuantize`.

    observe_and_quantize       updates given ranges and scales with a tensor, and quantizes it, in one pass
    quantize_with_own_range    uses the range of a tensor alone: dynamic observers, scales per token and per block
    quantize_purely            does either without changing anything: for torch.func, and for exported programs

The fourth way, a stored scale, is a method of `FakeQuantize`, which chooses between them in `_run`.
"""

import warnings
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fakequant._backends.blocks import group_length, short_blocks
from fakequant._backends.torch import compiled_nodes, tensor_functions
from fakequant._backends.torch.plain_memory import is_memory
from fakequant._backends.torch.tensor_functions import fake_quantize
from fakequant._backends.torch.tensor_kernels import Observation, updated_range, zero_dtype
from fakequant._backends.torch.torch_private import innermost_transform
from fakequant._kernels import scale_rule_name
from fakequant.nn._quantizer import ONLY_FINITE, LastTensor
from fakequant.observers._observer import State
from fakequant.observers._ranks import ALONE, Ranks
from fakequant.qparams import QParams

if TYPE_CHECKING:
    from fakequant.nn._fake_quantize import FakeQuantize


# --- one pass -------------------------------------------------------------------------------------


def observe_and_quantize(
    quantizer: "FakeQuantize", x: Tensor, running_min: Tensor, running_max: Tensor, scale: Tensor, zero_point: Tensor
) -> Tensor:
    """Quantizes `x` after updating the running range, scale and zero point with it, in place."""
    spec, how = quantizer.spec, quantizer._in_kernel
    assert how is not None
    if spec.group_size is not None:
        quantizer._check_blocks(x)
    if not short_blocks(tuple(x.shape), spec):
        y = observe_compiled(quantizer, x, running_min, running_max, scale, zero_point, quantize=True)
        if y is not None:
            return y
    quantizer._last = None
    if spec.axis is not None:
        quantizer._check_blocks(x)
    if not torch.compiler.is_compiling() and not is_memory(x) and not short_blocks(tuple(x.shape), spec):
        return tensor_functions.observe_into(  # few launches, and nothing is copied afterwards
            x, spec, (running_min, running_max, scale, zero_point), quantizer._nonfinite, update=how.update,
            averaging_constant=how.constant, eps=quantizer.eps, gradient=quantizer._following,
        )  # fmt: skip
    result = tensor_functions.observe_fake_quantize(
        x, spec, running_min, running_max, update=how.update, averaging_constant=how.constant, eps=quantizer.eps,
        gradient=quantizer._following,
    )  # fmt: skip
    quantizer._count_nonfinite(result.nonfinite)
    scale.copy_(result.scale)
    zero_point.copy_(result.zero_point)
    return result.y


def observe_compiled(quantizer: "FakeQuantize", x: Tensor, *state: Tensor, quantize: bool) -> Tensor | None:
    """The fast path: observes ordinary memory in compiled code. Returns None if it does not apply.

    `state` is the running minimum and maximum, scale and zero point, which are updated in place. Without `quantize`,
    returns `x` itself.
    """
    spec = quantizer.spec
    if compiled_nodes.compiled is None or torch.compiler.is_compiling() or spec.group_rows is not None:
        return None
    axis, group = spec.axis, spec.group_size
    found: tuple[Tensor | None, int] | None = compiled_nodes.compiled.observe(
        x, *state, *quantizer._kernel_options, axis + x.dim() if axis is not None and axis < 0 else axis,
        group if axis is None or group is None else group_length(x.shape[axis], spec), quantize,
        quantizer._following == "clipped",
    )  # fmt: skip
    if found is None:
        return None
    y, nonfinite = found
    # Not by `setattr`, which is slow in a module.
    quantizer.__dict__["_last"] = None if nonfinite else ONLY_FINITE
    if nonfinite:
        quantizer._count_nonfinite(torch.tensor(nonfinite))
    return x if y is None else y


# --- the range of the tensor alone ----------------------------------------------------------------


def quantize_with_own_range(quantizer: "FakeQuantize", x: Tensor, ranks: Ranks) -> Tensor:
    """Quantizes with the range that a dynamic observer finds in `x` alone, or in the `x` of all ranks."""
    if quantizer._in_kernel is None:
        return _quantize_by_observer(quantizer, x, ranks)
    if quantizer._blocks is None or not quantizer.training:
        return _quantize_in_new_tensors(quantizer, x)
    if ranks.several or quantizer.rounding is not None:
        quantizer._observe(x, ranks)
        return quantizer._quantize(x, quantizer._following)
    return observe_and_quantize(
        quantizer, x, quantizer.running_min, quantizer.running_max, quantizer.scale, quantizer.zero_point
    )


def _quantize_in_new_tensors(quantizer: "FakeQuantize", x: Tensor) -> Tensor:
    """Computes the range in new tensors, which are then copied: several threads may evaluate one model."""
    blocks = quantizer._check_blocks(x)
    if torch.compiler.is_compiling() or is_memory(x) or x.numel() == 0:
        lo = torch.full(blocks, torch.inf, dtype=torch.float32, device=x.device)
        hi = -lo
    else:  # nothing is launched for what is not read
        lo, hi = torch.empty((2, *blocks), dtype=torch.float32, device=x.device)
    scale, zero_point = torch.empty_like(lo), torch.empty_like(lo, dtype=zero_dtype(scale_rule_name(quantizer.spec)))
    y = observe_and_quantize(quantizer, x, lo, hi, scale, zero_point)
    if quantizer._blocks is not None:
        buffers = (quantizer.running_min, quantizer.running_max, quantizer.scale, quantizer.zero_point)
        for buffer, value in zip(buffers, (lo, hi, scale, zero_point), strict=True):
            buffer.copy_(value)
    elif (torch.is_grad_enabled() or quantizer.spec.granularity == "token") and not torch.compiler.is_compiling():
        # For codes that are saved for the backward pass, and for exact sums.
        only_finite = quantizer._last is not None and quantizer._last.only_finite
        _remember(quantizer, y, QParams(scale, zero_point), only_finite=only_finite)
    return y


def _remember(quantizer: "FakeQuantize", y: Tensor, qparams: QParams[Tensor], *, only_finite: bool = False) -> None:
    """Keeps scale and zero point of a result, which are not stored, for the operator that takes it."""
    result = weakref.ref(y, quantizer._forget_last)
    quantizer.__dict__["_last"] = LastTensor(only_finite, result, qparams)


def _quantize_by_observer(quantizer: "FakeQuantize", x: Tensor, ranks: Ranks) -> Tensor:
    """Quantizes with the range that the observer finds in `x` alone: 0 to 0 if there is no finite value."""
    state, nonfinite, (scale, zero_point) = _found_by_observer(quantizer, x, ranks)
    quantizer._last = None
    quantizer._count_nonfinite(nonfinite)
    for name, value in {**state, "scale": scale, "zero_point": zero_point}.items():
        getattr(quantizer, name).copy_(value)
    return fake_quantize(x, scale, zero_point, quantizer.spec, gradient=quantizer._following)


def _found_by_observer(quantizer: "FakeQuantize", x: Tensor, ranks: Ranks) -> tuple[State, Tensor, QParams[Tensor]]:
    """Returns the state of the observer after `x` alone, the number of values left out, and scale and zero point."""
    observer, spec = quantizer.observer, quantizer.spec
    state = observer.init(quantizer._check_blocks(x), x.device)
    nonfinite = observer.update(state, x.detach(), spec, ranks)
    return state, nonfinite, choose(quantizer, *observer.range(state, spec))


def choose(quantizer: "FakeQuantize", lo: Tensor, hi: Tensor) -> QParams[Tensor]:
    """Chooses scale and zero point. An empty range (lo > hi) counts as 0 to 0."""
    seen = lo <= hi
    return tensor_functions.choose_qparams(
        torch.where(seen, lo, 0), torch.where(seen, hi, 0), quantizer.spec, eps=quantizer.eps
    )


# --- without changes of state ---------------------------------------------------------------------


def must_be_pure(training: bool) -> bool:
    """Returns True under `torch.func`, and in a model exported for evaluation: no tensor may be changed there."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() and not training
    return innermost_transform() is not None


def quantize_purely(quantizer: "FakeQuantize", x: Tensor, ranks: Ranks) -> Tensor:
    """Returns what the forward pass would return, but stores nothing."""
    observer = quantizer.observer
    if not observer.dynamic and not torch.compiler.is_compiling():
        warnings.warn(
            "Quantizers that observe under a transform of torch.func do not remember what they see.\n"
            "Call `calibrate` first, and freeze the ranges: fakequant.nn.switch_quantizers(model, frozen=True).",
            RuntimeWarning,
            stacklevel=3,
        )
    if ranks.several:
        raise RuntimeError(
            "ranges are exchanged between processes, which a transform of torch.func cannot do.\n"
            "Freeze them: fakequant.nn.switch_quantizers(model, frozen=True)."
        )
    if not quantizer._quantizing:
        return x
    qparams = pure_qparams(quantizer, x)
    y = fake_quantize(x, *qparams, quantizer.spec, gradient=quantizer._following)
    quantizer._last = None
    if not torch.compiler.is_compiling():
        _remember(quantizer, y, qparams)
    return y


def pure_qparams(quantizer: "FakeQuantize", x: Tensor) -> QParams[Tensor]:
    """Returns the scale and zero point that a call with `x` quantizes with, and stores nothing."""
    observer, spec = quantizer.observer, quantizer.spec
    if quantizer._in_kernel is None and observer.dynamic:
        return _found_by_observer(quantizer, x, ALONE)[2]
    if quantizer._in_kernel is None:
        raise RuntimeError(
            f"{observer} cannot observe under a transform of torch.func: it changes its state in place.\n"
            "Call `calibrate` first, and freeze the ranges: fakequant.nn.switch_quantizers(model, frozen=True)."
        )
    quantizer._check_blocks(x)
    seen = tensor_functions.min_max(x.detach(), spec)
    if quantizer._blocks is None:
        before = torch.full_like(seen.min, torch.inf, dtype=torch.float32)
        running = before, -before
    else:
        running = quantizer.running_min, quantizer.running_max
    how = Observation(*quantizer._in_kernel, scale_rule_name(spec))
    lo, hi = updated_range(*running, seen.min, seen.max, how)
    return tensor_functions.choose_qparams(lo, hi, spec, eps=quantizer.eps)
