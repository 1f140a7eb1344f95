"""How LiteRT quantizes floats: rint(x * (1 / scale)) + zero_point, and tokens with scales of their own."""

from fakequant._runtimes.litert.target import TOKEN_SPEC
from fakequant._runtimes.reciprocal_rounding import ReciprocalRounding


class LitertRounding(ReciprocalRounding):
    """The rule of XNNPACK, in LiteRT."""

    name = "litert"
    token_spec = TOKEN_SPEC


ROUNDING = LitertRounding()
