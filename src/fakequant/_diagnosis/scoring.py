"""Scores of a prepared model with selected quantizers on."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from numbers import Real

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._diagnosis.units import Switches, Unit
from fakequant._diagnosis.watching import Args
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import Bar


class Scorer:
    """Calls `evaluate` with selected layers quantized."""

    def __init__(
        self,
        model: nn.Module,
        evaluate: Callable[[nn.Module], object],
        units: list[Unit],
        switches: Switches,
        bar: Bar,
    ) -> None:
        self.model, self.evaluate, self.units, self.switches, self.bar = model, evaluate, units, switches, bar
        self.was_run = False

    def with_only(self, units: list[Unit], words: str) -> float:
        """Returns the score with only these units quantized; `words` describes them in errors."""
        self.switches.set(units)
        return self._score(words)

    def with_weights(self, units: list[Unit], words: str) -> float:
        """Returns the score with only the weights of these units quantized; `words` describes them in errors."""
        self.switches.set_weights(units)
        return self._score(words)

    def _score(self, words: str) -> float:
        if any(module.training for module in self.model.modules()):
            self.model.eval()
        with ExitStack() as undo:
            if not self.was_run:
                for unit in self.units:
                    undo.callback(unit.module.register_forward_pre_hook(self._note).remove)
            # `evaluate` may use training mode, which changes ranges and statistics: restore them for the next call.
            with torch.no_grad(), unchanged(self.model):
                score = _number(self.evaluate(self.model), words)
        if not self.was_run:
            raise ValueError(
                "`evaluate` did not run the model that it was given: none of its quantized layers was called.\n"
                "Run the function's argument, a prepared copy, as in evaluate=lambda model: accuracy(model, images)."
            )
        self.bar.update()
        return score

    def _note(self, module: nn.Module, args: Args) -> None:
        self.was_run = True


def _number(score: object, words: str) -> float:
    if isinstance(score, (Tensor, np.ndarray)) and math.prod(score.shape) == 1:
        score = score.item()
    if not isinstance(score, Real) or isinstance(score, bool):
        raise TypeError(
            f"`evaluate` must return a number, larger for a better model, got {type(score).__name__} with {words} "
            "quantized."
        )
    if not math.isfinite(score):
        raise ValueError(
            f"`evaluate` returned {float(score)} with {words} quantized, which cannot be ranked.\n"
            "Return a finite number, such as an accuracy, or look for values that overflow."
        )
    return float(score)
