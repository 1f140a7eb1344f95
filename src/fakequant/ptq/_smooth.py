"""`smooth`: moves the scale of activations into the weights (SmoothQuant, AWQ)."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fakequant._model.running import Batch, as_batches, evaluating, first_batch, run
from fakequant._paired_models.calls import Args, Kwargs, Result, changed_inputs, first_tensor, inputs_of, watching
from fakequant._paired_models.errors import ErrorSums
from fakequant._prepare.attach import preparation
from fakequant._prepare.output_quantizers import give_own_inputs
from fakequant._prepare.record_flow import record_flow
from fakequant.nn._model_quantizers import in_float
from fakequant.nn._quantized_layer import QuantizedLayer, input_grid_of
from fakequant.nn._quantizer import Quantizer
from fakequant.observers._ranks import ranks_of
from fakequant.ptq._channels import channel_axis, parameters_of, per_channel, scale_inputs
from fakequant.ptq._insertions import Insertion, find_insertions, inserting
from fakequant.ptq._layer_changes import Changes, LayerChange, check_switch, layers_in_order, undone_on_error
from fakequant.ptq._links import Link, Links
from fakequant.ptq._rescaling import (
    drop_wrong_links,
    finished_factors,
    links_to_rescale,
    observe_again,
    observing,
    observing_copy,
    recalibrate,
    refresh_weights,
    stored_ranges,
)

# The exponents that the search tries, besides no change.
_GRID = tuple(step / 10 for step in range(1, 11))


@torch.no_grad()
def smooth(
    model: nn.Module,
    data: Iterable[Batch],
    *,
    alpha: float | Literal["search"] = 0.5,
    powers_of_two: bool = True,
    insert: bool = False,
    progress: bool = True,
) -> Changes:
    """Moves the scale of activations into the weights that multiply them, in place (SmoothQuant).

        x' = x / s        w' = w * s        s = max|x|^alpha / max|w|^(1 - alpha)        per input channel

    Activations with outliers in a few channels, as transformers have, need a coarse grid for all channels. Divided by
    `s`, they are even, and the weights, which have their own scales, absorb the factors.

    x is divided where it is computed: in the weight and bias of a norm (LayerNorm, RMSNorm, GroupNorm, batch norm), or
    in the output channels of a layer. Between that and the layers may be ReLU, pooling, dropout, a product with
    another tensor, or operations that move elements. If x is used in any other way too, as in a residual connection, or
    returned, it is not changed, and the table says why. The first batch shows how data flows, and every pair is checked
    on it.

    With `insert`, layers that are left multiply their input themselves, before they quantize it: in post-norm
    transformers (BERT) all of them, because a residual connection reads the result of every norm, and no norm is before
    the others. This costs a multiplication per element of the input, which layers with the same input share in the
    file, so it is inserted only where it makes the error of the outputs smaller. If the layers shared a quantizer with
    a residual addition, they get their own, and the addition reads floats.

    The model computes the same in float as before: bit by bit with `powers_of_two`, up to the range of floats, and up
    to rounding without. Ranges of the changed activations and weights, learned scales included, are found again if the
    model had any. Layers with frozen or fixed ranges are not changed.

    Args:
        model: A prepared model, calibrated or not.
        data: Batches, as `calibrate` takes them. They are iterated several times.
        alpha: How much of the scale moves, 0 to 1: 1 makes all activation channels equal, and 0 all weight channels.
            "search" tries 0.1 to 1 and no change for each group of layers with the same input, and keeps what gives
            their outputs the smallest error (as AWQ does).
        powers_of_two: Whether factors are rounded to powers of two.
        insert: Whether layers whose producers cannot take factors multiply their input. Only targets that multiply in
            float can do so: ONNX files. `unprepare` multiplies the weights instead; states of the model have the
            factors beside the weights, so they do not load into a float model.
        progress: Whether to show a progress bar.

    Returns:
        A row per layer: the SQNR of its output on `data`, with its own input and weight quantized.

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
    check_switch("insert", insert)
    batches = as_batches(data)
    example = first_batch(batches)
    title = "smooth" if progress else None
    with undone_on_error(model):
        graph = record_flow(model, example)
        found = links_to_rescale(model, graph, example, _reason_against)
        insertions = find_insertions(model, graph, found) if insert else []
        with inserting(model, insertions) as undo:
            if insertions:
                found.links += insertions
                drop_wrong_links(model, found, example)
            trials: dict[str, LayerTrials] = {}
            chosen: dict[str, Trial] = {}
            changed: list[Link] = []
            if found.links:
                with evaluating(model), in_float(model):
                    largest = _largest_inputs(model, found.links, batches, title)
                    choices = [
                        _choices(link, x, alpha, powers_of_two) for link, x in zip(found.links, largest, strict=True)
                    ]
                    trials = _trials(found.links, choices)
                    _run_trials(model, trials, batches, title)
                for link, factors in zip(found.links, choices, strict=True):
                    costs = isinstance(link, Insertion)
                    number = _best(link, trials) if alpha == "search" or costs else 1
                    chosen.update({path: trials[path].trials[number] for path in link.users if path in trials})
                    if costs and number == 0:
                        continue
                    link.rescale(factors[number])
                    changed.append(link)
                    if costs:
                        undo.callback(give_own_inputs(model, link.users))
                refresh_weights(changed)
                recalibrate(model, stored_ranges(model, changed), batches, title)
    number = sum(isinstance(link, Insertion) for link in changed)
    note = f"Inserted multiplications of inputs: {number}." if number else None
    rows = _rows(layers_in_order(model, graph), found, trials, chosen)
    return Changes("smooth", "SQNR dB", rows, note)


@dataclasses.dataclass(eq=False)
class Trial:
    """One choice of factors for a layer, with its quantizers and its errors."""

    # One per input channel.
    factors: Tensor
    activation: Quantizer | None
    weight: Quantizer | None
    sums: ErrorSums = dataclasses.field(default_factory=ErrorSums)


class LayerTrials:
    """The trials of one layer."""

    def __init__(self, layer: QuantizedLayer, choices: list[Tensor]) -> None:
        self.layer = layer
        self.trials = [self._trial(factors) for factors in choices]

    def _trial(self, factors: Tensor) -> Trial:
        grid, of_weight = input_grid_of(self.layer), self.layer.weight_quantizer
        made = None if of_weight is None else observing_copy(of_weight)
        if made is not None:
            observe_again(made, self._weight(factors))
        return Trial(factors, None if grid is None else observing_copy(grid), made)

    def _weight(self, factors: Tensor) -> Tensor:
        weight = parameters_of(self.layer)[0].detach().clone()
        scale_inputs(self.layer, factors, weight)
        return weight

    def _scaled(self, trial: Trial, x: Tensor) -> Tensor:
        return x / per_channel(self.layer, trial.factors, x)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Context in which the quantizers of the trials observe the inputs of the layer."""
        static = [t for t in self.trials if t.activation is not None and not t.activation.is_dynamic]

        def look(layer: nn.Module, args: Args, kwargs: Kwargs) -> None:
            for x in inputs_of(layer, args, kwargs):
                for trial in static:
                    assert trial.activation is not None
                    trial.activation(self._scaled(trial, x))

        handle = self.layer.register_forward_pre_hook(look, with_kwargs=True)
        with ExitStack() as undo:
            undo.callback(handle.remove)
            undo.enter_context(observing(trial.activation for trial in static if trial.activation is not None))
            yield

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Context in which every call of the layer is repeated with each trial, and errors are summed."""

        def look(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
            for trial in self.trials:
                trial.sums.add_result(first_tensor(result), self._result(trial, args, kwargs))

        with watching({"": self.layer}, look):
            yield

    def _result(self, trial: Trial, args: Args, kwargs: Kwargs) -> Tensor | None:
        def quantized(x: Tensor) -> Tensor:
            x = self._scaled(trial, x)
            return x if trial.activation is None else trial.activation(x)

        args, kwargs = changed_inputs(self.layer, args, kwargs, quantized)
        weight = self._weight(trial.factors)
        parameter = parameters_of(self.layer)[0]
        before = parameter.data
        try:
            parameter.data = weight if trial.weight is None else trial.weight(weight)
            return first_tensor(type(self.layer).forward(self.layer, *args, **kwargs))  # without hooks
        finally:
            parameter.data = before


def _check_alpha(alpha: Any) -> None:
    if alpha == "search":
        return
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ValueError(f'`alpha` must be a number from 0 to 1, or "search", got {alpha!r}.')


def _reason_against(link: Link) -> str | None:
    """Returns why the users of a link need no smoothing, or None if they do."""
    return None if any(isinstance(layer, QuantizedLayer) for layer in link.users.values()) else "it is not quantized"


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
    """Returns the factors to compare for a link: all 1, and the factors of each exponent."""
    weights = link.user_ranges().cpu()
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
        if path in chosen:
            before, after = trials[path].trials[0], chosen[path]
            same = "no other factors have a smaller error" if before is after else None
            rows.append(LayerChange.of(path, layer, (before.sums.sqnr, after.sums.sqnr), same))
        else:
            rows.append(LayerChange.of(path, layer, reason=found.reasons.get(path)))
    return rows
