"""The health of a model while it is trained."""

from torch import nn

from fakequant._demo.data import BATCH, Digits
from fakequant._diagnosis.history import History
from fakequant._train.health import health

# So many points make a curve.
_LOOKS = 24


class Watch:
    """Looks at a model now and then, with the first batch."""

    def __init__(self, model: nn.Module, digits: Digits, steps: int) -> None:
        self.history = History()
        self._model, self._images = model, digits.train_images[:BATCH]
        self._every = max(1, steps // _LOOKS)

    def look(self, step: int) -> None:
        """After a step, if it is time."""
        if step % self._every == 0:
            self.history.add(step, health(self._model, [self._images]))
