"""`Schedule`: when quantization starts, and when ranges and batch norms are frozen."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fakequant._prepare.attach import check_name, deploy_biases, freeze_norm, release_norms
from fakequant._train.running import check_module
from fakequant._train.unmoved_scales import UnmovedScales
from fakequant.nn._model_quantizers import quantizers, switch_quantizers


class Schedule:
    """Switches the quantizers of a model during training. Call `step()` after every optimizer step.

        before quantize_from         quantizers only observe; the model computes in float
        from freeze_ranges_at on     scales and zero points do not change
        from freeze_norms_at on      batch norms use their running statistics and do not update them

    When batch norms are frozen (or ranges, if `freeze_norms_at` is None), layers start to add their biases rounded to
    the scale of the sums, as they always do in evaluation. Gradients pass the rounding unchanged.

    `state_dict()` saves the number of steps. A new schedule for the same model starts a new training: it releases
    batch norms that an earlier schedule froze.

    Args:
        model: A prepared model.
        quantize_from: The step from which quantizers quantize. If None, this is not switched.
        freeze_ranges_at: The step from which ranges are frozen. If None, they are not.
        freeze_norms_at: The step from which batch norms are frozen. If None, they are not.

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
        check_module(model)
        if (quantize_from, freeze_ranges_at) != (None, None) and next(quantizers(model), None) is None:
            raise ValueError(
                "The model has no quantizers to switch.\n"
                "Use fakequant.prepare(model, config) before you create the schedule."
            )
        self.model = model
        self.quantize_from = quantize_from
        self.freeze_ranges_at = freeze_ranges_at
        self.freeze_norms_at = freeze_norms_at
        self.steps = 0
        self._unmoved_scales = UnmovedScales(model)
        if freeze_norms_at is not None:
            for norm in self._norms():
                check_name(norm)
        release_norms(model)
        self._apply()

    def step(self) -> None:
        """Counts one training step, and makes the switches that are due."""
        self._unmoved_scales.check_step()
        self.steps += 1
        self._apply()

    def _apply(self) -> None:
        if self.quantize_from is not None and self.steps in (0, self.quantize_from):
            switch_quantizers(self.model, quantizing=self.steps >= self.quantize_from)
        if self.freeze_ranges_at is not None and self.steps in (0, self.freeze_ranges_at):
            switch_quantizers(self.model, frozen=self.steps >= self.freeze_ranges_at)
        if self.freeze_norms_at is not None and self.steps == self.freeze_norms_at:
            self._freeze_norms()
        if self.steps == self._deploys_biases_at:
            deploy_biases(self.model, on=True)

    @property
    def _deploys_biases_at(self) -> int | None:
        return self.freeze_ranges_at if self.freeze_norms_at is None else self.freeze_norms_at

    def _freeze_norms(self) -> None:
        for norm in self._norms():
            freeze_norm(norm)

    def _norms(self) -> list[nn.Module]:
        return [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved number of steps, and sets all switches accordingly."""
        steps = state.get("steps") if isinstance(state, Mapping) else None
        if type(steps) is not int or steps < 0:
            raise ValueError(f"The state of a schedule must be {{'steps': number of steps}}, got {state!r}.")
        self.steps = steps
        if self.quantize_from is not None:
            switch_quantizers(self.model, quantizing=self.steps >= self.quantize_from)
        if self.freeze_ranges_at is not None:
            switch_quantizers(self.model, frozen=self.steps >= self.freeze_ranges_at)
        if self.freeze_norms_at is not None:
            release_norms(self.model)
            if self.steps >= self.freeze_norms_at:
                self._freeze_norms()
        if self._deploys_biases_at is not None:
            deploy_biases(self.model, on=self.steps >= self._deploys_biases_at)
