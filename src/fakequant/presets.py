"""The common specs by name.

    weights        int8   int4   int2     symmetric; only int8 has a narrow range, fewer bits need every code
    activations    uint8  uint4  int16    per tensor; int8_per_token for dynamic ranges

Each function returns a plain `QuantSpec`. Use `dataclasses.replace(int8(), bits=6)` to derive another.
"""

from fakequant.spec import WHOLE_AXIS, QuantSpec


def int8(*, group: int | None = None, axis: int | None = None) -> QuantSpec:
    """Returns the spec of 8-bit weights: symmetric, per channel of axis 0, codes -127 to 127.

    Without -128 every code can change its sign, so a batch norm with a negative factor can be folded. With
    `group`, there is one scale per group along the last axis. `axis` selects another axis.

    >>> int8().qmin, int8().qmax, int8().granularity
    (-127, 127, 'channel')
    """
    return _weights(8, group, axis, narrow_range=True)


def int4(*, group: int | None = 32, axis: int | None = None) -> QuantSpec:
    """Returns the spec of 4-bit weights: symmetric, per group of 32 along the last axis, codes -8 to 7.

    With `group=None`, there is one scale per channel of axis 0.

    >>> int4(group=64).group_size, int4(group=None).granularity
    (64, 'channel')
    """
    return _weights(4, group, axis, narrow_range=False)


def int2(*, group: int | None = 32, axis: int | None = None) -> QuantSpec:
    """Returns the spec of 2-bit weights: symmetric, per group of 32 along the last axis, codes -2 to 1.

    >>> int2().levels
    4
    """
    return _weights(2, group, axis, narrow_range=False)


def uint8() -> QuantSpec:
    """Returns the spec of 8-bit activations: affine, per tensor, codes 0 to 255.

    >>> uint8().qmin, uint8().qmax, uint8().symmetric
    (0, 255, False)
    """
    return QuantSpec(bits=8, signed=False, symmetric=False)


def uint4() -> QuantSpec:
    """Returns the spec of 4-bit activations: affine, per tensor, codes 0 to 15.

    >>> uint4().levels
    16
    """
    return QuantSpec(bits=4, signed=False, symmetric=False)


def int16() -> QuantSpec:
    """Returns the spec of 16-bit activations: symmetric, per tensor.

    >>> int16().qmax
    32767
    """
    return QuantSpec(bits=16)


def int8_per_token() -> QuantSpec:
    """Returns the spec of dynamic 8-bit activations: symmetric, one scale per token.

    >>> int8_per_token().granularity
    'token'
    """
    return QuantSpec(bits=8, axis=-1, group_size=WHOLE_AXIS)


def _weights(bits: int, group: int | None, axis: int | None, *, narrow_range: bool) -> QuantSpec:
    if axis is None:
        axis = 0 if group is None else -1
    return QuantSpec(bits=bits, narrow_range=narrow_range, axis=axis, group_size=group)
