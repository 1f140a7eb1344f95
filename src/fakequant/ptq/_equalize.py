"""`equalize`: gives the channels of neighbouring layers similar ranges (cross-layer equalization)."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fakequant._diagnosis.sums import decibels
from fakequant._prepare.flow_graph import FlowGraph
from fakequant._prepare.prepare import preparation
from fakequant._train.running import Bar, Batch
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._records import float_class_of
from fakequant.ptq._changes import Changes, LayerChange
from fakequant.ptq._channels import input_ranges, output_ranges
from fakequant.ptq._factors import check_switch, finished_factors
from fakequant.ptq._float_runs import as_batches, first_batch, recorded_flow, traced_flows
from fakequant.ptq._layers import layers_in_order
from fakequant.ptq._link_quantizers import reason_against_quantizers, refresh_weights, stored_ranges
from fakequant.ptq._links import Link, Links, find_links
from fakequant.ptq._probe import drop_wrong_links
from fakequant.ptq._ranges import observe_again, observing_copy, recalibrate
from fakequant.ptq._undoing import undone_on_error

# Factors have converged when none changes by more than this, in powers of two.
_CONVERGED = 0.01
_ROUNDS = 100


@torch.no_grad()
def equalize(
    model: nn.Module,
    data: Iterable[Batch] | None = None,
    *,
    powers_of_two: bool = False,
    progress: bool = True,
) -> Changes:
    """Gives the channels between two layers ranges that are alike in both, in place (cross-layer equalization).

        w1' = w1 / s        w2' = w2 * s        s = sqrt(r1 / r2)        per channel between the layers

    r1 and r2 are the largest magnitudes of the weights that compute and that use a channel. After it, both are
    sqrt(r1 r2). The steps are repeated over all pairs until nothing changes. If a batch norm follows the first layer
    and will be folded into it, the batch norm takes the factors. Weights are quantized before they are folded, so w1
    stays as it is, and s = 1 / r2.

    This is made for weights with one scale per tensor, where channels of small range lose their values, above all in
    depthwise convolutions. With scales per channel no gain was measured.

    Between two layers may be ReLU, pooling, dropout, and operations that move elements, but no function that clips or
    bends, such as ReLU6 or GELU. If the result of the first layer is used in any other way too, it is not changed, and
    the table says why.

    The model computes the same in float as before, up to rounding; bit by bit with `powers_of_two`, up to the range of
    floats. Ranges of the changed activations and weights, learned scales included, are found again if the model had
    any. Layers with frozen or fixed ranges are not changed.

    Args:
        model: A prepared model, calibrated or not.
        data: Batches, as `calibrate` takes them. None if the model has no ranges of activations yet and torch.fx can
            trace it. With data, the flow is that of the first batch, and every pair is checked on it.
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
    >>> changes = fq.ptq.equalize(fq.prepare(model, config), progress=False)
    >>> changes.layers[0].after > changes.layers[0].before
    True
    >>> torch.allclose(fq.unprepare(model)(x), expected, atol=1e-5)
    True
    """
    made = preparation(model)
    check_switch("powers_of_two", powers_of_two)
    batches = None if data is None else as_batches(data)
    example = None if batches is None else first_batch(batches)
    folded = set(made.norms.values())
    with undone_on_error(model):
        graphs = traced_flows(model) if example is None else [recorded_flow(model, example)]
        found = _find(model, graphs)
        _drop_others(model, found, folded)
        if example is not None:
            drop_wrong_links(model, found, example)
        stale = stored_ranges(model, found.links)
        if stale and batches is None:
            raise ValueError(
                f"The ranges of activations would no longer fit: {stale[0].path} and {len(stale) - 1} more have one.\n"
                "Pass `data` to find them again, or equalize before the model is calibrated."
            )
        rows = layers_in_order(model, graphs[-1])
        before = {path: _weight_sqnr(layer) for path, layer in rows.items()}
        _rescale(found.links, powers_of_two=powers_of_two, progress=progress)
        refresh_weights(found.links)
        if batches is not None:
            recalibrate(model, stale, batches, "equalize" if progress else None)
    changed = {path for link in found.links for path in (link.path, *link.users)}
    return Changes(
        "equalize",
        "weight SQNR dB",
        [
            LayerChange(path, float_class_of(layer).__name__, before[path], _weight_sqnr(layer))
            if path in changed
            else LayerChange(path, float_class_of(layer).__name__, reason=found.reasons.get(path))
            for path, layer in rows.items()
        ],
    )


def _find(model: nn.Module, graphs: list[FlowGraph]) -> Links:
    """Returns the links that are the same in all flow graphs."""
    each = [find_links(model, graph) for graph in graphs]
    found = each[-1]
    for link in list(found.links):
        for other in each[:-1]:  # of the training mode
            if not any(link.path == one.path and link.repeats == one.repeats for one in other.links):
                found.links.remove(link)
                found.reasons.update(dict.fromkeys(link.users, "its input is computed differently in training mode"))
                break
    return found


def _drop_others(model: nn.Module, found: Links, folded: set[str]) -> None:
    """Removes links that are no pairs of layers, and those whose quantizers cannot change."""
    for link in list(found.links):
        reason = None
        if link.is_norm and link.path not in folded:
            reason = f"{link.path} stands before it, {type(link.module).__name__}, which is not folded into a layer"
        elif not any(isinstance(layer, QuantizedLayer) for layer in (link.module, *link.users.values())):
            reason = "it is not quantized"
        reason = reason or reason_against_quantizers(model, link)
        if reason is not None:
            found.links.remove(link)
            found.reasons.update(dict.fromkeys(link.users, reason))


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
    second = torch.stack(
        [link.per_channel(path, input_ranges(layer).double()) for path, layer in link.users.items()]
    ).amax(0)
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
