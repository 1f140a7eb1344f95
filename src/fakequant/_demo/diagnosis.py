"""The report of one of the demo's models."""

from pathlib import Path

from torch import nn

from fakequant._demo.data import Digits
from fakequant._demo.training import certainty
from fakequant._demo.variants import int4
from fakequant._diagnosis.history import History
from fakequant._diagnosis.report.writing import report
from fakequant._diagnosis.sensitivity import sensitivity
from fakequant._verify.verdict import Verification

# Batches that pass through the models for the report.
_LOOKED_AT = 4


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
    """`report.html` and its figures; returns the path of the page.

    The costs of layers are those before training, in percent of certainty about the images to train on: small ones,
    but not one of these images is read wrong because of 4 bits.
    """
    batches = digits.batches()
    costs = sensitivity(
        float_model, int4(), lambda m: certainty(m, digits.train_images, digits.train_labels),
        data=batches, progress=progress,
    )  # fmt: skip
    title = f"fakequant demo: {name} on digits"
    return report(
        model, folder, batches[:_LOOKED_AT], float_model=float_model, sensitivity=costs, history=history,
        verification=verification, title=title, progress=progress,
    )  # fmt: skip
