"""What is wrong with a quantizer, in words, and what helps."""

import dataclasses
from typing import NamedTuple

from fakequant._diagnosis.report.tensors import TensorCounts
from fakequant._train.health import QuantizerHealth

# From which on it is worth a word. Few levels pay for clipping with finer steps: learned scales clip some percent.
CLIPPED, CLIPPED_OF_FEW, FEW = 0.01, 0.10, 16
USED, USED_OF_FEW = 0.25, 0.6
# An outlier that has the range has a code near its end.
FAR_FROM_ENDS = 0.6
# The SQNR of a layer by itself, in decibels, below which it is worth looking at: 3 % of the signal is noise.
LOW_SQNR = 15.0
DRIFT = 0.05
# Between neighbours of many levels there is not much to jump.
OSCILLATING, OSCILLATING_OF_FEW = 0.2, 0.02


class Finding(NamedTuple):
    """One thing that is wrong."""

    # One or two words, for a table.
    mark: str
    why: str
    # The same for all with the same mark, of weights and of activations.
    what_to_do: str


@dataclasses.dataclass(frozen=True)
class Judged:
    """A quantizer, what was counted of it, and what is wrong with it."""

    health: QuantizerHealth
    counts: TensorCounts
    findings: list[Finding]

    @property
    def path(self) -> str:
        """Where the quantizer is in the model."""
        return self.health.path

    @property
    def order(self) -> tuple[int, float]:
        """The worst comes first."""
        sqnr = self.counts.sqnr
        return -len(self.findings), float("inf") if sqnr is None else sqnr


def judge(health: QuantizerHealth, counts: TensorCounts, has_scale: bool, is_on: bool = True) -> Judged:
    """What is wrong with one quantizer."""
    found = [] if has_scale else [_NO_SCALE]
    found += [] if is_on else [_OFF]
    found += [f for f in (_nonfinite(health), _clipped(health, counts), _unused(counts)) if f]
    found += [f for f in (_drift(health), _oscillating(health, counts)) if f]
    return Judged(health, counts, found)


_NO_SCALE = Finding(
    "no scale",
    "It has no scale yet: nothing was observed.",
    "Run fakequant.calibrate(model, data), or a few training steps, with data that reach this layer.",
)


_OFF = Finding(
    "off",
    "It is switched off: the model computes in float here, and so do the figures of the whole model.",
    "Use fakequant.nn.switch_quantizers(model, quantizing=True), or look again when the schedule has switched it on.",
)


def _nonfinite(health: QuantizerHealth) -> Finding | None:
    if not health.nonfinite:
        return None
    return Finding(
        "not finite",
        f"{health.nonfinite:,} values were NaN or infinite and were left out of the range.",
        "Look for an overflow in the layers before it: a learning rate that is too high, or half precision without "
        "loss scaling.",
    )


def _clipped(health: QuantizerHealth, counts: TensorCounts) -> Finding | None:
    limit = CLIPPED_OF_FEW if counts.spec.levels <= FEW else CLIPPED
    # A largest value that is half a step out, as symmetric grids have it, is no worse than rounded.
    if health.clipped is None or counts.far <= limit * counts.total:
        return None
    if counts.kind == "weight":
        help = (
            "Train on with a learned scale, or use one scale per channel and the range of the weights at hand. A "
            "learned scale that is much too small needs another start (`weight_observer`) or a lower learning rate."
        )
    else:
        help = (
            "Calibrate with data that look like these, on more batches; or use an observer with a wider range, such "
            "as observers.MinMax()."
        )
    return Finding("clips", f"{health.clipped:.1%} of the values are outside the range and are clipped.", help)


def _unused(counts: TensorCounts) -> Finding | None:
    possible = min(counts.spec.levels, counts.total, len(counts.codes))
    limit = USED_OF_FEW if counts.spec.levels <= FEW else USED
    if not possible or counts.used >= limit * possible or counts.spec.levels < 4:
        return None
    if _nearest_to_an_end(counts) < FAR_FROM_ENDS:
        return Finding(
            "few codes",
            f"{counts.used:,} of {counts.spec.levels:,} codes occur, and none near an end: the scale is much too large "
            "for all of the values.",
            "It is not an outlier. Give a learned scale another start (`weight_observer` or `activation_observer`, "
            "such as observers.MSE()) or a lower learning rate; calibrate an observed one with data that look like "
            "these.",
        )
    return Finding(
        "few codes",
        f"{counts.used:,} of {counts.spec.levels:,} codes occur: the range is much wider than most of the values.",
        "Look for outliers in the histogram. Use observers.Percentile() or observers.MSE(), one scale per channel or "
        "group, or fewer bits. Inputs with few different values, such as images of few grey levels, are fine as they "
        "are.",
    )


def _nearest_to_an_end(counts: TensorCounts) -> float:
    """How far the codes in use go from zero's code to an end of the range: 1 is the end."""
    spec = counts.spec
    if len(counts.codes) < spec.levels or (counts.one_grid is None and not spec.symmetric):
        return 1.0  # not known
    zero = 0 if counts.one_grid is None else round(counts.one_grid[1])
    used = counts.codes.nonzero().flatten() + spec.qmin
    lowest, highest = int(used.min()), int(used.max())
    return max((highest - zero) / max(spec.qmax - zero, 1), (zero - lowest) / max(zero - spec.qmin, 1))


def _drift(health: QuantizerHealth) -> Finding | None:
    if health.scale_drift is None or health.scale_drift <= DRIFT:
        return None
    return Finding(
        "drifts",
        f"A scale has changed by {health.scale_drift:.1%} since the last look.",
        "Train until it settles, lower the learning rate of scales (nn.param_groups), or let ranges stay as they are "
        "in the last part of the training: Schedule(freeze_ranges_at=...).",
    )


def _oscillating(health: QuantizerHealth, counts: TensorCounts) -> Finding | None:
    limit = OSCILLATING_OF_FEW if counts.spec.levels <= FEW else OSCILLATING
    if health.oscillating is None or health.oscillating <= limit:
        return None
    return Finding(
        "oscillates",
        f"{health.oscillating:.1%} of the weights jump to another code and back.",
        "Let the learning rate go down at the end, and freeze ranges and batch norms before that: "
        "Schedule(freeze_ranges_at=..., freeze_norms_at=...).",
    )
