"""`calibrate`: shows a prepared model some data, so that its activations have scales."""

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fakequant._prepare.first_last import settled_by_first_batch
from fakequant._prepare.prepare import link_norms
from fakequant._train.model_snapshot import Snapshot
from fakequant._train.running import Data, check_module, evaluating, explaining_ranks, run
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._model_quantizers import quantizers
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer


@torch.no_grad()
def calibrate(model: nn.Module, data: Data, steps: int | None = None, *, progress: bool = True) -> nn.Module:
    """Runs `data` through the model, in float, and lets its quantizers observe; returns the model.

    This is post-training quantization in one call, and the start of training with quantizers. `data` is
    a DataLoader or any iterable of batches, of which at most `steps` are used, or one tensor, which is a
    batch. A batch is a tensor, a dict of keyword arguments, or a tuple; of a tuple as many elements are
    passed as `forward` needs, so that labels may be there, and a warning says if one may have been meant
    for an optional argument. Or `data` is a function that runs the model itself.

    A moving average is the mean over the batches here, so that the first counts no more than the last.
    Frozen quantizers, and learned ones that have a scale, stay as they are. The model is in evaluation
    mode while it runs, and afterwards in the mode it was in. If anything fails, nothing has changed. A
    warning names the layers that no data reached.

    >>> import fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8())
    >>> model = calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> model[0].input_quantizer.scale
    tensor(0.0039)
    """
    check_module(model)
    found = [module for _, module in quantizers(model) if not module.frozen]
    if all(module.is_initialized for module in found):
        raise ValueError(_nothing_to_do(model))
    link_norms(model)
    before = Snapshot(model)
    switches = [(q, q.observing, q.quantizing) for q in found]
    with evaluating(model), ExitStack() as undo:
        undo.callback(_restore, switches)
        shown = _watch(found, undo)
        for quantizer in found:
            quantizer.train()
            if not quantizer.is_initialized:
                quantizer.observing = True
            quantizer.quantizing = False
            if isinstance(quantizer, FakeQuantize):
                undo.enter_context(quantizer.averaging_evenly())
        try:
            with settled_by_first_batch(model), explaining_ranks():
                run(model, data, steps, "calibrate" if progress else None)
                _require_any(model, shown)
        except BaseException:
            before.restore()
            raise
    _warn_about_unseen(model, shown)
    return model


def without_scale(model: nn.Module, *, weights: bool = True) -> str | None:
    """Which quantizers, also those of weights, still have to see their ranges, in words; None: all have them."""
    of_weights = {module.weight_quantizer for module in model.modules() if isinstance(module, QuantizedLayer)}
    missing = []
    for path, quantizer in quantizers(model):
        if (weights or quantizer not in of_weights) and not quantizer.is_dynamic:
            try:
                quantizer.qparams()
            except RuntimeError:
                missing.append(path)
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"{', '.join(missing[:3])}{more}" if missing else None


def _restore(switches: list[tuple[Quantizer, bool, bool]]) -> None:
    for quantizer, observing, quantizing in switches:
        if quantizer.observing != observing:
            quantizer.observing = observing
        quantizer.quantizing = quantizing


def _nothing_to_do(model: nn.Module) -> str:
    there = [module for _, module in quantizers(model)]
    if not there:
        return "The model has no quantizers to calibrate.\nUse fakequant.prepare(model, config) first."
    frozen = sum(module.frozen for module in there)
    return (
        f"There is nothing to calibrate: of {len(there)} quantizers {frozen} are frozen, and {len(there) - frozen} "
        "have a learned scale.\n"
        "Use fakequant.nn.switch_quantizers(model, frozen=False), or reset_parameters() of the quantizers."
    )


def _watch(found: list[Quantizer], undo: ExitStack) -> dict[Quantizer, bool]:
    """Which quantizers were shown values."""
    shown = dict.fromkeys(found, False)

    def look(quantizer: Any, args: tuple[Any, ...]) -> None:
        shown[quantizer] = shown[quantizer] or args[0].numel() > 0

    for quantizer in found:
        undo.callback(quantizer.register_forward_pre_hook(look).remove)
    return shown


def _warn_about_unseen(model: nn.Module, shown: dict[Quantizer, bool]) -> None:
    """Names the modules whose quantizers saw nothing although the model ran."""
    unseen = []
    for path, module in model.named_modules():
        own = [child for child in module.children() if child in shown and not child.is_initialized]
        if own and not any(shown[child] for child in own):
            unseen.append(path or "the model")
    if not unseen:
        return
    more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
    warnings.warn(
        f"No data reached the quantizers of {', '.join(unseen[:5])}{more}: the model does not call these layers, or "
        "other code uses their weights. These layers stay in float.\n"
        "Leave them out, config.skip(path), or calibrate with data that reach them.",
        UserWarning,
        stacklevel=4,
    )


def _require_any(model: nn.Module, shown: dict[Quantizer, bool]) -> None:
    """That values came to a quantizer of activations, if there is one; weights are always there."""
    of_weights = {module.weight_quantizer for module in model.modules() if isinstance(module, QuantizedLayer)}
    activations = [q for q in shown if q not in of_weights]
    if not any(shown[q] for q in activations or shown):
        raise ValueError("`data` has no batches with values in them: there was nothing to calibrate with.")
