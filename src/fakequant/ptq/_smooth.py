"""`smooth`: moves the scale of activations into the weights (SmoothQuant, AWQ)."""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fakequant._backends.torch.process_ranks import ranks_of
from fakequant._diagnosis.inputs import inputs_of
from fakequant._diagnosis.watching import Args, Kwargs
from fakequant._prepare.prepare import preparation
from fakequant._train.running import Batch, evaluating, run
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._records import float_class_of
from fakequant.ptq._changes import Changes, LayerChange
from fakequant.ptq._channels import channel_axis, input_ranges
from fakequant.ptq._factor_trials import LayerTrials, Trial
from fakequant.ptq._factors import check_switch, finished_factors
from fakequant.ptq._float_runs import as_batches, first_batch, in_float, recorded_flow
from fakequant.ptq._layers import layers_in_order
from fakequant.ptq._link_quantizers import reason_against_quantizers, refresh_weights, stored_ranges
from fakequant.ptq._links import Link, Links, find_links
from fakequant.ptq._probe import drop_wrong_links
from fakequant.ptq._ranges import recalibrate
from fakequant.ptq._undoing import undone_on_error

# The exponents that the search tries, besides no change.
_GRID = tuple(step / 10 for step in range(1, 11))


@torch.no_grad()
def smooth(
    model: nn.Module,
    data: Iterable[Batch],
    *,
    alpha: float | Literal["search"] = 0.5,
    powers_of_two: bool = True,
    progress: bool = True,
) -> Changes:
    """Moves the scale of activations into the weights that multiply them, in place (SmoothQuant).

        x' = x / s        w' = w * s        s = max|x|^alpha / max|w|^(1 - alpha)        per input channel

    Activations with outliers in a few channels, as transformers have, need a coarse grid for all channels. Divided by
    `s`, they are even, and the weights, which have scales of their own, take the factors.

    x is divided where it is computed: in the weight and bias of a norm (LayerNorm, RMSNorm, GroupNorm, batch norm), or
    in the output channels of a layer. Between that and the layers may be ReLU, pooling, dropout, a product with
    another tensor, or operations that move elements. If x is used in any other way too, as in a residual connection, or
    returned, it is not changed, and the table says why. The data flow is that of the first batch; every pair is checked
    on it.

    The model computes the same in float as before: bit by bit with `powers_of_two`, up to the range of floats, and up
    to rounding without. Ranges of the changed activations and weights, learned scales included, are found again if the
    model had any. Layers with frozen or fixed ranges are not changed.

    Args:
        model: A prepared model, calibrated or not.
        data: Batches, as `calibrate` takes them. They are iterated several times.
        alpha: How much of the scale moves, 0 to 1: 1 makes all activation channels equal, and 0 all weight channels.
            "search" tries 0.1 to 1 and no change for each group of layers with the same input, and keeps what gives
            their results the smallest error (as AWQ does).
        powers_of_two: Whether factors are rounded to powers of two.
        progress: Whether to show a progress bar.

    Returns:
        A row per layer: the SQNR of its result on `data`, with its own input and weight quantized.

    >>> import fakequant as fq
    >>> model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    >>> with torch.no_grad():
    ...     _ = model[0].weight.copy_(torch.tensor([50.0, 0.1, 0.1, 0.1]))  # an outlier
    >>> data = [torch.randn(32, 4, generator=torch.Generator().manual_seed(0))]
    >>> expected = model(data[0])
    >>> model = fq.calibrate(fq.prepare(model, fq.recipes.int8(), data[0]), data, progress=False)
    >>> changes = fq.ptq.smooth(model, data, progress=False)
    >>> changes.layers[0].after > changes.layers[0].before
    True
    >>> torch.equal(fq.unprepare(model)(data[0]), expected)
    True
    """
    preparation(model)
    _check_alpha(alpha)
    check_switch("powers_of_two", powers_of_two)
    batches = as_batches(data)
    example = first_batch(batches)
    title = "smooth" if progress else None
    with undone_on_error(model):
        graph = recorded_flow(model, example)
        found = find_links(model, graph)
        _drop_unquantized(model, found)
        drop_wrong_links(model, found, example)
        trials: dict[str, LayerTrials] = {}
        chosen: dict[str, Trial] = {}
        if found.links:
            with evaluating(model), in_float(model):
                largest = _largest_inputs(model, found.links, batches, title)
                choices = [
                    _choices(link, x, alpha, powers_of_two) for link, x in zip(found.links, largest, strict=True)
                ]
                trials = _trials(found.links, choices)
                _run_trials(model, trials, batches, title)
            for link, factors in zip(found.links, choices, strict=True):
                number = _best(link, trials) if alpha == "search" else 1
                chosen.update({path: trials[path].trials[number] for path in link.users if path in trials})
                link.rescale(factors[number])
            refresh_weights(found.links)
            recalibrate(model, stored_ranges(model, found.links), batches, title)
    return Changes("smooth", "SQNR dB", _rows(layers_in_order(model, graph), found, trials, chosen))


def _check_alpha(alpha: Any) -> None:
    if alpha == "search":
        return
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ValueError(f'`alpha` must be a number from 0 to 1, or "search", got {alpha!r}.')


def _drop_unquantized(model: nn.Module, found: Links) -> None:
    """Removes links without quantized users, and those whose quantizers cannot change."""
    for link in list(found.links):
        quantized = [path for path, layer in link.users.items() if isinstance(layer, QuantizedLayer)]
        reason = "it is not quantized" if not quantized else reason_against_quantizers(model, link)
        if reason is not None:
            found.links.remove(link)
            found.reasons.update(dict.fromkeys(link.users, reason))


def _largest_inputs(model: nn.Module, links: list[Link], data: Iterable[Batch], progress: str | None) -> list[Tensor]:
    """Returns the largest magnitude of the users' inputs, per channel, for each link."""
    found = [torch.zeros(link.channels, dtype=torch.float64) for link in links]
    with ExitStack() as undo:
        for number, link in enumerate(links):
            for path, layer in link.users.items():

                def look(layer: nn.Module, args: Args, kwargs: Kwargs, at: int = number, path: str = path) -> None:
                    for x in inputs_of(layer, args, kwargs):
                        if x.numel():
                            axis = channel_axis(layer, x.dim())
                            x = x.detach().abs().amax([a for a in range(x.dim()) if a != axis])
                            values = links[at].per_channel(path, torch.nan_to_num(x, nan=0.0, posinf=0.0).double())
                            found[at] = torch.maximum(found[at], values.cpu())

                undo.callback(layer.register_forward_pre_hook(look, with_kwargs=True).remove)
        run(model, data, None, progress)
    return [ranks_of().range(x, x)[1] for x in found]


def _choices(link: Link, largest: Tensor, alpha: float | str, powers_of_two: bool) -> list[Tensor]:
    """Returns the factors to compare for a link: none, and those of each exponent."""
    ranges = [link.per_channel(path, input_ranges(layer).double()) for path, layer in link.users.items()]
    weights = torch.stack(ranges).amax(0).cpu()
    exponents = _GRID if alpha == "search" else (float(alpha),)
    device = next(link.module.parameters()).device
    return [
        torch.ones(link.channels, dtype=torch.float64, device=device),
        *(
            finished_factors(
                torch.where((largest > 0) & (weights > 0), largest**a / weights ** (1 - a), 0),
                powers_of_two=powers_of_two,
            ).to(device)
            for a in exponents
        ),
    ]


def _trials(links: list[Link], choices: list[list[Tensor]]) -> dict[str, LayerTrials]:
    return {
        path: LayerTrials(layer, [link.factors_of(path, factors) for factors in own])
        for link, own in zip(links, choices, strict=True)
        for path, layer in link.users.items()
        if isinstance(layer, QuantizedLayer)
    }


def _run_trials(model: nn.Module, trials: dict[str, LayerTrials], data: Iterable[Batch], progress: str | None) -> None:
    with ExitStack() as undo:
        for of_layer in trials.values():
            undo.enter_context(of_layer.observing())
        run(model, data, None, progress)
    with ExitStack() as undo:
        for of_layer in trials.values():
            undo.enter_context(of_layer.measuring())
        run(model, data, None, progress)


def _best(link: Link, trials: dict[str, LayerTrials]) -> int:
    """Returns the number of the trial with the smallest squared error over all users of a link."""
    errors = []
    for of_layer in (trials[path] for path in link.users if path in trials):
        sums = [trial.sums for trial in of_layer.trials]
        errors.append(torch.tensor([s.noise for s in sums], dtype=torch.float64))
    total = ranks_of().total(torch.stack(errors).sum(0))
    return int(torch.where(total.isnan(), math.inf, total).argmin())


def _rows(
    layers: dict[str, QuantizedLayer], found: Links, trials: dict[str, LayerTrials], chosen: dict[str, Trial]
) -> list[LayerChange]:
    rows = []
    for path, layer in layers.items():
        kind = float_class_of(layer).__name__
        if path in chosen:
            before, after = trials[path].trials[0], chosen[path]
            same = "no other factors have a smaller error" if before is after else None
            rows.append(LayerChange(path, kind, before.sqnr, after.sqnr, same))
        else:
            rows.append(LayerChange(path, kind, reason=found.reasons.get(path)))
    return rows
