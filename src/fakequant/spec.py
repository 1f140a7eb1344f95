"""`QuantSpec`: the grid of one tensor, and which of its elements share a scale."""

import dataclasses
import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

Numerics = Literal["torch", "onnx", "half_away"]
Granularity = Literal["tensor", "channel", "group", "token"]

NUMERICS: tuple[Numerics, ...] = ("torch", "onnx", "half_away")
WHOLE_AXIS = -1
_ABSENT = -(2**31)  # stands for None in `to_numbers`
_MAX_IN_MESSAGE = 100  # characters of a value that a message quotes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """The grid of one tensor, and which of its elements share a scale.

        granularity   axis   group_size   one scale per
        tensor        None   None         tensor
        channel       a      None         index on axis a
        group         a      g            g neighbours along axis a
        token         a      -1           the whole of axis a, e.g. the features of each token

    The range follows from `bits`, `signed` and `narrow_range`:

    >>> spec = QuantSpec(bits=4, narrow_range=True, axis=0)
    >>> spec.qmin, spec.qmax, spec.granularity
    (-7, 7, 'channel')
    >>> QuantSpec(signed=False, symmetric=False).qmax
    255
    """

    # 2 to 32 for a signed grid, 1 to 31 for an unsigned one: every code fits int32.
    bits: int = 8
    # Whether codes start at -2^(bits-1) rather than at 0.
    signed: bool = True
    # Whether the zero point is always 0. Needs a signed grid.
    symmetric: bool = True
    # Whether a signed grid leaves out its lowest code, so that every code can change its sign.
    narrow_range: bool = False
    # The axis along which scales differ, or None for one scale per tensor. May be negative.
    axis: int | None = None
    # How many elements along `axis` share a scale: None for a scale per index, -1 for the whole axis.
    group_size: int | None = None
    # How values are rounded to codes; see docs/numerics.md.
    numerics: Numerics = "onnx"

    def __post_init__(self) -> None:
        for name in ("signed", "symmetric", "narrow_range"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")
        _require_int("bits", self.bits)
        low, high, kind = (2, 32, "a signed") if self.signed else (1, 31, "an unsigned")
        if not low <= self.bits <= high:
            raise ValueError(f"`bits` must be between {low} and {high} for {kind} grid, got {self.bits}.")
        if self.symmetric and not self.signed:
            raise ValueError(
                "`symmetric=True` needs a signed grid: an unsigned one has no negative half.\n"
                "Use QuantSpec(signed=False, symmetric=False) for values that are never negative."
            )
        if self.narrow_range and not self.signed:
            raise ValueError(
                "`narrow_range=True` leaves out the lowest code of a signed grid; an unsigned grid starts at 0.\n"
                "Use QuantSpec(signed=False, symmetric=False, narrow_range=False)."
            )
        if self.axis is not None:
            _require_int("axis", self.axis)
        if self.group_size is not None:
            _require_int("group_size", self.group_size)
            if self.axis is None:
                raise ValueError(
                    f"`group_size={self.group_size}` needs the axis that is cut into groups.\n"
                    f"Use QuantSpec(axis=-1, group_size={self.group_size}) for groups along the last axis."
                )
            if self.group_size < 1 and self.group_size != WHOLE_AXIS:
                raise ValueError(f"`group_size` must be at least 1, or -1 for the whole axis, got {self.group_size}.")
        if self.numerics not in NUMERICS:
            raise ValueError(f"`numerics` must be one of {', '.join(NUMERICS)}, got {self.numerics!r}.")

    @property
    def qmin(self) -> int:
        """The lowest code."""
        return -(1 << (self.bits - 1)) + self.narrow_range if self.signed else 0

    @property
    def qmax(self) -> int:
        """The highest code."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def levels(self) -> int:
        """The number of codes.

        >>> QuantSpec(bits=4, narrow_range=True).levels
        15
        """
        return self.qmax - self.qmin + 1

    @property
    def granularity(self) -> Granularity:
        """Which elements share a scale: "tensor", "channel", "group" or "token"."""
        if self.axis is None:
            return "tensor"
        if self.group_size is None:
            return "channel"
        return "token" if self.group_size == WHOLE_AXIS else "group"

    @property
    def storage(self) -> str:
        """The name of the smallest integer dtype that holds a code.

        >>> QuantSpec(bits=4).storage, QuantSpec(bits=16, signed=False, symmetric=False).storage
        ('int8', 'uint16')
        """
        width = 8 if self.bits <= 8 else 16 if self.bits <= 16 else 32
        return f"{'int' if self.signed else 'uint'}{width}"

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields by name. The values are numbers, strings and None.

        >>> QuantSpec(bits=4, axis=0).to_dict()["bits"]
        4
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "QuantSpec":
        """Returns the spec with these fields. Missing fields have their defaults.

        Raises ValueError for a field that a QuantSpec does not have.

        >>> QuantSpec.from_dict({"bits": 4, "axis": 0}) == QuantSpec(bits=4, axis=0)
        True
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"A QuantSpec is read from a dict with its fields, got {shortened(repr(fields))}.")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in names:
                # Matching is slow for long names, and they match nothing.
                is_short = isinstance(name, str) and len(name) <= _MAX_IN_MESSAGE
                near = get_close_matches(name, names, n=1) if is_short else []
                hint = f", did you mean {near[0]!r}?" if near else "."
                raise ValueError(
                    f"A QuantSpec has no field {shortened(repr(name))}{hint}\nThe fields are {', '.join(names)}."
                )
        return cls(**fields)

    def to_json(self) -> str:
        """Returns the spec as a JSON object.

        >>> QuantSpec.from_json(QuantSpec(bits=4).to_json()) == QuantSpec(bits=4)
        True
        """
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "QuantSpec":
        """Returns the spec that `to_json` wrote."""
        fields = read_json(text)
        if not isinstance(fields, dict):
            raise TypeError(f"A QuantSpec in JSON is an object with its fields, got {type(fields).__name__}.")
        return cls.from_dict(fields)

    def to_numbers(self) -> list[int]:
        """Returns the spec as a list of integers, for buffers and arguments of operators.

        >>> QuantSpec.from_numbers(QuantSpec(bits=4, axis=0).to_numbers()) == QuantSpec(bits=4, axis=0)
        True
        """
        flags = (self.signed, self.symmetric, self.narrow_range)
        where = (_ABSENT if v is None else v for v in (self.axis, self.group_size))
        return [self.bits, *map(int, flags), *where, NUMERICS.index(self.numerics)]

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> "QuantSpec":
        """Returns the spec that `to_numbers` wrote."""
        bits, signed, symmetric, narrow_range, axis, group_size, numerics = numbers
        return cls(
            bits=bits,
            signed=bool(signed),
            symmetric=bool(symmetric),
            narrow_range=bool(narrow_range),
            axis=None if axis == _ABSENT else axis,
            group_size=None if group_size == _ABSENT else group_size,
            numerics=NUMERICS[numerics],
        )

    def __str__(self) -> str:
        """Returns a short description, for tables.

        >>> print(QuantSpec(bits=4, narrow_range=True, axis=-1, group_size=32))
        int4 narrow, per group of 32 on axis -1
        """
        kind = f"{'int' if self.signed else 'uint'}{self.bits}"
        kind += " narrow" * self.narrow_range + " affine" * (self.signed and not self.symmetric)
        where = {
            "tensor": "per tensor",
            "channel": f"per channel on axis {self.axis}",
            "group": f"per group of {self.group_size} on axis {self.axis}",
            "token": f"per token over axis {self.axis}",
        }[self.granularity]
        return f"{kind}, {where}" + (f", {self.numerics} numerics" if self.numerics != "onnx" else "")


def shortened(text: str, length: int = _MAX_IN_MESSAGE) -> str:
    """Returns `text`, cut to at most `length` characters.

    >>> shortened("x" * 1000, 10)
    'xxxxxxx...'
    """
    return text if len(text) <= length else f"{text[: length - 3]}..."


def read_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is not valid JSON or is nested too deeply.

    >>> read_json("[" * 100000)
    Traceback (most recent call last):
    ValueError: The text is nested too deeply to be read as JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("The text is nested too deeply to be read as JSON.") from None


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {shortened(repr(value))}.")
