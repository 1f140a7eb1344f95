"""`Schedule`: when quantizers begin, and when they stop to move."""

from typing import Any

from torch import nn

from fakequant.nn.quantizer import set_state


def _stay_in_evaluation(module: Any, args: Any) -> None:
    module.eval()


class Schedule:
    """Switches the quantizers of a model as training goes on; call `step()` after every optimizer step.

        before quantize_from         observe only: activations are in float
        from freeze_ranges_at on     scales and zero points stay as they are
        from freeze_norms_at on      batch normalizations use their running statistics, and keep them

    None leaves something out. The steps are saved with `state_dict()`.

    >>> import fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8())
    >>> schedule = Schedule(model, quantize_from=2, freeze_ranges_at=3)
    >>> states = []
    >>> for _ in range(4):
    ...     states.append((model[0].input_quantizer.quantizing, model[0].input_quantizer.frozen))
    ...     schedule.step()
    >>> states
    [(False, False), (False, False), (True, False), (True, True)]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        quantize_from: int | None = None,
        freeze_ranges_at: int | None = None,
        freeze_norms_at: int | None = None,
    ) -> None:
        for name, value in (
            ("quantize_from", quantize_from),
            ("freeze_ranges_at", freeze_ranges_at),
            ("freeze_norms_at", freeze_norms_at),
        ):
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"`{name}` must be a number of steps or None, got {value!r}.")
        self.model = model
        self._hooks: list[Any] = []
        self.quantize_from = quantize_from
        self.freeze_ranges_at = freeze_ranges_at
        self.freeze_norms_at = freeze_norms_at
        self.steps = 0
        self._apply()

    def step(self) -> None:
        """One training step is done."""
        self.steps += 1
        self._apply()

    def _apply(self) -> None:
        if self.quantize_from is not None and self.steps in (0, self.quantize_from):
            set_state(self.model, quantizing=self.steps >= self.quantize_from)
        if self.freeze_ranges_at is not None and self.steps in (0, self.freeze_ranges_at):
            set_state(self.model, frozen=self.steps >= self.freeze_ranges_at)
        if self.freeze_norms_at is not None:
            self._freeze_norms(self.steps >= self.freeze_norms_at)

    def _freeze_norms(self, on: bool) -> None:
        if on and not self._hooks:
            norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
            # A hook, because `model.train()` would wake them up.
            self._hooks = [norm.register_forward_pre_hook(_stay_in_evaluation) for norm in norms]
            for norm in norms:
                norm.eval()
        elif not on:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def state_dict(self) -> dict[str, Any]:
        """The number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken; the switches are as they were then."""
        self.steps = int(state["steps"])
        if self.quantize_from is not None:
            set_state(self.model, quantizing=self.steps >= self.quantize_from)
        if self.freeze_ranges_at is not None:
            set_state(self.model, frozen=self.steps >= self.freeze_ranges_at)
        self._apply()
