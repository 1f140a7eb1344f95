"""How XNNPACK quantizes floats: rint(x * (1 / scale)) + zero_point, and tokens with scales of their own."""

from fakequant._runtimes.reciprocal_rounding import ReciprocalRounding
from fakequant._runtimes.xnnpack.target import RUNTIME, TOKEN_SPEC

ROUNDING = ReciprocalRounding(RUNTIME.room, TOKEN_SPEC)
