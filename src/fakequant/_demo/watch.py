"""Records the health of a model during training."""

from torch import nn

from fakequant._demo.data import BATCH, Digits
from fakequant._diagnosis.history import History
from fakequant._train.health import health

# The number of points in a curve.
_POINTS = 24


class Watch:
    """Records the health of a model on the first batch, at regular steps."""

    def __init__(self, model: nn.Module, digits: Digits, steps: int) -> None:
        self.history = History()
        self._model, self._images = model, digits.train_images[:BATCH]
        self._every = max(1, steps // _POINTS)

    def after_step(self, step: int) -> None:
        """Records the health if the step is due."""
        if step % self._every == 0:
            self.history.add(step, health(self._model, [self._images]))
