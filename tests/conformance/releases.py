"""Arguments on which other torch releases differ from torch 2.13, which fakequant follows.

docs/numerics.md has them as a table. `test_release_differences.py` runs every example on the installed torch, so an
outdated entry fails there; a difference that is not listed fails in `test_aten_errors.py`.
"""

import re
from typing import Any, NamedTuple

import numpy as np
import torch

RELEASE = tuple(int(n) for n in re.match(r"(\d+)\.(\d+)", torch.__version__).groups())

# The type and the start of the message of an exception; None if the call succeeds.
Outcome = tuple[str, str] | None


class Difference(NamedTuple):
    """A change of outcome in torch release `first`: `since` replaces `before`, which fakequant keeps."""

    first: tuple[int, int]
    functions: tuple[str, ...]
    before: Outcome
    since: Outcome
    example: dict[str, Any]  # arguments that differ from those of an ordinary call


FUSED = ("fused_moving_avg_obs_fake_quant", "fused_moving_avg_obs_fq_helper")
PER_TENSOR = ("fake_quantize_per_tensor_affine", "fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
TOO_LARGE_INT = ("RuntimeError", "value cannot be converted to type int without overflow")
TOO_LARGE_INT64 = ("RuntimeError", "value cannot be converted to type int64_t without overflow")
WIDEST = {"quant_min": -(2**63), "quant_max": 2**63 - 1}

DIFFERENCES = {
    "a zero point between 2^31 - 1 and 2^31 in a float64 tensor is cut off": Difference(
        (2, 14), PER_TENSOR, TOO_LARGE_INT, None, {"zero_point": np.array([2147483647.5])}
    ),
    "learned zero points per channel of 2^63 or more are refused where the range does not end before": Difference(
        (2, 14),
        ("fake_quantize_learnable_per_channel_affine_backward",),
        None,
        TOO_LARGE_INT64,
        {"zero_point": np.array([np.inf, 0], np.float32), **WIDEST},
    ),
    "the fused observer refuses complex numbers as a wrong type": Difference(
        (2, 15),
        FUSED,
        ("NotImplementedError", '"aminmax_cpu" not implemented for \'Complex'),
        ("TypeError", "aminmax not implemented for Complex"),
        {"input": np.ones((2, 3), np.complex64)},
    ),
    "the fused observer refuses complex numbers before it looks for elements": Difference(
        (2, 15),
        FUSED[1:],
        ("RuntimeError", "aminmax(): cannot compute aminmax over an empty dimension"),
        ("TypeError", "aminmax not implemented for Complex"),
        {"input": np.zeros(0, np.complex64)},
    ),
    "a gradient of another shape with as many elements gets a warning": Difference(
        (2, 15),
        ("fake_quantize_learnable_per_tensor_affine_backward",),
        None,
        ("UserWarning", "An output with one or more elements was resized"),
        {"grad": np.ones((1, 2, 3), np.float32)},
    ),
}


def matches(outcome: Outcome, expected: Outcome) -> bool:
    if outcome is None or expected is None:
        return outcome is expected
    return outcome[0] == expected[0] and outcome[1].startswith(expected[1])


def is_known(function: str, ours: Outcome, torchs: Outcome) -> bool:
    """Returns True if the installed torch is known to differ in this way.

    A call with two mistakes may be refused because of either. Where torch now accepts one, its error may be any.
    """
    for difference in DIFFERENCES.values():
        if difference.first > RELEASE or function not in difference.functions:
            continue
        if difference.before is not None and matches(ours, difference.before):
            if difference.since is None or matches(torchs, difference.since):
                return True
        elif difference.before is None and matches(torchs, difference.since):
            return True
    return False
