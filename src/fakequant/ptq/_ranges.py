"""Finding the ranges of quantizers again, after the values that they see have changed."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from fakequant._train.running import Data, evaluating, run
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._model_quantizers import has_scale
from fakequant.nn._quantizer import Quantizer
from fakequant.ptq._float_runs import in_float


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
            tokens = quantizer.has_tokens
            quantizer.reset_parameters()
            quantizer.train()
            quantizer.note_tokens(tokens)  # which `reset_parameters` forgets
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
