"""`equalize`: gives the channels of neighbouring layers similar ranges (cross-layer equalization)."""

import copy
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from fakequant._model.running import Bar, Batch, as_batches, first_batch
from fakequant._paired_models.errors import decibels
from fakequant._prepare.attach import preparation
from fakequant._prepare.record_flow import record_flow
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.ptq._channels import output_ranges
from fakequant.ptq._layer_changes import Changes, LayerChange, check_switch, layers_in_order, undone_on_error
from fakequant.ptq._links import Link
from fakequant.ptq._rescaling import (
    finished_factors,
    links_to_rescale,
    observe_again,
    observing_copy,
    recalibrate,
    refresh_weights,
    stored_ranges,
)

# Factors have converged when none changes by more than this, in powers of two.
_CONVERGED = 0.01
_ROUNDS = 100


@torch.no_grad()
def equalize(model: nn.Module, data: Iterable[Batch], *, powers_of_two: bool = False, progress: bool = True) -> Changes:
    """Rescales the channels between two layers so that their weight ranges match, in place (cross-layer equalization).

        w1' = w1 / s        w2' = w2 * s        s = sqrt(r1 / r2)        per channel between the layers

    r1 and r2 are the largest magnitudes of the weights that compute and that use a channel. After it, both are
    sqrt(r1 r2). The steps are repeated over all pairs until nothing changes. If a batch norm follows the first layer
    and will be folded into it, the batch norm takes the factors. Weights are quantized before they are folded, so w1
    stays as it is, and s = 1 / r2.

    This is made for weights with one scale per tensor, where channels of small range lose their values, above all in
    depthwise convolutions. With scales per channel no gain was measured.

    Between two layers may be ReLU, pooling, dropout, and operations that move elements, but no function that clips or
    bends, such as ReLU6 or GELU. If the output of the first layer is used in any other way too, it is not changed, and
    the table says why.

    The model computes the same in float as before, up to rounding; bit by bit with `powers_of_two`, up to the range of
    floats. Ranges of the changed activations and weights, learned scales included, are found again if the model had
    any. Layers with frozen or fixed ranges are not changed.

    Args:
        model: A prepared model, calibrated or not.
        data: Batches, as `calibrate` takes them. The first shows how data flows, and every pair is checked on it.
        powers_of_two: Whether factors are rounded to powers of two. Ranges are then alike only up to a factor of 2.
        progress: Whether to show a progress bar.

    Returns:
        A row per layer: the SQNR of its quantized weight, as the mean over its output channels.

    >>> import fakequant as fq
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    >>> with torch.no_grad():
    ...     _ = model[0].weight.mul_(torch.tensor([[1.0], [100.0], [0.01], [1.0]]))  # channels of different ranges
    >>> x = torch.ones(1, 3)
    >>> expected = model(x)
    >>> config = fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(bits=8)))
    >>> changes = fq.ptq.equalize(fq.prepare(model, config, example=x), [x], progress=False)
    >>> changes.layers[0].after > changes.layers[0].before
    True
    >>> torch.allclose(fq.unprepare(model)(x), expected, atol=1e-5)
    True
    """
    made = preparation(model)
    check_switch("powers_of_two", powers_of_two)
    batches = as_batches(data)
    example = first_batch(batches)
    folded = set(made.norms.values())
    with undone_on_error(model):
        graph = record_flow(model, example)
        found = links_to_rescale(model, graph, example, partial(_reason_against, folded=folded))
        stale = stored_ranges(model, found.links)
        rows = layers_in_order(model, graph)
        before = {path: _weight_sqnr(layer) for path, layer in rows.items()}
        _rescale(found.links, powers_of_two=powers_of_two, progress=progress)
        refresh_weights(found.links)
        recalibrate(model, stale, batches, "equalize" if progress else None)
    changed = {path for link in found.links for path in (link.path, *link.users)}
    return Changes(
        "equalize",
        "weight SQNR dB",
        [
            LayerChange.of(path, layer, (before[path], _weight_sqnr(layer)))
            if path in changed
            else LayerChange.of(path, layer, reason=found.reasons.get(path))
            for path, layer in rows.items()
        ],
    )


def _reason_against(link: Link, folded: set[str]) -> str | None:
    """Returns why a link is not a pair of layers to equalize, or None if it is."""
    if link.is_norm and link.path not in folded:
        return f"{link.path} stands before it, {type(link.module).__name__}, which is not folded into a layer"
    is_quantized = any(isinstance(layer, QuantizedLayer) for layer in (link.module, *link.users.values()))
    return None if is_quantized else "it is not quantized"


def _rescale(links: list[Link], *, powers_of_two: bool, progress: bool) -> None:
    """Finds the factors of all links together, and applies them once, so that rounding errors do not add up."""
    values = {parameter: parameter.detach().clone() for link in links for parameter in link.parameters()}
    total = [torch.zeros(link.channels, dtype=torch.float64) for link in links]
    with Bar(total=_ROUNDS, desc="equalize", disable=not progress, leave=False) as bar:
        for _ in range(_ROUNDS if links else 0):
            largest = 0.0
            for number, link in enumerate(links):
                logs = _step(link)
                total[number] += logs.cpu()
                logs = logs.nan_to_num(nan=0.0)
                largest = max(largest, float(logs.abs().max()))
                link.rescale(torch.exp2(logs))
            bar.update()
            if largest <= _CONVERGED:
                break
    for parameter, value in values.items():
        parameter.copy_(value)
    for link, logs in zip(links, total, strict=True):
        link.rescale(finished_factors(torch.exp2(logs), powers_of_two=powers_of_two))


def _step(link: Link) -> Tensor:
    """Returns log2 of the factors that make the ranges of a link equal: NaN for channels without values."""
    second = link.user_ranges()
    if link.is_norm:
        valid = second > 0
        logs = -torch.where(valid, second, 1.0).log2()
        logs = logs - logs[valid].mean()
    else:
        first = output_ranges(link.module).double()
        valid = (first > 0) & (second > 0)
        logs = (torch.where(valid, first, 1.0).log2() - torch.where(valid, second, 1.0).log2()) / 2
    return torch.where(valid & logs.isfinite(), logs, torch.nan)


def _weight_sqnr(layer: QuantizedLayer) -> float | None:
    """Returns the SQNR of a layer's weight in dB, as the mean over output channels. None if there is no error."""
    quantizer, kind = layer.weight_quantizer, layer._fakequant.kind
    if quantizer is None:
        return None
    weight: Tensor = kind.read_weight(layer).detach()
    made = observing_copy(copy.deepcopy(quantizer))
    observe_again(made, weight)
    signal, noise = (
        t.movedim(kind.channel_axis, 0).flatten(1).double().square().sum(1).tolist()
        for t in (weight, weight - made(weight))
    )
    found = [decibels(s, n) for s, n in zip(signal, noise, strict=True) if s > 0 and n > 0]
    return sum(found) / len(found) if found else None
