"""Learned scales that no optimizer has: found by whether anything writes to them while weights are written to."""

import warnings

from torch import nn

from fakequant.nn._model_quantizers import quantizers

# Steps in which weights changed and no learned scale did. Another optimizer may have the scales, and step less often.
_STEPS = 20


class Unmoved:
    """Looks after every training step; warns once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.steps = 0
        self.is_done = False
        self._weights: dict[int, int] = {}
        self._scales: dict[int, int] = {}

    def look(self) -> None:
        """One step is done: tensors that an optimizer changed in place have a new version."""
        if self.is_done:
            return
        learned = [
            p for _, q in quantizers(self.model) if not q.frozen and q.quantizing for p in q.parameters()
            if p.requires_grad and p.grad is not None
        ]  # fmt: skip
        own = {id(p) for _, q in quantizers(self.model) for p in q.parameters()}
        others = [p for p in self.model.parameters() if id(p) not in own and p.requires_grad]
        weights, scales = {id(p): p._version for p in others}, {id(p): p._version for p in learned}
        moved = any(self._scales.get(key, version) != version for key, version in scales.items())
        trained = any(self._weights.get(key, version) != version for key, version in weights.items())
        self._weights, self._scales = weights, scales
        if moved:
            self.is_done = True
        elif trained and scales:
            self.steps += 1
            if self.steps >= _STEPS:
                self._warn()

    def _warn(self) -> None:
        self.is_done = True
        warnings.warn(
            f"The weights were changed in {_STEPS} steps, and no learned scale was: the optimizer does not have them.\n"
            "Make it after prepare and calibrate, from fakequant.nn.param_groups(model).",
            UserWarning,
            stacklevel=4,
        )
