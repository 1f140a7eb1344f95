"""`QuantSpec`: the grid of one tensor, and which of its elements share a scale."""

import dataclasses
import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from fakequant._util.shown import html_of, short_repr
from fakequant._util.text import MAX_IN_MESSAGE, read_json, shortened
from fakequant.formats import (
    FLOAT_FORMATS,
    FORMATS,
    GGML_TYPES,
    SCALE_FORMATS,
    SCALE_RULES,
    FloatFormat,
    Format,
    GgmlType,
    ScaleFormat,
    ScaleRule,
)

Numerics = Literal["torch", "onnx", "half_away"]
Granularity = Literal["tensor", "channel", "group", "token", "block"]

NUMERICS: tuple[Numerics, ...] = ("torch", "onnx", "half_away")
WHOLE_AXIS = -1
_ABSENT = -(2**31)  # stands for None in `to_numbers`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QuantSpec:
    """The grid of one tensor, and which of its elements share a scale.

        granularity   axis   group_size   one scale per
        tensor        None   None         tensor
        channel       a      None         index on axis a
        group         a      g            g neighbours along axis a
        token         a      -1           the whole of axis a, e.g. the features of each token
        block         a      g            block of `group_rows` rows x g neighbours along axis a, the last one

    The range follows from `bits`, `signed` and `narrow_range`:

    >>> spec = QuantSpec(bits=4, narrow_range=True, axis=0)
    >>> spec.qmin, spec.qmax, spec.granularity
    (-7, 7, 'channel')
    >>> QuantSpec(signed=False, symmetric=False).qmax
    255

    `per_token` writes the last row of the table in words:

    >>> QuantSpec(bits=8).per_token() == QuantSpec(bits=8, axis=-1, group_size=-1)
    True

    With a float `format`, the grid has the values of the format, which also decides `bits`. Codes are its bit patterns:

    >>> spec = QuantSpec(format="e2m1", scale_format="e8m0", axis=-1, group_size=32)
    >>> print(spec)
    e2m1, per group of 32 on axis -1, scales e8m0 (floor)
    >>> spec.bits, spec.largest
    (4, 6.0)
    """

    # 2 to 32 for a signed grid, 1 to 31 for an unsigned one: every code fits int32. Follows from a float format.
    bits: int = 8
    # Whether codes start at -2^(bits-1) rather than at 0.
    signed: bool = True
    # Whether the zero point is always 0. Needs a signed grid.
    symmetric: bool = True
    # Whether a signed grid leaves out its lowest code, so that every code can change its sign.
    narrow_range: bool = False
    # The axis along which scales differ, or None for one scale per tensor. May be negative.
    axis: int | None = None
    # How many elements along `axis` share a scale: None for a scale per index, -1 for the whole axis (`per_token`).
    group_size: int | None = None
    # How values are rounded to codes; see docs/numerics.md.
    numerics: Numerics = "onnx"
    # "int" for equal steps, or a float format: see `fakequant.formats`.
    format: Format = "int"
    # "float32", or "float16" or "bfloat16" for scales that are rounded to that type; "e8m0" for powers of two (MX);
    # "e4m3fn" for FP8 scales under one float32 scale per tensor (NVFP4). "e8m0" and "e4m3fn" follow the data: every
    # tensor gets the scales of its own blocks.
    scale_format: ScaleFormat = "float32"
    # How a power of two is chosen for the largest magnitude of a block ("e8m0"), or "divided" if the scale of the
    # tensor divides the FP8 scales instead of multiplying them ("e4m3fn"; compressed-tensors stores NVFP4 so), or the
    # block type of ggml whose rule chooses scales and rounds ("q4_0" and others; see `presets.q4_0`).
    scale_rule: ScaleRule = "floor"
    # How many rows, indices of the axis before `axis`, share the scales of a group: blocks of `group_rows` x
    # `group_size` elements on the last two axes. None for one row. The last blocks of both axes may be shorter.
    group_rows: int | None = None

    def __post_init__(self) -> None:
        self._check_formats()
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
                raise ValueError(
                    f"`group_size` must be at least 1, or -1 for the whole axis, got {self.group_size}.\n"
                    "Use QuantSpec().per_token() for one scale per token."
                )
        if self.group_rows is not None:
            self._check_rows(self.group_rows)
        if self.numerics not in NUMERICS:
            raise ValueError(f"`numerics` must be one of {', '.join(NUMERICS)}, got {self.numerics!r}.")
        if self.has_block_scales:
            self._check_block_scales()

    def _check_rows(self, rows: int) -> None:
        _require_int("group_rows", rows)
        if rows < 1:
            raise ValueError(f"`group_rows` must be at least 1, or None for groups of one row, got {rows}.")
        if self.axis in (None, 0) or self.group_size in (None, WHOLE_AXIS):
            raise ValueError(
                f"`group_rows={rows}` needs groups along an axis that has another one before it, got axis={self.axis} "
                f"and group_size={self.group_size}.\nUse QuantSpec(axis=-1, group_size=128, group_rows={rows})."
            )

    def _check_formats(self) -> None:
        """Checks the fields of formats, and sets `bits` to the bits of a float format."""
        allowed = (("format", FORMATS), ("scale_format", SCALE_FORMATS), ("scale_rule", SCALE_RULES))
        for name, values in allowed:
            if getattr(self, name) not in values:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(values)}, got {shortened(repr(getattr(self, name)))}."
                )
        if self.scale_rule == "divided" and self.scale_format != "e4m3fn":
            raise ValueError(
                "`scale_rule='divided'` is about the scale of a tensor over its FP8 scales, got "
                f"scale_format={self.scale_format!r}.\nUse scale_format='e4m3fn', or leave out `scale_rule`."
            )
        if self.scale_rule in GGML_TYPES:
            self._check_ggml_type(GGML_TYPES[self.scale_rule])
            return
        if self.scale_rule not in ("floor", "divided") and self.scale_format != "e8m0":
            raise ValueError(
                f"`scale_rule={self.scale_rule!r}` chooses powers of two, which scales of the format "
                f"{self.scale_format!r} are not.\nUse scale_format='e8m0', or leave out `scale_rule`."
            )
        float_format = self.float_format
        if float_format is None and not self.has_block_scales:
            return
        what = f"format={self.format!r}" if float_format is not None else f"scale_format={self.scale_format!r}"
        if not (self.signed is True and self.symmetric is True):
            raise ValueError(f"`{what}` needs signed=True and symmetric=True: its zero point is always 0.")
        if self.numerics != "onnx":
            raise ValueError(f"`{what}` has one rounding rule, numerics='onnx', got {self.numerics!r}.")
        if float_format is None:
            return
        if self.narrow_range is not False:
            raise ValueError(f"`narrow_range` leaves out a code of an integer grid; `{what}` needs narrow_range=False.")
        if self.bits not in (8, float_format.bits):
            raise ValueError(
                f"`bits` must be {float_format.bits} for `{what}`, got {self.bits!r}.\n"
                "Leave it out: it follows from the format."
            )
        object.__setattr__(self, "bits", float_format.bits)

    def _check_ggml_type(self, ggml: GgmlType) -> None:
        fixed = {**dataclasses.asdict(ggml), "symmetric": ggml.signed, "format": "int", "numerics": "onnx"}
        for name, value in fixed.items():
            if getattr(self, name) != value or type(getattr(self, name)) is not type(value):
                raise ValueError(
                    f"`scale_rule={self.scale_rule!r}` is a block type of ggml with {name}={value!r}, got "
                    f"{shortened(repr(getattr(self, name)))}.\nUse fakequant.presets.{self.scale_rule}()."
                )

    def _check_block_scales(self) -> None:
        if self.granularity != "group":
            raise ValueError(
                f"`scale_format={self.scale_format!r}` has one scale per block of neighbours, got {self.granularity!r} "
                "granularity.\nUse axis=-1 and group_size=32 (MX) or 16 (NVFP4) for blocks along the last axis."
            )
        if self.scale_format == "e4m3fn" and self.format != "e2m1":
            raise ValueError(
                f"`scale_format='e4m3fn'` is defined for format='e2m1' (NVFP4), got {self.format!r}.\n"
                "Use scale_format='e8m0' (MX) or 'float32'."
            )

    @property
    def float_format(self) -> FloatFormat | None:
        """The float format, or None for integers.

        >>> QuantSpec(format="e4m3fn").float_format.mantissa_bits
        3
        """
        return FLOAT_FORMATS.get(self.format)

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers without block scales: what integer kernels compute with.

        >>> QuantSpec().is_integer, QuantSpec(format="e4m3fn").is_integer
        (True, False)
        """
        return self.format == "int" and not self.has_block_scales

    @property
    def has_block_scales(self) -> bool:
        """Whether there are block scales (MX, NVFP4, ggml's types), which follow every tensor."""
        return self.scale_format in ("e8m0", "e4m3fn") or self.scale_rule in GGML_TYPES

    @property
    def ggml_type(self) -> str | None:
        """The name of the ggml rule that chooses scales and rounds, or None.

        >>> QuantSpec(bits=4).ggml_type is None
        True
        """
        return self.scale_rule if self.scale_rule in GGML_TYPES else None

    @property
    def has_offset(self) -> bool:
        """Whether the place of the zero point is taken by a float, the value of code 0 (ggml's q4_1 and q4_k)."""
        return self.scale_rule in ("q4_1", "q4_k")

    @property
    def has_learnable_scales(self) -> bool:
        """Whether scales can be learned: float32 scales, and those of ggml's weights.

        >>> QuantSpec().has_learnable_scales, QuantSpec(scale_format="bfloat16").has_learnable_scales
        (True, False)
        """
        if self.ggml_type is not None:
            return not self.ggml_type.endswith("_input")
        return self.scale_format == "float32"

    @property
    def qmin(self) -> int:
        """The lowest code. A code of a float format is its bit pattern, a number from 0."""
        if self.format != "int":
            return 0
        return -(1 << (self.bits - 1)) + self.narrow_range if self.signed else 0

    @property
    def qmax(self) -> int:
        """The highest code."""
        return (1 << (self.bits - (self.signed and self.format == "int"))) - 1

    @property
    def largest(self) -> float:
        """The largest value of the grid, in units of the scale: `qmax`, or the largest value of a float format.

        >>> QuantSpec().largest, QuantSpec(format="e4m3fn").largest
        (127.0, 448.0)
        """
        return float(self.qmax) if self.float_format is None else self.float_format.largest

    @property
    def levels(self) -> int:
        """The number of codes.

        >>> QuantSpec(bits=4, narrow_range=True).levels
        15
        """
        return self.qmax - self.qmin + 1

    @property
    def granularity(self) -> Granularity:
        """Which elements share a scale: "tensor", "channel", "group", "token" or "block"."""
        if self.axis is None:
            return "tensor"
        if self.group_size is None:
            return "channel"
        if self.group_rows is not None:
            return "block"
        return "token" if self.group_size == WHOLE_AXIS else "group"

    def per_token(self, axis: int = -1) -> "QuantSpec":
        """Returns the spec with one scale for the whole of `axis`, such as the features of each token.

        >>> print(QuantSpec(symmetric=False).per_token())
        int8 affine, per token over axis -1
        """
        return dataclasses.replace(self, axis=axis, group_size=WHOLE_AXIS, group_rows=None)

    @property
    def storage(self) -> str:
        """The name of the smallest integer dtype that holds a code.

        >>> QuantSpec(bits=4).storage, QuantSpec(bits=16, signed=False, symmetric=False).storage
        ('int8', 'uint16')
        """
        width = 8 if self.bits <= 8 else 16 if self.bits <= 16 else 32
        return f"{'int' if self.signed and self.format == 'int' else 'uint'}{width}"

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
                is_short = isinstance(name, str) and len(name) <= MAX_IN_MESSAGE
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
        numbers = [self.bits, *map(int, flags), *where, NUMERICS.index(self.numerics)]
        is_plain = self.format == "int" and self.scale_format == "float32" and self.scale_rule == "floor"
        if is_plain and self.group_rows is None:
            return numbers  # as before there were other formats
        formats = (FORMATS.index(self.format), SCALE_FORMATS.index(self.scale_format))
        rows = () if self.group_rows is None else (self.group_rows,)  # as before there were blocks
        return [*numbers, *formats, SCALE_RULES.index(self.scale_rule), *rows]

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> "QuantSpec":
        """Returns the spec that `to_numbers` wrote."""
        bits, signed, symmetric, narrow_range, axis, group_size, numerics, *formats = numbers
        number_format, scale_format, scale_rule, *rows = formats or (0, 0, 0)
        return cls(
            bits=bits,
            signed=bool(signed),
            symmetric=bool(symmetric),
            narrow_range=bool(narrow_range),
            axis=None if axis == _ABSENT else axis,
            group_size=None if group_size == _ABSENT else group_size,
            numerics=NUMERICS[numerics],
            format=FORMATS[number_format],
            scale_format=SCALE_FORMATS[scale_format],
            scale_rule=SCALE_RULES[scale_rule],
            group_rows=rows[0] if rows else None,
        )

    def __repr__(self) -> str:
        return short_repr(self, "bits") if self.format == "int" else short_repr(self)

    def _repr_html_(self) -> str:
        """Returns the call that makes it and its description, for notebooks."""
        return html_of(f"{self!r}\n{self}")

    def __str__(self) -> str:
        """Returns a short description, for tables.

        >>> print(QuantSpec(bits=4, narrow_range=True, axis=-1, group_size=32))
        int4 narrow, per group of 32 on axis -1
        """
        kind = f"{'int' if self.signed else 'uint'}{self.bits}" if self.format == "int" else self.format
        kind += " narrow" * self.narrow_range + " affine" * (self.signed and not self.symmetric)
        where = {
            "tensor": "per tensor",
            "channel": f"per channel on axis {self.axis}",
            "group": f"per group of {self.group_size} on axis {self.axis}",
            "token": f"per token over axis {self.axis}",
            "block": f"per block of {self.group_rows} x {self.group_size} on axis {self.axis}",
        }[self.granularity]
        scales = f", scales {self.scale_format}" if self.scale_format != "float32" else ""
        scales += f" ({self.scale_rule})" if self.scale_format == "e8m0" or self.scale_rule != "floor" else ""
        return f"{kind}, {where}{scales}" + (f", {self.numerics} numerics" if self.numerics != "onnx" else "")


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {shortened(repr(value))}.")
