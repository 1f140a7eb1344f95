"""Rules of torch's operators that are the same for arrays and tensors."""

import numpy as np

# The spaces are in torch's message: its source has a line continuation inside a string literal.
RANGE = "`quant_min` should be less than or         equal to `quant_max`."
ZERO_POINT = "`zero_point` must be between `quant_min` and `quant_max`."


def check(condition: bool | np.bool_, message: str) -> None:
    """Raises RuntimeError with `message` unless `condition`."""
    if not condition:
        raise RuntimeError(message)


# --- learned zero points --------------------------------------------------------------------------


def zero_point_of_forward(zero_point: float, quant_min: int, quant_max: int) -> int:
    """Returns the zero point of torch's learnable per-tensor forward: rounded, then clamped in float32."""
    return _clamped(np.rint(np.float32(zero_point)), quant_min, quant_max)


def zero_point_of_backward(zero_point: float, quant_min: int, quant_max: int) -> int:
    """Returns the zero point of torch's per-tensor backward: `zero_point + 0.5`, clamped in float32 and truncated."""
    return _clamped(np.float32(zero_point) + np.float32(0.5), quant_min, quant_max)


def _clamped(z: np.float32, quant_min: int, quant_max: int) -> int:
    """Clamps in float32, then converts as x86 does: values that do not fit int64 become the smallest int64."""
    # Not np.clip, which rounds the bounds to double first. NaN passes both comparisons.
    low, high = np.array([quant_min, quant_max], np.int64).astype(np.float32)
    z = low if z < low else z
    z = high if high < z else z
    return int(z) if -(2.0**63) <= z < 2.0**63 else -(2**63)


# --- signs of zeros -------------------------------------------------------------------------------

# torch's eight-lane minimum returns the later of two zeros, first within each lane and then between lanes that are 4,
# 2 and 1 apart. So among the lanes with a zero, the one with the largest bit-reversed index wins.
_LANE_RANK = np.array([0, 4, 2, 6, 1, 5, 3, 7])


def sign_zeros(running: np.ndarray, unseen: np.ndarray, x: np.ndarray, per_row: bool) -> None:
    """Gives a zero in a range that was just initialized the sign that torch gives it.

    If the data has zeros of both signs, the order of torch's reduction decides. For more than 32768 elements that
    depends on torch's number of threads; this is the result of a single thread. Later steps of the moving average do
    not keep the sign.

    `running` is the running minimum or maximum, changed in place; `unseen` says which entries were infinite before.
    """
    running = running.reshape(-1)
    for i in np.flatnonzero(unseen.reshape(-1) & (running == 0)):
        values = (x[i] if per_row else x).reshape(-1)
        zeros = np.flatnonzero(values == 0)
        if per_row:
            decides = zeros[0]
        elif values.size < 8:
            decides = zeros[-1]
        else:
            decides = zeros[np.argmax(_LANE_RANK[zeros % 8] * values.size + zeros)]
        running[i] = values[decides]
