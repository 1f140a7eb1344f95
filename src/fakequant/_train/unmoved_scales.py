"""A warning about learned scales that no optimizer updates."""

import warnings

from torch import nn

from fakequant.nn._model_quantizers import quantizers

# Warn after this many steps that changed weights but no scale. It is not 1, because a second optimizer may update the
# scales less often.
_STEPS = 20


class UnmovedScales:
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
            p for _, q in quantizers(self.model) if not q.frozen and q.quantizing for p in q.parameters()
            if p.requires_grad and p.grad is not None
        ]  # fmt: skip
        own = {id(p) for _, q in quantizers(self.model) for p in q.parameters()}
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
