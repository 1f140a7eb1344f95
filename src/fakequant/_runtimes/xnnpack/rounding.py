"""How XNNPACK quantizes floats: rint(x * (1 / scale)) + zero_point, and tokens with scales of their own."""

from fakequant._runtimes.reciprocal_rounding import ReciprocalRounding
from fakequant._runtimes.xnnpack.target import TOKEN_SPEC


class XnnpackRounding(ReciprocalRounding):
    """The rule of XNNPACK."""

    name = "xnnpack"
    token_spec = TOKEN_SPEC


ROUNDING = XnnpackRounding()
