"""Rescaling links: a check on an example, and the quantizers that see other values afterwards."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from fakequant._model.running import Batch, Data, call_arguments, copied, evaluating, run
from fakequant._model.snapshot import unchanged
from fakequant._paired_models.calls import Args, Kwargs, Result, first_tensor, watching
from fakequant._prepare.flow_graph import FlowGraph
from fakequant.nn._call_quantizers import quantizers_in
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._function_calls import CallingModule
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._model_quantizers import has_scale, in_float
from fakequant.nn._quantized_layer import QuantizedLayer, input_grids_of
from fakequant.nn._quantizer import Quantizer
from fakequant.ptq._channels import per_channel
from fakequant.ptq._links import Link, Links, find_links

# Factors are within 2^-16 and 2^16.
_LARGEST_FACTOR = 16.0
# The factors of the check are powers of two, which change no bit. A wrong factor changes a result by far more.
_TOLERANCE = 1e-5
# Results are compared at about this many places.
_SAMPLES = 2**18


def finished_factors(factors: Tensor, *, powers_of_two: bool) -> Tensor:
    """Returns factors with a geometric mean of about 1, in float64.

    Channels without values have factors that are not positive and finite; these become 1. A common factor of all
    channels has no effect on quantization, so it is left out.

    >>> finished_factors(torch.tensor([1.0, 3.9, 0.0, 15.0]), powers_of_two=True)
    tensor([0.2500, 1.0000, 1.0000, 4.0000], dtype=torch.float64)
    """
    factors = factors.double()
    valid = (factors > 0) & factors.isfinite()
    logs = torch.where(valid, factors, 1.0).log2()
    if bool(valid.any()):
        logs = torch.where(valid, logs - logs[valid].mean(), 0.0)
    logs = logs.clamp(-_LARGEST_FACTOR, _LARGEST_FACTOR)
    return torch.exp2(logs.round() if powers_of_two else logs)


def activation_quantizers(model: nn.Module, link: Link) -> list[Quantizer]:
    """Returns the quantizers of activations that have the factors of a link."""
    layers = [layer for layer in link.users.values() if isinstance(layer, QuantizedLayer)]
    found: list[Quantizer | None] = [grid for layer in layers for grid in input_grids_of(layer)]
    for call in link.calls:
        if call.kind == "function":
            caller = model.get_submodule(call.path)
            functions = caller.function_quantizers._modules if isinstance(caller, CallingModule) else {}
            found += quantizers_in(functions.get(call.key))
        paths = [*call.returned_by, *([call.path] if call.kind == "module" else [])]
        for path in paths:
            found += quantizers_in(model.get_submodule(path)._modules.get("output_quantizer"))
    return list(dict.fromkeys(quantizer for quantizer in found if quantizer is not None))


def weight_quantizers(link: Link) -> dict[QuantizedLayer, Quantizer]:
    """Returns the quantizers of the weights that a link changes, by layer."""
    layers = (link.module, *link.users.values())
    return {
        layer: layer.weight_quantizer
        for layer in layers
        if isinstance(layer, QuantizedLayer) and layer.weight_quantizer is not None
    }


def links_to_rescale(
    model: nn.Module, graph: FlowGraph, example: Batch, reason_against: Callable[[Link], str | None]
) -> Links:
    """Returns the links of a model that a method can rescale: their quantizers can change, and the example agrees.

    `reason_against` returns why the method does not rescale a link, or None if it does.
    """
    found = find_links(model, graph)
    for link in list(found.links):
        reason = reason_against(link) or _reason_against_quantizers(model, link)
        if reason is not None:
            found.drop(link, reason)
    drop_wrong_links(model, found, example)
    return found


def _reason_against_quantizers(model: nn.Module, link: Link) -> str | None:
    """Returns why the quantizers of a link cannot follow its factors, or None if they can."""
    found = [*activation_quantizers(model, link), *weight_quantizers(link).values()]
    return next((reason for q in found if (reason := reason_against_new_range(q)) is not None), None)


def refresh_weights(links: list[Link]) -> None:
    """Finds the ranges of changed weights again, if they are stored."""
    for layer, quantizer in {layer: q for link in links for layer, q in weight_quantizers(link).items()}.items():
        scale = None if quantizer.is_dynamic and quantizer._blocks is None else quantizer.scale
        if has_stored_range(quantizer) or (scale is not None and not bool(scale.isnan().any())):
            observe_again(quantizer, layer._fakequant.kind.read_weight(layer))


def stored_ranges(model: nn.Module, links: list[Link]) -> list[Quantizer]:
    """Returns the quantizers of activations of links whose stored ranges no longer fit, each once."""
    found = [q for link in links for q in activation_quantizers(model, link)]
    return [quantizer for quantizer in dict.fromkeys(found) if has_stored_range(quantizer)]


@torch.no_grad()
def drop_wrong_links(model: nn.Module, found: Links, example: Batch) -> None:
    """Removes links whose users compute something else when the producer is scaled, and gives them a reason."""
    with in_float(model), evaluating(model):
        expected = _results(model, found.links, example, {})
        while found.links:
            values = {p: p.detach().clone() for link in found.links for p in link.parameters()}
            try:
                factors = [_factors(link.channels, number) for number, link in enumerate(found.links)]
                for link, own in zip(found.links, factors, strict=True):
                    link.rescale(own)
                divided = {link.path: own for link, own in zip(found.links, factors, strict=True) if link.path}
                results = _results(model, found.links, example, divided)
            finally:
                for parameter, value in values.items():
                    parameter.copy_(value)
            wrong = next((path for path, y in results.items() if not _same_results(expected[path], y)), None)
            if wrong is None:
                return
            # Only the first in the order of the calls: its result is an input of the others.
            link = next(link for link in found.links if wrong in link.users)
            what = f"scaling the weight of {link.path}" if link.path else "multiplying what it is called with"
            found.drop(link, f"{what} does not scale its input")


def _factors(channels: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-1, 2, (channels,), generator=generator)


def _results(model: nn.Module, links: list[Link], example: Batch, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns samples of the outputs of all users, in the order of the calls.

    Users that are producers too have divided their outputs by the factors of their path, which is undone.
    """
    found: dict[str, Tensor] = {}

    def look(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
        y = first_tensor(result)
        if y is not None:
            if path in factors:
                y = y * per_channel(model.get_submodule(path), factors[path], y)
            found[path] = y.detach().flatten()[:: y.numel() // _SAMPLES | 1].clone()

    args, kwargs = copied(*call_arguments(model, example))
    users = {path: layer for link in links for path, layer in link.users.items()}
    with torch.random.fork_rng(devices=[]), unchanged(model), watching(users, look):
        model(*args, **kwargs)
    return found


def _same_results(expected: Tensor, result: Tensor) -> bool:
    if expected.shape != result.shape:
        return False
    a, b = (torch.nan_to_num(t.double(), nan=0.0, posinf=1e30, neginf=-1e30) for t in (expected, result))
    return bool((a - b).norm() <= _TOLERANCE * a.norm())


def reason_against_new_range(quantizer: Quantizer) -> str | None:
    """Returns why the range of a quantizer cannot be found again, or None if it can."""
    if quantizer.frozen:
        return f"{quantizer.path} is frozen; use fakequant.nn.switch_quantizers(model, frozen=False)"
    if isinstance(quantizer, FakeQuantize):
        return None if quantizer.observer.needs_data else f"{quantizer.path} has a fixed range"
    return None if isinstance(quantizer, LearnedFakeQuantize) else f"{quantizer.path} is a {type(quantizer).__name__}"


def has_stored_range(quantizer: Quantizer) -> bool:
    """Returns True if a quantizer has a range that it keeps for later tensors."""
    return not quantizer.is_dynamic and has_scale(quantizer)


@contextmanager
def observing(quantizers: Iterable[Quantizer]) -> Iterator[None]:
    """Context in which quantizers forget their ranges and observe, and after which they have new ones."""
    found = list(dict.fromkeys(quantizers))
    states = [(q, q.observing, q.quantizing, q.training) for q in found]
    with ExitStack() as undo:
        for quantizer in found:
            quantizer.reset_parameters()
            quantizer.train()
            quantizer.observing = True
            quantizer.quantizing = False
            if isinstance(quantizer, FakeQuantize):
                undo.enter_context(quantizer.averaging_evenly())
        yield
    for quantizer, was_observing, quantizing, training in states:
        quantizer.train(training)  # which also ends deferred searches
        if quantizer.observing != was_observing:
            quantizer.observing = was_observing
        quantizer.quantizing = quantizing


@torch.no_grad()
def observe_again(quantizer: Quantizer, x: Tensor) -> None:
    """Finds the range of a quantizer again, from one tensor."""
    with observing([quantizer]):
        quantizer(x.detach())


def observing_copy(quantizer: Quantizer) -> Quantizer:
    """Returns a copy of a quantizer that is ready to be used in `observing`, and quantizes afterwards."""
    made = copy.deepcopy(quantizer)
    made.eval()
    made.quantizing = True
    if isinstance(made, FakeQuantize):
        made.observing = True  # which dynamic ranges need
    return made


def recalibrate(model: nn.Module, quantizers: list[Quantizer], data: Data, progress: str | None) -> None:
    """Finds the ranges of some quantizers again on data, with the model in float. Other quantizers do not change."""
    if not quantizers:
        return
    with torch.no_grad(), evaluating(model), in_float(model), observing(quantizers):
        run(model, data, None, progress)
