"""`Schedule`: when quantization starts, and when ranges and batch norms are frozen."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fakequant._model.running import check_module
from fakequant._prepare.attach import check_name, deploy_biases, freeze_norm, release_norms
from fakequant.nn._model_quantizers import named_quantizers, switch_quantizers

# Warn after this many steps that changed weights but no scale. It is not 1, because a second optimizer may update the
# scales less often.
_STEPS = 20


class Schedule:
    """Switches the quantizers of a model during training. Call `step()` after every optimizer step.

        before quantize_from         quantizers only observe; the model computes in float
        from freeze_ranges_at on     scales and zero points do not change
        from freeze_norms_at on      batch norms use their running statistics and do not update them

    When batch norms are frozen (or ranges, if `freeze_norms_at` is None), layers start to round their biases to the
    scale of the accumulator, as they always do in evaluation. Gradients pass the rounding unchanged.

    `state_dict()` saves the number of steps. A new schedule for the same model starts a new training run: it releases
    batch norms that an earlier schedule froze.

    Args:
        model: A prepared model.
        quantize_from: The step from which quantizers quantize. If None, this is not switched.
        freeze_ranges_at: The step from which ranges are frozen. If None, they are not.
        freeze_norms_at: The step from which batch norms are frozen. If None, they are not.

    >>> import torch, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), example=torch.ones(1, 4))
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
        if (quantize_from, freeze_ranges_at) != (None, None) and next(named_quantizers(model), None) is None:
            raise ValueError(
                "The model has no quantizers to switch.\n"
                "Use fakequant.prepare(model, config) before you create the schedule."
            )
        self.model = model
        self.quantize_from = quantize_from
        self.freeze_ranges_at = freeze_ranges_at
        self.freeze_norms_at = freeze_norms_at
        self.steps = 0
        self._unmoved_scales = _UnmovedScales(model)
        if freeze_norms_at is not None:
            for norm in self._norms():
                check_name(norm)
        release_norms(model)
        self._switch(is_due=lambda at: True)

    def step(self) -> None:
        """Counts one training step, and makes the switches that are due."""
        self._unmoved_scales.check_step()
        self.steps += 1
        self._switch(is_due=lambda at: at == self.steps)

    def _switch(self, is_due: Callable[[int], bool]) -> None:
        """Sets the switches for whose steps `is_due` is true."""
        if self.quantize_from is not None and is_due(self.quantize_from):
            switch_quantizers(self.model, quantizing=self.steps >= self.quantize_from)
        if self.freeze_ranges_at is not None and is_due(self.freeze_ranges_at):
            switch_quantizers(self.model, frozen=self.steps >= self.freeze_ranges_at)
        if self.freeze_norms_at is not None and is_due(self.freeze_norms_at) and self.steps >= self.freeze_norms_at:
            for norm in self._norms():
                freeze_norm(norm)
        deploys_biases_at = self.freeze_ranges_at if self.freeze_norms_at is None else self.freeze_norms_at
        if deploys_biases_at is not None and is_due(deploys_biases_at):
            deploy_biases(self.model, on=self.steps >= deploys_biases_at)

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
        if self.freeze_norms_at is not None:
            release_norms(self.model)
        self._switch(is_due=lambda at: True)


class _UnmovedScales:
    """Checks after every training step whether weights and learned scales have changed, and warns once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.steps = 0
        self.is_done = False
        # Version numbers after the last step, by the id of the parameter.
        self._weights: dict[int, int] = {}
        self._scales: dict[int, int] = {}

    def check_step(self) -> None:
        """Checks one training step. Tensors that an optimizer changed in place have a new version number."""
        if self.is_done:
            return
        learned = [
            p for _, q in named_quantizers(self.model) if not q.frozen and q.quantizing for p in q.parameters()
            if p.requires_grad and p.grad is not None
        ]  # fmt: skip
        own = {id(p) for _, q in named_quantizers(self.model) for p in q.parameters()}
        weights = {id(p): p._version for p in self.model.parameters() if id(p) not in own and p.requires_grad}
        scales = {id(p): p._version for p in learned}
        scales_changed = any(self._scales.get(key, version) != version for key, version in scales.items())
        weights_changed = any(self._weights.get(key, version) != version for key, version in weights.items())
        self._weights, self._scales = weights, scales
        if scales_changed:
            self.is_done = True
        elif weights_changed and scales:
            self.steps += 1
            if self.steps >= _STEPS:
                self._warn()

    def _warn(self) -> None:
        self.is_done = True
        warnings.warn(
            f"Weights changed in {_STEPS} steps, but no learned scale did: no optimizer has the scales.\n"
            "Create the optimizer after prepare and calibrate, with fakequant.nn.param_groups(model).",
            UserWarning,
            stacklevel=4,
        )
