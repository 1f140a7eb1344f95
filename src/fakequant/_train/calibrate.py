"""`calibrate`: runs data through a prepared model to find the scales of its activations."""

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._model.running import Data, check_module, check_steps, evaluating, explaining_ranks, run
from fakequant._model.snapshot import Snapshot
from fakequant._model.unfit_ranges import sample_of, warn_about_ranges
from fakequant._prepare.attach import link_norms
from fakequant._util.text import listed
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._model_quantizers import has_scale, named_quantizers, weight_quantizers
from fakequant.nn._quantizer import Quantizer


@torch.no_grad()
def calibrate(model: nn.Module, data: Data, steps: int | None = None, *, progress: bool = True) -> nn.Module:
    """Runs data through a prepared model in float, lets its quantizers observe, and returns the model.

    This is all that post-training quantization needs, and the first step of quantization-aware training.

    Observers that keep a moving average use the mean over all batches here, so that every batch has the same weight.
    Frozen quantizers, and learned quantizers that have a scale already, do not change. The model runs in evaluation
    mode; its previous mode is restored afterwards. If an error occurs, the model is left unchanged. Warnings name
    layers that no data reached, and quantizers whose range does not fit the data: all values were 0, none was finite,
    or most values share a code or two.

    Args:
        model: A prepared model.
        data: A DataLoader or another iterable of batches; a single tensor, which is one batch; or a function that
            takes the model and runs it. A batch is a tensor, a dict of keyword arguments, or a tuple. From a tuple,
            only the arguments that `forward` requires are passed, so that it may also contain labels. A warning is
            given if one of the other elements may be meant for an optional argument.
        steps: The maximum number of batches. If None, all are used.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If the model has no quantizer to calibrate, or `data` has no values.

    >>> import fakequant as fq
    >>> x = torch.ones(3, 4)
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), example=x)
    >>> model = calibrate(model, [x], progress=False)
    >>> model[0].input_quantizer.scale
    tensor(0.0039)
    """
    check_module(model)
    check_steps(steps)
    found = [module for _, module in named_quantizers(model) if not module.frozen]
    if found and all(module.is_initialized for module in found) and weight_quantizers(model) >= set(found):
        return model  # learned scales of weights start when the model is prepared
    if all(module.is_initialized for module in found):
        raise ValueError(_nothing_to_do(model))
    link_norms(model)
    before = Snapshot(model)
    switches = [(q, q.observing, q.quantizing) for q in found]
    with evaluating(model), ExitStack() as undo:
        undo.callback(_restore, switches)
        shown, samples = _watch(model, found, undo)
        for quantizer in found:
            quantizer.train()
            if not quantizer.is_initialized:
                quantizer.observing = True
            quantizer.quantizing = False
            if isinstance(quantizer, FakeQuantize):
                undo.enter_context(quantizer.averaging_evenly())
        try:
            with explaining_ranks():
                run(model, data, steps, "calibrate" if progress else None)
                _require_any(model, shown)
        except BaseException:
            before.restore()
            raise
    _warn_about_unseen(model, shown)
    warn_about_ranges(samples, named_quantizers(model))
    return model


def require_scales(model: nn.Module, what_to_do: str) -> None:
    """Raises ValueError, with the advice `what_to_do`, if a quantizer has no scale."""
    missing = [path for path, quantizer in named_quantizers(model) if not has_scale(quantizer)]
    if missing:
        raise ValueError(f"{listed(missing)} have no scale, because they have not observed any data.\n{what_to_do}")


def _restore(switches: list[tuple[Quantizer, bool, bool]]) -> None:
    for quantizer, observing, quantizing in switches:
        if quantizer.observing != observing:
            quantizer.observing = observing
        quantizer.quantizing = quantizing


def _nothing_to_do(model: nn.Module) -> str:
    found = [module for _, module in named_quantizers(model)]
    if not found:
        return "The model has no quantizers to calibrate.\nUse fakequant.prepare(model, config) first."
    frozen = sum(module.frozen for module in found)
    return (
        f"There is nothing to calibrate: of {len(found)} quantizers {frozen} are frozen, and {len(found) - frozen} "
        "have a learned scale.\n"
        "Use fakequant.nn.switch_quantizers(model, frozen=False), or call reset_parameters() of the quantizers."
    )


def _watch(
    model: nn.Module, found: list[Quantizer], undo: ExitStack
) -> tuple[dict[Quantizer, bool], dict[Quantizer, Tensor]]:
    """Returns two dicts that hooks will fill, which `undo` removes.

    They say which quantizers were given values, and have some values of the first batch of those that look for a scale
    of an activation.
    """
    shown: dict[Quantizer, bool] = dict.fromkeys(found, False)
    samples: dict[Quantizer, Tensor] = {}
    calibrated = {q for q in found if not q.is_initialized and not q.is_dynamic} - weight_quantizers(model)

    def note(quantizer: Quantizer, args: tuple[Any, ...]) -> None:
        if not shown[quantizer] and args[0].numel():
            shown[quantizer] = True
            if quantizer in calibrated:
                samples[quantizer] = sample_of(args[0])

    for quantizer in found:
        undo.callback(quantizer.register_forward_pre_hook(note).remove)
    return shown, samples


def _warn_about_unseen(model: nn.Module, shown: dict[Quantizer, bool]) -> None:
    """Warns about modules whose quantizers were given no values, although the model ran."""
    unseen = []
    for path, module in model.named_modules():
        own = [child for child in module.children() if child in shown and not child.is_initialized]
        if own and not any(shown[child] for child in own):
            unseen.append(path or "the model")
    if not unseen:
        return
    warnings.warn(
        f"No data reached the quantizers of {listed(unseen, most=5)}: the model does not call these layers, or "
        "other code uses their weights. These layers stay in float.\n"
        "Leave them out with config.skip(path), or calibrate with data that reaches them.",
        UserWarning,
        stacklevel=4,
    )


def _require_any(model: nn.Module, shown: dict[Quantizer, bool]) -> None:
    """Raises ValueError if no quantizer of an activation was given values.

    Quantizers of weights always have values. They count only if the model has no others.
    """
    of_weights = weight_quantizers(model)
    activations = [q for q in shown if q not in of_weights]
    if not any(shown[q] for q in activations or shown):
        raise ValueError("`data` has no batches with values: there was nothing to calibrate with.")
