"""How LiteRT quantizes floats: rint(x * (1 / scale)) + zero_point, and tokens with scales of their own."""

from fakequant._runtimes.litert.target import RUNTIME, TOKEN_SPEC
from fakequant._runtimes.reciprocal_rounding import ReciprocalRounding

ROUNDING = ReciprocalRounding(RUNTIME.room, TOKEN_SPEC)
