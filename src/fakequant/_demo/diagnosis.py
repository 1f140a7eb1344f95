"""Writes the report about one of the demo's models."""

from pathlib import Path

from torch import nn

from fakequant._demo.data import Digits
from fakequant._demo.training import certainty
from fakequant._demo.variants import int4
from fakequant._diagnosis.history import History
from fakequant._diagnosis.report.writing import report
from fakequant._diagnosis.sensitivity import sensitivity
from fakequant._verify.verdict import Verification

# The number of batches for the report.
_BATCHES = 4


def write_report(
    model: nn.Module,
    folder: Path,
    digits: Digits,
    *,
    name: str,
    float_model: nn.Module,
    history: History | None,
    verification: Verification,
    progress: bool,
) -> Path:
    """Writes `report.html` and its figures, and returns the path of the page.

    The sensitivity of layers is measured before quantized training. The score is the mean probability of the right
    digit, because 4 bits change the accuracy on the training images too little.

    Args:
        model: The prepared model.
        folder: The folder of the report.
        digits: The data.
        name: The name of the model, for the title.
        float_model: The float model from which it was made.
        history: The health of the model over its training.
        verification: The result of `verify`.
        progress: Whether to show progress bars.
    """
    batches = digits.batches()
    costs = sensitivity(
        float_model, int4(), lambda m: certainty(m, digits.train_images, digits.train_labels),
        data=batches, progress=progress,
    )  # fmt: skip
    title = f"fakequant demo: {name} on digits"
    return report(
        model, folder, batches[:_BATCHES], float_model=float_model, sensitivity=costs, history=history,
        verification=verification, title=title, progress=progress,
    )  # fmt: skip
