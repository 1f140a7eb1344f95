"""Finds problems of quantizers and says what helps."""

import dataclasses
from typing import NamedTuple

from fakequant._diagnosis.health import QuantizerHealth
from fakequant._diagnosis.report.tensor_counts import TensorCounts

# Thresholds of findings. With few levels, clipping some percent is worth the finer steps, and learned scales do so.
CLIPPED, CLIPPED_OF_FEW, FEW = 0.01, 0.10, 16
USED, USED_OF_FEW = 0.25, 0.6
# If an outlier had widened the range, there would be codes near an end.
FAR_FROM_ENDS = 0.6
# The SQNR of an isolated layer, in dB, below which it is reported: noise is 3 % of the signal.
LOW_SQNR = 15.0
DRIFT = 0.05
# With many levels, a jump to the next code is small and matters less.
OSCILLATING, OSCILLATING_OF_FEW = 0.2, 0.02


class Finding(NamedTuple):
    """One problem of a quantizer."""

    # One or two words, for a table.
    mark: str
    why: str
    # The advice. Findings with the same mark and advice are shown together.
    what_to_do: str


@dataclasses.dataclass(frozen=True)
class Judged:
    """A quantizer with its counts and its problems."""

    health: QuantizerHealth
    counts: TensorCounts
    findings: list[Finding]

    @property
    def path(self) -> str:
        """The path of the quantizer in the model."""
        return self.health.path

    @property
    def order(self) -> tuple[int, float]:
        """A sort key: the most findings first, then the lowest SQNR."""
        sqnr = self.counts.sqnr
        return -len(self.findings), float("inf") if sqnr is None else sqnr


def judge(health: QuantizerHealth, counts: TensorCounts, has_scale: bool, is_on: bool = True) -> Judged:
    """Returns the problems of one quantizer."""
    found = [] if has_scale else [_NO_SCALE]
    found += [] if is_on else [_OFF]
    found += [f for f in (_nonfinite(health), _clipped(health, counts), _unused(counts)) if f]
    found += [f for f in (_drift(health), _oscillating(health, counts)) if f]
    return Judged(health, counts, found)


_NO_SCALE = Finding(
    "no scale",
    "It has no scale yet: nothing was observed.",
    "Run fakequant.calibrate(model, data), or a few training steps, with data that reaches this layer.",
)


_OFF = Finding(
    "off",
    "It is switched off: the model computes in float here, also for the figures of the whole model.",
    "Use fakequant.nn.switch_quantizers(model, quantizing=True), or write the report after the schedule has switched "
    "it on.",
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
    limit = CLIPPED_OF_FEW if counts.levels <= FEW else CLIPPED
    # Symmetric grids clip the largest value by half a step, which is no worse than rounding: only `far` counts.
    if health.clipped is None or counts.far <= limit * counts.total:
        return None
    if counts.spec.has_block_scales:
        help = (
            "Use scale_rule='rceil' or 'ceil': the power of two that 'floor' chooses can be too small for the largest "
            "values of a block."
        )
    elif counts.kind == "weight":
        help = (
            "Use one scale per channel and the current range of the weights, or continue training with a learned "
            "scale. A learned scale that is much too small needs a different initial value (`weight_observer`) or a "
            "lower learning rate."
        )
    else:
        help = (
            "Calibrate with more batches of data like this, or use an observer with a wider range, such as "
            "observers.MinMax()."
        )
    return Finding("clips", f"{health.clipped:.1%} of the values are outside the range and are clipped.", help)


def _unused(counts: TensorCounts) -> Finding | None:
    if counts.spec.float_format is not None and counts.spec.bits == 8:
        return None  # most of its values are close to zero: tensors are not expected to use them
    possible = min(counts.levels, counts.total, len(counts.codes))
    limit = USED_OF_FEW if counts.levels <= FEW else USED
    if not possible or counts.used >= limit * possible or counts.levels < 4:
        return None
    if _nearest_to_an_end(counts) < FAR_FROM_ENDS:
        return Finding(
            "few codes",
            f"{counts.used:,} of {counts.levels:,} codes occur, and none near an end: the scale is much too large "
            "for all values.",
            "The cause is not an outlier. Give a learned scale a different initial value (`weight_observer` or "
            "`activation_observer`, such as observers.MSE()) or a lower learning rate. Calibrate an observed scale "
            "with data like this.",
        )
    return Finding(
        "few codes",
        f"{counts.used:,} of {counts.levels:,} codes occur: the range is much wider than most of the values need.",
        "Look for outliers in the histogram. Use observers.Percentile() or observers.MSE(), one scale per channel or "
        "group, or fewer bits. Inputs with few different values, such as images with few grey levels, need no change.",
    )


def _nearest_to_an_end(counts: TensorCounts) -> float:
    """Returns how close the used codes come to an end of the range: 0 is the zero point, 1 is the end."""
    spec = counts.spec
    if spec.float_format is not None:
        return float(abs(spec.float_format.grid()[counts.codes.numpy() > 0]).max()) / spec.largest
    if len(counts.codes) < spec.levels or (counts.one_grid is None and not spec.symmetric):
        return 1.0  # unknown
    zero = 0 if counts.one_grid is None else round(counts.one_grid[1])
    used = counts.codes.nonzero().flatten() + spec.qmin
    lowest, highest = int(used.min()), int(used.max())
    return max((highest - zero) / max(spec.qmax - zero, 1), (zero - lowest) / max(zero - spec.qmin, 1))


def _drift(health: QuantizerHealth) -> Finding | None:
    if health.scale_drift is None or health.scale_drift <= DRIFT:
        return None
    return Finding(
        "drifts",
        f"A scale has changed by {health.scale_drift:.1%} since the last check.",
        "Train until it settles, lower the learning rate of scales (nn.param_groups), or freeze ranges in the last "
        "part of the training: Schedule(freeze_ranges_at=...).",
    )


def _oscillating(health: QuantizerHealth, counts: TensorCounts) -> Finding | None:
    limit = OSCILLATING_OF_FEW if counts.levels <= FEW else OSCILLATING
    if health.oscillating is None or health.oscillating <= limit:
        return None
    return Finding(
        "oscillates",
        f"{health.oscillating:.1%} of the weights jump to another code and back.",
        "Decay the learning rate at the end of training, and freeze ranges and batch norms before that: "
        "Schedule(freeze_ranges_at=..., freeze_norms_at=...).",
    )
